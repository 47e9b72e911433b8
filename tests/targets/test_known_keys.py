"""The written-down lists of other tools' names against the installed tools."""

import dataclasses
import inspect
import json
import os
import re

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import TrainingArguments

from toolkit.targets import (
    accelerate,
    environment,
    megatron_arguments,
    training_arguments,
)
from toolkit.targets.known_keys import (
    ACCELERATE,
    FILE,
    OLD_TRAINING_ARGUMENTS,
    SECTIONS,
    TRAINER_FSDP,
    TRAINING_ARGUMENTS,
)
from toolkit.targets.megatron_arguments import TORCHRUN, megatron_options


def expect(table: str, installed: set[str], listed: frozenset[str]) -> None:
    """Compare a table of the file, or write it."""
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        tables = json.loads(FILE.read_text()) | {table: sorted(installed)}
        FILE.write_text(json.dumps(tables, indent=1) + "\n")
    else:
        assert installed == listed


def test_training_arguments() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    public = {name for name in fields if not name.startswith("_")}
    expect("training_arguments", public, TRAINING_ARGUMENTS)
    assert not TRAINING_ARGUMENTS & OLD_TRAINING_ARGUMENTS
    read = training_arguments._SAME.keys() - {
        "model_name_or_path", "max_seq_length", "max_length",  # of scripts and of TRL
    }  # fmt: skip
    assert read <= TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS


def test_transformers_fsdp_config() -> None:
    read = inspect.getsource(TrainingArguments._process_fsdp_args)
    keys = set(re.findall(r"self\.fsdp_config(?:\.get\(|\.setdefault\(|\[)\"(\w+)", read))
    expect("training_arguments fsdp_config", keys, TRAINER_FSDP)


def test_accelerates_config_file() -> None:
    older = {"dynamo_backend", "fp16"}
    expect("accelerate", ClusterConfig.__dataclass_fields__.keys() | older, ACCELERATE)


def test_accelerates_sections_are_arguments_of_its_launcher() -> None:
    arguments = {action.dest for action in launch_command_parser()._actions}
    listed = {name for names in SECTIONS.values() for name in names}
    assert listed <= arguments
    prefixes = ("fsdp_", "megatron_lm_", "parallelism_config_", "fp8_", "dynamo_", "offload_")
    assert {name for name in arguments if name.startswith(prefixes)} <= listed
    read = {*accelerate._SAME, *accelerate._OFFLOADS, *accelerate._CLIPPING}
    assert read <= listed | ACCELERATE
    assert {*environment._ACCELERATE.values()} <= listed | ACCELERATE


def test_megatrons_options() -> None:
    read = {
        *megatron_arguments._SAME,
        *megatron_arguments._SWITCHES,
        *megatron_arguments._RULES,
        *megatron_arguments._SAID_ELSEWHERE,
    }
    assert read <= megatron_options() | TORCHRUN


def test_torchruns_options() -> None:
    options = {
        option.replace("_", "-")
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    assert options >= TORCHRUN
