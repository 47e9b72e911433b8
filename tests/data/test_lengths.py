"""Stages of several sequence lengths: every token once, in every layout, from any step on."""

import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.data.building import built
from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.data.batches import GlobalBatches, evaluation_batches
from toolkit.data.build import TrainingData
from toolkit.data.formats.indexed import write_indexed
from toolkit.data.lengths import cut
from toolkit.data.rows import Int64Array
from toolkit.recipe.lengths import SequenceLengths
from toolkit.recipe.schema import BatchRampSection, StageSection, TrainingSection

BATCH, FIRST = 8, 8
STAGES = [
    {"from_step": 5, "sequence_length": 32},
    {"from_step": 9, "sequence_length": 16},
    {"from_step": 12, "sequence_length": 8},
]
LENGTHS = [8] * 5 + [32] * 4 + [16] * 3 + [8] * 8
"""Of every step, counted by hand."""
STEPS = len(LENGTHS)


def write_documents(folder: Path, name: str, first: int, tokens: int) -> list[Int64Array]:
    """Documents of all sizes, every token of which is another number."""
    chance, documents, at = random.Random(name), [], first
    while at < first + tokens:
        size = min(chance.choice([1, 3, 7, 31, 90]), first + tokens - at)
        documents.append(np.arange(at, at + size))
        at += size
    write_indexed(folder / name, np.int32, documents)
    return documents


def build(folder: Path, *, length: int = FIRST, **data: Any) -> TrainingData:
    section = {"train": {"kind": "megatron", "prefix": "one"}, "stages": STAGES, **data}
    return built(folder, {"cache": "cache", **section}, length, BATCH, 3, None)


def one_source(folder: Path, **data: Any) -> TrainingData:
    write_documents(folder, "one", 0, 32 * 80 + 5)
    return build(folder, **data)


def isolated(folder: Path, **data: Any) -> TrainingData:
    return one_source(folder, isolate_documents=True, **data)


def blend(folder: Path, **data: Any) -> TrainingData:
    """Three sources, the third smaller than what is seen of it; weights change with a length
    and by themselves."""
    for number, size in enumerate((2000, 1500, 150)):
        write_documents(folder, "abc"[number], 10_000 * number, size)
    train = [
        {"kind": "megatron", "prefix": name, "label": name, "weight": weight}
        for name, weight in zip("abc", (0.5, 0.3, 0.2), strict=True)
    ]
    weights = {"a": 0.2, "b": 0.2, "c": 0.6}
    stages = [
        STAGES[0] | {"weights": weights},
        {"from_step": 7, "weights": weights | {"c": 0}},
        *STAGES[1:],
    ]
    return build(folder, train=train, stages=stages, **data)


def batches_of(data: TrainingData) -> GlobalBatches:
    return GlobalBatches(data.train, data.order, BATCH, data.lengths)


def contents(batch: MicroBatch) -> list[bytes]:
    """The rows of a micro batch, with all that they hold."""
    held = (batch.input_ids, batch.labels, batch.positions, batch.segments)
    arrays = [array.numpy() for array in held if array is not None]
    return [b"".join(array[n].tobytes() for array in arrays) for n in range(len(arrays[0]))]


def step_rows(data: TrainingData, step: int, world: int = 1, micro: int = 1) -> list[bytes]:
    found: list[bytes] = []
    batches = batches_of(data)
    for rank in range(world):
        for batch in batches.micro_batches(step * BATCH, rank, [micro] * world):
            found += contents(batch)
    return found


@pytest.mark.parametrize("make", [one_source, isolated])
def test_every_token_once_across_changes(tmp_path: Path, make: Any) -> None:
    """The reference: all documents, laid end to end by numpy and cut at the longest length."""
    documents = write_documents(tmp_path, "one", 0, 32 * 80 + 5)
    stream = np.concatenate(documents)
    last = set(np.cumsum([len(one) for one in documents]) - 1)
    data, blocks = make(tmp_path), set()
    seen: Counter[int] = Counter()
    for step, length in enumerate(LENGTHS):
        (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        assert batch.input_ids.shape == (BATCH, length)
        for tokens, labels in zip(batch.input_ids.numpy(), batch.labels.numpy(), strict=True):
            start = int(tokens[0])  # tokens are their places
            assert start % length == 0
            assert tokens.tolist() == stream[start : start + length].tolist()
            ends = [place in last for place in range(start, start + length)]
            expected = np.where(ends, IGNORE_INDEX, stream[start + 1 : start + 1 + length])
            assert labels.tolist() == expected.tolist()
            seen.update(tokens.tolist())
            blocks.add(start // 32)
    assert set(seen.values()) == {1}
    # 5·8·8 + 4·8·32 + 3·8·16 + 8·8·8 tokens, each block of 32 whole: 10 + 32 + 12 + 16 of 80.
    assert len(seen) == sum(BATCH * length for length in LENGTHS) == 32 * len(blocks)


def test_a_pass_ends_where_all_blocks_are_seen(tmp_path: Path) -> None:
    """80 blocks: 10, 32 and 12 in three stages, 26 in the first 13 steps of the last, and then
    the same again in another order."""
    data = one_source(tmp_path)
    passes: list[list[int]] = [[], []]
    for step in range(25):
        (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        passes[0] += batch.input_ids.flatten().tolist()
    assert sorted(passes[0]) == [*range(32 * 80)]
    for step in range(25, 25 + 40):
        (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        passes[1] += batch.input_ids.flatten().tolist()
    assert sorted(passes[1]) == [*range(32 * 80)]
    training = TrainingSection(sequence_length=FIRST, global_batch_size=BATCH, epochs=1.0)
    assert data.lengths.total_steps(training, data.samples_per_epoch) == 25
    twice = training.model_copy(update={"epochs": 2.0})
    assert data.lengths.total_steps(twice, data.samples_per_epoch) == 65


def test_isolated_documents_count_from_the_part_of_the_row(tmp_path: Path) -> None:
    documents = write_documents(tmp_path, "one", 0, 32 * 80 + 5)
    starts = {int(one[0]) for one in documents}
    data = isolated(tmp_path)
    for step in (0, 5, 9, 12):
        (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        assert batch.positions is not None and batch.segments is not None
        for row in range(BATCH):
            position, segment = -1, 0
            for place, token in enumerate(batch.input_ids[row].tolist()):
                begins = token in starts and place > 0
                position, segment = (0, segment + 1) if begins else (position + 1, segment)
                assert batch.positions[row, place] == position
                assert batch.segments[row, place] == segment


@pytest.mark.parametrize("make", [one_source, isolated, blend])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_layout_and_restart_gets_the_same_rows(
    tmp_path: Path, make: Any, world: int
) -> None:
    """From any step on, with an empty cache, by any number of ranks."""
    data = make(tmp_path)
    expected = [step_rows(data, step) for step in range(STEPS)]
    assert [len(rows[0]) // 8 // 2 for rows in expected] == LENGTHS or make is isolated
    for resumed in random.Random(world).sample(range(STEPS), 5):
        samples = resumed * BATCH
        after = make(tmp_path, cache=f"cache-{world}-{resumed}")
        assert after.fingerprint_at(samples) == data.fingerprint_at(samples)
        for step in range(resumed, STEPS):
            for micro in {1, BATCH // world}:
                assert step_rows(after, step, world, micro) == expected[step]


def test_shares_of_a_blend_hold_in_blocks(tmp_path: Path) -> None:
    """Blocks of the stages: 5·8·8/32 = 10, 2·8 = 16, 16, 12, 16."""
    data = blend(tmp_path)
    found: list[Counter[int]] = []
    for steps in ((0, 5), (5, 7), (7, 9), (9, 12), (12, 20)):
        found.append(Counter())
        for step in range(*steps):
            (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
            found[-1].update((batch.input_ids.flatten() // 10_000).tolist())
    blocks = [{source: count / 32 for source, count in one.items()} for one in found]
    assert blocks[0] == {0: 5, 1: 3, 2: 2}
    assert all(abs(blocks[1][source] - 16 * w) < 1 for source, w in enumerate((0.2, 0.2, 0.6)))
    assert blocks[2:] == [{0: 8, 1: 8}, {0: 6, 1: 6}, {0: 8, 1: 8}]
    assert data.counts(STEPS) == [sum(one.get(s, 0) for one in blocks) for s in range(3)]


def test_without_lengths_nothing_changes(tmp_path: Path) -> None:
    """A run of one length has the samples and the fingerprint that it had without stages."""
    data, plain = one_source(tmp_path, stages=[]), GlobalBatches
    before = plain(data.train, data.order, BATCH)
    for step in range(12):
        (old,) = before.micro_batches(step * BATCH, 0, [BATCH])
        (new,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        assert old.samples == new.samples and contents(old) == contents(new)
    assert data.fingerprint_at(99) == data.fingerprint


def test_a_checkpoint_knows_the_lengths_of_done_steps(tmp_path: Path) -> None:
    first = one_source(tmp_path)
    done = {step: first.fingerprint_at(step * BATCH) for step in (0, 5, 6, 9, 10, 20)}
    later = one_source(tmp_path, stages=[*STAGES[:2], {"from_step": 11, "sequence_length": 32}])
    assert {step for step in done if later.fingerprint_at(step * BATCH) == done[step]} == {
        0, 5, 6, 9, 10,
    }  # fmt: skip
    moved = [STAGES[0] | {"from_step": 6}, *STAGES[1:]]
    other = one_source(tmp_path, stages=moved)
    assert {step for step in done if other.fingerprint_at(step * BATCH) == done[step]} == {0, 5}
    # The longest length decides what a block is: a run of 8 alone has other samples.
    assert one_source(tmp_path, stages=[]).fingerprint_at(0) != done[0]
    # A run that had the longest length from the start may add a shorter stage.
    long = build(tmp_path, length=32, stages=[])
    shorter = build(tmp_path, length=32, stages=[{"from_step": 9, "sequence_length": 8}])
    assert long.fingerprint_at(9 * BATCH) == shorter.fingerprint_at(9 * BATCH)
    assert long.fingerprint_at(10 * BATCH) != shorter.fingerprint_at(10 * BATCH)


def test_the_rest_of_a_block_is_skipped_and_said(tmp_path: Path) -> None:
    """Of 3 steps with 8 samples of 5 parts each, the last block has 4: one part is left."""
    stages = [{"from_step": 3, "sequence_length": 40}]
    data = one_source(tmp_path, stages=stages)
    seen: list[int] = []
    for step in range(5):
        (batch,) = batches_of(data).micro_batches(step * BATCH, 0, [BATCH])
        seen += batch.input_ids.flatten().tolist()
    assert len(set(seen)) == len(seen) == 3 * 8 * 8 + 2 * 8 * 40
    assert list(data.notes(5, 5)) == [
        "data: 8 tokens are skipped where a stage begins after step 3"
    ]
    assert list(data.notes(3, 3)) == []


def test_validation_is_cut_alike(tmp_path: Path) -> None:
    data = one_source(tmp_path, validation_fraction=0.3)
    (held_out,) = data.validation.values()
    whole, parts = (
        evaluation_batches(cut(held_out, parts), BATCH, 2 * parts, 0, [BATCH])
        for parts in (1, 4)
    )
    found = [
        [batch.input_ids[batch.labels != IGNORE_INDEX].numpy() for batch in batches]
        for batches in (whole, parts)
    ]
    tokens = [sorted(np.concatenate(one).tolist()) for one in found]
    assert tokens[0] == tokens[1] and len(tokens[0]) > 100
    assert {batch.input_ids.shape[1] for batch in parts} == {8}


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([2, 4, 8, 16, 48]), st.booleans()),
        max_size=5,
    ),
    st.integers(1, 13),
    st.sampled_from([2, 4, 8, 16, 48]),
    st.integers(1, 60_000),
)
def test_steps_tokens_and_blocks_against_counting(
    stages: list[tuple[int, int, bool]], batch: int, first: int, tokens: int
) -> None:
    """Against a loop over the steps."""
    begins = np.cumsum([steps for steps, _, _ in stages]).tolist()
    per_step = [first] * 400
    sections, total = [], 0
    for begin, (_, length, by_tokens) in zip(begins, stages, strict=True):
        total = sum(batch * one for one in per_step[:begin])
        where = {"from_tokens": total} if by_tokens else {"from_step": begin}
        sections.append(StageSection(**where, sequence_length=length))
        per_step[begin:] = [length] * (400 - begin)
    lengths = SequenceLengths.of(sections, first, batch)
    longest = max([first, *(length for _, length, _ in stages)])
    assume(all(longest % one == 0 for one in per_step))
    assert lengths.longest == longest
    assert [lengths.stage_of(step).sequence_length for step in range(400)] == per_step
    before = np.cumsum([0, *(batch * one for one in per_step)])
    assert all(lengths.tokens(step) == before[step] for step in range(0, 400, 7))
    if tokens <= before[-1]:
        assert lengths.steps_of_tokens(tokens) == int(np.searchsorted(before, tokens))
    block, blocks = 0.0, [0]  # seen of the blocks after every step
    for step, length in enumerate(per_step):
        if step in begins:
            block = float(np.ceil(block - 1e-9))
        block += batch * length / longest
        blocks.append(int(np.ceil(block - 1e-9)))
    for step in range(0, 400, 7):
        assert lengths.blocks(step * batch) == blocks[step]
        assert lengths.steps_of_blocks(blocks[step], whole=True) >= step


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
    lengths, consumed = SequenceLengths.of([], 16, whole, 1, ramp), 0
    for step in range(50):
        theirs.update(consumed, consistency_check=True)
        size = theirs.get_current_global_batch_size()
        assert (lengths.samples(step), lengths.batch_size(step)) == (consumed, size)
        assert lengths.stage_at(consumed).global_batch_size == size
        consumed += size
        assert lengths.tokens(step + 1) == 16 * consumed
        assert lengths.steps_of_tokens(16 * consumed) == step + 1
        assert lengths.steps_of_tokens(16 * consumed + 1) == step + 2
        assert lengths.steps_of_blocks(consumed) == step + 1
        assert lengths.steps_of_blocks(consumed - 1, whole=True) == step
        assert lengths.blocks(consumed) == consumed


def test_a_ramp_in_steps() -> None:
    """Equal parts, rounded up to whole steps; more increments than steps pass in one."""
    ramp = BatchRampSection(start=4, increment=4, steps=7)
    lengths = SequenceLengths.of([], 16, 12, 2, ramp)
    assert [lengths.batch_size(step) for step in range(9)] == [4] * 4 + [8] * 3 + [12] * 2
    assert lengths.step_tokens(0) == 4 * 2 * 16
    short = SequenceLengths.of([], 16, 12, 1, BatchRampSection(start=4, increment=4, steps=1))
    assert [short.batch_size(step) for step in range(3)] == [4, 12, 12]
    assert short.begun(100) == []
