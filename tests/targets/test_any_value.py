"""A file of any content is compared or refused: no setting may stop a run with a traceback."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.targets.conftest import Planned
from toolkit.engines.deepspeed import keys as deepspeed_keys
from toolkit.errors import DmtError
from toolkit.targets import environment_conflicts
from toolkit.targets.known_keys import ACCELERATE, SECTIONS, TRAINER_FSDP, TRAINING_ARGUMENTS

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 10**400, 10**4000),
    *("", "x", "true", "100", "no", "steps", "cpu", "FSDP", "DEEPSPEED", "{", "{}", "a\0b"),
    *("y" * 5000, "full_shard offload", [], [[]], [{}], [True, "x"], ["wandb", None]),
    *({}, {"A": 1}, {"stage": {}}, {"version": []}, {"min_lr": {}}, {"enabled": [1]}),
)
RUNS = 150


def accelerate_config(chance: random.Random) -> dict[str, Any]:
    """Sections of known keys, or anything else in their place."""
    some = {key: chance.choice(VALUES) for key in chance.sample(sorted(ACCELERATE), 9)}
    for section in chance.sample(sorted(SECTIONS), 3):
        keys = sorted(SECTIONS[section])
        some[section] = {
            key: chance.choice(VALUES) for key in chance.sample(keys, min(6, len(keys)))
        }
    kind = chance.choice(["FSDP", "DEEPSPEED", "MEGATRON_LM", chance.choice(VALUES)])
    return {"machine_rank": 0, "main_process_ip": "x", **some, "distributed_type": kind}


def arguments(chance: random.Random) -> dict[str, Any]:
    """TrainingArguments, often with FSDP's block."""
    some = {key: chance.choice(VALUES) for key in chance.sample(sorted(TRAINING_ARGUMENTS), 40)}
    block = {key: chance.choice(VALUES) for key in chance.sample(sorted(TRAINER_FSDP), 6)}
    fsdp = chance.choice([{}, {"fsdp": True, "fsdp_config": block}])
    return {"output_dir": "x", "seed": 1, **some, **fsdp}


def deepspeed_config(chance: random.Random) -> dict[str, Any]:
    """Blocks of known keys, or anything else in their place."""
    known = deepspeed_keys.KNOWN_KEYS
    some: dict[str, Any] = {
        key: chance.choice(VALUES) for key in chance.sample(sorted(known[""]), 8)
    }
    for block in ("zero_optimization", "fp16", "optimizer"):
        keys = sorted(known[block])
        some[block] = {
            key: chance.choice(VALUES) for key in chance.sample(keys, min(3, len(keys)))
        }
    return some


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("made", [accelerate_config, arguments, deepspeed_config])
def test_any_value_at_any_key(made: Any, suffix: str, tiny: Planned, tmp_path: Path) -> None:
    """YAML is a superset of JSON, but has a reader of its own."""
    chance = random.Random(6)
    compared = 0
    for _ in range(RUNS):
        file = tmp_path / f"file{suffix}"
        file.write_text(json.dumps(made(chance)))
        try:
            compared += len(tiny.against(file).compared)
        except DmtError:
            continue
    assert compared > RUNS


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("tpu_env: {A: 1}\nuse_cpu: {A: 1}", "use_cpu", "a map, where one value belongs"),
        ("fsdp_config: 3", "fsdp_config", "not a map"),
        (
            "parallelism_config: {parallelism_config_dp_shard_size: {}}",
            "parallelism_config.parallelism_config_dp_shard_size",
            "a map, where one value belongs",
        ),
    ],
)
def test_a_stray_config_of_the_wrong_shape_stops_nothing(
    text: str, name: str, hint: str, tiny: Planned, tmp_path: Path
) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    file = folder / "default_config.yaml"
    file.write_text(f"num_processes: 2\nnum_machines: 1\n{text}\n")
    assert (
        environment_conflicts(tiny.recipe, tiny.plan, "launch", {"HF_HOME": str(tmp_path)})
        == ()
    )
    (wrong,) = tiny.against(file).unknown
    assert (wrong.name, wrong.hint) == (name, hint)


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
    (wrong,) = tiny.against(file).unknown
    assert (wrong.name, wrong.hint) == (key, "not a number")
