"""Reads a text as a file of another tool, next to a recipe."""

from pathlib import Path

from tests.foreign.conftest import Planned
from toolkit.foreign.compare import Report


def read(tiny: Planned, folder: Path, text: str, name: str) -> Report:
    file = folder / name
    file.write_text(text)
    return tiny.against(file)


def told(report: Report) -> dict[str, tuple[str, str, str]]:
    """By the other's name: our key, the verdict, and its line."""
    return {
        row.name: (row.key, row.verdict, row.place.rpartition(":")[2])
        for row in report.compared
    }
