"""`launch/examples/trl_trainer.py` trains sharded what TRL trains in one plain process."""

import runpy
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from tests.accelerate.launched import common, launch
from tests.accelerate.trl_example_ranks import (
    BATCH,
    BETA,
    EPS,
    LENGTH,
    OBJECTIVES,
    RATE,
    SEED,
    SHARDED,
    STEPS,
    Seen,
    plain,
    sharded,
)
from tests.data.chat.families import TEMPLATES
from tests.e2e.conftest import Project
from tests.e2e.product import settings
from tests.forked import run_ranks
from tests.processes import ROOT
from toolkit.errors import PlanError
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT
]

SCRIPT = ROOT / "launch" / "examples" / "trl_trainer.py"
TINY = ROOT / "recipes" / "tiny"
ROWS = {"sft": "docstrings.jsonl", "dpo": "docstrings-preferences.jsonl"}
RECIPE = """
extends: {tiny}/llama-{objective}.yaml
model:
  hub: ./start
  init: pretrained
  config: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}}
data:
  train: {{path: ./{objective}.parquet}}
  chat_template: {template}
  packing: none
training:
  steps: {steps}
  sequence_length: {length}
  global_batch_size: {batch}
  micro_batch_size: 2
  seed: {seed}
optimizer: {{learning_rate: {rate}, weight_decay: 0.0, eps: {eps}}}
schedule: {{name: constant, warmup_steps: 0}}
evaluation: {{every_steps: null}}
adapter: {{rank: 8, alpha: 16}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes with their data, and the model that both begin with."""
    folder = tmp_path_factory.mktemp("trl-example")
    template = TEMPLATES / "chatml_generation.jinja"
    for objective in OBJECTIVES:
        rows = (TINY / ROWS[objective]).read_text(encoding="utf-8").splitlines()
        (folder / f"{objective}.jsonl").write_text("\n".join(rows[: STEPS * BATCH * 2]))
        table = pyarrow.json.read_json(folder / f"{objective}.jsonl")
        pyarrow.parquet.write_table(table, folder / f"{objective}.parquet")
        text = RECIPE.format(
            tiny=TINY, objective=objective, template=template, steps=STEPS, length=LENGTH,
            batch=BATCH, seed=SEED, rate=RATE, eps=EPS,
        )  # fmt: skip
        text += f"dpo: {{beta: {BETA}}}\n" if objective == "dpo" else ""
        (folder / f"{objective}.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(folder / "sft.yaml", ["model.init=random", "model.hub=null"])
    config = hf.build_config(recipe.model)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(recipe.model, config, SEED))
    model.save_pretrained(folder / "start")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Seen]:
    template = (TEMPLATES / "chatml_generation.jinja").read_text(encoding="utf-8")
    return run_ranks(plain, 1, folder, template)[0]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Seen]:
    return run_ranks(sharded, 2, folder)[0]


@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_are_those_of_one_plain_process(
    objective: str,
    engine: str,
    found: dict[str, Seen],
    expected: dict[str, Seen],
    folder: Path,
) -> None:
    seen, wanted = found[f"{objective}-{engine}"], expected[objective]
    assert seen["kind"] == engine
    assert 0.5 <= seen["share"] < 0.52, "of the numbers, on each of two ranks"
    assert len(wanted["losses"]) == STEPS
    assert wanted["losses"][-1] != pytest.approx(wanted["losses"][0], rel=1e-2)
    assert seen["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert seen["margins"] == pytest.approx(wanted["margins"], rel=1e-3, abs=1e-6)
    assert_adapter(folder, f"{objective}-{engine}", objective)


def assert_adapter(folder: Path, name: str, objective: str) -> None:
    """The saved adapter is that of the plain process."""
    adapter, expected = (
        load_file(folder / run_name / "adapter_model.safetensors")
        for run_name in (name, f"{objective}-plain")
    )
    assert adapter.keys() == expected.keys() and all(t.any() for t in adapter.values())
    for key, tensor in expected.items():
        torch.testing.assert_close(adapter[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("expected")
def test_the_script_under_accelerate_launch(folder: Path) -> None:
    changes = settings({"parallel.engine": "deepspeed", "parallel.zero.stage": 2})
    project = Project(folder, "dpo.yaml")
    arguments = ["--output-dir", "dpo-launched", *changes]
    ended = launch(project, common("zero2"), SCRIPT, project.recipe, *arguments)
    assert ended.code == 0, ended.err
    assert_adapter(folder, "dpo-launched", "dpo")


REFUSED = {
    "training.objective": "pretrain",
    "model.init": "random",
    "data.packing": "greedy",
    "data.train.columns": "{messages: talk}",
    "data.train.loss_on": "last_assistant",
    "adapter.folder": "./start",
    "dpo.label_smoothing": "0.1",
    "dpo.sft_weight": "1.0",
}


def test_what_the_script_does_not_know_is_refused(folder: Path) -> None:
    check = runpy.run_path(str(SCRIPT))["check"]
    for key, value in REFUSED.items():
        changes = [f"{key}={value}"]
        if key == "training.objective":
            changes.append(
                "data={train: {kind: text, files: ['*.jsonl']}, chat_template: null}"
            )
        with pytest.raises(PlanError, match="this script does not know") as caught:
            check(load_recipe(folder / f"{'dpo' if 'dpo' in key else 'sft'}.yaml", changes))
        assert f"set {key} to" in (caught.value.fix or "")
