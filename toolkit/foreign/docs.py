"""The tables of docs/coming-from.md: `python -m toolkit.foreign.docs` writes them."""

from collections.abc import Iterator
from pathlib import Path

from toolkit.foreign.tables import ForeignRow, tool, tools
from toolkit.recipe.words import settings

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
MARK = "<!-- tables: python -m toolkit.foreign.docs -->\n"


def page() -> str:
    """The page, with a table for each tool."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return head + MARK + "\n".join(line for line in _tables()) + "\n"


def _tables() -> Iterator[str]:
    for one in tools():
        extends_trainer = one in (tool("llama_factory"), tool("axolotl"))
        more = ", and the Trainer's settings" if extends_trainer else ""
        yield f"\n## {one.name.removeprefix('the ')}{more}"
        yield "\n| there | in a recipe |\n|---|---|"
        ours: dict[str, list[str]] = {}
        base = tool("trainer").rows if extends_trainer else {}
        for name, row in one.rows.items():
            target = _target(row)
            if target and base.get(name) != row and not _is_named_alike(name, target):
                ours.setdefault(target, []).append(f"`{name}`")
        for target, names in ours.items():
            yield f"| {', '.join(names)} | {target} |"


def _is_named_alike(name: str, target: str) -> bool:
    """Whether a recipe's key ends in the name: `training.seed` in `seed`."""
    last = name.rpartition(".")[2].strip("-").replace("-", "_")
    return f"_{target.strip('`').replace('.', '_')}".endswith(f"_{last}")


def _target(row: ForeignRow) -> str | None:
    keys = list(row.to)
    for words in (row.words or {}).values():
        keys += words if isinstance(words, dict) else []
    keys += row.more
    known = [key for key in dict.fromkeys(keys) if key.partition("[")[0] in settings()]
    return ", ".join(f"`{key}`" for key in known) or None


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
