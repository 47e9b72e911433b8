"""Where a streamed source is: what a checkpoint keeps of it."""

from dataclasses import dataclass

from toolkit.recipe.schema import Count


@dataclass(frozen=True)
class StreamPlace:
    """Where a window of a source begins: what a run needs to continue in it."""

    epoch: Count
    """Passes over the source before."""
    window: Count
    """Windows of the pass before."""
    samples: Count
    """Samples of the source before, of all passes."""
