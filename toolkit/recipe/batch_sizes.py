"""How many samples each step has. Its tokens follow from that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True)
class BatchStage:
    """Steps with batches of one size, until the next stage begins."""

    first_step: int
    """Steps before."""
    first_sample: int
    """Samples before."""
    size: int
    """Samples per step."""


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes of a run's steps."""

    stages: tuple[BatchStage, ...]
    """The first begins at step 0, the last has no end."""
    sample_tokens: int
    """Positions of a sample, masked ones too."""

    @classmethod
    def of(cls, sizes: Sequence[int], sample_tokens: int, steps: int = 0) -> "BatchSizes":
        """Sizes that follow each other in equal parts of the first `steps` steps, after which
        the last one stays."""
        found = cls((BatchStage(0, 0, sizes[0]),), sample_tokens)
        for number, size in enumerate(sizes[1:], start=1):
            first = math.ceil(Fraction(number * steps, len(sizes) - 1))
            stage = BatchStage(first, found.samples(first), size)
            found = replace(found, stages=(*found.stages, stage))
        return found

    def at_step(self, step: int) -> int:
        """Samples of the step after `step` steps."""
        return self._stage(step).size

    def at_sample(self, sample: int) -> int:
        """Samples of the step that has sample `sample`."""
        return next(
            stage.size for stage in reversed(self.stages) if stage.first_sample <= sample
        )

    def samples(self, steps: int) -> int:
        """Samples of the first `steps` steps."""
        stage = self._stage(steps)
        return stage.first_sample + (steps - stage.first_step) * stage.size

    def tokens(self, steps: int) -> int:
        """Positions of the first `steps` steps, masked ones too."""
        return self.samples(steps) * self.sample_tokens

    def steps_of_tokens(self, tokens: int) -> int:
        """Steps that have so many positions, rounded up."""
        return self.steps_of_samples(-(-tokens // self.sample_tokens))

    def steps_of_samples(self, samples: float) -> int:
        """Steps that have so many samples, rounded up."""
        stage = next(
            (one for one in reversed(self.stages) if one.first_sample < samples), self.stages[0]
        )
        rest = samples - stage.first_sample
        return stage.first_step + math.ceil(rest / stage.size)

    def _stage(self, step: int) -> BatchStage:
        """The stage of the step after `step` steps."""
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)
