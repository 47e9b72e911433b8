"""README and docs: their `dmt` commands run as they stand, the settings that they name exist,
their links lead somewhere, and the site is built without warnings."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.warm import SUBPROCESS
from toolkit.cli.main import main
from toolkit.foreign import docs as foreign_docs
from toolkit.recipe.schema import LaunchSection, Recipe
from toolkit.recipe.words import settings
from toolkit.run.events import EventKind


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
        for page in ("README.md", "docs/commands.md", "docs/staying-alive.md")
        for command in commands_of(page)
        if "runs/demo" not in command and "--gpu" not in command and command != FIRST_RUN
    )
]
"""tests/rehearse/test_dress.py has `--gpu`."""
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


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("warm")
def test_command(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    words += SHORTER.get(words[0], [])
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


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_the_python_api(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/commands.md plans, rehearses and trains."""
    monkeypatch.chdir(reader)
    _, _, page = text_of("docs/commands.md").partition("## Python API")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    steps = '"training.steps=30"'
    assert steps in code
    exec(code.replace(steps, '"training.steps=20", "parallel.engine=ddp"'), {})
    assert (reader / "runs/first/export/model.safetensors").is_file()


def anchors(page: Path) -> set[str]:
    """Of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}


def test_links_lead_somewhere() -> None:
    """Those between pages of the site are checked where it is built, the others here."""
    pages = [*ROOT.glob("*.md"), ROOT / "docs" / "llms.txt", *(ROOT / "docs").rglob("*.md")]
    assert {"AGENTS.md", "CONTRIBUTING.md", "SECURITY.md"} <= {page.name for page in pages}
    for path in pages:
        text = path.read_text(encoding="utf-8")
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
            if anchor and path.name == "README.md":
                assert anchor in anchors(path.parent / link), f"{path.name}: {link}#{anchor}"


def test_every_command_is_run() -> None:
    verbs = {command.split()[0] for command in COMMANDS}
    assert verbs == {
        "init", "check", "plan", "render", "rehearse", "launch", "data", "doctor",
        "recipes", "schema",
    }  # fmt: skip


def test_the_conversion_of_another_tools_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/coming-from.md, in a folder with the file that it shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the recipe is for GPUs
    text = text_of("docs/coming-from.md")
    (name, content), *_ = re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```$', text, re.M | re.S)
    Path(name).write_text(content, encoding="utf-8")
    commands = commands_of("docs/coming-from.md")
    assert commands
    for command in commands:
        assert main(shlex.split(command)) == 0, capfd.readouterr().err
    assert foreign_docs.page() == text, "python -m toolkit.foreign.docs writes its tables"


def test_settings_exist() -> None:
    found, known = set(), settings().keys()
    others = {"model.py", "model.gradient_checkpointing_enable", "launch.log"}
    for path in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^\| .+? \| ", "", path.read_text(encoding="utf-8"), flags=re.M)
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:\[\d\])?(?:[:=] ?[^`]+)?`", text):
            if name.startswith("data.train.") or name in others:
                continue  # by kind
            if name.split(".")[0] in Recipe.model_fields:
                assert name in known, f"{path.name}: {name}"
                found.add(name)
    assert len(found) > 80


def test_events_and_limits_of_runs_that_stay_alive() -> None:
    page = text_of("docs/staying-alive.md")
    named = re.findall(r"`(\w+)`", page.partition("`events.jsonl`:")[2].partition("\n\n")[0])
    assert len({*named} & {*EventKind.__args__}) >= 8
    default = LaunchSection.model_fields["hang_timeout_s"].default
    assert f"`launch.hang_timeout_s` ({default:,.0f} s)" in page


def test_the_site(tmp_path: Path) -> None:
    """What `make docs` builds; a link to nowhere and a page that is not listed are errors.
    Agents find the Markdown, and diagrams are pictures."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 15
    assert all((tmp_path / link.partition("#")[0]).is_file() for link in links)
    page = (tmp_path / "architecture.html").read_text(encoding="utf-8")
    assert "mermaid" not in page and "pictures/diagram-" in page
