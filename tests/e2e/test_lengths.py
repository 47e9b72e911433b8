"""Sequences that change their length by stage: real runs against a plain transformers loop."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.e2e.indexed import Case, sample_numbers, written
from tests.e2e.product import curve, events, records

RECIPE = """
name: lengths
model: {hub: model, init: pretrained}
data:
  train: {kind: megatron, prefix: train}
  validation: {kind: megatron, prefix: validation}
  stages:
    - {from_step: 3, sequence_length: 32}
    - {from_tokens: 896, sequence_length: 8}
  cache: cache
training: {steps: 7, sequence_length: 16, global_batch_size: 8, precision: fp32, seed: 7}
optimizer: {learning_rate: 3.0e-3, weight_decay: 0.1, betas: [0.9, 0.95], clip_grad_norm: 1.0}
schedule: {name: constant}
evaluation: {every_steps: 2, batches: 2}
parallel: {engine: ddp}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {export: false}
logging: {every_steps: 1, samples: true}
"""
LENGTHS = [16, 16, 16, 32, 32, 8, 8]
"""896 tokens are 3 · 8 · 16 + 2 · 8 · 32."""
BATCH = 8
LAYOUTS: dict[str, dict[str, object]] = {
    "ddp": {},
    "ddp-chunked": {"kernels.loss": "chunked", "parallel.recompute": "full"},
    "fsdp2": {"parallel.engine": "fsdp", "parallel.zero.stage": 2},
    "fsdp3": {"parallel.engine": "fsdp", "parallel.zero.stage": 3},
    "zero2": {"parallel.engine": "deepspeed", "parallel.zero.stage": 2},
    "zero3": {"parallel.engine": "deepspeed", "parallel.zero.stage": 3},
    "megatron-tp2-sp": {
        "parallel.engine": "megatron", "parallel.tensor": 2, "parallel.sequence": "true",
    },
    "megatron-pp2": {"parallel.engine": "megatron", "parallel.pipeline": 2},
    "megatron-vpp2": {
        "parallel.engine": "megatron", "parallel.pipeline": 2, "parallel.virtual_pipeline": 2,
    },
    "deepspeed-megatron": {
        "parallel.engine": "deepspeed", "parallel.model": "megatron", "parallel.tensor": 2,
        "parallel.sequence": "true", "parallel.zero.stage": 1,
    },
}  # fmt: skip
SELDOM = ("ddp-chunked", "fsdp2", "zero2", "megatron-vpp2")
"""Left to `make soak`."""


@dataclass(frozen=True)
class Reference:
    """What the same steps are in transformers and torch alone."""

    curve: dict[int, tuple[float, float]]
    """Loss and gradient norm of every step."""
    validation: dict[int, float]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return written(tmp_path_factory.mktemp("lengths"), RECIPE)


@pytest.fixture(scope="module")
def one_process(case: Case) -> Path:
    case.launch("one", {})
    return case.folder / "one"


@pytest.fixture(scope="module")
def reference(case: Case, one_process: Path) -> Reference:
    """The samples that the run names, cut and trained here."""
    numbers = sample_numbers(one_process)
    model, optimizer = case.in_torch(lr=3e-3)
    found = Reference({}, {})
    for step, length in enumerate(LENGTHS, start=1):
        inputs, labels = case.batch(numbers[step], length, "train")
        logits = model(input_ids=inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.curve[step] = loss.item(), norm.item()
        if step % 2 == 0 or step == len(LENGTHS):
            found.validation[step] = validation_loss(case, model, length)
    return found


def validation_loss(case: Case, model: torch.nn.Module, length: int) -> float:
    """Over the first two global batches of the longest length, cut at this one."""
    blocks = min(2 * BATCH, (len(case.streams["validation"]) - 1) // 32)
    inputs, labels = case.batch([*range(blocks * 32 // length)], length, "validation")
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return float(cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))


def assert_equal(run_dir: Path, reference: Reference) -> None:
    assert curve(run_dir) == {
        step: pytest.approx(both, rel=1e-5) for step, both in reference.curve.items()
    }
    for event in events(run_dir, "evaluation"):
        assert event["loss"] == pytest.approx(reference.validation[event["step"]], rel=1e-5)


def test_one_process(one_process: Path, reference: Reference) -> None:
    """Losses, norms and validation; speeds count each step's own tokens."""
    assert_equal(one_process, reference)
    for line, length in zip(records(one_process / "metrics.jsonl"), LENGTHS, strict=True):
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(BATCH * length)
    assert records(one_process / "metrics.jsonl")[-1]["consumed_samples"] == 7 * BATCH
    plan = json.loads((one_process / "plan.json").read_text())
    assert [one["sequence_length"] for one in plan["lengths"]] == [8, 16, 32]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in SELDOM else ()) for name in LAYOUTS],
)
def test_every_engine(case: Case, reference: Reference, name: str) -> None:
    changes = {"cluster.gpus_per_node": 2, "training.micro_batch_size": 2} | LAYOUTS[name]
    case.launch(name, changes)
    assert_equal(case.folder / name, reference)


@pytest.mark.slow
def test_a_stage_in_a_layout_of_its_own(case: Case, reference: Reference) -> None:
    """Stopped in front of, inside of and behind the long stage; each part in other ranks."""
    parts = ((2, "ddp", 2), (4, "zero2", 4), (6, "megatron-tp2-sp", 2), (7, "fsdp3", 1))
    for steps, layout, ranks in parts:
        changes = {"training.steps": steps, "cluster.gpus_per_node": ranks} | LAYOUTS[layout]
        case.launch("parts", changes)
        planned = json.loads((case.folder / "parts/plan.json").read_text())["lengths"]
        assert len(planned) == (0 if steps == 2 else 2 if steps == 4 else 3)
    assert_equal(case.folder / "parts", reference)


@pytest.mark.slow
def test_only_stages_to_come_may_change(case: Case) -> None:
    case.launch("changed", {"training.steps": 4})
    first = {"from_step": 3, "sequence_length": 32}
    refused = case.launch("changed", {"data.stages": [first | {"from_step": 2}]}, None)
    assert refused.code != 0 and "was trained on different data" in refused.err
    shorter = case.launch("changed", {"data.stages": []}, None)
    assert shorter.code != 0 and "keep 32 as the longest sequence_length" in shorter.err
    later = [first, {"from_step": 6, "sequence_length": 16}]
    case.launch("changed", {"data.stages": later})
