"""Plans checked by hand: 16 bytes per parameter, spread as the ZeRO paper says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_legality import intent
from toolkit.errors import PlanError, RecipeError
from toolkit.models.families import model_spec
from toolkit.plan import legality
from toolkit.plan.memory import GIB
from toolkit.plan.planner import Plan, ShapeUnknown, model_config, plan_recipe
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import ModelSection, Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA_8B = load_recipe(RECIPES / "llama/llama-3.1-8b-finetune.yaml")
PSI_8B = 8_030_261_248
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def recipe(**changes: Any) -> Recipe:
    """A tiny recipe; `section__key=value` changes a setting."""
    sections: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": TINY},
        "data": {"train": {"kind": "text", "files": ["x"]}},
        "training": {"steps": 1, "sequence_length": 64, "global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        sections.setdefault(section, {})[key] = value
    return Recipe.model_validate(sections)


def llama_8b(
    gpus: int = 8, gpu: str = "h100-80gb", batch: int = 32, length: int = 2048, **parallel: Any
) -> Plan:
    """The plan of Llama 3.1 8B on one node."""
    update = {
        "parallel": intent(**parallel),
        "cluster": LLAMA_8B.cluster.model_copy(update={"gpus_per_node": gpus, "gpu": gpu}),
        "training": LLAMA_8B.training.model_copy(
            update={"global_batch_size": batch, "sequence_length": length}
        ),
    }
    return plan_recipe(LLAMA_8B.model_copy(update=update))


@pytest.mark.parametrize(
    ("gpus", "gpu", "stage", "bytes_per_parameter"),
    [
        # 8 B parameters: 7.48 GiB per byte; 60% of 80 GiB are 6.4 bytes, of 40 GiB 3.2,
        # of 180 GiB 14.4.
        # Stage 2 at least: 16-bit stage 1 keeps the fp32 sum of all gradients whole.
        (2, "b200", 2, 2 + 16 / 2),
        (8, "h100-80gb", 2, 2 + 16 / 8),
        (4, "h100-80gb", 2, 2 + (4 + 12) / 4),
        (3, "h100-80gb", 3, 18 / 3),
        (16, "a100-40gb", 2, 2 + 16 / 16),
        (8, "a100-40gb", 3, 18 / 8),
        (1, "h100-80gb", 3, 18),
    ],
)
def test_lowest_stage_that_fits(
    gpus: int, gpu: str, stage: int, bytes_per_parameter: float
) -> None:
    plan = llama_8b(gpus, gpu, batch=48)
    assert plan.parameters == PSI_8B
    assert (plan.layout.dp, plan.layout.zero_stage) == (gpus, stage)
    assert plan.model_states_gib == pytest.approx(PSI_8B * bytes_per_parameter / 2**30)
    warned = "WARNING" in plan.reasons[1]
    assert warned == (gpus == 1)
    assert f"model states take {plan.model_states_gib:.1f} of" in plan.reasons[1]


@pytest.mark.parametrize(
    ("name", "stage", "recompute", "micro_batch"),
    [
        ("gpt2/gpt2-124m-pretrain", 2, "none", 8),
        ("pythia/pythia-1.4b-pretrain", 2, "none", 4),
        ("llama/llama-3.2-1b-finetune", 2, "none", 4),
        ("llama/llama-3.1-8b-pretrain", 2, "full", 1),
        ("llama/llama-3.1-70b-pretrain", 3, "full", 1),
        ("mistral/mixtral-8x7b-pretrain", 3, "full", 1),
    ],
)
def test_sized_recipes(name: str, stage: int, recompute: str, micro_batch: int) -> None:
    wanted = load_recipe(RECIPES / f"{name}.yaml")
    plan = plan_recipe(wanted)
    layout = plan.layout
    assert (plan.engine, plan.model) == ("deepspeed", "hf")
    assert (layout.zero_stage, layout.recompute, layout.micro_batch) == (
        stage, recompute, micro_batch,
    )  # fmt: skip
    assert layout.world == wanted.cluster.world_size
    assert layout.global_batch == wanted.training.global_batch_size
    assert plan.peak_flops_per_gpu
    assert not any("WARNING" in reason for reason in plan.reasons)


def test_every_decision_has_a_reason() -> None:
    words = ("engine deepspeed with model hf:", "zero 2:", "micro batch 4:", "recompute full:")
    for reason, begin in zip(llama_8b().reasons, words, strict=True):
        assert reason.startswith(begin)
    assert llama_8b().reasons[0].endswith("auto; preferred to ddp, megatron")
    nvme = {"offload_optimizer": "nvme"}
    assert "the only one" in llama_8b(zero=nvme).reasons[0]
    assert llama_8b(zero={"stage": 1}).reasons[1].startswith("zero 1: asked for; ")
    assert llama_8b(engine="deepspeed").reasons[0].endswith("asked for")
    assert llama_8b(recompute="none").reasons[3] == "recompute none: asked for"


def test_ddp_copies_everything() -> None:
    plan = llama_8b(engine="ddp")
    assert (plan.engine, plan.layout.zero_stage) == ("ddp", 0)
    assert plan.model_states_gib == pytest.approx(16 * PSI_8B / GIB)
    assert plan.reasons[1].startswith("zero 0: ddp shards nothing; WARNING")


def test_offload_leaves_the_device() -> None:
    optimizer = llama_8b(1, zero={"offload_optimizer": "cpu"})
    assert optimizer.layout.offload_optimizer == "cpu"
    assert optimizer.layout.zero_stage == 2
    assert optimizer.model_states_gib == pytest.approx(2 * PSI_8B / GIB)
    both = llama_8b(2, zero={"offload_optimizer": "nvme", "offload_parameters": "cpu"})
    assert both.layout.zero_stage == 3
    assert both.reasons[1].startswith("zero 3: the only stage with this offload")
    assert both.model_states_gib == 0
    assert llama_8b(zero={"offload_optimizer": "nvme"}).layout.zero_stage == 3


@pytest.mark.parametrize(
    ("ranks", "precision", "offload", "stage"),
    [
        (1, "fp32", "none", 0),
        (1, "bf16", "none", 1),  # stage 0 of DeepSpeed sums micro batches in bf16
        (2, "fp32", "none", 2),
        (1, "fp32", "cpu", 2),
        (1, "fp32", "nvme", 3),
    ],
)
def test_stage_on_cpu(ranks: int, precision: str, offload: str, stage: int) -> None:
    wanted = recipe(
        cluster__gpus_per_node=ranks,
        training__precision=precision,
        parallel__zero={"offload_optimizer": offload},
    )
    plan = plan_recipe(wanted)
    assert plan.layout.zero_stage == stage
    assert plan.peak_flops_per_gpu is None


def test_recompute_looks_at_the_whole_micro_batch() -> None:
    # 34 bytes · tokens · 4096 hidden · 32 layers against 40% of 80 GiB: 7,710 tokens.
    assert llama_8b(length=2048, batch=24).layout.micro_batch == 3
    assert llama_8b(length=2048, batch=24).layout.recompute == "none"
    assert llama_8b(length=2048, batch=32).layout.micro_batch == 4
    assert llama_8b(length=2048, batch=32).layout.recompute == "full"


@pytest.mark.parametrize(
    ("length", "batch", "micro_batch"),
    [(8192, 64, 1), (4096, 64, 2), (4096, 40, 1), (1024, 64, 8), (1024, 48, 6), (1024, 56, 7)],
)
def test_micro_batch_divides_a_ranks_share(length: int, batch: int, micro_batch: int) -> None:
    layout = llama_8b(8, length=length, batch=batch).layout
    assert layout.micro_batch == micro_batch
    assert layout.gradient_accumulation == batch // 8 // micro_batch


@pytest.mark.parametrize(
    ("batch", "micro", "fix"),
    [(9, "auto", "8 or 12"), (3, "auto", "4"), (20, 2, "16 or 24"), (7, 2, "8")],
)
def test_batch_that_cannot_be_spread(batch: int, micro: int | str, fix: str) -> None:
    wanted = recipe(
        cluster__gpus_per_node=4,
        training__global_batch_size=batch,
        training__micro_batch_size=micro,
    )
    with pytest.raises(PlanError, match=r"^training\.global_batch_size: ") as raised:
        plan_recipe(wanted)
    assert raised.value.fix == f"set it to {fix}"


def test_what_is_illegal_by_now_is_refused() -> None:
    """As when the recipe's own DeepSpeed file sets the stage after the check."""
    zero = {"stage": 2, "offload_optimizer": "nvme"}
    with pytest.raises(RecipeError, match="nvme with stage: 2"):
        plan_recipe(recipe(parallel__zero=zero))


def test_legality_chooses_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = legality.Pair("ddp", "hf")
    monkeypatch.setattr("toolkit.plan.legality.AVAILABLE", frozenset((ddp,)))
    assert plan_recipe(recipe()).engine == "ddp"


def test_a_shape_that_is_only_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    wanted = recipe(model__config=None, model__hub="nobody/nothing")
    with pytest.raises(ShapeUnknown, match="'nobody/nothing' is neither") as raised:
        plan_recipe(wanted)
    assert "model.config" in raised.value.fix
    with pytest.raises(PlanError, match="neither a folder nor a hub id"):
        plan_recipe(recipe(model__config=None, model__hub=str(tmp_path / "absent")))


def test_a_shape_in_a_local_folder(tmp_path: Path) -> None:
    model = ModelSection(hub=str(tmp_path))
    with pytest.raises(PlanError, match="cannot read"):
        model_config(model)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    plan = plan_recipe(recipe(model__config=None, model__hub=str(tmp_path)))
    assert plan.parameters == model_spec(TINY).parameters.total
    for bad, message in (
        ("[]", "cannot read"),
        ("{", "cannot read"),
        ('{"model_type": "bert"}', "model_type"),
    ):
        config.write_text(bad)
        with pytest.raises(PlanError, match=message):
            model_config(model)


def test_round_trip() -> None:
    plan = llama_8b(zero={"offload_optimizer": "cpu"})
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@given(
    ranks=st.integers(1, 64),
    share=st.integers(1, 200),
    length=st.integers(2, 20_000),
    micro=st.none() | st.integers(1, 20),
)
def test_batches_multiply_to_the_global_batch(
    ranks: int, share: int, length: int, micro: int | None
) -> None:
    batch = ranks * share * (micro or 1)
    layout = plan_recipe(
        recipe(
            cluster__gpus_per_node=ranks,
            training__global_batch_size=batch,
            training__micro_batch_size=micro or "auto",
            training__sequence_length=length,
        )
    ).layout
    assert layout.dp * layout.micro_batch * layout.gradient_accumulation == batch
    assert layout.micro_batch == (micro or layout.micro_batch)
    assert micro or layout.micro_batch * length <= max(8192, length)
