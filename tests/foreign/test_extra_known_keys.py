"""The written-down lists of other tools' names against the installed tools."""

import dataclasses
import inspect
import re

from transformers import TrainingArguments

from tests.foreign.known import expect
from toolkit.foreign import trainer, training_arguments
from toolkit.foreign.trainer_keys import (
    FILE,
    OLD_TRAINING_ARGUMENTS,
    TRAINER_FSDP,
    TRAINING_ARGUMENTS,
)


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
