"""The position of a streamed source, as stored in a checkpoint."""

from dataclasses import dataclass

from toolkit.recipe.section import Count


@dataclass(frozen=True)
class StreamPlace:
    """The beginning of a window of a source, from which a run can resume."""

    epoch: Count
    """Passes over the source before."""
    window: Count
    """Windows of the pass before."""
    samples: Count
    """Samples of the source before, of all passes."""
