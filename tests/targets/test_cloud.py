"""Tasks of SkyPilot and dstack: their fields, and that their command starts the recipe.

The fields were validated with `get_task_schema` and `get_resources_schema` of skypilot 0.14.1
and with `TaskConfiguration` of dstack 0.22.5. Both packages pin too much for our environments.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.intake.load import load_recipe

SFT = ROOT / "recipes/llama/llama-3.1-8b-sft.yaml"
SKYPILOT = {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
DSTACK = {"type", "name", "nodes", "files", "env", "commands", "resources"}


def task(dmt: Dmt, to: str, recipe: Path, *settings: str) -> tuple[dict[str, Any], str]:
    """The task, and what the shell of a machine runs."""
    sets = [word for setting in settings for word in ("--set", setting)]
    made = yaml.safe_load(dmt("render", recipe, "--to", to, *sets).out)
    return made, made["run"] if to == "skypilot" else made["commands"][1]


@pytest.mark.parametrize(
    ("to", "fields", "first"),
    [
        ("skypilot", SKYPILOT, "$(echo \"$SKYPILOT_NODE_IPS\" | head -n 1)"),
        ("dstack", DSTACK, "$DSTACK_MASTER_NODE_IP"),
    ],
)  # fmt: skip
def test_a_task_of_two_machines(to: str, fields: set[str], first: str, dmt: Dmt) -> None:
    made, command = task(dmt, to, SFT, "cluster.nodes=2")
    assert made.keys() == fields
    assert made["name"] == "dmt-llama-3-1-8b-sft"
    assert made.get("num_nodes", made.get("nodes")) == 2
    gpus = made["resources"].get("accelerators", made["resources"].get("gpu"))
    assert gpus in ("H100:8", "H100:80GB:8")
    assert command.rstrip().endswith(
        'dmt launch recipe.yaml --run-dir "$RUN_DIR" --launcher torchrun --set '
        f'launch.rendezvous="{first}:29400"'
    )


@pytest.mark.parametrize("to", ["skypilot", "dstack"])
def test_the_command_starts_the_same_recipe(to: str, dmt: Dmt, tmp_path: Path) -> None:
    """As a machine's shell runs it, with a `dmt` that only shows its arguments."""
    program = tmp_path / "dmt"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    _, command = task(dmt, to, ROOT / "recipes/tiny/llama-bytes.yaml")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RUN_DIR": "runs/x y"}
    ran = subprocess.run(
        ["bash", "-eu", "-c", command], cwd=tmp_path, env=environ, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "launch recipe.yaml --run-dir runs/x y --launcher local\n"
    there = load_recipe(tmp_path / "recipe.yaml")
    assert there == load_recipe(ROOT / "recipes/tiny/llama-bytes.yaml")


def test_an_accelerator_without_a_name_there(dmt: Dmt) -> None:
    printed = dmt(
        "render", SFT, "--to", "skypilot", "--set", "cluster.gpu=h100-96gb", code=2
    ).err
    assert "cluster.gpu: SkyPilot knows no h100-96gb" in printed


def test_a_task_is_never_read(dmt: Dmt, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("run: dmt launch\nnum_nodes: 2\n")
    printed = dmt("check", SFT, "--against", file, code=2).err
    assert "settings run, num_nodes" in printed
    assert ", ," not in printed
