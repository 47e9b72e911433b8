"""`model.freeze`: patterns of names, what they match, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from tests.models.configs import CONFIGS, config_of
from tests.plan.making import TINY, intent, recipe
from toolkit.errors import RecipeError
from toolkit.models import frozen
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.models.weights import is_correction_bias
from toolkit.plan.estimate import estimate_plan
from toolkit.plan.planner import plan_recipe
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import problems
from toolkit.recipe.schema import ModelSection, Recipe
from toolkit.rehearse.shrink import shrink_freeze

GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
RELU = TINY | {"hidden_act": "relu"}
"""What megatron-core cannot compute: the map of its tensors is known nevertheless."""
MIXTRAL = TINY | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}

GPT_OSS = MIXTRAL | {"model_type": "gpt_oss"}
GRANITE = MIXTRAL | {"model_type": "granitemoe"}


def freezing(*patterns: str, config: dict[str, Any] = TINY, **parallel: Any) -> Recipe:
    found = recipe(model__config=config, model__freeze=list(patterns))
    return found.model_copy(update={"parallel": intent(**parallel)})


def problem_of(wanted: Recipe) -> str:
    job = PlanRequest(
        wanted.parallel, wanted.cluster, wanted.training, wanted.model.config or {},
        wanted.model.freeze,
    )  # fmt: skip
    (problem,) = problems(job)
    return str(problem)


@pytest.mark.parametrize("config", [*map(config_of, CONFIGS), GEMMA2, RELU])
def test_names_are_those_of_transformers(config: dict[str, Any]) -> None:
    """Without torch, for every family: `dmt check` knows them."""
    shapes = hf.checkpoint_shapes(hf.build_config(ModelSection(config=config)))
    trained = {name for name in shapes if not is_correction_bias(name)}
    assert frozen.names_of(config) == trained
    everything = frozen.spec_of(config, ["*"])
    assert everything.trainable == 0
    assert everything.frozen is not None
    assert everything.frozen.total == model_spec(config).parameters.total


def test_trainable_parameters_are_in_the_plan() -> None:
    plan = plan_recipe(freezing("model.embed_tokens.*", "model.layers.1.*"))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert plan.trainable_parameters == plan.parameters - 512 * 64 - layer
    assert plan_recipe(freezing()).trainable_parameters == plan.parameters


@pytest.mark.parametrize(
    ("patterns", "config", "parallel", "told"),
    [
        (["model.embed.*", "model.norm.*"], TINY, {}, "found model.embed.*, which matches no"),
        (["lm_head.*"], TINY | {"tie_word_embeddings": True}, {}, "which matches no tensor"),
        (["model.*", "lm_*"], TINY, {}, "matches all 21 tensors; allowed: at least one"),
        (
            ["*.0.self_attn.q_proj.*"], TINY, {"engine": "megatron"},
            "k_proj.weight and model.layers.0.self_attn.q_proj.weight; allowed: one value",
        ),
        (["*.gate_proj.*"], TINY, {"model": "megatron"}, "fix: match all or none of"),
        (["*.experts.1.*"], MIXTRAL, {"engine": "ddp"}, "different values for model.layers."),
        (["*.experts.1.*"], GPT_OSS, {"engine": "ddp"}, "different values for model.layers."),
        (["*.experts.1.*"], GRANITE, {"engine": "ddp"}, "different values for model.layers."),
    ],
)  # fmt: skip
def test_refused(
    patterns: list[str], config: dict[str, Any], parallel: dict[str, Any], told: str
) -> None:
    assert told in problem_of(freezing(*patterns, config=config, **parallel))


def test_a_part_that_the_plan_did_not_see_is_refused() -> None:
    with pytest.raises(RecipeError, match="different values for a and b"):
        frozen.value_of_parameter("model.freeze", {"a"}.__contains__, ["a", "b"])


def test_a_part_of_a_parameter_rules_out_only_who_keeps_it_whole() -> None:
    assert plan_recipe(freezing("*.q_proj.*")).model == "hf"
    assert plan_recipe(freezing("*.experts.1.*", config=MIXTRAL)).model == "megatron"


def test_a_small_model_has_what_patterns_still_match() -> None:
    patterns = ("model.embed_tokens.*", "model.layers.1.*", "model.layers.30.*")
    assert shrink_freeze(patterns, TINY) == patterns[:2]
    assert shrink_freeze(("model.layers.*", "model.[en]*", "lm_head.*"), TINY) == (
        "model.layers.*", "model.[en]*",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "spread"),
    [
        # Ranks that share gradients, and optimizer states.
        ({"engine": "ddp"}, (1, 1)),
        ({"engine": "deepspeed", "model": "hf", "zero": {"stage": 1}}, (1, 4)),
        ({"engine": "deepspeed", "model": "hf", "zero": {"stage": 2}}, (4, 4)),
        ({"engine": "megatron", "tensor": 4}, (4, 4)),
    ],
)
def test_memory_is_smaller_by_the_bytes_of_what_is_frozen(
    parallel: dict[str, Any], spread: tuple[int, int]
) -> None:
    """All matrices of layer 0 and the embedding: what tensor parallel splits evenly."""
    patterns = ("model.embed_tokens.*", "*.0.*proj.weight")
    count = 512 * 64 + 4 * 64 * 64 + 3 * 64 * 128
    update = {"precision": "fp32", "global_batch_size": 8, "micro_batch_size": 1}
    found = []
    for freeze in ((), patterns):
        wanted = freezing(*freeze, **{"pipeline": 1, "recompute": "none", **parallel})
        training = wanted.training.model_copy(update=update)
        cluster = wanted.cluster.model_copy(update={"gpus_per_node": 4})
        wanted = wanted.model_copy(update={"training": training, "cluster": cluster})
        found.append(estimate_plan(wanted, plan_recipe(wanted)))
    before, after = (one.memory for one in found)
    assert after["weights"] == before["weights"]
    assert before["gradients"] - after["gradients"] == pytest.approx(4 * count / spread[0])
    assert before["optimizer"] - after["optimizer"] == pytest.approx(8 * count / spread[1])
    assert after["activations"] == before["activations"]
    assert found[1].time["update"] < found[0].time["update"]


def test_a_stage_that_is_frozen_has_weights_alone() -> None:
    """Five layers on two stages, 3 and 2: each stage's own layers count."""
    from toolkit.plan.cost.stages import stage_share

    config = TINY | {"num_hidden_layers": 5, "tie_word_embeddings": True}
    spec = frozen.spec_of(config, ["model.embed_tokens.*", "model.layers.[0-2].*"])
    first, last = (stage_share(spec, 1, 1, 2, 1, stage) for stage in (0, 1))
    assert (first.layers, last.layers) == (3, 2)
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    # The planner spreads the final norm over all layers.
    assert first.trained.parameters == pytest.approx(64 * 3 / 5)
    assert last.trained.parameters == pytest.approx(2 * layer + 64 * 2 / 5)
    assert last.trained.output == 0.0
    everything = replace(spec, frozen=None)
    assert stage_share(everything, 1, 1, 2, 1, 1).trained.output == 512 * 64
