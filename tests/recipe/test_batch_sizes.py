"""A batch that grows, against megatron-core's calculator and by hand."""

from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import BatchRampSection, TrainingSection


def megatrons_calculator() -> Any:
    """The class in megatron-core's file, which imports nothing of it."""
    (folder,) = find_spec("megatron").submodule_search_locations  # type: ignore[union-attr]
    path = Path(folder) / "core" / "num_microbatches_calculator.py"
    return run_path(str(path))["RampupBatchsizeNumMicroBatchesCalculator"]


Calculator = megatrons_calculator()


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 9),
    increments=st.integers(1, 12),
    ramp_samples=st.integers(12, 2000),
)
@settings(max_examples=40)
def test_a_ramp_in_tokens_is_megatrons(
    start: int, increment: int, increments: int, ramp_samples: int
) -> None:
    """Each step's batch, and what follows from them, against megatron-core's calculator."""
    whole = start + increment * increments
    theirs = Calculator(whole, 1, 1, False, 1, start, increment, ramp_samples)
    ramp = BatchRampSection(start=start, increment=increment, tokens=16 * ramp_samples)
    training = TrainingSection(sequence_length=16, global_batch_size=whole, batch_ramp=ramp)
    sizes, consumed = training.batches, 0
    for step in range(50):
        theirs.update(consumed, consistency_check=True)
        size = theirs.get_current_global_batch_size()
        assert (sizes.samples(step), sizes.at_step(step)) == (consumed, size)
        assert sizes.at_sample(consumed) == size
        consumed += size
        assert sizes.tokens(step + 1) == 16 * consumed
        assert sizes.steps_of_tokens(16 * consumed) == step + 1
        assert sizes.steps_of_tokens(16 * consumed + 1) == step + 2
        assert sizes.steps_of_samples(consumed) == step + 1
        assert sizes.steps_of_samples(consumed - 1, whole=True) == step


def test_a_ramp_in_steps() -> None:
    """Equal parts, rounded up to whole steps; more increments than steps pass in one."""
    sizes = BatchSizes.of([4, 8, 12], 2 * 16, steps=7)
    assert [sizes.at_step(step) for step in range(9)] == [4] * 4 + [8] * 3 + [12] * 2
    assert sizes.tokens(1) == 4 * 2 * 16
    assert [*sizes.steps_by_size(9)] == [(4, 4), (8, 3), (12, 2)]
    assert [*sizes.steps_by_size(5)] == [(4, 4), (8, 1), (12, 0)]
    short = BatchSizes.of([4, 8, 12], 16, steps=1)
    assert [short.at_step(step) for step in range(3)] == [4, 12, 12]
