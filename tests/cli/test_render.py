"""`dmt render`: what the backend reads, or one clear error."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from toolkit.cli.render import render
from toolkit.errors import PlanError

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny" / "llama-bytes.yaml")


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(render)
    result = CliRunner().invoke(app, [RECIPE, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prints_complete_json() -> None:
    config = json.loads(run("--to", "deepspeed"))
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_batch_size"] == 16
    assert config["optimizer"]["params"]["lr"] == 3.0e-3


def test_fsdps_keyword_arguments() -> None:
    fsdp = ("--set", "parallel.engine=fsdp", "--set", "parallel.zero.stage=3")
    config = json.loads(run("--to", "fsdp", *fsdp))
    assert config == json.loads(run(*fsdp))
    assert config["reshard_after_forward"] is True
    with pytest.raises(PlanError, match="engine fsdp, which reads no deepspeed config"):
        run("--to", "deepspeed", *fsdp)


def test_overrides_choose_another_preset() -> None:
    config = json.loads(
        run("--set", "parallel.zero.stage=3", "--set", "parallel.zero.offload_optimizer=cpu")
    )
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_engines_read_no_other_configuration() -> None:
    ddp = ("--set", "parallel.engine=ddp", "--set", "parallel.zero.stage=auto")
    with pytest.raises(PlanError, match="runs on the engine ddp, which reads no configuration"):
        run(*ddp)
    for engine in ("deepspeed", "fsdp", "megatron"):
        with pytest.raises(PlanError, match=f"which reads no {engine} configuration") as caught:
            run("--to", engine, *ddp)
        assert caught.value.fix == f"--set parallel.engine={engine}"


def test_megatron_cores_arguments_are_the_default_of_its_engine() -> None:
    config = json.loads(
        run("--set", "parallel.engine=megatron", "--set", "parallel.zero.stage=auto")
    )
    assert list(config) == ["transformer", "gpt", "ddp", "optimizer"]
    assert config["transformer"]["num_query_groups"] == 2
    assert config["optimizer"]["lr"] == 3.0e-3


def test_a_megatron_model_under_deepspeed_has_both_configurations() -> None:
    model = ("--set", "parallel.model=megatron")
    config = json.loads(run("--to", "megatron", *model))
    assert list(config) == ["transformer", "gpt"]
    assert config["gpt"]["vocab_size"] == 320
    assert json.loads(run(*model))["zero_optimization"]["stage"] == 2
