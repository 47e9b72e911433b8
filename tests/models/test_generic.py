"""Model types without a family file: counted, checked, initialised, trained and stored."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.every_type import tried
from tests.models.small import tiny
from tests.plan.making import recipe
from toolkit.errors import PlanError
from toolkit.intake.checks import broken_rules
from toolkit.models import huggingface as hf
from toolkit.models.families import attention
from toolkit.models.model import check_config
from toolkit.models.types import NOT_INITIALISED
from toolkit.models.weights import RandomWeights
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ModelSection

SAMPLE = "gpt_oss", "cohere2", "bloom", "mamba", "nemotron_h", "opt"
"""Sinks, missing and learned positions, recurrent layers and mixtures of both. Other families
are in test_pairs.py and test_isolation.py, and `every_type` trains all."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SAMPLE)
def test_trains_as_a_plain_loop_does(model_type: str):
    row = tried(model_type)
    assert row.agrees, row


def test_attention_is_the_fastest_that_is_exact():
    assert attention({"model_type": "cohere2"}) == "sdpa"
    assert attention({"model_type": "gpt_oss"}) == "eager"  # sinks
    capped = {"model_type": "vaultgemma", "attn_logit_softcapping": 50.0}
    assert attention(capped) == "eager"


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
