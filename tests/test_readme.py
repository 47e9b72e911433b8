"""Every `dmt` command of the README is run as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.warm import SUBPROCESS
from toolkit.cli.main import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].removeprefix("$ dmt ").strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ dmt ") and "my.yaml" not in line and "runs/demo" not in line
]


def test_first_two_commands_are_demo_and_tests() -> None:
    commands = re.findall(r"^\$ (.+?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


SHORTER = {"launch": ["--dry-run"], "rehearse": ["--layouts", "ddp", "--steps", "1"]}
"""Of commands that other tests start as they are."""


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS)
def test_command(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DMT_CACHE", str(tmp_path))
    monkeypatch.setattr("toolkit.rehearse.ranks.subprocess", SUBPROCESS)
    words = [
        str(path) if "*" in word else word
        for word in shlex.split(command)
        for path in (sorted(ROOT.glob(word)) if "*" in word else [word])
    ]
    words += SHORTER.get(words[0], [])
    words = [word.replace("my-tokenizer", str(tmp_path / "tokenizer")) for word in words]
    code = main(words)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out


def test_there_are_commands() -> None:
    verbs = {command.split()[0] for command in COMMANDS}
    assert verbs == {
        "init", "check", "plan", "estimate", "render", "rehearse", "launch", "data", "doctor",
    }  # fmt: skip
