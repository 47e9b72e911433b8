"""What others wrote reaches the terminal as text, whichever command shows it."""

import ast
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit.cli.output import Console
from toolkit.errors import Problem
from toolkit.run.directory import RunDirectory
from toolkit.run.rank_log import setup_rank_logging
from toolkit.text.terminal import LossyStream, printable

EVIL = "a\x1b[31m\x9b2J\x07\r\u202eb\x7f\udcff[red]"
SHOWN = "a\\x1b[31m\\x9b2J\\x07\\r\\u202eb\\x7f\\udcff[red]"
QUOTED = json.dumps(EVIL.replace("\udcff", ""))
"""As a double-quoted scalar of YAML."""

OWN_WORDS = {"cli/main.py", "text/generated.py"}
"""May print past the boundary: a version, names of our own files."""
TERMINALS_ONLY = {"cli/output.py", "data/progress.py", "train/watchdog.py", "run/progress.py"}
"""May use rich's own console: for bars that show nothing but numbers and our words."""


def clean(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_printable() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("one\ntwo\t日本 é ✓") == "one\\ntwo\\t日本 é ✓"
    assert printable("one\n\ttwo\r", lines=True) == "one\n\ttwo\\r"
    problem = Problem(EVIL, "a\nb", "", "", EVIL, 1)
    assert str(problem).startswith(f"{SHOWN}:1: {SHOWN}: found a\\nb; ")


RECIPES = {
    "key": (GOOD + f"{QUOTED}: 1\n", []),
    "key of the model": (GOOD.replace("hidden_size", QUOTED, 1), []),
    "value": (GOOD.replace("name: good", f"name: {QUOTED}"), []),
    "raw": (GOOD + EVIL.replace("\udcff", ""), []),
    "set": (GOOD, ["--set", f"training.{EVIL}={EVIL}"]),
    "set without a value": (GOOD, ["--set", EVIL]),
    "wrong value": (GOOD, ["--set", f"training.seed={EVIL}"]),
}


@pytest.mark.parametrize(("text", "more"), RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("verb", ["check", "plan"])
def test_a_recipe_cannot_steer_the_terminal(
    verb: str, text: str, more: list[str], tmp_path: Path, dmt: Dmt
) -> None:
    path = tmp_path / f"{EVIL}.yaml"
    path.write_text(text)
    captured = dmt(verb, path, *more, code=2)
    assert clean(captured.out + captured.err)
    if "--set" not in more:
        assert SHOWN in captured.out + captured.err, "the file's name"


def test_a_good_recipe_in_an_evil_place(tmp_path: Path, dmt: Dmt) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    (folder / "good.yaml").write_text(GOOD)
    for command in (["check"], ["launch", "--dry-run", "--run-dir", str(folder / "run")]):
        captured = dmt(*command, folder / "good.yaml")
        assert clean(captured.out + captured.err)
        assert SHOWN in captured.out


def test_consoles_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80, force_terminal=True, color_system="standard").print(EVIL, style="red")
    assert capsys.readouterr().out == f"\x1b[31m{SHOWN}\x1b[0m\n"
    run = RunDirectory(tmp_path)
    added = setup_rank_logging(run, 0)
    record = logging.makeLogRecord({"name": "evil", "levelno": 30, "msg": f"x{EVIL}x"})
    for handler in added:
        handler.handle(record)  # not through the root logger: pytest cannot report surrogates
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert f"x{SHOWN}x\n" in capsys.readouterr().err
    assert run.rank_log(0).read_text().endswith(f"x{SHOWN}x\n")


def printing(path: Path) -> Iterator[str]:
    """Calls and imports that reach a terminal without passing through `tell` or `Console`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
            yield from (f"rich's {alias.name}" for alias in node.names)
        if not isinstance(node, ast.Call):
            continue
        call, said = ast.unparse(node.func), ast.unparse(node)
        if call.endswith((".stderr.write", ".stdout.write")):
            yield said
        if call in ("print", "typer.echo") and "json.dumps" not in said:
            yield said


def test_a_stream_whose_reader_is_gone() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as plain:
        stream = LossyStream(plain)
        print("read", file=stream, flush=True)  # type: ignore[call-overload]
        assert os.read(reader, 99) == b"read\n"
        os.close(reader)
        for _ in range(2):
            print("lost", file=stream, flush=True)  # type: ignore[call-overload]
        os.write(writer, b"a library's own line")  # no SIGPIPE, no error


def test_nothing_prints_past_the_boundary() -> None:
    root = Path(toolkit.__file__).parent
    found = {
        path.relative_to(root).as_posix(): list(printing(path)) for path in root.rglob("*.py")
    }
    allowed = {"text/terminal.py", "extras/launchers/ray.py"} | OWN_WORDS | TERMINALS_ONLY
    past = {name: calls for name, calls in found.items() if calls and name not in allowed}
    assert not past
