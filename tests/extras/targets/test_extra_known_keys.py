"""The written-down lists of other tools' names against the installed tools."""

import dataclasses
import inspect
import re

from torch.distributed.run import get_args_parser
from transformers import TrainingArguments

from tests.targets.known import expect
from toolkit.extras.targets import megatron_lm, trainer
from toolkit.extras.targets.known_keys import (
    FILE,
    OLD_TRAINING_ARGUMENTS,
    TRAINER_FSDP,
    TRAINING_ARGUMENTS,
)
from toolkit.extras.targets.megatron_lm import megatron_options
from toolkit.targets import training_arguments


def test_training_arguments() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    public = {name for name in fields if not name.startswith("_")}
    expect("transformers", "training_arguments", public, TRAINING_ARGUMENTS, FILE)
    assert not TRAINING_ARGUMENTS & OLD_TRAINING_ARGUMENTS
    of_scripts_and_trl = {"model_name_or_path", "max_seq_length", "max_length"}
    read = {*training_arguments.KEYS, *trainer.DEPENDENT, *trainer.BLOCKS}
    assert read - of_scripts_and_trl <= TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS


def test_transformers_fsdp_config() -> None:
    read = inspect.getsource(TrainingArguments._process_fsdp_args)
    keys = set(re.findall(r"self\.fsdp_config(?:\.get\(|\.setdefault\(|\[)\"(\w+)", read))
    expect("transformers", "training_arguments fsdp_config", keys, TRAINER_FSDP, FILE)


def test_megatrons_and_torchruns_options() -> None:
    options = {
        option.replace("_", "-")
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    earlier = {"--data-impl"}
    assert {*megatron_lm._table()} - earlier <= megatron_options() | options
