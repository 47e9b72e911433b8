"""Settings that 8-bit AdamW refuses: one problem, at its line, with a fix."""

from pathlib import Path

import pytest

from tests.recipe.good import GOOD
from toolkit.cli.check import judge

NAME = "optimizer:\n  name: adamw"
ADAPTER = "adapter: {rank: 4, alpha: 8}\n"
MISTAKES = {
    "8-bit AdamW with adapters": (
        f"{ADAPTER}optimizer:\n  name: adamw_8bit",
        "optimizer.name", "set optimizer.name to adamw", "name: adamw_8bit",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("new", "key", "fix", "at"), MISTAKES.values(), ids=MISTAKES)
def test_one_clear_problem(new: str, key: str, fix: str, at: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = GOOD.replace(NAME, new, 1)
    path.write_text(text)
    (problem,) = judge(path).problems
    assert (problem.key, problem.file) == (key, str(path))
    assert fix in problem.fix
    assert at in text.splitlines()[problem.line - 1]
