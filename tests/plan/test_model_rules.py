"""What megatron-core refuses of a shape is refused first, and may be left to the planner."""

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.families import GEMMA, LLAMA, MIXTRAL
from tests.plan.making import intent, optimizer_of
from toolkit.errors import Problem
from toolkit.layout import Pair
from toolkit.models.model import check_config
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality
from toolkit.plan.rules.models import able_pairs, problems
from toolkit.plan.space import fallbacks, partial_layouts
from toolkit.recipe.schema import ClusterSection, TrainingSection

MUON = optimizer_of("muon")

ZERO_MEGATRON = Pair("deepspeed", "megatron")
HF = [Pair("deepspeed", "hf")]


def job(
    config: dict[str, Any], ranks: int, batch: int = 48, length: int = 64, **asked: Any
) -> PlanRequest:
    assert check_config(config) == []
    micro = asked.pop("micro_batch", "auto")
    precision = asked.pop("precision", "fp32")
    cluster = ClusterSection(gpus_per_node=ranks)
    parallel = intent(**asked)
    assert legality.problems(parallel, cluster) == []
    training = TrainingSection(
        steps=1,
        sequence_length=length,
        global_batch_size=batch,
        micro_batch_size=micro,
        precision=precision,
    )
    return PlanRequest(parallel, cluster, training, config)


def only(asked: PlanRequest) -> Problem:
    (problem,) = problems(asked)
    return problem


@pytest.mark.parametrize(
    ("config", "ranks", "asked"),
    [
        (LLAMA, 4, {}),
        (LLAMA, 4, {"tensor": 4}),
        (LLAMA | {"num_key_value_heads": 2}, 4, {"tensor": 4}),  # more ranks than kv heads
        (LLAMA, 4, {"tensor": 4, "sequence": True}),  # 257 rows are padded to 260
        (LLAMA, 6, {"pipeline": 6}),
        (LLAMA, 4, {"pipeline": 4}),  # 6 layers on 4 stages
        (LLAMA, 2, {"pipeline": 2, "virtual_pipeline": 3}),
        (LLAMA, 4, {"engine": "deepspeed", "tensor": 2, "zero": {"stage": 3}}),
        (MIXTRAL, 4, {"tensor": 2}),
        (MIXTRAL, 4, {"expert": 2}),
        (MIXTRAL, 4, {"tensor": 2, "expert": 2}),
        (MIXTRAL, 2, {"tensor": 2, "expert": 2}),  # expert divides dp · tp, not dp
        (MIXTRAL, 6, {"pipeline": 2, "expert": 3}),
        (MIXTRAL, 2, {"engine": "deepspeed", "zero": {"stage": 3}}),
        (GEMMA, 2, {}),
    ],
)
def test_legal(config: dict[str, Any], ranks: int, asked: dict[str, Any]) -> None:
    wanted = job(config, ranks, **asked)
    assert problems(wanted) == []
    assert able_pairs(wanted)


@pytest.mark.parametrize(
    ("changes", "ranks", "allowed"),
    [
        ({}, 8, "12 attention heads"),
        ({}, 5, "12 attention heads"),
        ({}, 6, "multiple or a divisor of the 4 key/value"),
        ({"num_key_value_heads": 1, "head_dim": 2}, 12, "28 rows"),
        ({"intermediate_size": 190}, 4, "size 190"),
        ({"intermediate_size": 191}, 2, "size 191"),
    ],
)
def test_tensor(changes: dict[str, Any], ranks: int, allowed: str) -> None:
    problem = only(job(LLAMA | changes, ranks, tensor=ranks))
    assert (problem.key, problem.found) == ("parallel.tensor", str(ranks))
    assert allowed in problem.allowed
    assert problem.fix == "set parallel.tensor to auto"
    assert problems(job(LLAMA | changes, ranks, engine="megatron")) == []


def test_tensor_divides_the_shared_experts() -> None:
    shared = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 66}
    config = LLAMA | {"model_type": "qwen2_moe", "num_experts": 4, **shared}
    problem = only(job(config, 4, tensor=4))
    assert "shared experts' intermediate size 66" in problem.allowed


def test_sequence_parallel_cuts_the_sequence_evenly() -> None:
    for config in (LLAMA, MIXTRAL):
        problem = only(job(config, 4, length=66, tensor=4, sequence=True))
        assert (problem.key, problem.fix) == (
            "parallel.sequence", "set parallel.sequence to auto",
        )  # fmt: skip
    assert problems(job(LLAMA, 4, length=66, tensor=4)) == []
    assert problems(job(LLAMA, 4, length=66, tensor=4, sequence=False)) == []


def test_experts_under_tensor_parallel_need_sequence_parallel() -> None:
    problem = only(job(MIXTRAL, 2, tensor=2, sequence=False))
    assert (problem.key, problem.allowed[:5]) == ("parallel.sequence", "true:")
    problem = only(job(MIXTRAL, 4, length=66, tensor=4))
    assert problem.key == "parallel.tensor"
    assert "sequence length 66" in problem.allowed


def test_experts() -> None:
    problem = only(job(LLAMA, 2, expert=2))
    assert (problem.key, problem.fix) == ("parallel.expert", "set parallel.expert to auto")
    assert only(job(MIXTRAL, 4, expert=4)).key == "parallel.expert"
    assert "the 6 experts" in only(job(MIXTRAL, 6, expert=6, pipeline=2)).allowed
    # With expert parallel, an expert is whole on its rank; without, tensor cuts it.
    odd = MIXTRAL | {"intermediate_size": 191}
    assert problems(job(odd, 2, tensor=2, expert=2)) == []
    assert "experts' intermediate size 191" in only(job(odd, 2, tensor=2)).allowed


def test_experts_are_not_deepspeeds_with_megatron() -> None:
    problem = only(job(MIXTRAL, 2, engine="deepspeed", tensor=2))
    assert problem.key == "parallel.engine"
    assert "parallel.engine to megatron" in problem.fix
    assert only(job(MIXTRAL, 2, tensor=2, zero={"stage": 2})).key == "parallel.zero"


def test_deepspeed_in_16_bits_shards_optimizer_states_at_least() -> None:
    asked = {"engine": "deepspeed", "model": "megatron", "zero": {"stage": 0}}
    problem = only(job(LLAMA, 4, precision="bf16", tensor=2, **asked))
    assert problem.key == "parallel.zero.stage"
    assert "set parallel.zero.stage to 1" in problem.fix
    assert problems(job(LLAMA, 4, precision="bf16", tensor=1, **asked)) == []
    assert problems(job(LLAMA, 4, tensor=2, **asked)) == []


def test_an_open_tensor_degree_is_settled_at_1_in_16_bits() -> None:
    asked = {"engine": "deepspeed", "model": "megatron", "zero": {"stage": 0}}
    open_degree = job(LLAMA, 4, precision="bf16", **asked)
    assert problems(open_degree) == []
    found = partial_layouts(open_degree, fallbacks(open_degree, island=8)[0])
    assert {partial.layout.tp for partial in found} == {1}
    # Sequence parallel needs a tensor group.
    assert only(job(LLAMA, 4, precision="bf16", sequence=True, **asked)).key == (
        "parallel.zero.stage"
    )


def test_fp16_has_one_loss_scale_for_all() -> None:
    """megatron-core's ChainedOptimizer: experts on ranks of their own keep another one."""
    for engine in ("megatron", "auto"):
        problem = only(job(MIXTRAL, 4, precision="fp16", engine=engine, expert=2))
        assert (problem.key, problem.found) == (
            "training.precision", "fp16 with parallel.expert: 2",
        )  # fmt: skip
        assert problem.fix == "set training.precision to bf16, or parallel.expert to 1"
    for precision in ("fp32", "bf16"):
        assert problems(job(MIXTRAL, 4, precision=precision, expert=2)) == []
    assert problems(job(MIXTRAL, 4, precision="fp16", engine="megatron", tensor=2)) == []


def test_muon_stays_on_the_device() -> None:
    for engine, zero in (
        ("deepspeed", {"stage": 2, "offload_optimizer": "cpu"}),
        ("deepspeed", {"stage": 3, "offload_parameters": "cpu"}),
        ("auto", {"offload_optimizer": "cpu"}),
    ):
        problem = only(replace(job(LLAMA, 4, engine=engine, zero=zero), optimizer=MUON))
        assert problem.key == f"parallel.zero.{[*zero][-1]}"
        assert "muon" in problem.allowed
    open_places = replace(job(LLAMA, 4), optimizer=MUON)
    assert problems(open_places) == []
    for fallback in fallbacks(open_places, 4):
        places = {
            one.layout.offload_optimizer for one in partial_layouts(open_places, fallback)
        }
        assert places <= {"none"}


def test_muon_in_fp16() -> None:
    """megatron-core's optimizers do not all agree on the step of an overflow."""
    asked = replace(
        job(LLAMA, 4, precision="fp16", engine="megatron", tensor=2), optimizer=MUON
    )
    assert only(asked).found == "fp16 with optimizer.name: muon on engine megatron"
    other = job(LLAMA, 4, precision="fp16", engine="deepspeed", zero={"stage": 2})
    assert problems(replace(other, optimizer=MUON)) == []


def test_a_layer_per_chunk() -> None:
    assert only(job(LLAMA, 8, pipeline=8)).key == "parallel.pipeline"
    assert only(job(LLAMA, 8, pipeline=8, virtual_pipeline=2)).key == "parallel.pipeline"
    problem = only(job(LLAMA, 2, pipeline=2, virtual_pipeline=4))
    assert (problem.key, problem.allowed[:15]) == (
        "parallel.virtual_pipeline", "at most a chunk",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "micro", "tensor", "good"),
    [(9, "auto", 1, 8), (12, 4, 1, 16), (2, 2, 1, 4), (9, "auto", 2, 10)],
)
def test_interleaving_takes_whole_groups(
    batch: int, micro: int | str, tensor: int, good: int
) -> None:
    asked = {"tensor": tensor, "pipeline": 2, "virtual_pipeline": 2}
    problem = only(job(LLAMA, 2 * tensor, batch, micro_batch=micro, **asked))
    assert problem.key == "parallel.virtual_pipeline"
    assert problems(job(LLAMA, 2 * tensor, good, micro_batch=micro, **asked)) == []


def test_what_megatron_cannot_express_is_left_to_transformers() -> None:
    unknown = {**LLAMA, "hidden_act": "relu"}
    assert able_pairs(job(unknown, 2)) == HF
    for asked in ({"engine": "megatron"}, {"tensor": 2}, {"model": "megatron"}):
        problem = only(job(unknown, 2, **asked))
        assert (problem.key, problem.fix[:24]) == ("model.config", "set parallel.model to hf")
        assert "activation relu" in problem.allowed


def test_several_mistakes_are_all_reported() -> None:
    asked = {"tensor": 8, "sequence": True, "expert": 3, "pipeline": 8}
    found = problems(job(MIXTRAL, 64, length=63, **asked))
    assert [problem.key for problem in found] == [
        "parallel.expert", "parallel.tensor", "parallel.sequence", "parallel.pipeline",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {"stages": (1, 2), "pipeline": 2},
        {"stages": (1, 1), "pipeline": 1, "virtual_pipeline": 1},
        {"stages": (1, 1), "engine": "ddp"},
    ],
)
def test_stages_that_do_not_suit_the_model(asked: dict[str, Any]) -> None:
    two_layers = LLAMA | {"num_hidden_layers": 2}
    assert only(job(two_layers, 2, **{"engine": "megatron", **asked})).key == "parallel.stages"
