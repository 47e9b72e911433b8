"""Other models, precisions and starts, under ZeRO-3 as under ddp."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.conftest import RECIPE, Project
from tests.e2e.product import curve, dmt, events, run, settings
from tests.forked import ForkedRanks
from tests.models.small import FAMILIES
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.models.model import is_dropout
from toolkit.train.worker import train_recipe

pytestmark = pytest.mark.slow

ZERO_3 = {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}
ONE_RANK = {"cluster.gpus_per_node": 1}


def trained(project: Project, recipe: Path, name: str, changes: Mapping[str, object]) -> Path:
    """Run directory of a finished run of another recipe of the project."""
    argv = dmt("launch", recipe, "--run-dir", name, *settings(changes))
    run(argv, project.folder, code=0)
    return project.folder / name


OF_EACH_KIND = ("llama", "gpt2", "gemma2", "mixtral", "deepseek_v3", "gpt_oss")
"""Dense, transposed, capped, with experts, with latent attention, with stacked experts."""


def validation_loss(run_dir: Path) -> float:
    return float(events(run_dir, "evaluation")[-1]["loss"])


def assert_same(run_dir: Path, reference: Path, relative: float) -> None:
    expected = curve(reference)
    assert curve(run_dir) == {
        step: pytest.approx(expected[step], rel=relative) for step in curve(run_dir)
    }
    assert validation_loss(run_dir) == pytest.approx(validation_loss(reference), rel=relative)


def recipe_with(project: Project, name: str, model: str) -> Path:
    """The project's recipe with another `model`, as YAML."""
    recipe = project.folder / f"{name}.yaml"
    before, _, after = RECIPE.partition("model:\n")
    data = after[after.index("data:\n") :]
    recipe.write_text(f"{before}model: {model}\n{data}")
    return recipe


def test_a_convolution_is_saved_resumed_and_exported(project: Project):
    """Its weights have three axes."""
    config = "{config: {model_type: mamba, vocab_size: 320, hidden_size: 32, state_size: 4, "
    recipe = recipe_with(project, "mamba", config + "num_hidden_layers: 2}}")
    whole = trained(project, recipe, "mamba-ddp", {"training.steps": 4} | ONE_RANK)
    first = {"training.steps": 2, "schedule.name": "constant"} | ONE_RANK
    trained(project, recipe, "mamba", first)
    fsdp = {"training.steps": 4, "parallel.engine": "fsdp", "parallel.zero.stage": 3}
    resumed = trained(project, recipe, "mamba", fsdp)
    assert_same(resumed, whole, 1e-5)
    exported = load_file(resumed / "export" / "model.safetensors")
    expected = load_file(whole / "export" / "model.safetensors")
    assert {name: t.shape for name, t in exported.items()} == {
        name: t.shape for name, t in expected.items()
    }
    assert exported["backbone.layers.0.mixer.conv1d.weight"].shape == (64, 1, 4)
    loaded = AutoModelForCausalLM.from_pretrained(resumed / "export")
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.data, exported[name])


def test_a_pretrained_start_is_where_the_export_ended(project: Project, ddp_run: Path):
    changes = ZERO_3 | {
        "model.init": "pretrained",
        "model.hub": ddp_run / "export",
        "training.steps": 1,
        "optimizer.learning_rate": 1e-12,
    }
    run_dir = trained(project, project.recipe, "pretrained", changes)
    assert validation_loss(run_dir) == pytest.approx(validation_loss(ddp_run), rel=1e-5)
    ((loss, _),) = curve(run_dir).values()
    assert loss < curve(ddp_run)[15][0], "step 1 goes on where step 20 was"


def base_model(folder: Path, family: str) -> Path:
    """A model folder as transformers writes it, with settings that are no defaults."""
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": 320})
    for key in filter(is_dropout, config.to_dict()):
        setattr(config, key, 0.125)
    model = AutoModelForCausalLM.from_config(config)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [2, 5]}
    model.generation_config.update(**sampling)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def tuned(project: Project, name: str, model: str, base: Path) -> Path:
    """Run directory of two steps on one rank, whose export has the JSON files of `base`."""
    recipe, run_dir = recipe_with(project, name, model), project.folder / name
    overrides = ["training.steps=2", "cluster.gpus_per_node=1", f"data.tokenizer={base}"]
    ranks = ForkedRanks(train_recipe, (recipe, overrides, run_dir), 1, project.folder)
    assert ranks.end() == [0], ranks.printed()
    assert len(curve(run_dir)) == 2
    for file in base.glob("*.json"):
        assert json.loads((run_dir / "export" / file.name).read_text()) == json.loads(
            file.read_text()
        ), file.name
    return run_dir


def test_a_start_from_a_checkpoint_keeps_the_files_of_its_model(project: Project):
    base = base_model(project.folder / "base", "llama")
    first = tuned(project, "first", f"{{hub: {base}, init: pretrained}}", base)
    model = f"{{hub: {base}, init: checkpoint, checkpoint: {first}}}"
    tuned(project, "second", model, base)


@pytest.mark.parametrize(
    "family",
    [
        one if one in OF_EACH_KIND else pytest.param(one, marks=pytest.mark.soak)
        for one in FAMILIES
    ],
)
def test_every_family_is_launched_and_its_export_differs_in_weights_alone(
    project: Project, family: str
):
    base = base_model(project.folder / f"base-{family}", family)
    run_dir = tuned(project, f"tuned-{family}", f"{{hub: {base}, init: pretrained}}", base)
    weights, original = (
        load_file(folder / "model.safetensors") for folder in (run_dir / "export", base)
    )
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in original.items()
    }
    assert any((weights[name] != original[name]).any() for name in weights)
