"""Same seed, same loss: runs of one process, resumed ones, in 16 bits, against a plain
transformers loop. Every layout with every feature is in test_pairs.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.cases import (
    OFFLOAD_TOLERANCE,
    STEPS,
    WIDE,
    Case,
    assert_curves,
    each_case,
    first_batch,
    global_batches,
    new_engine,
    plain_model,
    reference,
    run,
    zero,
)
from tests.forked import call_ranks
from toolkit.engines.distributed import Ranks

SINGLE = [
    Case("ddp", 8),
    Case("ddp", 2, kernels={"compile": "layers"}),
    Case("fsdp", 2, stage=3),
]


def test_reference_learns() -> None:
    losses = reference(SINGLE[0])["loss"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(4.6, abs=0.1)


def test_one_process() -> None:
    for name, result in run(SINGLE, world=1).items():
        assert_curves(result, reference(SINGLE[0]), name=name)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_two_processes_with_cpu_offload(tmp_path: Path) -> None:
    cases = [
        Case("deepspeed", 2, stage=1, offload="cpu"),
        Case("deepspeed", 4, stage=3, offload="cpu", resume_in=str(tmp_path)),
        zero(3, "cpu"),
    ]
    results = run(cases, world=2)
    for case in cases:
        result, wanted = results[case.name], reference(case)
        assert_curves(result, wanted, tolerance=OFFLOAD_TOLERANCE, name=str(case))


@pytest.mark.soak
@pytest.mark.usefixtures("async_io")
def test_two_processes_with_nvme_offload(tmp_path: Path) -> None:
    """Resumed half-way: DeepSpeed's own NVMe checkpoint goes on with other weights."""
    swap = tmp_path / "swap"
    swap.mkdir()
    case = Case(
        "deepspeed", 2, stage=3, offload="nvme", zero={"nvme_path": str(swap)}, family=WIDE,
        resume_in=str(tmp_path / "checkpoint"),
    )  # fmt: skip
    (result,) = run([case], world=2).values()
    assert_curves(result, reference(case), tolerance=OFFLOAD_TOLERANCE)
    swapped = sum(path.stat().st_size for path in swap.rglob("*") if path.is_file())
    assert swapped > 10 * 2**20, "nothing was swapped to disk"


FINE = Case(
    "ddp", 4, precision="bf16", family={"initializer_range": 0.1},
    optimizer={"learning_rate": 1e-4},
)  # fmt: skip
"""bf16 resolves the weights so coarsely that most of the first update lies between two of its
numbers: masters that start from rounded weights lose three quarters of it."""


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_fp32_masters() -> None:
    """Every engine's masters start from the weights before they are rounded to bf16: from step
    1 to 2 over one batch the loss falls as in a plain loop with such masters. All models of
    transformers have the same first loss: none rounds the rotary frequencies, which would shift
    positions in one ZeRO stage only."""
    megatron, sharded = replace(FINE, engine="megatron"), replace(FINE, engine="deepspeed")
    cases = [
        FINE,
        replace(FINE, engine="fsdp", stage=3),
        *(replace(sharded, stage=stage) for stage in (1, 2, 3)),
        *(replace(sharded, stage=stage, offload="cpu") for stage in (2, 3)),
        replace(sharded, parallel={"model": "megatron", "tensor": 2}),
        *(replace(megatron, stage=stage) for stage in (0, 1)),
        replace(megatron, parallel={"tensor": 2}),
    ]
    found = call_ranks(each_case, 2, _two_losses, cases)[0]
    begin, end = _plain_losses()
    for case in cases:
        first, second = found[case.name]
        assert first == pytest.approx(begin, rel=1e-3), case
        if case.engine != "megatron" and "model" not in case.parallel:
            assert first == pytest.approx(found[FINE.name][0], rel=1e-4), case
        assert first - second == pytest.approx(begin - end, rel=0.05), case


def _two_losses(case: Case, ranks: Ranks) -> tuple[float, float]:
    """The loss of one global batch before and after the first step."""
    engine, layout = new_engine(case, ranks)
    batch = first_batch(ranks, layout)
    first, second = (engine.train_step(*batch, case.learning_rate).loss for _ in range(2))
    engine.close()
    return first, second


def _plain_losses() -> tuple[float, float]:
    """The same of a bf16 model by transformers, updated from fp32 masters by torch."""
    masters, model = plain_model(FINE), plain_model(FINE).bfloat16()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=FINE.learning_rate, eps=1e-6)
    (batch,) = global_batches(1)
    before = model(batch.input_ids, labels=batch.labels, shift_labels=batch.labels).loss
    before.backward()
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
    for master, weight in pairs:
        master.grad = weight.grad.float()
    torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for master, weight in pairs:
            weight.copy_(master)
    after = model(batch.input_ids, labels=batch.labels, shift_labels=batch.labels).loss
    return before.item(), after.item()
