"""Models of other families: launched, and exported with the files that they came with."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.conftest import RECIPE, Project
from tests.e2e.product import curve, records
from tests.forked import ForkedRanks
from tests.models.small import tiny
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.models.model import is_dropout
from toolkit.train.worker import train_recipe

pytestmark = pytest.mark.slow

SOME = ("gpt2", "mixtral")
"""Transposed, and with experts; tests/checkpoint/test_export.py has every family."""


def recipe_with(project: Project, name: str, model: str) -> Path:
    """The project's recipe with another `model`, as YAML."""
    recipe = project.folder / f"{name}.yaml"
    before, _, after = RECIPE.partition("model:\n")
    data = after[after.index("data:\n") :]
    recipe.write_text(f"{before}model: {model}\n{data}")
    return recipe


def base_model(folder: Path, family: str) -> Path:
    """A model folder as transformers writes it, with settings that are no defaults."""
    config = AutoConfig.for_model(**tiny(family) | {"vocab_size": 320, "pad_token_id": None})
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


@pytest.mark.parametrize("family", SOME)
def test_an_export_differs_in_weights_alone(project: Project, family: str):
    base = base_model(project.folder / f"base-{family}", family)
    balance = (
        ", balance: {kind: sequence_loss, coefficient: 0.01}" if family == "mixtral" else ""
    )
    model = f"{{hub: {base}, init: pretrained{balance}}}"
    run_dir = tuned(project, f"tuned-{family}", model, base)
    if balance:
        steps = records(run_dir / "metrics.jsonl")
        assert all(step["busiest_expert"] >= 1 and "dropped_tokens" in step for step in steps)
    weights, original = (
        load_file(folder / "model.safetensors") for folder in (run_dir / "export", base)
    )
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in original.items()
    }
    assert any((weights[name] != original[name]).any() for name in weights)
