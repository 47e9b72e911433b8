"""The written-down lists of other tools' names against the installed tools."""

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from tests.foreign.known import expect
from tests.needs import is_of_ci
from toolkit.foreign import accelerate, environment
from toolkit.foreign.known_keys import ACCELERATE, FILE, SECTIONS


def test_accelerates_config_file() -> None:
    older = {"dynamo_backend", "fp16"}
    fields = ClusterConfig.__dataclass_fields__.keys() | older
    expect("accelerate", "accelerate", fields, ACCELERATE, FILE)


@pytest.mark.skipif(not is_of_ci("accelerate"), reason="older ones have fewer")
def test_accelerates_sections_are_arguments_of_its_launcher() -> None:
    arguments = {action.dest for action in launch_command_parser()._actions}
    listed = {name for names in SECTIONS.values() for name in names}
    assert listed <= arguments
    prefixes = ("fsdp_", "megatron_lm_", "parallelism_config_", "fp8_", "dynamo_", "offload_")
    assert {name for name in arguments if name.startswith(prefixes)} <= listed
    assert accelerate.KEYS.keys() <= listed | ACCELERATE
    assert {*environment._ACCELERATE.values()} <= listed | ACCELERATE
