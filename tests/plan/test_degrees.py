"""Degrees that a recipe leaves open, for the pairs that have any."""

from typing import Any

import pytest

from tests.plan.test_planner import RECIPES, TINY, llama_8b, recipe
from toolkit.errors import PlanError, RecipeError
from toolkit.plan.layout import Layout
from toolkit.plan.planner import Plan, plan_recipe
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import ZeroSection

PSI_8B = 8_030_261_248
MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4}


def tiny(ranks: int, batch: int = 8, length: int = 64, **parallel: Any) -> Plan:
    """The plan of a tiny model on CPU."""
    sections = {f"parallel__{name}": value for name, value in parallel.items()}
    return plan_recipe(
        recipe(
            cluster__gpus_per_node=ranks,
            training__global_batch_size=batch,
            training__sequence_length=length,
            training__precision="fp32",
            **sections,
        )
    )


def test_405b_as_published() -> None:
    plan = plan_recipe(load_recipe(RECIPES / "llama/llama-3.1-405b-pretrain.yaml"))
    assert (plan.engine, plan.model) == ("megatron", "megatron")
    assert plan.layout == Layout(
        dp=128,
        tp=8,
        pp=16,
        sequence_parallel=True,
        zero_stage=1,
        recompute="full",
        micro_batch=1,
        gradient_accumulation=16,
    )
    assert any(reason.endswith("7 + 14 × 8 + 7 layers") for reason in plan.reasons)
    assert not any("WARNING" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("gpus", "gpu", "tensor", "pipeline", "fits"),
    [
        # 8 B parameters, 6 + 12/dp bytes of each: 7.5 GiB a byte; 60% of 80 GiB are 6.4.
        (8, "b200", 1, 1, True),  # 7.5 of 14.4
        (8, "h100-80gb", 2, 1, True),  # 4.5
        (2, "h100-80gb", 2, 1, False),  # 9; two stages take more: one has more than half
        (8, "a100-40gb", 4, 1, True),  # 3 of 3.2
        (4, "a100-40gb", 4, 1, False),  # 4.5
    ],
)
def test_the_least_tensor_degree_that_fits(
    gpus: int, gpu: str, tensor: int, pipeline: int, fits: bool
) -> None:
    plan = llama_8b(gpus, gpu, engine="megatron")
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.vpp) == (tensor, pipeline, 1)
    assert layout.dp == gpus // (tensor * pipeline)
    assert layout.sequence_parallel == (tensor > 1)
    assert layout.zero_stage == (1 if layout.dp > 1 else 0)
    assert any("WARNING" in reason for reason in plan.reasons) != fits


def test_pipeline_stages_when_a_node_is_too_small() -> None:
    big = load_recipe(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")
    parallel = big.parallel.model_copy(update={"tensor": "auto", "pipeline": "auto"})
    plan = plan_recipe(big.model_copy(update={"parallel": parallel}))
    # 405 B · (6 + 12/512) bytes / 32 are 71 GiB, of 48; / 64 are 36.
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (8, 8, 256)
    assert "pipeline 8: auto; the least that model states fit with" in "\n".join(plan.reasons)


def test_zero_comes_before_tensor_with_deepspeed() -> None:
    plan = llama_8b(8, engine="deepspeed", model="megatron")
    assert (plan.engine, plan.model) == ("deepspeed", "megatron")
    assert (plan.layout.tp, plan.layout.zero_stage) == (1, 2)
    split = llama_8b(8, engine="deepspeed", tensor=2, zero={"stage": 3})
    assert (split.model, split.layout.tp, split.layout.dp) == ("megatron", 2, 4)
    assert split.model_states_gib == pytest.approx(18 * PSI_8B / 8 / 2**30, rel=1e-3)


def llama_70b(**changes: Any) -> Plan:
    """Llama 3.1 70B under DeepSpeed with megatron-core's model, on 16 nodes of 8 H100."""
    wanted = load_recipe(RECIPES / "llama/llama-3.1-70b-pretrain.yaml")
    parallel = {"engine": "deepspeed", "model": "megatron", **changes}
    cluster = wanted.cluster.model_copy(update={"nodes": 16})
    update = {"parallel": wanted.parallel.model_copy(update=parallel), "cluster": cluster}
    return plan_recipe(wanted.model_copy(update=update))


def test_tensor_rises_until_the_model_can_be_built() -> None:
    """70.6 B parameters · 2 bytes are 131 GiB on every GPU before ZeRO shards them, of 48."""
    plan = llama_70b(zero=ZeroSection(stage=3))
    assert (plan.layout.tp, plan.layout.dp, plan.layout.zero_stage) == (4, 32, 3)
    assert "tensor 4: auto; the least that the weights fit with before ZeRO" in plan.reasons[1]
    zero = next(reason for reason in plan.reasons if reason.startswith("zero 3"))
    assert "take 8.2 of 80 GiB per GPU, and 32.9 while the model is built" in zero
    assert not any("WARNING" in reason for reason in plan.reasons)
    # Where the stage is open, the lowest that fits: here 2 + 14/32 bytes of a quarter.
    assert (llama_70b().layout.tp, llama_70b().layout.zero_stage) == (4, 2)


def test_a_model_that_cannot_be_built_is_warned_of() -> None:
    plan = llama_70b(tensor=1)
    assert (plan.layout.tp, plan.layout.zero_stage) == (1, 3)
    (warning,) = (reason for reason in plan.reasons if "WARNING" in reason)
    assert "8.2 of 80 GiB per GPU, and 131.4 while the model is built" in warning
    assert "use a higher tensor degree" in warning


def test_on_cpu_nothing_is_split_unasked() -> None:
    plan = tiny(2, engine="megatron")
    assert (plan.layout.dp, plan.layout.tp, plan.layout.pp, plan.layout.zero_stage) == (
        2,
        1,
        1,
        1,
    )
    assert plan.reasons[1] == "tensor 1: auto on CPU, where memory is not the limit"


def test_what_needs_a_degree_gets_one() -> None:
    assert tiny(4, sequence=True).layout.tp == 2
    interleaved = tiny(4, virtual_pipeline=1, pipeline=2, tensor=1)
    assert (interleaved.layout.pp, interleaved.layout.dp) == (2, 2)
    deeper = recipe(
        model__config=TINY | {"num_hidden_layers": 4},
        cluster__gpus_per_node=2,
        parallel__virtual_pipeline=2,
    )
    assert (plan_recipe(deeper).layout.pp, plan_recipe(deeper).layout.vpp) == (2, 2)


def test_sequence_parallel_is_used_where_it_can_be() -> None:
    assert tiny(2, tensor=2).layout.sequence_parallel
    assert not tiny(2, tensor=2, sequence=False).layout.sequence_parallel
    odd = tiny(2, tensor=2, length=63)
    assert not odd.layout.sequence_parallel
    assert "sequence parallel false: auto; tensor 2 does not divide 63 tokens" in odd.reasons


def test_a_degree_that_spreads_the_batch_is_preferred() -> None:
    assert tiny(4, batch=2, engine="megatron").layout.tp == 2
    with pytest.raises(PlanError, match="cannot be spread evenly over 3 ranks"):
        tiny(3, batch=4, engine="megatron")


@pytest.mark.parametrize(
    ("batch", "asked", "micro_batch", "accumulation"),
    [
        (8, {"pipeline": 2}, 4, 2),  # a micro batch per stage
        (12, {"pipeline": 2}, 6, 2),
        (3, {"pipeline": 2}, 1, 3),
        (1, {"pipeline": 2}, 1, 1),
        (12, {"tensor": 2}, 12, 1),
    ],
)
def test_micro_batches_fill_the_pipeline(
    batch: int, asked: dict[str, Any], micro_batch: int, accumulation: int
) -> None:
    layout = tiny(2, batch, **asked).layout
    assert (layout.micro_batch, layout.gradient_accumulation) == (micro_batch, accumulation)


def test_interleaved_micro_batches_come_in_groups() -> None:
    wanted = recipe(
        model__config=TINY | {"num_hidden_layers": 8},
        cluster__gpus_per_node=4,
        training__global_batch_size=24,
        parallel__pipeline=4,
        parallel__virtual_pipeline=2,
    )
    plan = plan_recipe(wanted)
    assert (plan.layout.micro_batch, plan.layout.gradient_accumulation) == (6, 4)
    # (4 − 1) / (2 · 4)
    assert any("idles for 38% of the time" in reason for reason in plan.reasons)


def test_tensor_groups_across_nodes_are_warned_of() -> None:
    wanted = recipe(cluster__nodes=2, cluster__gpus_per_node=2, parallel__tensor=4)
    assert any("WARNING: its groups reach" in reason for reason in plan_recipe(wanted).reasons)


def test_activations_are_split_too() -> None:
    """34 bytes · 8,192 tokens · 4,096 hidden · 32 layers are 34 GiB, of 32."""
    whole = llama_8b(8, length=8192, engine="megatron", tensor=1, zero={"stage": 1})
    half = llama_8b(8, length=8192, engine="megatron", tensor=2)
    assert (whole.layout.recompute, half.layout.recompute) == ("full", "none")
    assert "17.0 GiB of activations" in half.reasons[-1]
    # Without sequence parallel, 10 of the 34 bytes stay whole.
    alone = llama_8b(8, length=8192, engine="megatron", tensor=2, sequence=False)
    assert "22.0 GiB of activations" in alone.reasons[-1]
    # Two stages hold two micro batches of half the layers each.
    stages = llama_8b(8, length=8192, engine="megatron", tensor=1, pipeline=2)
    assert "34.0 GiB of activations of 2 micro batches" in stages.reasons[-1]


def test_a_model_from_the_hub_is_checked_when_planned(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_attention_heads": 1}))
    wanted = recipe(
        model__config=None,
        model__hub=str(tmp_path),
        cluster__gpus_per_node=2,
        parallel__tensor=2,
    )
    with pytest.raises(RecipeError, match=r"parallel\.tensor: found 2; allowed: a divisor of"):
        plan_recipe(wanted)


def test_no_degrees_at_all() -> None:
    wanted = recipe(
        model__config=TINY | {"intermediate_size": 127},
        cluster__gpus_per_node=2,
        parallel__sequence=True,
    )
    with pytest.raises(PlanError, match=r"^parallel\.tensor: no tensor and") as caught:
        plan_recipe(wanted)
    assert caught.value.fix == "set parallel.sequence to auto"


def test_experts() -> None:
    wanted = recipe(
        model__config=MIXTRAL, cluster__gpus_per_node=4, parallel__expert=2, parallel__tensor=2
    )
    plan = plan_recipe(wanted)
    assert (plan.layout.ep, plan.layout.tp, plan.layout.dp) == (2, 2, 2)
    assert plan.layout.sequence_parallel
    assert "expert 2: asked for; 2 experts per rank" in plan.reasons
