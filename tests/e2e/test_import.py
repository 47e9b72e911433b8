"""What DeepSpeed saved, imported and continued: the losses of DeepSpeed's own next steps."""

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
from toolkit.models.frozen import matching

pytestmark = pytest.mark.slow

ODD = {"vocab_size": 323, "intermediate_size": 67}
"""Numbers of elements that no number of ranks divides: partitions are padded."""
CASES = {
    "zero0": Saved(0),
    "zero0-bf16": Saved(0, "bf16"),
    "universal2": Saved(2, universal=True),
    "universal3": Saved(3, universal=True),
    "neox-pipeline": Saved(1, stages=2, neox=True),
    "neox-data": Saved(1, stages=1, neox=True),
    "neox-sequential": Saved(1, neox=True),
    "zero1": Saved(1, model=ODD),
    "zero2": Saved(2, model=ODD),
    "zero3": Saved(3),
    "zero1-frozen": Saved(1, freeze=("model.layers.0.*",)),
    "zero3-frozen-untied": Saved(
        3, freeze=("model.embed_tokens.*",), model={**ODD, "tie_word_embeddings": "false"}
    ),
    "zero2-bf16": Saved(2, "bf16", grouped=False),
    "zero3-bf16": Saved(3, "bf16"),
}
STEP = f"step-{SAVED_AT:08d}"


class Foreign:
    """DeepSpeed's checkpoints, and how it went on."""

    def __init__(self, folder: Path) -> None:
        text = (
            write_project(folder)
            .read_text()
            .replace("model_type: llama", "model_type: gpt_neox")
        )
        text = text.replace("    num_key_value_heads: 2\n", "").replace("s: true", "s: false")
        (folder / "neox.yaml").write_text(text)
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
        "checkpoint", "import", foreign.project.folder / CASES[source].recipe,
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
    # 16-bit stage 0 makes one update more, in its constructor.
    updates = SAVED_AT + (name == "zero0-bf16")
    assert Manifest.read(folder).optimizer_steps == updates
    assert verify(folder).problems == ()
    state = SavedState(folder)
    truth = torch.load(foreign.saved / f"{name}.truth.pt") if not case.neox else {}
    assert case.neox or state.shapes.keys() == truth.keys()
    frozen = matching(case.freeze, state.shapes)
    assert {tensor for tensor in truth if not truth[tensor]} == frozen
    for tensor, quantities in truth.items():
        assert state.quantities(tensor) == [*quantities] or tensor in frozen
        for quantity, value in quantities.items():
            assert torch.equal(whole(state, quantity, tensor), value.view(-1)), tensor
    if case.precision == "fp32":
        recipe = load_recipe(foreign.project.folder / case.recipe, case.overrides)
        assert continued(state, recipe, folder) == pytest.approx(
            foreign.losses[name], rel=TOLERANCE
        )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("zero2", {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}),
        ("zero3", {"parallel.engine": "megatron", "parallel.tensor": 2}),
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
