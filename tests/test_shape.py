"""The shape of the source: short functions, one meaning per class name."""

import ast
from collections.abc import Iterator
from pathlib import Path

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
