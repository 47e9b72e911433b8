"""docs/staying-alive.md: its commands and settings exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.recipe.schema import LaunchSection
from toolkit.train.events import EventKind

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "staying-alive.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ dmt (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli.main", *shlex.split(command), "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_a_command() -> None:
    assert COMMANDS


def test_every_setting_and_event_exists() -> None:
    settings = set(re.findall(r"`launch\.(\w+)", PAGE))
    assert settings == {"hang_timeout_s", "grace_s"} <= set(LaunchSection.model_fields)
    recorded = PAGE.partition("`events.jsonl`:")[2]
    named = set(re.findall(r"`(launch|start|hang|restart|replay|signal|end)`", recorded))
    assert named == {"launch", "start", "hang", "restart", "replay", "signal", "end"}
    assert named <= set(EventKind.__args__)
    default = LaunchSection.model_fields["hang_timeout_s"].default
    assert f"`launch.hang_timeout_s` ({default:,.0f} s)" in PAGE
