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
from toolkit.plan.space import bounds, partial_layouts
from toolkit.recipe.schema import ClusterSection, TrainingSection

MUON = optimizer_of("muon")
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 66}
QWEN2_MOE = LLAMA | {"model_type": "qwen2_moe", "num_experts": 4, **SHARED}
RELU = LLAMA | {"hidden_act": "relu"}
TWO_LAYERS = LLAMA | {"num_hidden_layers": 2}
DEEPSPEED = {"engine": "deepspeed", "model": "megatron", "zero": {"stage": 0}}
IN_16_BITS = DEEPSPEED | {"precision": "bf16"}
ODD_EXPERTS = MIXTRAL | {"intermediate_size": 191}
ONE_KEY = LLAMA | {"num_key_value_heads": 1, "head_dim": 2}
LONG = {"length": 66, "tensor": 4}
NO_PIPELINE = {"engine": "megatron", "pipeline": 1, "virtual_pipeline": 1}

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
        (LLAMA | {"num_key_value_heads": 2}, 4, {"tensor": 4}),  # more ranks than kv heads
        (LLAMA, 4, {"tensor": 4, "sequence": True}),  # 257 rows are padded to 260
        (LLAMA, 4, {"pipeline": 4}),  # 6 layers on 4 stages
        (LLAMA, 2, {"pipeline": 2, "virtual_pipeline": 3}),
        (LLAMA, 4, {"engine": "deepspeed", "tensor": 2, "zero": {"stage": 3}}),
        (MIXTRAL, 2, {"tensor": 2, "expert": 2}),  # expert divides dp · tp, not dp
        (MIXTRAL, 6, {"pipeline": 2, "expert": 3}),
        (MIXTRAL, 2, {"engine": "deepspeed", "zero": {"stage": 3}}),
        (GEMMA, 2, {}),
        (LLAMA, 4, LONG | {"sequence": False}),
        (ODD_EXPERTS, 2, {"tensor": 2, "expert": 2}),
        (LLAMA, 4, DEEPSPEED | {"tensor": 2}),
    ],
)
def test_legal(config: dict[str, Any], ranks: int, asked: dict[str, Any]) -> None:
    wanted = job(config, ranks, **asked)
    assert problems(wanted) == []
    assert able_pairs(wanted)


@pytest.mark.parametrize(
    ("config", "ranks", "asked", "key", "allowed"),
    [
        (LLAMA, 8, {"tensor": 8}, "tensor", "12 attention heads"),
        (LLAMA, 6, {"tensor": 6}, "tensor", "multiple or a divisor of the 4 key/value"),
        (ONE_KEY, 12, {"tensor": 12}, "tensor", "28 rows"),
        (QWEN2_MOE, 4, {"tensor": 4}, "tensor", "shared experts' intermediate size 66"),
        (LLAMA, 4, LONG | {"sequence": True}, "sequence", "divides the 66 tokens"),
        (MIXTRAL, 4, LONG | {"sequence": True}, "sequence", "divides the 66 tokens"),
        (MIXTRAL, 4, LONG, "tensor", "sequence length 66"),
        (MIXTRAL, 2, {"tensor": 2, "sequence": False}, "sequence", "true:"),
        (MIXTRAL, 4, {"expert": 4}, "expert", "the 6 experts"),
        (MIXTRAL, 6, {"expert": 6, "pipeline": 2}, "expert", "the 6 experts"),
        # With expert parallel, an expert is whole on its rank; without, tensor cuts it.
        (ODD_EXPERTS, 2, {"tensor": 2}, "tensor", "experts' intermediate size 191"),
        (LLAMA, 8, {"pipeline": 8, "virtual_pipeline": 2}, "pipeline", "6 layers"),
    ],
)
def test_what_may_be_left_to_the_planner(
    config: dict[str, Any], ranks: int, asked: dict[str, Any], key: str, allowed: str
) -> None:
    problem = only(job(config, ranks, **asked))
    assert (problem.key, problem.fix) == (
        f"parallel.{key}", f"set parallel.{key} to auto",
    )  # fmt: skip
    assert allowed in problem.allowed


@pytest.mark.parametrize(
    ("config", "asked", "key", "fix"),
    [
        (MIXTRAL, {"engine": "deepspeed", "tensor": 2}, "engine", "engine to megatron"),
        (MIXTRAL, {"tensor": 2, "zero": {"stage": 2}}, "zero", "engine to megatron"),
        (LLAMA, IN_16_BITS, "zero.stage", "zero.stage to 1"),
        (RELU, {"tensor": 2}, "model.config", "model to hf"),
        (TWO_LAYERS, {"stages": (1, 2), "pipeline": 2}, "stages", "state that many"),
        (TWO_LAYERS, {"stages": (1, 1)} | NO_PIPELINE, "stages", "state that many"),
        (TWO_LAYERS, {"stages": (1, 1), "engine": "ddp"}, "stages", "engine to megatron"),
    ],
)
def test_what_else_to_do(
    config: dict[str, Any], asked: dict[str, Any], key: str, fix: str
) -> None:
    problem = only(job(config, 2, **asked))
    assert problem.key.removeprefix("parallel.") == key
    assert fix in problem.fix


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
    widest = partial_layouts(open_places, bounds(open_places, 4)[-1])
    assert {one.layout.offload_optimizer for one in widest} == {"none"}


def test_muon_in_fp16() -> None:
    """megatron-core's optimizers do not all agree on the step of an overflow."""
    asked = replace(
        job(LLAMA, 4, precision="fp16", engine="megatron", tensor=2), optimizer=MUON
    )
    assert only(asked).found == "fp16 with optimizer.name: muon on engine megatron"
    other = job(LLAMA, 4, precision="fp16", engine="deepspeed", zero={"stage": 2})
    assert problems(replace(other, optimizer=MUON)) == []


def test_what_megatron_cannot_express_is_left_to_transformers() -> None:
    assert able_pairs(job(RELU, 2)) == HF


def test_several_mistakes_are_all_reported() -> None:
    asked = {"tensor": 8, "sequence": True, "expert": 3, "pipeline": 8}
    found = problems(job(MIXTRAL, 64, length=63, **asked))
    assert [problem.key for problem in found] == [
        "parallel.expert", "parallel.tensor", "parallel.sequence", "parallel.pipeline",
    ]  # fmt: skip
