"""A batch that grows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import BatchRampSection, TrainingSection


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 9),
    increments=st.integers(1, 12),
    steps=st.integers(1, 60),
)
@settings(max_examples=40)
def test_what_follows_from_each_steps_batch(
    start: int, increment: int, increments: int, steps: int
) -> None:
    """Samples, tokens and steps of a run, counted step by step."""
    whole = start + increment * increments
    ramp = BatchRampSection(start=start, increment=increment, steps=steps)
    training = TrainingSection(sequence_length=16, global_batch_size=whole, batch_ramp=ramp)
    sizes, consumed = training.batches, 0
    for step in range(50):
        size = min(whole, start + step * increments // steps * increment)
        assert (sizes.samples(step), sizes.at_step(step)) == (consumed, size)
        assert sizes.at_sample(consumed) == size
        consumed += size
        assert sizes.tokens(step + 1) == 16 * consumed
        assert sizes.steps_of_tokens(16 * consumed) == step + 1
        assert sizes.steps_of_tokens(16 * consumed + 1) == step + 2
        assert sizes.steps_of_samples(consumed) == step + 1


def test_a_ramp_in_steps() -> None:
    """Equal parts, rounded up to whole steps; more increments than steps pass in one."""
    sizes = BatchSizes.of([4, 8, 12], 2 * 16, steps=7)
    assert [sizes.at_step(step) for step in range(9)] == [4] * 4 + [8] * 3 + [12] * 2
    assert sizes.tokens(1) == 4 * 2 * 16
    short = BatchSizes.of([4, 8, 12], 16, steps=1)
    assert [short.at_step(step) for step in range(3)] == [4, 12, 12]
