"""Every `dmt` command of README, docs/commands.md and the tutorials is run as it stands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.rehearse import warm_gpu
from tests.warm import SUBPROCESS
from toolkit.cli.main import main


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str) -> list[str]:
    return [
        line.split("#")[0].removeprefix("$ dmt ").strip()
        for block in re.findall(r"```console\n(.*?)```", text_of(page), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ dmt ")
    ]


README = text_of("README.md")
FIRST_RUN = "launch llama-bytes --set training.steps=50"
"""The run of the first tutorial, with which the others go on."""
COMMANDS = [
    *dict.fromkeys(
        command
        for page in ("README.md", "docs/commands.md")
        for command in commands_of(page)
        if "runs/demo" not in command and command != FIRST_RUN
    )
]
TUTORIALS = ("first-run", "fine-tune-on-your-chats", "laptop-to-cluster")


def test_first_two_commands_are_demo_and_tests() -> None:
    commands = re.findall(r"^\$ (.+?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


SHORTER = {"launch": ["--dry-run"], "rehearse": ["--layouts", "ddp", "--steps", "1"]}
"""Of commands that other tests start as they are."""
FEWER_STEPS = {
    "training.steps=50": "training.steps=20",
    "training.steps=60": "training.steps=22",
    "training.epochs=20": "training.epochs=2",
}
"""Of runs that are trained here."""


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMT_CACHE", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
    monkeypatch.setattr("toolkit.rehearse.gpu.dress.subprocess", warm_gpu.SUBPROCESS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command if "--gpu" in command else pytest.param(command, marks=pytest.mark.quick)
        for command in COMMANDS
    ],
)
@pytest.mark.usefixtures("warm")
def test_command(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    words += [] if "--gpu" in words else SHORTER.get(words[0], [])
    words = [word.replace("my-tokenizer", str(tmp_path / "tokenizer")) for word in words]
    if words[0] == "launch":  # a recipe for GPUs; the tests' own variable says CPU
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    code = main(words)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's folder, in which the first run was trained."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "texts.jsonl").write_text('{"text": "A document."}\n' * 50, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DMT_CACHE", str(folder / "cache"))
        patch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
        assert main(shlex.split(shorter(FIRST_RUN))) == 0
        yield folder


def shorter(command: str) -> str:
    for steps, fewer in FEWER_STEPS.items():
        command = command.replace(steps, fewer)
    return command


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("tutorial", TUTORIALS)
@pytest.mark.usefixtures("warm")
def test_tutorial(
    tutorial: str,
    reader: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its files are written and its commands run in their order, in one folder for all."""
    monkeypatch.chdir(reader)
    page = f"docs/tutorials/{tutorial}.md"
    pattern = r"Write .*?to `(\S+)`.*?```\w+\n(.*?)```"
    files = re.findall(pattern, text_of(page), re.DOTALL)
    for name, text in files:
        (reader / name).write_text(text, encoding="utf-8")
    commands = commands_of(page)
    assert len(commands) >= 5 and (tutorial != TUTORIALS[0] or FIRST_RUN in commands)
    for command in commands:
        if command in (FIRST_RUN, *COMMANDS):
            continue  # run above
        with monkeypatch.context() as patch:
            if "h100" in command:  # the tests' own variable says CPU
                patch.delenv("DS_ACCELERATOR", raising=False)
            words = shlex.split(shorter(command))
            words += ["--dry-run"] if words[:2] == ["launch", "own.yaml"] else []
            code = main(words)
        out, err = capfd.readouterr()
        assert code == 0 and out + err, f"{command}\n{out}\n{err}"
    if tutorial == TUTORIALS[1]:
        assert (reader / "runs/export-lora/export/adapter_model.safetensors").is_file()


def anchors(page: Path) -> set[str]:
    """Of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_links_lead_somewhere() -> None:
    """Those between pages of the site are checked where it is built, the others here."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
            if anchor and path.name == "README.md":
                assert anchor in anchors(path.parent / link), f"{path.name}: {link}#{anchor}"


def test_there_are_commands() -> None:
    verbs = {command.split()[0] for command in COMMANDS}
    assert verbs == {
        "init", "check", "plan", "render", "rehearse", "launch", "data", "doctor",
        "recipes", "schema", "tune",
    }  # fmt: skip
