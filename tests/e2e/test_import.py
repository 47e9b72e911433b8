"""Checkpoints of DeepSpeed and of FSDP2, imported and continued in another layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dmt import Dmt
from tests.e2e.conftest import Project, write_project
from tests.e2e.foreign_savers import (
    BATCH,
    FURTHER,
    SAVED_AT,
    Saved,
    save_deepspeed,
    save_fsdp,
)
from tests.e2e.product import curve
from tests.forked import run_ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.verify import verify

pytestmark = pytest.mark.slow

CASES = {"1": Saved(1), "2-bf16": Saved(2, "bf16", grouped=False), "3": Saved(3)}
"""By ZeRO's stage; made universal by DeepSpeed's own script."""
UNIVERSAL = f"global_step{SAVED_AT}_universal"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with DeepSpeed's and torch's checkpoints."""
    folder = tmp_path_factory.mktemp("foreign")
    write_project(folder)
    return Project(folder)


@pytest.fixture(scope="module")
def of_deepspeed(foreign: Project) -> dict[str, list[float]]:
    """How DeepSpeed went on, by case."""
    out = foreign.folder / "deepspeed"
    return run_ranks(save_deepspeed, 2, foreign.folder, CASES, out)[0]


@pytest.fixture(scope="module")
def of_fsdp(foreign: Project) -> list[float]:
    """How FSDP2 went on."""
    return run_ranks(save_fsdp, 2, foreign.folder, foreign.folder / "fsdp")[0]


def imported(foreign: Project, dmt: Dmt, source: str, overrides: Sequence[str]) -> Any:
    run = foreign.folder / f"run-{source.replace('/', '-')}-{len(overrides)}"
    words = [word for one in overrides for word in ("--set", one)]
    return dmt(
        "checkpoint", "import", foreign.recipe, foreign.folder / source, "--run-dir", run,
        *words, "--json",
    ).json  # fmt: skip


def state_of(report: Any) -> SavedState:
    """The imported state, of which the report tells the place."""
    folder = Path(report["folder"])
    assert (report["step"], report["consumed_samples"]) == (SAVED_AT, BATCH * SAVED_AT)
    assert Manifest.read(folder).optimizer_steps == SAVED_AT
    assert verify(folder).problems == ()
    return SavedState(folder)


def whole(state: SavedState, quantity: str, tensor: str) -> torch.Tensor:
    return state.read(quantity, whole_quantity(quantity, tensor, state.shapes[tensor]))


@pytest.mark.usefixtures("of_deepspeed")
@pytest.mark.parametrize("name", CASES)
def test_deepspeeds_state_to_the_bit(
    name: str, foreign: Project, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.folder)
    source, overrides = f"deepspeed/{name}/{UNIVERSAL}", CASES[name].overrides
    report = imported(foreign, dmt, source, overrides)
    state = state_of(report)
    assert len(report["notes"]) == 1, "about the data"
    truth = torch.load(foreign.folder / "deepspeed" / f"{name}.truth.pt")
    assert state.shapes.keys() == truth.keys()
    for tensor, quantities in truth.items():
        assert state.quantities(tensor) == [*quantities]
        for quantity, value in quantities.items():
            assert torch.equal(whole(state, quantity, tensor).view(-1), value.view(-1)), tensor


TENSOR = {"parallel.engine": "megatron", "parallel.tensor": 2}
ZERO_3 = {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}
CONTINUED: dict[str, dict[str, object]] = {
    f"deepspeed/3/{UNIVERSAL}": TENSOR,
    "fsdp/nested": {},
    "fsdp/flat": ZERO_3,
    "fsdp/checkpoint-2": TENSOR,
}


@pytest.mark.parametrize("source", CONTINUED)
def test_launch_continues_it_in_another_layout(
    source: str,
    foreign: Project,
    of_deepspeed: dict[str, list[float]],
    of_fsdp: list[float],
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(foreign.folder)
    changes: dict[str, object] = {**CONTINUED[source], "training.steps": SAVED_AT + FURTHER}
    words = [f"{key}={value}" for key, value in changes.items()]
    report = imported(foreign, dmt, source, words)
    state_of(report)
    run = Path(report["folder"]).parents[1]
    ended = foreign.launch(str(run), changes)
    assert f"continuing from step {SAVED_AT} of {SAVED_AT + FURTHER}" in ended.err
    losses = [loss for loss, _ in curve(run).values()]
    expected = of_fsdp if source.startswith("fsdp") else of_deepspeed["3"]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
