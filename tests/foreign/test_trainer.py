"""What a file of TrainingArguments says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.any_value import VALUES, try_any_value
from tests.foreign.conftest import TINY, Planned
from tests.foreign.reading import read, told
from toolkit.foreign.trainer_keys import TRAINER_FSDP, TRAINING_ARGUMENTS

TRAINER = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0.1,
    "max_steps": 200,
    "num_train_epochs": 3.0,
    "bf16": True,
    "fp16": False,
    "max_grad_norm": 0.0,
    "optim": "lion_32bit",
    "eval_strategy": "no",
    "save_strategy": "epoch",
    "save_steps": 500,
    "gradient_checkpointing": True,
    "report_to": ["tensorboard"],
    "deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"},
    "learning_rat": 1.0,
    "hub_token": "<HUB_TOKEN>",
    "eval_steps": None,
}


def test_training_arguments(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, json.dumps(TRAINER, indent=2), "training_args.json")
    assert told(report) == {
        "per_device_train_batch_size": ("training.micro_batch_size", "disagrees", "3"),
        "gradient_accumulation_steps": ("gradient_accumulation", "disagrees", "4"),
        "per_device_train_batch_size · gradient_accumulation_steps · dp": (
            "training.global_batch_size",
            "agrees",
            "3",
        ),
        "learning_rate": ("optimizer.learning_rate", "agrees", "5"),
        "lr_scheduler_type": ("schedule.name", "disagrees", "6"),
        "warmup_steps": ("schedule.warmup_steps", "agrees", "7"),  # a tenth of 200
        "max_steps": ("training.steps", "agrees", "8"),
        "bf16": ("training.precision", "disagrees", "10"),
        "fp16": ("training.precision", "agrees", "11"),
        "max_grad_norm": ("optimizer.clip_grad_norm", "disagrees", "12"),
        "optim": ("optimizer.name", "disagrees", "13"),
        "eval_strategy": ("evaluation.every_steps", "disagrees", "14"),
        "gradient_checkpointing": ("parallel.recompute", "disagrees", "17"),
        "report_to": ("logging.tensorboard", "disagrees", "18"),
        "deepspeed": ("parallel.engine", "agrees", "21"),
        "deepspeed.zero_optimization.stage": ("parallel.zero.stage", "agrees", "23"),
        "deepspeed.train_batch_size": ("training.global_batch_size", "auto", "25"),
    }
    (typo,) = report.source.unknown
    assert (typo.name, typo.hint) == ("learning_rat", "did you mean `learning_rate`?")
    assert {"output_dir", "save_strategy", "hub_token"} <= {*report.source.only_there}


def test_the_advice_can_be_followed(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, json.dumps(TRAINER, indent=2), "training_args.json")
    advice = {row.name: row.advice for row in report.conflicts}
    where = f"{tmp_path}/training_args.json"
    assert advice["bf16"] == f"--set training.precision=bf16, or change bf16 at {where}:10"
    # No recipe can say this.
    assert advice["optim"] == (
        f"change optim at {where}:13 to mean optimizer.name adamw, or change the recipe"
    )


def test_a_deepspeed_file_that_training_arguments_name(tiny: Planned, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    text = json.dumps({"output_dir": "out", "deepspeed": "ds.json"})
    report = read(tiny, tmp_path, text, "args.json")
    stage = told(report)["zero_optimization.stage"]
    assert stage == ("parallel.zero.stage", "disagrees", "1")
    (row,) = report.conflicts
    assert row.place == f"{tmp_path}/ds.json:1"


@pytest.mark.parametrize(
    ("text", "key", "verdict"),
    [
        ("num_train_epochs: 2", "training.epochs", "open"),  # the recipe counts steps
        ("bf16: false\nfp16: false\ntf32: true", "training.precision", "disagrees"),
        ("warmup_ratio: 0.05", "schedule.warmup_steps", "disagrees"),
        ("fsdp: full_shard", "parallel.zero.stage", "disagrees"),
        ("lr_scheduler_kwargs: {min_lr: 1.0e-9}", "schedule.min_learning_rate", "disagrees"),
    ],
)
def test_more_training_arguments(
    text: str, key: str, verdict: str, tiny: Planned, tmp_path: Path
) -> None:
    report = read(tiny, tmp_path, f"output_dir: x\n{text}\n", "args.yaml")
    last = report.compared[-1]
    assert (last.key, last.verdict) == (key, verdict)
    assert bool(last.advice) == (verdict != "agrees")


@pytest.mark.parametrize(
    ("fsdp", "config", "found"),
    [
        (True, {}, {"parallel.zero.stage": "3"}),
        ("shard_grad_op offload", {}, {"parallel.zero.offload_parameters": "cpu"}),
        (
            True,
            {"fsdp_reshard_after_forward": False, "activation_checkpointing": True},
            {"parallel.recompute": "full"},
        ),
        (["full_shard"], {"reshard_after_forward": False, "cpu_offload": False}, {}),
        (
            True,
            {"version": 1, "reshard_after_forward": "full_shard"},
            {"parallel.engine": "1", "parallel.zero.stage": "full_shard"},
        ),
        (False, {"version": 1}, {}),
    ],
    ids=str,
)
def test_fsdp_in_training_arguments(
    fsdp: object, config: dict[str, Any], found: dict[str, str], tmp_path: Path
) -> None:
    """The recipe keeps gathered parameters until the backward pass: stage 2."""
    planned = Planned.of(TINY, "parallel.engine=fsdp", "parallel.zero.stage=2")
    arguments = {"output_dir": "out", "fsdp": fsdp, "fsdp_config": config}
    report = read(planned, tmp_path, json.dumps(arguments, indent=1), "args.json")
    written = {"3": "true", "cpu": fsdp, "full": "true"}
    assert {row.key: row.other for row in report.conflicts} == {
        key: written.get(value, value) for key, value in found.items()
    }
    assert not report.source.unknown


def test_fsdp_in_a_file_of_its_own(tiny: Planned, tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"cpu_offlod": true, "fsdp_version": 2}')
    text = json.dumps({"output_dir": "out", "fsdp": True, "fsdp_config": "fsdp.json"})
    report = read(tiny, tmp_path, text, "args.json")
    (typo,) = report.source.unknown
    assert (typo.name, typo.hint) == ("cpu_offlod", "did you mean `cpu_offload`?")
    assert told(report)["fsdp_version"] == ("parallel.engine", "disagrees", "1")


def arguments(chance: random.Random) -> dict[str, Any]:
    """TrainingArguments, often with FSDP's block."""
    some = {key: chance.choice(VALUES) for key in chance.sample(sorted(TRAINING_ARGUMENTS), 40)}
    block = {key: chance.choice(VALUES) for key in chance.sample(sorted(TRAINER_FSDP), 6)}
    fsdp = chance.choice([{}, {"fsdp": True, "fsdp_config": block}])
    return {"output_dir": "x", "seed": 1, **some, **fsdp}


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_any_value_at_any_key(suffix: str, tiny: Planned, tmp_path: Path) -> None:
    try_any_value(arguments, suffix, tiny, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_steps", "100"),
        ("logging_steps", 10**400),
        ("warmup_ratio", "0.03"),
        ("eval_steps", "x"),
        ("save_steps", True),
    ],
)
def test_what_is_no_number_is_told(
    key: str, value: object, tiny: Planned, tmp_path: Path
) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": "x", key: value, "report_to": True}))
    (wrong,) = tiny.against(file).source.unknown
    assert (wrong.name, wrong.hint) == (key, "not a number")
