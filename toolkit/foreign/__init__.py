"""Files of other tools, read by tables, and the environment (docs/coming-from.md)."""

from toolkit.foreign.environment import preflight

__all__ = ["preflight"]
