"""`accelerate launch` of a script, by the files of `launch/accelerate/`."""

from pathlib import Path

from tests.e2e.conftest import Project
from tests.e2e.product import Ended, run, tool
from tests.processes import ROOT


def launch(project: Project, file: Path, script: Path, *arguments: str | Path) -> Ended:
    """Start a script by a file of `launch/accelerate/`, on two processes."""
    start = tool("accelerate", "launch", "--config_file", file, "--num_processes", "2")
    return run([*start, str(script), *map(str, arguments)], project.folder)


def common(name: str) -> Path:
    return ROOT / "launch" / "accelerate" / f"{name}.yaml"
