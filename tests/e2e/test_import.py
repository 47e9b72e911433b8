"""Checkpoints of DeepSpeed and of FSDP2, imported and continued: the losses of their own next
steps, in plain transformers and torch, and in another layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from launch.examples.recipe_samples import RecipeSamples
from tests.dmt import Dmt
from tests.e2e.conftest import Project, write_project
from tests.e2e.foreign_savers import (
    BATCH,
    FURTHER,
    SAVED_AT,
    Saved,
    adamw,
    loss_of,
    save_deepspeed,
    save_fsdp,
)
from tests.e2e.product import curve
from tests.forked import run_ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.verify import verify
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config

pytestmark = pytest.mark.slow

CASES = {"1": Saved(1), "2-bf16": Saved(2, "bf16", grouped=False), "3": Saved(3)}
"""By ZeRO's stage; made universal by DeepSpeed's own script."""
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


def imported(
    foreign: Project, dmt: Dmt, source: str, overrides: Sequence[str], *more: str
) -> Any:
    run = foreign.folder / f"run-{source.replace('/', '-')}{len(more)}"
    words = [word for one in overrides for word in ("--set", one)]
    return dmt(
        "checkpoint", "import", foreign.recipe, foreign.folder / source, "--run-dir", run,
        *words, *more, "--json",
    ).json  # fmt: skip


def checked(
    foreign: Project, dmt: Dmt, source: str, overrides: Sequence[str], losses: Sequence[float]
) -> tuple[SavedState, Any]:
    """Import a checkpoint of fp32 and continue it; its state, and what the import reports."""
    report = imported(foreign, dmt, source, overrides)
    folder = Path(report["folder"])
    assert (report["step"], report["consumed_samples"]) == (SAVED_AT, BATCH * SAVED_AT)
    assert Manifest.read(folder).optimizer_steps == SAVED_AT
    assert verify(folder).problems == ()
    state = SavedState(folder)
    if "precision=bf16" not in str(overrides):
        recipe = load_recipe(foreign.recipe, overrides)
        assert continued(state, recipe) == pytest.approx(losses, rel=TOLERANCE)
    return state, report


def whole(state: SavedState, quantity: str, tensor: str) -> torch.Tensor:
    return state.read(quantity, whole_quantity(quantity, tensor, state.shapes[tensor]))


def continued(state: SavedState, recipe: Any) -> list[float]:
    """Losses of plain transformers and torch from the imported state on."""
    samples, section = RecipeSamples(recipe), recipe.optimizer
    model = AutoModelForCausalLM.from_config(build_config(recipe.model)).float()
    optimizer = adamw(list(model.parameters()), section, section.weight_decay)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole(state, "weight", name).view_as(parameter))
            moments = {
                moment: whole(state, moment, name).view_as(parameter).clone()
                for moment in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = {"step": torch.tensor(float(SAVED_AT)), **moments}
    losses = []
    for step in range(SAVED_AT, SAVED_AT + FURTHER):
        loss = loss_of(model, [samples[step * BATCH + n] for n in range(BATCH)])
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), section.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_deepspeeds_state_to_the_bit(
    name: str,
    foreign: Project,
    of_deepspeed: dict[str, list[float]],
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(foreign.folder)
    source, overrides = f"deepspeed/{name}", CASES[name].overrides
    state, report = checked(foreign, dmt, source, overrides, of_deepspeed[name])
    unknown = "training.sequence_length, schedule.name"
    assert report["notes"][1:] == [f"not stated by the checkpoint, so not compared: {unknown}"]
    truth = torch.load(foreign.folder / f"{source}.truth.pt")
    assert state.shapes.keys() == truth.keys()
    for tensor, quantities in truth.items():
        assert state.quantities(tensor) == [*quantities]
        for quantity, value in quantities.items():
            assert torch.equal(whole(state, quantity, tensor).view(-1), value.view(-1)), tensor


@pytest.mark.parametrize("name", ["nested", "flat", "checkpoint-2"])
def test_fsdp2(
    name: str,
    foreign: Project,
    of_fsdp: list[float],
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(foreign.folder)
    checked(foreign, dmt, f"fsdp/{name}", [], of_fsdp)


def test_launch_continues_it_in_another_layout(
    foreign: Project,
    of_deepspeed: dict[str, list[float]],
    dmt: Dmt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(foreign.folder)
    changes: dict[str, object] = {
        "training.precision": "fp32",
        "parallel.engine": "megatron",
        "parallel.tensor": 2,
        "training.steps": SAVED_AT + FURTHER,
    }
    words = [f"{key}={value}" for key, value in changes.items()]
    report = imported(foreign, dmt, "deepspeed/3", words, "--samples", str(BATCH * SAVED_AT))
    run = Path(report["folder"]).parents[1]
    ended = foreign.launch(str(run), changes)
    assert f"continuing from step {SAVED_AT} of {SAVED_AT + FURTHER}" in ended.err
    losses = [loss for loss, _ in curve(run).values()]
    assert losses == pytest.approx(of_deepspeed["3"], rel=TOLERANCE)
