"""The shape of the source: short functions, one meaning per class name, no links out of it."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LONGEST_FUNCTION = 60
"""Lines, with the signature and the docstring."""

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "toolkit").rglob("*.py"))


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield file, node


def test_no_function_is_longer_than_a_screen() -> None:
    too_long = {}
    for file, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        lines = node.end_lineno - node.lineno + 1
        if lines > LONGEST_FUNCTION:
            too_long[f"{file}:{node.lineno} {node.name}"] = lines
    assert not too_long


def test_public_class_names_are_unique() -> None:
    """One name, one meaning."""
    homes: dict[str, list[str]] = {}
    for file, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        if not node.name.startswith("_"):
            homes.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_no_committed_link_leads_out_of_the_checkout() -> None:
    """A link to an environment elsewhere, say: in another clone it leads nowhere."""
    command = ["git", "ls-files", "--stage", "-z"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    links = [line.split("\t")[1] for line in listed.split("\0") if line.startswith("120000")]
    assert "toolkit/recipes" in links
    assert all((ROOT / link).resolve(strict=True).is_relative_to(ROOT) for link in links)
