"""A checkpoint of any layout continues in any other: the same state to the bit, the same run.

Regressions for PAINS 3 (resuming on other GPUs or in another layout): DeepSpeed#5405, #2921,
#7200; Megatron-LM#659, #1517, #7162; ms-swift#8240. The model that a checkpoint is loaded into
was made from another seed, five layers divide by no pipeline, 101 tokens by no tensor group.
"""

import json
import random
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engines.parity_worker import Case
from tests.engines.test_megatron_parity import LAYERS, MIXTRAL, megatron
from tests.engines.test_parity import OFFLOAD_TOLERANCE, TOLERANCE
from tests.processes import run_ranks


def zero(stage: int, **more: Any) -> Case:
    """Engine deepspeed, two ranks."""
    return Case("deepspeed", 2, stage=stage, family=LAYERS, **more)


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
    "pp2-vpp2": (2, megatron(pipeline=2, virtual_pipeline=2)),
    "dp2-distributed": (2, megatron(stage=1)),
    "tp2-zero1": (
        2,
        zero(1, parallel={"model": "megatron", "tensor": 2}),
    ),
    "tp2-pp2": (4, megatron(tensor=2, pipeline=2)),
}
"""Name → ranks and case."""
MOE: dict[str, tuple[int, Case]] = {
    "ddp-2": (2, Case("ddp", 2, family=MIXTRAL)),
    "zero3-2": (2, Case("deepspeed", 2, stage=3, family=MIXTRAL)),
    "ep2": (2, megatron(expert=2, family=MIXTRAL)),
    "ep2-replicated": (2, megatron(expert=2, stage=0, family=MIXTRAL)),
    "tp2-ep2": (4, megatron(tensor=2, expert=2, family=MIXTRAL)),
}


def run(mode: str, folder: Path, world: int, layouts: dict[str, Any], pairs: Any = None) -> Any:
    """The worker in `world` ranks; `layouts` of other worlds are left out."""
    cases = {name: asdict(case) for name, (ranks, case) in layouts.items() if ranks == world}
    if not cases:
        return {}
    argv = [
        "-m",
        "tests.checkpoint.reshape_worker",
        mode,
        str(folder),
        json.dumps(cases),
        json.dumps(pairs),
    ]
    output = run_ranks(argv, world, timeout_s=60 + 15 * len(pairs or cases))[0]
    line = next(line for line in output.splitlines() if line.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


def write_all(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of every layout; how each went on unbroken."""
    return {
        name: unbroken
        for world in (1, 2, 4)
        for name, unbroken in run("save", folder, world, layouts).items()
    }


def check(folder: Path, unbroken: Any, layouts: Any, pairs: list[tuple[str, str]]) -> None:
    """Continue the first layout of each pair in the second."""
    # Other processes for each target: the groups of every engine have threads that stay.
    for name_of_target, (world, _) in layouts.items():
        mine = [pair for pair in pairs if pair[1] == name_of_target]
        if not mine:
            continue
        results = run("load", folder, world, layouts, mine)
        assert len(results) == len(mine)
        for (source, target), (name, result) in zip(mine, results.items(), strict=True):
            assert result["different"] == [], name
            offload = "offload" in name
            for quantity in ("loss", "grad_norm"):
                tolerance = OFFLOAD_TOLERANCE if offload else TOLERANCE
                wanted = unbroken[source][quantity]
                assert result[quantity] == pytest.approx(wanted, rel=tolerance), name
                if source == target:
                    assert result[quantity] == wanted, f"{name}: not bitwise the same"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, write_all(folder, LAYOUTS)


def pairs_of(layouts: dict[str, Any]) -> list[tuple[str, str]]:
    return list(product(layouts, layouts))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_some_pairs(written) -> None:
    """Every layout is left and entered once; `make soak` tries all pairs."""
    names = list(LAYOUTS)
    shuffled = random.Random(5).sample(names, len(names))
    around = list(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))
    unbroken = [(name, name) for name in ("ddp-2", "zero3-2", "fsdp3-2", "pp2-vpp2")]
    check(*written, LAYOUTS, around + unbroken)


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    unbroken = write_all(tmp_path, MOE)
    check(tmp_path, unbroken, MOE, pairs_of(MOE))


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
def test_every_pair(written) -> None:
    check(*written, LAYOUTS, pairs_of(LAYOUTS))
