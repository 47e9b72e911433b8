"""Rectangles of tensors: cut from runs of elements, stored, and read in any other cut."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.checkpoint.conftest import MANIFEST
from toolkit.checkpoint import saved_state
from toolkit.checkpoint.manifest import FileRecord, record_of
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.checkpoint.saver import entries_of
from toolkit.checkpoint.shards import (
    QUANTITIES,
    StateShard,
    block_numel,
    cut,
    key_of,
    parameter_blocks,
    rectangle,
    stored_values,
    with_offsets,
)
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block, ends
from toolkit.models.safetensors import write_file

ROWS, COLUMNS = 9, 5
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)

EVEN = Block("w", (0, 5), (0, ROWS), True, (2, 1))
ODD = Block("w", (1, 4), (0, ROWS), True, (2, 1))
"""The columns of WHOLE in turn, in another order than the rows that are read."""


def value_of(block: Block) -> torch.Tensor:
    """The rectangle of WHOLE, in the block's orientation."""
    assert block.columns is not None
    oriented = WHOLE.T if block.transposed else WHOLE
    each, apart = block.steps
    return oriented[slice(*block.rows, each), slice(*block.columns, apart)]


@st.composite
def stacks(draw: st.DrawFn) -> list[Block]:
    """Some rectangles of WHOLE, as a Megatron tensor stacks them."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        transposed = draw(st.booleans())
        rows, columns = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
        low, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        high, right = draw(st.integers(low + 1, rows)), draw(st.integers(left + 1, columns))
        each, apart = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        numbers = range(low, high, each), range(left, right, apart)
        found.append(Block("w", *map(ends, numbers), transposed, (each, apart)))
    return found


@given(stacks(), st.integers(0, 150), st.integers(0, 150))
def test_a_cut_is_the_run_of_elements_in_order(stack, start, length):
    flat = torch.cat([value_of(block).reshape(-1) for block in stack])
    pieces = cut(stack, start, start + length)
    parts = [value_of(block).reshape(-1) for block in pieces]
    expected = flat[start : start + length]  # what lies behind the end is padding
    assert torch.equal(torch.cat(parts) if parts else flat[:0], expected)
    assert sum(map(block_numel, pieces)) == len(expected)
    assert len(pieces) <= 3 * len(stack)


@given(stacks())
def test_what_is_stored_has_the_orientation_of_the_checkpoint(stack):
    flat = torch.cat([value_of(block).reshape(-1) for block in stack])
    for held, offset in with_offsets(stack):
        block = held.stored
        assert torch.equal(stored_values(held, offset, flat), value_of(block))
        tensor, _, spelt = key_of("exp_avg", block).partition("[")
        assert tensor == "exp_avg/w" and rectangle(f"[{spelt}") == replace(block, tensor="")


def test_rectangles_that_are_none():
    for spelt in ("", "[0:1,2]", "[0:0]", "[0:1,3:3]", "[0:4:0]", "[0:4:]"):
        assert rectangle(spelt) is None


def store_in_pieces(folder: Path, chance: random.Random) -> None:
    """WHOLE and a vector, cut at random over three files."""
    files: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for quantity in QUANTITIES:
        offset = QUANTITIES.index(quantity) * 1000
        for blocks, flat in (
            ([EVEN, ODD], torch.cat([value_of(EVEN), value_of(ODD)]).reshape(-1)),
            (parameter_blocks("v", (ROWS,)), WHOLE[:, 0]),
        ):
            places = sorted({0, len(flat), *chance.sample(range(len(flat)), 3)})
            for start, stop in pairwise(places):
                part = cut(blocks, start, stop)
                for block, place in with_offsets(part):
                    values = stored_values(block, place, flat[start:stop] + offset)
                    files[chance.randrange(3)][key_of(quantity, block.stored)] = (
                        values.contiguous()
                    )
    for number, content in enumerate(files):
        save_file(content, folder / f"state-{number:05d}.safetensors")
    write_manifest(folder)


def write_manifest(folder: Path) -> None:
    names = [path.name for path in folder.glob("state-*.safetensors")]
    MANIFEST.with_files({name: FileRecord(0, "") for name in names}).write(folder)


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_is_read_from_any_other(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    store_in_pieces(tmp_path, chance)
    saved = SavedState(tmp_path)
    assert saved.shapes == {"v": (ROWS,), "w": (ROWS, COLUMNS)}
    for _ in range(40):
        rows = sorted(chance.sample(range(ROWS + 1), 2))
        columns = sorted(chance.sample(range(COLUMNS + 1), 2))
        steps = chance.randrange(1, 4), chance.randrange(1, 4)
        block = Block("w", (rows[0], rows[1]), (columns[0], columns[1]), False, steps)
        assert torch.equal(saved.read("exp_avg", block), value_of(block) + 1000)
        turned = Block("w", block.columns, block.rows, True, steps[::-1])  # type: ignore[arg-type]
        assert torch.equal(saved.read("weight", turned), value_of(turned))
        vector = Block("v", block.rows, None, False, (steps[0], 1))
        expected = WHOLE[slice(*rows, steps[0]), 0] + 2000
        assert torch.equal(saved.read("exp_avg_sq", vector), expected)
    weights = SavedWeights(saved, {"w": (ROWS, COLUMNS)})
    assert torch.equal(weights.read("w", 7, 33), WHOLE.reshape(-1)[7:33])


def test_a_shard_is_loaded_whatever_wrote_it(tmp_path: Path):
    store_in_pieces(tmp_path, random.Random(1))
    values = {quantity: torch.full((20,), -1.0) for quantity in QUANTITIES}
    blocks = cut(parameter_blocks("w", (ROWS, COLUMNS)), 30, 60)
    SavedState(tmp_path).load(StateShard(blocks, values, saved_here=True))
    assert torch.equal(values["exp_avg"][:15], WHOLE.reshape(-1)[30:] + 1000)
    assert torch.equal(values["exp_avg"][15:], torch.full((5,), -1.0)), "padding stays"


def test_what_is_missing_is_named(tmp_path: Path):
    store_in_pieces(tmp_path, random.Random(2))
    saved = SavedState(tmp_path)
    with pytest.raises(CheckpointError, match="does not hold weight of x, rows 0 to 3"):
        saved.read("weight", Block("x", (0, 3), (0, 2), False))
    with pytest.raises(CheckpointError, match="rows 5 to 12"):
        saved.read("weight", Block("w", (5, 12), (0, 2), False))


def test_a_file_that_is_no_state_is_named(tmp_path: Path):
    save_file({"foreign": torch.zeros(2)}, tmp_path / "state-00000.safetensors")
    write_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="holds foreign"):
        SavedState(tmp_path).read("weight", Block("x", (0, 3), None, False))
    (tmp_path / "state-00000.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"state-00000\.safetensors cannot be read"):
        SavedState(tmp_path).read("weight", Block("x", (0, 3), None, False))


def test_a_rank_opens_the_files_that_hold_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of all ranks: of 1,000, that took 10 s and 0.7 GiB on every rank."""
    store, files = CheckpointStore(tmp_path, keep=1), {}
    store.begin(1)
    shards = [shard_of(start, start + 15) for start in (0, 15, 30)]
    for rank, shard in enumerate(shards):
        path = store.partial(1) / f"state-{rank:05d}.safetensors"
        write_file(path, entries_of([shard]))
        files[path.name] = record_of(path)
    store.commit(MANIFEST.with_files(files))
    opened: list[str] = []
    safe_open = safetensors.safe_open

    def counted(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return safe_open(path, framework)

    monkeypatch.setattr(saved_state, "safe_open", counted)
    loaded = shard_of(15, 30)
    for quantity in QUANTITIES:
        loaded.get(quantity).zero_()
    saved = SavedState(store.of_step(1))
    assert saved.shapes == {"w": (ROWS, COLUMNS)}
    saved.load(loaded)
    assert opened == ["state-00001.safetensors"]
    assert torch.equal(loaded.get("exp_avg"), WHOLE.reshape(-1)[15:30] + 1)


def shard_of(start: int, stop: int) -> StateShard:
    """Some elements of WHOLE, with other numbers as moments."""
    flat = WHOLE.reshape(-1)[start:stop]
    values = {quantity: flat + number for number, quantity in enumerate(QUANTITIES)}
    blocks = cut(parameter_blocks("w", (ROWS, COLUMNS)), start, stop)
    return StateShard(blocks, values, saved_here=True)
