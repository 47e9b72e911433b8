"""The size of a checkpoint."""

BYTES_PER_PARAMETER = 12
"""The fp32 weight and both of Adam's moments."""
BYTES_PER_FROZEN_PARAMETER = 4
"""The weight alone."""


def checkpoint_bytes(trained: int, frozen: int) -> int:
    """Of a checkpoint with so many parameters that train, and others that do not."""
    return BYTES_PER_PARAMETER * trained + BYTES_PER_FROZEN_PARAMETER * frozen
