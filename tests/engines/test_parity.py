"""Same seed, same loss: runs of one process, resumed ones, in 16 bits, against a plain
transformers loop. Every layout with every feature is in test_pairs.py.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.engines.cases import OFFLOAD_TOLERANCE, assert_curves, run
from tests.engines.parity_worker import STEPS, Case, reference

SINGLE = [*(Case("ddp", micro) for micro in (8, 2)), Case("fsdp", 2, stage=3)]


@cache
def _reference(wide: bool = False) -> dict[str, list[float]]:
    return reference(wide=wide)


def test_reference_learns() -> None:
    losses = _reference()["loss"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(4.6, abs=0.1)


def test_one_process() -> None:
    for name, result in run(SINGLE, world=1).items():
        print(name)
        assert_curves(result, _reference())


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_two_processes_with_cpu_offload(tmp_path: Path) -> None:
    cases = [
        Case("deepspeed", 2, stage=1, offload="cpu"),
        Case("deepspeed", 4, stage=3, offload="cpu", resume_in=str(tmp_path)),
    ]
    for name, result in run(cases, world=2).items():
        print(name)
        assert_curves(result, _reference(), tolerance=OFFLOAD_TOLERANCE)


@pytest.mark.slow
def test_resumed_runs(tmp_path: Path) -> None:
    """A load that did nothing would go on from weights of another seed."""
    spread = {"context": 2}
    ddp = Case("ddp", 4, resume_in=str(tmp_path))
    zero3 = Case("deepspeed", 4, stage=3, parallel=spread)
    fsdp3 = Case("fsdp", 4, stage=3, parallel=spread, resume_in=str(tmp_path))
    cases = [replace(ddp, resume_as=zero3), replace(fsdp3, resume_as=ddp)] + [
        Case("deepspeed", 4, stage=stage, resume_in=str(tmp_path)) for stage in range(4)
    ]
    for name, result in run(cases, world=2).items():
        print(name)
        assert_curves(result, _reference())


@pytest.mark.soak
@pytest.mark.usefixtures("async_io")
def test_two_processes_with_nvme_offload(tmp_path: Path) -> None:
    """Resumed half-way: DeepSpeed's own NVMe checkpoint goes on with other weights."""
    swap = tmp_path / "swap"
    swap.mkdir()
    case = Case(
        "deepspeed", 2, stage=3, offload="nvme", nvme_path=str(swap), wide=True,
        resume_in=str(tmp_path / "checkpoint"),
    )  # fmt: skip
    (result,) = run([case], world=2).values()
    assert_curves(result, _reference(wide=True), tolerance=OFFLOAD_TOLERANCE)
    swapped = sum(path.stat().st_size for path in swap.rglob("*") if path.is_file())
    assert swapped > 10 * 2**20, "nothing was swapped to disk"


@pytest.mark.slow
def test_bf16_stages_agree() -> None:
    """bf16 rounds, but every stage rounds alike; in particular none rounds the rotary
    frequencies, which would shift positions in one stage only."""
    cases = [
        Case("deepspeed", 2, stage=stage, precision="bf16", steps=5) for stage in (0, 1, 2, 3)
    ]
    cases.append(Case("fsdp", 2, stage=3, precision="bf16", steps=5))
    cases.append(Case("ddp", 2, precision="bf16", steps=5))
    results = list(run(cases, world=2).values())
    expected = _reference()
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"][:5], rel=1e-3)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"][:5], rel=2e-2)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)
    assert results[2]["loss"] == pytest.approx(results[3]["loss"], rel=1e-5)
    assert results[4]["loss"] == pytest.approx(results[3]["loss"], rel=1e-4), "FSDP2"
    assert results[5]["loss"] == pytest.approx(results[3]["loss"], rel=1e-4), "DDP"
