"""Every `dmt` command of the README is run as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    words = [
        str(path) if "*" in word else word
        for word in shlex.split(command)
        for path in (sorted(ROOT.glob(word)) if "*" in word else [word])
    ]
    if words[0] == "launch":
        words.append("--dry-run")  # other tests start it
    words = [word.replace("my-tokenizer", str(tmp_path / "tokenizer")) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli.main", *words],
        cwd=ROOT,
        env=os.environ | {"DMT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_commands() -> None:
    verbs = {command.split()[0] for command in COMMANDS}
    assert verbs == {
        "init", "check", "plan", "estimate", "render", "rehearse", "launch", "data", "doctor",
    }  # fmt: skip
