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

from tests.checkpoint.reshaping import around, check, write_all
from tests.engines.cases import LAYERS, MIXTRAL, megatron
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


FEATURES: dict[str, list[Case]] = {
    # Transposed, gate and up projection in alternating columns, cut anywhere by ZeRO-3 and by
    # megatron-core's distributed optimizer.
    "stacked experts": [zero(3, family=GPT_OSS), megatron(tensor=2, family=GPT_OSS)],
    # All of the first of two pipeline stages.
    "frozen": [
        replace(case, freeze=("model.embed_tokens.*", "model.layers.[0-2].*"))
        for case in (zero(3), megatron(pipeline=2), Case("fsdp", 2, stage=3, family=LAYERS))
    ],
    # At larger rates AdamW makes a difference of 1e-5 of what is rounded otherwise.
    "groups": [
        replace(case, groups=GROUPS, optimizer={"learning_rate": 3e-4})
        for case in (zero(3), megatron(pipeline=2))
    ],
}
"""What two ranks save on one engine and continue on another."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, write_all(folder, LAYOUTS)


@pytest.mark.slow
@pytest.mark.quick
def test_between_engines(tmp_path: Path) -> None:
    three = {name: LAYOUTS[name] for name in ("fsdp3-2", "zero3-2", "tp2")}
    circle = [*zip(three, [*three][1:] + [*three][:1], strict=True)]
    check(tmp_path, write_all(tmp_path, three), three, circle)


@pytest.mark.slow
def test_some_pairs(tmp_path: Path) -> None:
    """`make soak` tries all pairs."""
    unbroken = [(name, name) for name in ("ddp-2", "fsdp3-2", "pp2-vpp2", "tp2-cp2")]
    check(tmp_path, write_all(tmp_path, SOME), SOME, around(SOME) + unbroken)


@pytest.mark.slow
def test_some_pairs_with_experts(tmp_path: Path) -> None:
    unbroken = [(name, name) for name in ("ep2", "tp2-ep2")]
    check(tmp_path, write_all(tmp_path, MOE), MOE, around(MOE) + unbroken)


@pytest.mark.slow
def test_some_pairs_of_features(tmp_path: Path) -> None:
    layouts: dict[str, tuple[int, Case]] = {}
    pairs: list[tuple[str, str]] = []
    for feature, cases in FEATURES.items():
        own = {f"{feature} on {case.engine}": (2, case) for case in cases}
        layouts |= own
        pairs += around(own)
    unbroken = [(name, name) for name in own]
    check(tmp_path, write_all(tmp_path, layouts), layouts, pairs + unbroken)


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
def test_every_pair(written) -> None:
    check(*written, LAYOUTS, list(product(LAYOUTS, LAYOUTS)))


@pytest.mark.soak
def test_every_pair_with_experts(tmp_path: Path) -> None:
    check(tmp_path, write_all(tmp_path, MOE), MOE, list(product(MOE, MOE)))
