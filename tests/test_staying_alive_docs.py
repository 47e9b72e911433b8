"""docs/staying-alive.md: its commands and settings exist."""

import re
import shlex

import pytest

from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.recipe.schema import LaunchSection
from toolkit.run.events import EventKind

PAGE = (ROOT / "docs" / "staying-alive.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ dmt (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*shlex.split(command), "--dry-run"]) == 0, capsys.readouterr().err


def test_there_is_a_command() -> None:
    assert COMMANDS


def test_every_setting_and_event_exists() -> None:
    settings = set(re.findall(r"`launch\.(\w+)", PAGE))
    assert {"hang_timeout_s", "start_timeout_s", "grace_s", "rendezvous"} <= settings
    assert settings <= set(LaunchSection.model_fields)
    recorded = PAGE.partition("`events.jsonl`:")[2]
    named = set(re.findall(r"`(launch|start|hang|restart|replay|resize|signal|end)`", recorded))
    assert named == {
        *("launch", "start", "hang", "restart", "replay", "resize", "signal", "end"),
    }
    assert named <= set(EventKind.__args__)
    default = LaunchSection.model_fields["hang_timeout_s"].default
    assert f"`launch.hang_timeout_s` ({default:,.0f} s)" in PAGE
