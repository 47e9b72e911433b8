"""The printer of all verbs: JSON, or lines that fit a terminal and stay whole in a file."""

import json
from dataclasses import dataclass

import pytest
import typer
from rich.text import Text

from toolkit.cli.output import Table, output, show

WORDS = "one two three four five six seven eight nine ten eleven twelve"
LINES = [f"  {WORDS}", Text.assemble("name  ", WORDS), f"a much longer label  {WORDS}"]


@dataclass(frozen=True)
class Row:
    name: str
    count: int


def test_lines_stay_whole_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    show(LINES)
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in LINES)


def test_lines_hang_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    show(LINES)
    assert capsys.readouterr().out.splitlines() == [
        "  one two three four five six seven",
        "      eight nine ten eleven twelve",
        "name  one two three four five six seven",
        "      eight nine ten eleven twelve",
        "a much longer label  one two three",
        "      four five six seven eight nine ten",
        "      eleven twelve",
    ]
    show(LINES, wrap=False)
    assert f"  {WORDS}\n" in capsys.readouterr().out


def test_a_secret_is_masked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-7d1f2c9b")
    show(["a canary-7d1f2c9b", Text.assemble(("name ", "red"), "canary-7d1f2c9b")])
    assert capsys.readouterr().out == "a ***\nname ***\n"


def test_json_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    rows, table = [Row("a", 1), Row("bc", 20)], Table[Row]({"name": lambda row: row.name})
    with pytest.raises(typer.Exit) as ended:
        output(True, {"rows": rows}, table.lines(rows), exit_code=4)
    assert ended.value.exit_code == 4
    assert json.loads(capsys.readouterr().out) == {"rows": [vars(row) for row in rows]}
    output(False, None, table.lines(rows))
    assert capsys.readouterr().out == "name\na\nbc\n"
