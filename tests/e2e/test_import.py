"""Universal checkpoints of DeepSpeed, continued: the losses of DeepSpeed's own next steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dmt import Dmt
from tests.e2e.conftest import Project, write_project
from tests.e2e.deepspeed_saver import FURTHER, SAVED_AT, Saved, save_all
from tests.e2e.importing import TOLERANCE, continued, whole
from tests.e2e.product import curve
from tests.forked import run_ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.verify import verify
from toolkit.intake.load import load_recipe

pytestmark = pytest.mark.slow

CASES = {"1": Saved(1), "2-bf16": Saved(2, "bf16", grouped=False), "3": Saved(3)}
"""By ZeRO's stage."""


class Foreign:
    """DeepSpeed's checkpoints, and how it went on."""

    def __init__(self, folder: Path) -> None:
        write_project(folder)
        self.project = Project(folder)
        self.saved = folder / "deepspeed"
        self.losses = run_ranks(save_all, 2, folder, CASES, self.saved)[0]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    return Foreign(tmp_path_factory.mktemp("deepspeed"))


def imported(
    foreign: Foreign, dmt: Dmt, source: str, overrides: Sequence[str], *more: str
) -> Any:
    run = foreign.project.folder / f"run-{source}{len(more)}"
    words = [word for one in overrides for word in ("--set", one)]
    return dmt(
        "checkpoint", "import", foreign.project.recipe,
        foreign.saved / source,
        "--run-dir", run, *words, *more, "--json",
    ).json  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_deepspeeds_to_the_bit_and_goes_on_alike(
    name: str, foreign: Foreign, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign.project.folder)
    case = CASES[name]
    report = imported(foreign, dmt, name, case.overrides)
    folder = Path(report["folder"])
    assert (report["step"], report["consumed_samples"]) == (SAVED_AT, 8 * SAVED_AT)
    unknown = "training.sequence_length, schedule.name"
    assert report["notes"][1:] == [f"not stated by the checkpoint, so not compared: {unknown}"]
    assert Manifest.read(folder).optimizer_steps == SAVED_AT
    assert verify(folder).problems == ()
    state = SavedState(folder)
    truth = torch.load(foreign.saved / f"{name}.truth.pt")
    assert state.shapes.keys() == truth.keys()
    for tensor, quantities in truth.items():
        assert state.quantities(tensor) == [*quantities]
        for quantity, value in quantities.items():
            assert torch.equal(whole(state, quantity, tensor), value.view(-1)), tensor
    if case.precision == "fp32":
        recipe = load_recipe(foreign.project.recipe, case.overrides)
        assert continued(state, recipe, folder) == pytest.approx(
            foreign.losses[name], rel=TOLERANCE
        )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("1", {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}),
        ("3", {"parallel.engine": "megatron", "parallel.tensor": 2}),
    ],
)
def test_launch_continues_it_in_another_layout(
    name: str,
    layout: dict[str, object],
    foreign: Foreign,
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(foreign.project.folder)
    changes = dict(one.split("=") for one in CASES[name].overrides) | layout
    changes["training.steps"] = SAVED_AT + FURTHER
    words = [f"{key}={value}" for key, value in changes.items()]
    run = Path(imported(foreign, dmt, name, words, "--samples", str(8 * SAVED_AT))["folder"])
    ended = foreign.project.launch(str(run.parents[1]), changes)
    assert f"continuing from step {SAVED_AT} of {SAVED_AT + FURTHER}" in ended.err
    losses = [loss for loss, _ in curve(run.parents[1]).values()]
    assert losses == pytest.approx(foreign.losses[name], rel=TOLERANCE)
