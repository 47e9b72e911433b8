"""Who compares names of engines and optimizers: these themselves, and the few places listed
here."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import toolkit
from toolkit.backend import BACKENDS
from toolkit.optimizers.base import OPTIMIZERS

ROOT = Path(toolkit.__file__).parent
MOST = 9
ALLOWED = {
    "plan/cost/workload.py: Workload": "the model implementation megatron",
    "plan/ledger.py: _approximated": "the model implementation megatron",
    "plan/rules/models.py: can_recompute_some": "the model implementation megatron",
    "plan/rules/models.py: pair_problems": "the model implementation megatron",
    "registry.py: ENGINES": "the registry",
    "doctor/needs.py: _packages": "the model implementation megatron",
}
"""Place and reason; a place is a file and what it defines at its top level."""


def compared(tree: ast.AST) -> Iterator[ast.expr]:
    """What is compared with something, matched, a key, or looked up by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for one in (node.left, *node.comparators):
                yield from getattr(one, "elts", [one])
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) != "Literal":
            yield node.slice
        elif isinstance(node, ast.MatchValue):
            yield node.value


def defined_by(statement: ast.stmt) -> str:
    """The name of what a statement defines at the top level of a file."""
    target = getattr(statement, "targets", [getattr(statement, "target", statement)])[0]
    return str(getattr(target, "name", None) or getattr(target, "id", "?"))


def comparing(text: str, names: Collection[str]) -> Iterator[str]:
    """What in a file compares with one of these names or looks something up by it."""
    for statement in ast.parse(text).body:
        constants = (one for one in compared(statement) if isinstance(one, ast.Constant))
        if any(one.value in names for one in constants):
            yield defined_by(statement)


def places(room: str, names: Collection[str]) -> set[str]:
    return {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != room
        for name in comparing(path.read_text(encoding="utf-8"), names)
    }


def test_engine_names_are_compared_in_listed_places_alone() -> None:
    assert len(ALLOWED) <= MOST
    assert places("engines", BACKENDS.names) == ALLOWED.keys()


def test_optimizer_names_are_compared_nowhere() -> None:
    assert places("optimizers", OPTIMIZERS.names) == set()
