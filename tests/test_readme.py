"""Every `dmt` command of the README is run as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.rehearse import warm_gpu
from tests.warm import SUBPROCESS
from toolkit.cli.main import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].removeprefix("$ dmt ").strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ dmt ") and not re.search(r"my\.yaml|own\.yaml|runs/demo", line)
]


def test_first_two_commands_are_demo_and_tests() -> None:
    commands = re.findall(r"^\$ (.+?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


SHORTER = {"launch": ["--dry-run"], "rehearse": ["--layouts", "ddp", "--steps", "1"]}
"""Of commands that other tests start as they are."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command if "--gpu" in command else pytest.param(command, marks=pytest.mark.quick)
        for command in COMMANDS
    ],
)
def test_command(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DMT_CACHE", str(tmp_path))
    monkeypatch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
    monkeypatch.setattr("toolkit.rehearse.gpu.dress.subprocess", warm_gpu.SUBPROCESS)
    words = [
        str(path) if "*" in word else word
        for word in shlex.split(command)
        for path in (sorted(ROOT.glob(word)) if "*" in word else [word])
    ]
    words += [] if "--gpu" in words else SHORTER.get(words[0], [])
    words = [word.replace("my-tokenizer", str(tmp_path / "tokenizer")) for word in words]
    if words[0] == "launch":  # a recipe for GPUs; the tests' own variable says CPU
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    code = main(words)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out


def own_recipe(base: str) -> str:
    """The recipe of "Train on your own data", on another base of this repository."""
    _, _, section = README.partition("## Train on your own data")
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return re.sub("^extends: .+$", f"extends: {ROOT / base}", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "base", re.findall(r"recipes/\S+\.yaml", README.partition("own data")[2])[:2]
)
def test_own_data(
    base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # one base is for GPUs
    Path("own.yaml").write_text(own_recipe(base), encoding="utf-8")
    Path("texts.jsonl").write_text('{"text": "A document."}\n' * 50, encoding="utf-8")
    for command in ("check own.yaml", "launch own.yaml --dry-run"):
        assert f"$ dmt {command.removesuffix(' --dry-run')} " in README
        assert main(command.split()) == 0, capfd.readouterr().err


def test_pages_are_listed_and_links_lead_somewhere() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    listed = re.findall(r"^\| \[(\S+)\]\(docs/\1\) \|", README, re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#[^)\s]*)?\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_there_are_commands() -> None:
    verbs = {command.split()[0] for command in COMMANDS}
    assert verbs == {
        "init", "check", "plan", "estimate", "render", "rehearse", "launch", "data", "doctor",
        "recipes",
    }  # fmt: skip
