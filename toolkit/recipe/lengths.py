"""How many sequences each step has, and of which length; tokens and samples follow from that.

The data are cut into *blocks* of the longest length, and the order of training is an order of
blocks. In a stage of a shorter length, a block is *n* samples: sample *j* of the stage is part
*j* mod *n* of its block *j* div *n*. So no token is repeated at a change, and sample *i* is a
function of the seed, the stages and *i*. Every stage begins with a new block: where the stage
before has used only a part of one, the rest of it is skipped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class LengthStage:
    """Steps of one length and batch, until the next stage begins."""

    first_step: int
    """Steps before."""
    first_sample: int
    """Samples before."""
    first_block: int
    """Blocks before, one that was used in part included."""
    sequence_length: int
    """Tokens per sequence."""
    parts: int
    """Samples of a block."""
    global_batch_size: int
    """Samples per step."""


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths and batches of a run's steps."""

    stages: tuple[LengthStage, ...]
    """The first begins at step 0, the others are those of the recipe."""
    rows_per_sample: int

    @classmethod
    def of(
        cls,
        stages: Sequence[Any],
        sequence_length: int,
        global_batch_size: int,
        rows_per_sample: int = 1,
        ramp: Any | None = None,
    ) -> "SequenceLengths":
        """Those of the sections `data.stages`, where the first steps have `sequence_length`, or
        of the section `training.batch_ramp`, which ends at `global_batch_size`."""
        stated = [sequence_length, *(one.sequence_length or 0 for one in stages)]
        longest = max(stated)
        lengths = cls(
            (
                LengthStage(
                    0, 0, 0, sequence_length, longest // sequence_length, global_batch_size
                ),
            ),
            rows_per_sample,
        )
        for stage in stages:
            lengths = lengths._then(stage, longest)
        return lengths if ramp is None or stages else lengths._ramped(ramp)

    @classmethod
    def of_training(cls, stages: Sequence[Any], training: Any) -> "SequenceLengths":
        """Those of the sections `data.stages` and `training`."""
        return cls.of(
            stages,
            training.sequence_length,
            training.global_batch_size,
            training.rows_per_sample,
            training.batch_ramp,
        )

    def _ramped(self, ramp: Any) -> "SequenceLengths":
        """The only stage's batch reached in steps of the ramp."""
        (stage,) = self.stages
        whole, first = stage.global_batch_size, 0
        sizes = [*range(ramp.start, whole, ramp.increment), whole]
        found = replace(self, stages=(replace(stage, global_batch_size=sizes[0]),))
        for number, size in enumerate(sizes[1:], start=1):
            share = Fraction(number, len(sizes) - 1)
            if ramp.steps is not None:
                first = math.ceil(share * ramp.steps)
            else:
                first = found.steps_of_tokens(math.ceil(share * (ramp.tokens or 0)))
            samples = found.samples(first)
            added = LengthStage(first, samples, samples, stage.sequence_length, 1, size)
            found = replace(found, stages=(*found.stages, added))
        return found

    def _then(self, stage: Any, longest: int) -> "SequenceLengths":
        """With one more stage."""
        first = stage.from_step or self.steps_of_tokens(stage.from_tokens or 0)
        length = stage.sequence_length or self.stages[-1].sequence_length
        samples, size = self.samples(first), self.stages[-1].global_batch_size
        added = LengthStage(
            first, samples, self.blocks(samples), length, longest // length, size
        )
        return SequenceLengths((*self.stages, added), self.rows_per_sample)

    @property
    def all(self) -> tuple[int, ...]:
        """The different lengths, ascending."""
        return tuple(sorted({stage.sequence_length for stage in self.stages}))

    @property
    def longest(self) -> int:
        """Tokens of a block."""
        return self.all[-1]

    def stage_of(self, step: int) -> LengthStage:
        """The stage of the step after `step` steps."""
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def samples(self, steps: int) -> int:
        """Samples of the first `steps` steps."""
        stage = self.stage_of(steps)
        return stage.first_sample + (steps - stage.first_step) * stage.global_batch_size

    def batch_size(self, step: int) -> int:
        """Samples of the step after `step` steps."""
        return self.stage_of(step).global_batch_size

    def step_tokens(self, step: int) -> int:
        """Positions of the step after `step` steps, masked ones too."""
        return self._step_tokens(self.stage_of(step))

    def _step_tokens(self, stage: LengthStage) -> int:
        return stage.global_batch_size * self.rows_per_sample * stage.sequence_length

    def steps_by_stage(self, steps: int) -> Iterator[tuple[LengthStage, int]]:
        """How many of the first `steps` steps are in each stage."""
        ends = [stage.first_step for stage in self.stages[1:]] + [steps]
        for stage, end in zip(self.stages, ends, strict=True):
            yield stage, max(0, min(end, steps) - stage.first_step)

    def steps_by_length(self, steps: int) -> dict[int, int]:
        """How many of the first `steps` steps have each length."""
        found = dict.fromkeys(self.all, 0)
        for stage, count in self.steps_by_stage(steps):
            found[stage.sequence_length] += count
        return found

    def tokens(self, steps: int) -> int:
        """Positions of the first `steps` global batches, masked ones too."""
        return sum(n * self._step_tokens(stage) for stage, n in self.steps_by_stage(steps))

    def steps_of_tokens(self, tokens: int) -> int:
        """Steps that have so many positions, rounded up."""
        befores = [self.tokens(stage.first_step) for stage in self.stages]
        number = max(n for n, before in enumerate(befores) if not n or tokens > before)
        stage = self.stages[number]
        rest = (tokens - befores[number]) / self._step_tokens(stage)
        return stage.first_step + math.ceil(rest)

    def blocks(self, samples: int) -> int:
        """Blocks that the first `samples` samples are of, the last perhaps in part."""
        stage = self.stage_at(max(samples - 1, 0))
        before = samples - stage.first_sample
        return stage.first_block - (-before // stage.parts)

    def block_of(self, sample: int) -> int:
        """The block of sample `sample`."""
        stage = self.stage_at(sample)
        return stage.first_block + (sample - stage.first_sample) // stage.parts

    def stage_at(self, sample: int) -> LengthStage:
        """The stage of the step that has sample `sample`."""
        return next(stage for stage in reversed(self.stages) if stage.first_sample <= sample)

    def steps_of_blocks(self, blocks: float, *, whole: bool = False) -> int:
        """Steps that see so many blocks, rounded up; `whole`: that need no more of them."""
        number = max(
            n for n, one in enumerate(self.stages) if not n or blocks > one.first_block
        )
        stage = self.stages[number]
        samples, size = (blocks - stage.first_block) * stage.parts, stage.global_batch_size
        steps = stage.first_step + int(samples // size if whole else math.ceil(samples / size))
        ends = [one.first_step for one in self.stages[number + 1 : number + 2]]
        return min([steps, *ends])

    def total_steps(self, training: Any, blocks_per_epoch: int | None = None) -> int | None:
        """Optimizer steps by the section `training`; without `blocks_per_epoch`, the number of
        steps of a run whose length is given in epochs is unknown: None."""
        steps: int | None = training.steps
        if steps is not None:
            return steps
        if training.tokens is not None:
            return self.steps_of_tokens(training.tokens)
        if training.epochs is None or blocks_per_epoch is None:
            return None
        return self.steps_of_blocks(training.epochs * blocks_per_epoch)

    def skipped(self, steps: int) -> Iterator[tuple[int, int]]:
        """Of a run of `steps` steps, the stages before which the rest of a block is skipped:
        steps before, and tokens."""
        for before, stage in pairwise(self.stages):
            samples = stage.first_sample - before.first_sample
            if stage.first_step < steps and (rest := -samples % before.parts):
                yield stage.first_step, rest * before.sequence_length

    def begun(self, samples: int) -> list[tuple[int, int]]:
        """First step and length of the stages that the first `samples` samples are of; empty
        where all of these have the longest length."""
        found = [
            (stage.first_step, stage.sequence_length)
            for stage in self.stages
            if stage.first_sample < max(samples, 1)
        ]
        return found if any(length != self.longest for _, length in found) else []
