"""The data section of a recipe, built."""

from pathlib import Path
from typing import Any

from toolkit.data.build import TrainingData, build_data
from toolkit.recipe.schema import DataSection


def built(
    base: Path,
    section: dict[str, Any],
    length: int,
    batch: int = 1,
    seed: int = 1,
    vocab_size: int | None = 257,
) -> TrainingData:
    """Samples of `length` tokens in batches of so many; relative paths start at `base`."""
    return build_data(
        DataSection.model_validate(section),
        sequence_length=length,
        global_batch_size=batch,
        seed=seed,
        vocab_size=vocab_size,
        base=base,
    )
