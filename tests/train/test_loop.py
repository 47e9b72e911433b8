"""The loop, with the fake engine: order of events, resuming, stopping."""

import itertools
import math
import statistics
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.fake import FakeEngine
from tests.train.fake_runs import (
    LAYOUT,
    STEPS,
    VOCABULARY,
    FakeJob,
    Recorder,
    SpoiledEngine,
    job,
    run,
)
from toolkit.data.batches import GlobalBatches
from toolkit.data.indexed import read_indexed, write_indexed
from toolkit.data.order import EpochOrder
from toolkit.data.packing import StreamSamples, TokenStream
from toolkit.data.tokenized import TokenizedData
from toolkit.errors import RunFailed, Stopped
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import GuardSection
from toolkit.train.loop import seed_dropout
from toolkit.train.shared import Progress
from toolkit.train.step_reduction import StepReduction


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamSamples:
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    tokens = np.random.default_rng(0).choice(VOCABULARY, 2000, p=[0.5, 0.2, *[0.05] * 6])
    write_indexed(prefix, np.uint16, [tokens])
    data = TokenizedData(read_indexed(prefix), "fingerprint", "test")
    return StreamSamples(TokenStream.whole(data), 16, vocab_size=VOCABULARY)


def test_loss_falls_to_the_unigram_entropy(dataset: StreamSamples) -> None:
    hooks = run(job(dataset, FakeEngine(VOCABULARY)))
    assert hooks.losses[0] == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    tokens, _ = dataset.stream.read(0, len(dataset.stream))
    shares = np.bincount(tokens) / len(tokens)
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert np.mean(hooks.losses[-10:]) == pytest.approx(entropy, rel=0.05)
    assert hooks.calls[:3] == [("step", 1), ("save", 1), ("evaluate", 1)]
    assert hooks.calls[-1] == ("evaluate", STEPS)


def test_resumed_run_is_the_uninterrupted_one(dataset: StreamSamples) -> None:
    whole = run(job(dataset, FakeEngine(VOCABULARY)))
    engine, progress = FakeEngine(VOCABULARY), Progress()
    first = run(job(dataset, engine, steps=15), progress)
    resumed = FakeEngine(VOCABULARY)
    for mine, saved in zip(resumed.state(), engine.state(), strict=True):
        mine.put("weight", saved.get("weight"))
    assert progress == Progress(15, 60, tuple(first.losses), sum(first.tokens))
    second = run(job(dataset, resumed), progress)
    assert progress.consumed_tokens == sum(whole.tokens) > 0
    assert first.losses + second.losses == whole.losses


def test_a_batch_that_grows_continues_where_it_was(
    dataset: StreamSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample once, in the order of a constant batch."""
    sizes = BatchSizes.of([2, 4], 16, steps=10)
    order = EpochOrder(1, len(dataset))

    def growing(engine: FakeEngine, steps: int = STEPS) -> FakeJob:
        batches = GlobalBatches(dataset, order, sizes)
        return replace(job(dataset, engine, steps=steps), batches=batches)

    whole = run(growing(FakeEngine(VOCABULARY)))
    engine, progress = FakeEngine(VOCABULARY), Progress()
    trained, train_step = [], engine.train_step

    def recorded(batches, *more):
        trained.extend(sample for batch in batches for sample in batch.samples)
        return train_step(batches, *more)

    monkeypatch.setattr(engine, "train_step", recorded)
    first = run(growing(engine, steps=7), progress)
    assert progress.consumed_samples == 7 * 2
    second = run(growing(engine), progress)
    assert first.losses + second.losses == whole.losses
    assert trained == order.indices(0, 10 * 2 + 30 * 4).tolist()


def test_ranks_draw_other_dropout_for_other_tokens(
    dataset: StreamSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in a tensor group, whose ranks compute the same tokens."""
    layout = replace(LAYOUT, tp=2, dp=2, gradient_accumulation=1)
    drawn: list[tuple[int, ...]] = []
    monkeypatch.setattr("toolkit.train.loop.seed_dropout", lambda *place: drawn.append(place))
    for rank in range(4):
        run(replace(job(dataset, FakeEngine(VOCABULARY), 1), layout=layout), rank=rank)
    assert drawn == [(1, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 1)]


def drawn(*place: int) -> float:
    seed_dropout(*place)
    return torch.rand(()).item()


def test_dropout_has_a_stream_for_each_seed_step_and_rank() -> None:
    places = [*itertools.product((1, 2), (0, 1), (0, 1))]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(1, 0, 1) == drawn(1, 0, 1)


class TwoTensorRanks(StepReduction):
    """Both ranks of a tensor-parallel group count the same batch."""

    def finish(self) -> tuple[bool, tuple[float, ...]]:
        stopping, numbers = super().finish()
        return stopping, tuple(2 * number for number in numbers)


def test_tensor_parallel_ranks_count_their_tokens_once(dataset: StreamSamples) -> None:
    alone = run(job(dataset, FakeEngine(VOCABULARY)))
    split = replace(job(dataset, FakeEngine(VOCABULARY)), layout=replace(LAYOUT, tp=2))
    two = run(split, reduction=TwoTensorRanks)
    assert two.tokens == alone.tokens
    assert two.losses == alone.losses


def skipped_steps(
    dataset: StreamSamples, engine: FakeEngine, progress: Progress, guard: GuardSection
) -> tuple[dict[int, str], Recorder]:
    """Train to the end or to a failure of the guard; why which steps were skipped."""
    hooks = Recorder()
    with suppress(RunFailed):
        run(job(dataset, engine, guard=guard), progress, hooks)
    return hooks.skipped, hooks


def test_a_spike_is_measured_against_the_median(dataset: StreamSamples) -> None:
    """Steps 4 and 20 (of 0…) jump to more than twice the loss of their forerunners."""
    spoiled = {4: 9.0, 20: 9.0, 30: 0.5}
    guard = GuardSection(spike_factor=2.0)
    skipped, hooks = skipped_steps(dataset, SpoiledEngine(spoiled), Progress(), guard)
    assert list(skipped) == [21], "too early to judge step 5, and step 31 is no spike"
    median = statistics.median(hooks.losses[:20])
    assert skipped[21] == f"the loss is above {2 * median:.6g}"
    assert hooks.losses[20] > 2 * median
    assert hooks.calls[-1] == ("evaluate", STEPS)


def test_a_median_of_0_makes_no_loss_a_spike(dataset: StreamSamples) -> None:
    remembered = Progress(15, 60, (0.0,) * 15)
    guard = GuardSection(spike_factor=2.0)
    assert 16 not in skipped_steps(dataset, SpoiledEngine({0: 9.0}), remembered, guard)[0]


def test_without_a_factor_only_a_loss_that_is_no_number_is_skipped(
    dataset: StreamSamples,
) -> None:
    engine = SpoiledEngine({12: 9.0, 20: math.nan})
    skipped, _ = skipped_steps(dataset, engine, Progress(), GuardSection())
    assert skipped == {21: "the loss is not finite"}


def test_a_resumed_run_remembers_the_losses(dataset: StreamSamples) -> None:
    guard = GuardSection(spike_factor=2.0)
    remembered = Progress(15, 60, (1.5,) * 15)
    assert list(skipped_steps(dataset, SpoiledEngine({0: 9.0}), remembered, guard)[0]) == [16]
    assert not skipped_steps(dataset, SpoiledEngine({0: 9.0}), Progress(15, 60), guard)[0]


def test_a_skipped_step_moves_the_cursor_and_is_not_remembered(dataset: StreamSamples) -> None:
    progress = Progress()
    engine = SpoiledEngine({3: math.nan})
    _, hooks = skipped_steps(dataset, engine, progress, GuardSection())
    assert (progress.step, progress.consumed_samples) == (STEPS, 4 * STEPS)
    assert progress.consumed_tokens == sum(hooks.tokens), "the skipped step's are consumed"
    assert len(progress.recent_losses) == STEPS - 1
    assert all(map(math.isfinite, progress.recent_losses))


def test_too_many_skips_in_a_row_stop_the_run_before_it_saves(dataset: StreamSamples) -> None:
    nan = dict.fromkeys([2, 3, *range(7, STEPS)], math.nan)
    hooks, progress = Recorder(), Progress()
    with pytest.raises(RunFailed) as failure:
        run(job(dataset, SpoiledEngine(nan)), progress, hooks)
    assert list(hooks.skipped) == [3, 4, *range(8, 28)], "two in a row are no reason to stop"
    assert "steps 8 to 27 were all skipped: the loss is not finite." in str(failure.value)
    assert "The weights are those of step 7" in str(failure.value)
    assert hooks.calls[-1] == ("step", 27), "neither saved nor validated"


def test_batches_without_a_trained_token_are_skipped(tmp_path: Path) -> None:
    """Documents of one token: the boundary behind each is not trained."""
    documents = [[token % VOCABULARY] for token in range(200)]
    write_indexed(tmp_path / "tokens", np.uint16, documents)
    data = TokenizedData(read_indexed(tmp_path / "tokens"), "fingerprint", "test")
    engine, progress = FakeEngine(VOCABULARY), Progress()
    dataset = StreamSamples(TokenStream.whole(data), 16, vocab_size=VOCABULARY)
    skipped, _ = skipped_steps(dataset, engine, progress, GuardSection())
    assert skipped == dict.fromkeys(range(1, 21), "no token of the batch is trained")
    assert not engine.steps and not progress.recent_losses


def test_signal_saves_and_stops(dataset: StreamSamples) -> None:
    hooks = Recorder(signal_at=7)
    with pytest.raises(Stopped, match="after saving step 7 of 40"):
        run(job(dataset, FakeEngine(VOCABULARY)), recorder=hooks)
    assert hooks.calls[-1] == ("stop", 7)


def test_signal_at_the_last_step_ends_normally(dataset: StreamSamples) -> None:
    hooks = run(job(dataset, FakeEngine(VOCABULARY)), recorder=Recorder(signal_at=STEPS))
    assert hooks.calls[-2:] == [("save", STEPS), ("evaluate", STEPS)]


def test_finished_run_does_nothing(dataset: StreamSamples) -> None:
    assert run(job(dataset, FakeEngine(VOCABULARY)), Progress(STEPS, 0)).calls == []
