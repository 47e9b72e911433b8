"""Runs whose batch grows and that follow their validation loss, against a plain transformers
loop with torch's ReduceLROnPlateau."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.e2e.hooks import hooked
from tests.e2e.layouts import outcome
from tests.e2e.product import (
    Ended,
    checkpoints,
    curve,
    dmt,
    events,
    records,
    run,
    settings,
    started,
)
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.validation import ValidationHistory
from toolkit.data.indexed import write_indexed

RECIPE = """
name: adaptive
model: {hub: model, init: pretrained}
data:
  train: {kind: megatron, prefix: train}
  validation: {kind: megatron, prefix: validation}
training:
  steps: 40
  sequence_length: 16
  global_batch_size: 12
  batch_ramp: {start: 4, increment: 4, steps: 10}
  precision: fp32
  seed: 7
optimizer: {learning_rate: 1.0e-2, eps: 1.0e-5, weight_decay: 0.1, clip_grad_norm: 1.0}
schedule:
  name: plateau
  warmup_steps: 3
  min_learning_rate: 3.0e-3
  plateau: {factor: 0.5, patience: 0}
evaluation: {every_steps: 2, batches: 2, patience: 2}
parallel: {engine: ddp}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every_steps: 4, keep: 1, keep_best: 2}
logging: {every_steps: 1}
"""
STEPS, WARMUP, LENGTH = 40, 3, 16
SIZES = [4] * 5 + [8] * 5 + [12] * (STEPS - 10)
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A folder with data, model and recipe."""

    folder: Path
    streams: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]

    def launch(self, name: str, changes: dict[str, object], code: int | None = 0) -> Ended:
        argv = dmt("launch", "recipe.yaml", "--run-dir", name, *settings(changes))
        return run(argv, self.folder, hooked("logged_samples"), code=code)

    def batch(self, numbers: list[int], length: int, name: str) -> tuple[torch.Tensor, ...]:
        """Inputs and labels of the samples with these numbers, cut out of the documents."""
        places = np.array(numbers)[:, None] * length + np.arange(length)
        stream, last = self.streams[name], self.ends[name]
        labels = np.where(np.isin(places, last), -100, stream[places + 1])
        return torch.from_numpy(stream[places]), torch.from_numpy(labels)

    def in_torch(self, lr: float, **more: float) -> tuple[PreTrainedModel, torch.optim.AdamW]:
        """The model as transformers loads it, and torch's AdamW as the recipes set it: no
        weight decay on vectors."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)
        decayed = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **more
        )
        return model, optimizer


def sample_numbers(run_dir: Path) -> dict[int, list[int]]:
    """The samples of each step of a run in one process, as hooks.py logs them."""
    lines = records(run_dir / "samples" / "rank-0.jsonl")
    return {line["step"]: line["samples"] for line in lines}


def written(folder: Path, recipe: str) -> Case:
    """A folder with this recipe, indexed data and a model."""
    (folder / "recipe.yaml").write_text(recipe)
    chance = np.random.default_rng(3)
    streams, ends = {}, {}
    for name, count in {"train": 60, "validation": 9}.items():
        sizes = chance.integers(5, 90, count)
        streams[name] = chance.integers(0, 256, sizes.sum())
        ends[name] = np.cumsum(sizes) - 1
        documents = np.split(streams[name], ends[name] + 1)[:-1]
        write_indexed(folder / name, np.uint16, documents)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return Case(folder, streams, ends)


@dataclass
class Reference:
    """What the same run is in transformers and torch alone."""

    curve: dict[int, tuple[float, float]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return written(tmp_path_factory.mktemp("adaptive"), RECIPE)


@pytest.fixture(scope="module")
def one_process(case: Case) -> Path:
    case.launch("one", {})
    return case.folder / "one"


@pytest.fixture(scope="module")
def reference(case: Case, one_process: Path) -> Reference:
    """The samples that the run names, trained here until two validations are no better."""
    numbers = sample_numbers(one_process)
    model, optimizer = case.in_torch(lr=1e-2, eps=1e-5)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=0, min_lr=3e-3)
    found, best, worse = Reference(), float("inf"), 0
    assert [len(numbers[step]) for step in numbers] == SIZES[: len(numbers)]
    for step in range(1, STEPS + 1):
        if step <= WARMUP:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * step / WARMUP
        found.rates.append(optimizer.param_groups[1]["lr"])
        inputs, labels = case.batch(numbers[step], LENGTH, "train")
        loss = mean_loss(model, inputs, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.curve[step] = loss.item(), norm.item()
        if step % 2 == 0:
            samples = min(2 * 12, (len(case.streams["validation"]) - 1) // LENGTH)
            with torch.no_grad():
                now = mean_loss(model, *case.batch([*range(samples)], LENGTH, "validation"))
            found.validation[step] = float(now)
            if step >= WARMUP:
                scheduler.step(now)
            worse = 0 if float(now) < best else worse + 1
            best = min(best, float(now))
            if worse == 2:
                break
    return found


def mean_loss(
    model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    logits = model(input_ids=inputs).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def assert_equal(run_dir: Path, reference: Reference) -> None:
    found = curve(run_dir)
    assert found.keys() == reference.curve.keys()
    for step, (loss, norm) in reference.curve.items():
        assert found[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=5e-3))
    rates = [line["lr"] for line in records(run_dir / "metrics.jsonl")]
    assert rates == pytest.approx(reference.rates, rel=1e-12)
    losses = {event["step"]: event["loss"] for event in events(run_dir, "evaluation")}
    assert losses == {
        step: pytest.approx(loss, rel=1e-5) for step, loss in reference.validation.items()
    }


def test_one_process(one_process: Path, reference: Reference) -> None:
    """It ends early, keeps its best checkpoints, and exports the best one."""
    assert_equal(one_process, reference)
    assert len(set(reference.rates[WARMUP:])) > 1, "reduced"
    last = max(reference.curve)
    assert last < STEPS
    (event,) = events(one_process, "early_stop")
    losses = reference.validation
    assert (event["step"], event["best_step"]) == (last, min(losses, key=losses.__getitem__))
    saved = {step: losses[step] for step in range(4, last, 4)} | {last: losses[last]}
    best = sorted(saved, key=saved.__getitem__)[:2]
    assert checkpoints(one_process) == sorted({last, *best})
    assert [event["step"] for event in events(one_process, "export")] == [best[0]]


def test_a_run_that_ended_early_does_nothing_more(case: Case, one_process: Path) -> None:
    before = (one_process / "metrics.jsonl").read_bytes()
    ended = case.launch("one", {})
    assert "stopped early: one/checkpoints/step-" in ended.err
    assert (one_process / "metrics.jsonl").read_bytes() == before
    assert len(events(one_process, "export")) == len(events(one_process, "early_stop")) == 1


def test_killed_and_resumed_to_the_bit(case: Case, one_process: Path) -> None:
    """Behind the first reduction, between two checkpoints."""
    saved = {"checkpoint.asynchronous": "false"}
    argv = dmt("launch", "recipe.yaml", "--run-dir", "killed", *settings(saved))
    run(argv, case.folder, {"DMT_FAILPOINTS": "step=kill@hit12"})
    assert checkpoints(case.folder / "killed")[-1] == 8
    case.launch("killed", saved)
    runs = [outcome(folder) for folder in (case.folder / "killed", one_process)]
    assert runs[0] == runs[1]
    assert histories(case.folder / "killed") == histories(one_process)


def histories(run_dir: Path) -> dict[int, ValidationHistory]:
    folders = [run_dir / "checkpoints" / f"step-{n:08d}" for n in checkpoints(run_dir)]
    return {one.step: one.validation for one in map(Manifest.read, folders)}


def test_stopped_at_the_best_step(case: Case, one_process: Path) -> None:
    """The stop leaves its validation out; the checkpoint has it when the run continues."""
    best, folder = events(one_process, "export")[0]["step"], case.folder / "stopped"
    argv = dmt("launch", "recipe.yaml", "--run-dir", "stopped")
    fault = {"DMT_FAILPOINTS": f"step=stop@hit{best}"}
    with started(argv, case.folder, fault) as command:
        command.terminate_in_step(best)
        command.end(75)
    assert histories(folder)[best].step < best
    case.launch("stopped", {})
    assert outcome(folder) == outcome(one_process)
    assert histories(folder) == histories(one_process)
