"""A file of any content is compared or refused: no setting may stop a run with a traceback."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.any_value import VALUES, try_any_value
from tests.foreign.conftest import Planned
from toolkit.engines.deepspeed import keys as deepspeed_keys
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import axolotl, environment_conflicts, llama_factory
from toolkit.foreign.known_keys import ACCELERATE, SECTIONS
from toolkit.foreign.trainer import BLOCKS


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


def finetuning_config(chance: random.Random) -> dict[str, Any]:
    """Settings of LLaMA-Factory or Axolotl."""
    target, own = chance.choice(
        [
            (llama_factory.TARGET, ("stage", "finetuning_type", "dataset", "lora_rank")),
            (axolotl.TARGET, ("base_model", "datasets", "sequence_len", "adapter")),
        ]
    )
    keys = sorted(target.table(JsonFile(Path("x.yaml"), {}, {}), {}).keys() | {*BLOCKS})
    some = {key: chance.choice(VALUES) for key in chance.sample(keys, 12)}
    return {**dict.fromkeys(own, "x"), **some, "learning_rate": 0.1}


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("made", [accelerate_config, deepspeed_config, finetuning_config])
def test_any_value_at_any_key(made: Any, suffix: str, tiny: Planned, tmp_path: Path) -> None:
    try_any_value(made, suffix, tiny, tmp_path)


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
    (wrong,) = tiny.against(file).source.unknown
    assert (wrong.name, wrong.hint) == (name, hint)
