"""A checkpoint of any layout continues in any other: the same state to the bit, the same run.

Regressions (resuming on other GPUs or in another layout): DeepSpeed#5405, #2921,
#7200; Megatron-LM#659, #1517, #7162; ms-swift#8240. The model that a checkpoint is loaded into
was made from another seed, five layers divide by no pipeline, 101 tokens by no tensor group.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.reshaping import around, check, check_exports, write_all
from tests.engines.cases import BIAS, GLM, LAYERS, MIXTRAL, TOLERANCE, megatron
from tests.engines.lora_worker import adapter
from tests.engines.pairs import GROUPS
from tests.engines.parity_worker import Case
from tests.models.configs import config_of

GPT_OSS = config_of("gpt_oss", num_hidden_layers=2)


def zero(stage: int, family: dict[str, Any] = LAYERS, **more: Any) -> Case:
    """Engine deepspeed, two ranks."""
    return Case("deepspeed", 2, stage=stage, family=family, **more)


LAYOUTS: dict[str, tuple[int, Case]] = {
    "ddp-1": (1, Case("ddp", 2, family=LAYERS)),
    "ddp-2": (2, Case("ddp", 2, family=LAYERS)),
    "zero0-2": (2, zero(0)),
    "zero1-2": (2, zero(1)),
    "zero2-2": (2, zero(2)),
    "zero3-2": (2, zero(3)),
    "zero3-2-offload": (2, zero(3, offload="cpu")),
    "fsdp2-2": (2, Case("fsdp", 2, stage=2, family=LAYERS)),
    "fsdp3-2": (2, Case("fsdp", 2, stage=3, family=LAYERS)),
    "tp2": (2, megatron(tensor=2)),
    "pp2": (2, megatron(pipeline=2)),
    "pp2-vpp2": (2, megatron(pipeline=2, virtual_pipeline=2, stages=(2, 1, 1, 1))),
    "dp2-distributed": (2, megatron(stage=1)),
    "tp2-zero1": (
        2,
        zero(1, parallel={"model": "megatron", "tensor": 2}),
    ),
    "tp2-pp2": (4, megatron(tensor=2, pipeline=2)),
    "tp2-cp2": (4, megatron(tensor=2, context=2)),
}
"""Name → ranks and case."""
SOME = {
    name: LAYOUTS[name]
    for name in ("ddp-2", "zero2-2", "fsdp3-2", "tp2", "pp2-vpp2", "dp2-distributed", "tp2-cp2")
}
"""One of each way to cut a state; `test_between_engines` has ZeRO-3."""
MOE: dict[str, tuple[int, Case]] = {
    "ddp-2": (2, Case("ddp", 2, family=MIXTRAL)),
    "zero3-2": (2, Case("deepspeed", 2, stage=3, family=MIXTRAL)),
    "ep2": (2, megatron(expert=2, family=MIXTRAL)),
    "ep2-replicated": (2, megatron(expert=2, stage=0, family=MIXTRAL)),
    "tp2-ep2": (4, megatron(tensor=2, expert=2, family=MIXTRAL)),
}


MAMBA = {
    "model_type": "mamba", "vocab_size": 101, "hidden_size": 32, "state_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
OPTIMIZERS = {"muon": 7e-5, "adamw_8bit": 1e-4}
"""At larger rates AdamW, and the bf16 of Muon's iteration, make a difference of 1e-5 of what is
rounded otherwise."""
TWO_LAYERS = {"num_hidden_layers": 2}
OWNERS = [
    megatron(tensor=2, family=TWO_LAYERS),
    zero(2, family=TWO_LAYERS),
    megatron(pipeline=2, family=TWO_LAYERS),
    Case("fsdp", 2, 3),
]


def each(cases: list[Case], **changes: Any) -> list[Case]:
    return [replace(case, **changes) for case in cases]


FEATURES: dict[str, list[Case]] = {
    # Transposed, gate and up projection in alternating columns, cut anywhere by ZeRO-3 and by
    # megatron-core's distributed optimizer.
    "stacked experts": [zero(3, family=GPT_OSS), megatron(tensor=2, family=GPT_OSS)],
    # Its weights have three axes.
    "convolution": each([Case("ddp", 2), Case("fsdp", 2, stage=3)], family=MAMBA),
    # All of the first of two pipeline stages.
    "frozen": each(
        [zero(3), megatron(pipeline=2), Case("fsdp", 2, stage=3, family=LAYERS)],
        freeze=("model.embed_tokens.*", "model.layers.[0-2].*"),
    ),
    "groups": each(
        [zero(3), megatron(pipeline=2)], groups=GROUPS, optimizer={"learning_rate": 3e-4}
    ),
    "adapters": each(
        [
            zero(3),
            megatron(tensor=2, sequence=True),
            megatron(pipeline=2),
            Case("fsdp", 2, stage=3, family=LAYERS),
        ],
        adapter=adapter(),
    ),
    # Columns of B lie apart: ranks have two experts, a half of each, or rows of all.
    "adapters of experts": each(
        [
            Case("fsdp", 2, stage=3),
            megatron(expert=2),
            megatron(tensor=2, sequence=True),
        ],
        family=MIXTRAL,
        adapter=adapter(targets=["attention", "experts"], rank=8),
    ),
    # Without them, a run would continue with biases of 0.
    "biases": each([Case("deepspeed", 4, 3), megatron(expert=2)], family=GLM, balance=BIAS),
    **{
        name: each(OWNERS, optimizer={"name": name, "learning_rate": rate})
        for name, rate in OPTIMIZERS.items()
    },
}
"""What two ranks save on one engine and continue on another."""
TO_THE_BIT: dict[str, list[Case]] = {
    # The fp32 weights are saved; the 16-bit ones of the model follow from them.
    "bf16": each(
        [
            zero(1),
            zero(3),
            Case("ddp", 2, family=LAYERS),
            megatron(stage=1),
            megatron(tensor=2),
        ],
        precision="bf16",
    ),
    "fp8": each(
        [Case("ddp", 2), Case("fsdp", 2, stage=3)], precision="bf16", kernels={"fp8": "rowwise"}
    ),
    # Random streams follow from the step.
    "dropout": each(
        [megatron(tensor=2, sequence=False), megatron(pipeline=2)],
        family=LAYERS | {"attention_dropout": 0.3},
    ),
}
"""What differs between layouts, but continues in its own one to the bit."""
WITHOUT: dict[str, dict[str, Any]] = {"fp8": {"kernels": {}}, "dropout": {"family": LAYERS}}
"""Changes that turn such a feature off."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, write_all(folder, LAYOUTS)


@pytest.mark.slow
@pytest.mark.quick
def test_between_engines(tmp_path: Path) -> None:
    """Each place in which an engine keeps moments."""
    some = {
        name: LAYOUTS[name]
        for name in ("fsdp3-2", "zero2-2", "zero3-2", "dp2-distributed", "tp2")
    }
    check(tmp_path, write_all(tmp_path, some), some, around(some))


@pytest.mark.slow
def test_some_pairs(tmp_path: Path) -> None:
    """`make soak` tries all pairs."""
    unbroken = [(name, name) for name in ("ddp-2", "fsdp3-2", "pp2-vpp2", "tp2-cp2")]
    found = write_all(tmp_path, SOME)
    check(tmp_path, found, SOME, around(SOME) + unbroken)
    check_exports(tmp_path, found, SOME)


@pytest.mark.slow
def test_some_pairs_with_experts(tmp_path: Path) -> None:
    unbroken = [(name, name) for name in ("ep2", "tp2-ep2")]
    found = write_all(tmp_path, MOE)
    check(tmp_path, found, MOE, around(MOE) + unbroken)
    check_exports(tmp_path, found, MOE)


def named(feature: str, cases: list[Case]) -> dict[str, tuple[int, Case]]:
    return {f"{feature} {number}": (2, case) for number, case in enumerate(cases)}


def continued(folder: Path, layouts: Any, pairs: list[tuple[str, str]]) -> Any:
    """How each layout went on unbroken, once `pairs` and each layout itself have continued."""
    found = write_all(folder, layouts)
    check(folder, found, layouts, pairs + [(name, name) for name in layouts])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_some_pairs_of_features(tmp_path: Path, feature: str) -> None:
    layouts = named(feature, FEATURES[feature])
    found = continued(tmp_path, layouts, around(layouts))
    if "adapters" not in feature:  # test_lora.py exports those
        check_exports(tmp_path, found, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("feature", TO_THE_BIT)
def test_in_the_same_layout(tmp_path: Path, feature: str) -> None:
    layouts = named(feature, TO_THE_BIT[feature])
    found = continued(tmp_path, layouts, [])
    if feature not in WITHOUT:
        return
    plain = named(feature, each(TO_THE_BIT[feature], **WITHOUT[feature]))
    for name, curves in write_all(tmp_path / "plain", plain).items():
        assert found[name]["loss"] != pytest.approx(curves["loss"], rel=10 * TOLERANCE), name
        if feature == "fp8":
            assert found[name]["loss"] == pytest.approx(curves["loss"], rel=0.02), name


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
def test_every_pair(written) -> None:
    check(*written, LAYOUTS, list(product(LAYOUTS, LAYOUTS)))


@pytest.mark.soak
def test_every_pair_with_experts(tmp_path: Path) -> None:
    check(tmp_path, write_all(tmp_path, MOE), MOE, list(product(MOE, MOE)))
