"""Model types without a family file: counted, checked, initialised, trained and stored."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.dmt import Dmt
from tests.models.configs import CONFIGS, config_of
from tests.models.every_type import tiny, tried
from tests.plan.making import recipe
from toolkit.errors import PlanError
from toolkit.intake.checks import broken_rules
from toolkit.layout import Layout, Pair, Recompute
from toolkit.models import huggingface as hf
from toolkit.models.config_check import check_config
from toolkit.models.families import attention, model_spec, published, unsupported
from toolkit.models.families.base import Settings
from toolkit.models.families.generic import NOT_INITIALISED, generic
from toolkit.models.families.shape import shape
from toolkit.models.weights import RandomWeights
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.workload import planned_workload
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ModelSection, TrainingSection

SHIPPED = {
    # Parameters of the published models, counted from their checkpoints' headers.
    "phi3": 3_821_079_552,  # microsoft/Phi-3-mini-4k-instruct
    "gpt_oss": 116_829_156_672,  # openai/gpt-oss-120b
    "deepseek_v3": 671_026_404_352,  # deepseek-ai/DeepSeek-V3, without its prediction layer
    "smollm3": 3_075_098_624,  # HuggingFaceTB/SmolLM3-3B
}
"""Types whose config class has the published sizes as its defaults."""
SAMPLE = (
    "phi3", "gemma3_text", "gpt_oss", "olmo3", "glm4", "glm4_moe", "granite", "smollm3",
    "cohere2", "bloom", "mamba", "falcon_h1", "nemotron_h", "opt", "ernie4_5_moe",
)  # fmt: skip
"""Norms after, soft caps, sinks, biases, shared experts, multipliers, missing and learned
positions, recurrent layers and mixtures of both."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SAMPLE)
def test_trains_as_a_plain_loop_does(model_type: str):
    row = tried(model_type)
    assert row.agrees, row


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_counted_is_what_a_family_file_says(case: str):
    config = config_of(case)
    known, counted = model_spec(config), shape(Settings(generic(config["model_type"]), config))
    assert counted.counted is not None
    assert counted.parameters.total == known.parameters.total
    assert counted.parameters.active == known.parameters.active
    for length in (32, 4096):
        for causal in (True, False):
            ours, theirs = (s.flops_per_token(length, causal=causal) for s in (counted, known))
            assert ours == pytest.approx(theirs, rel=0.01)
    theirs, ours = (
        {name: value for name, value in asdict(spec).items() if name not in _OF_KNOWN}
        for spec in (known, counted)
    )
    assert ours == theirs


_OF_KNOWN = ("generic", "counted", "qkv_bias", "attention_output_bias", "mlp_bias")
"""Counted, a model's biases are among its parameters."""


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", CONFIGS)
def test_memory_is_what_a_family_file_says(case: str, recompute: Recompute):
    config = config_of(case)
    specs = model_spec(config), shape(Settings(generic(config["model_type"]), config))
    training = TrainingSection(steps=1, sequence_length=32, global_batch_size=2)
    for engine, stage in (("ddp", 0), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 3)):
        layout = Layout(dp=2, zero_stage=stage, recompute=recompute)
        known, counted = (
            asdict(peak_memory(planned_workload(spec, training, Pair(engine, "hf")), layout))
            for spec in specs
        )
        assert counted == pytest.approx(known, rel=0.01), engine


@pytest.mark.parametrize("model_type", SHIPPED)
def test_a_published_model_has_its_published_parameters(model_type: str):
    assert model_spec({"model_type": model_type}).total == SHIPPED[model_type]


def test_attention_is_the_fastest_that_is_exact():
    assert attention({"model_type": "cohere2"}) == "sdpa"
    assert attention({"model_type": "gpt_oss"}) == "eager"  # sinks
    capped = {"model_type": "vaultgemma", "attn_logit_softcapping": 50.0}
    assert attention(capped) == "eager"


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"model_type": "cohere2", "hiden_size": 64}, "hiden_size", "hidden_size"),
        ({"model_type": "phi33"}, "model_type", "phi3"),
        ({"model_type": "bert"}, "is_decoder", "add is_decoder: true"),
        ({"model_type": "gemma3"}, "model_type", "vision_config"),
        ({"model_type": "cohere2", "hidden_size": "64"}, "hidden_size", "int"),
    ],
)
def test_mistakes_name_the_key_and_the_fix(config: dict[str, Any], key: str, words: str):
    (problem,) = check_config(config)
    assert problem.key == key
    assert words in f"{problem.found} {problem.allowed} {problem.fix}"


@pytest.mark.parametrize("model_type", NOT_INITIALISED)
def test_types_without_initial_weights_are_refused(model_type: str):
    """transformers itself fails, or leaves weights out."""
    config = tiny(model_type)
    assert not check_config(config)
    (problem,) = broken_rules(recipe(model__config=config))
    assert problem.key == "model.init"
    with pytest.raises((PlanError, ValueError, AttributeError)):
        weights = RandomWeights(hf.meta_model(hf.build_config(ModelSection(config=config))), 0)
        for name in weights.shapes:
            weights.read(name, 0, 1)


@pytest.mark.parametrize(("model_type", "assumed"), [("jamba", True), ("phi3", False)])
def test_a_plan_says_that_flops_are_assumed(model_type: str, assumed: bool):
    """A model that reads values of its input does not run without storage."""
    config = tiny(model_type) | {"max_position_embeddings": 128}
    reasons = plan_recipe(recipe(model__config=config)).reasons
    assert any(one.startswith("FLOPs: assumed") for one in reasons) == assumed


def test_check_names_file_line_and_suggestion(tmp_path: Path, dmt: Dmt):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: own\nmodel:\n  config:\n    model_type: cohere2\n    hidden_sise: 64\n"
        "data:\n  train: {kind: text, files: ['*.py']}\n"
        "training: {steps: 1, sequence_length: 16, global_batch_size: 1}\n"
        "optimizer: {learning_rate: 1.0e-3}\ncluster: {gpus_per_node: 1, gpu: cpu}\n"
    )
    error = dmt("check", recipe, code=2).err
    assert re.search(r"recipe\.yaml:5.*hidden_sise.*`hidden_size`", error, re.DOTALL)


def test_a_published_config_may_have_keys_that_nothing_reads():
    config = tiny("cohere2") | {"auto_map": {}, "attn_implementation": "x"}
    assert published(config) == tiny("cohere2")
    assert published({"model_type": "llama", "auto_map": {}}) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("granitemoehybrid", "state-space layers"), ("cohere2", "no map between")],
)
def test_why_it_is_not_for_megatron_core(model_type: str, words: str):
    assert words in (unsupported(tiny(model_type)) or "")


def test_own_initialisations_are_the_modules():
    """Mamba's decay rates are the model's own constants; its time steps are random, the same
    whichever part of them is read first, and others for another seed."""
    config = hf.build_config(ModelSection(config=tiny("mamba")))
    own = AutoModelForCausalLM.from_config(config)
    drawn, again, other = (RandomWeights(hf.meta_model(config), seed) for seed in (1, 1, 2))
    rates, steps = (f"backbone.layers.1.mixer.{name}" for name in ("A_log", "dt_proj.weight"))
    expected = own.get_parameter(rates).flatten()
    assert torch.equal(drawn.read(rates, 0, expected.numel()), expected)
    whole = drawn.read(steps, 0, 64)
    assert torch.equal(again.read(steps, 32, 64), whole[32:])
    assert not torch.equal(other.read(steps, 0, 64), whole)
    assert whole.abs().max() <= own.get_parameter(steps).abs().max() * 1.1
