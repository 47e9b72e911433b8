"""docs/support.md shows what rules and planner say now."""

import support

from tests.engines.pairs import FEATURES
from tests.processes import ROOT
from toolkit.plan.dimensions import DIMENSIONS

SUPPORT = (ROOT / "docs/support.md").read_text(encoding="utf-8")


def test_support_is_current() -> None:
    command = "PYTHONPATH=. python benchmarks/support.py --write docs/support.md"
    assert support.text() == SUPPORT, f"run {command}"


def test_support_has_every_dimension() -> None:
    asked = {key for row in support.LAYOUT_ROWS for key in keys(row.settings["parallel"])}
    dimensions = {one.key for one in DIMENSIONS if one.key.startswith("parallel.")}
    assert dimensions <= {f"parallel.{key}" for key in asked}


def test_support_has_every_axis_of_the_comparison() -> None:
    """Those that are no setting of what is trained are left out."""
    tables = [name for name in vars(support) if name.isupper() and name.endswith("_ROWS")]
    rows = [row for name in tables for row in getattr(support, name)]
    shown = {row.axis for row in [*rows, *support.MODELS, *support.exchanges()]}
    assert FEATURES.keys() - shown == {"weights", "micro batch"}


def keys(settings: support.Settings, before: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in settings.items():
        inside = keys(value, f"{before}{key}.") if isinstance(value, dict) else set()
        found |= inside or {f"{before}{key}"}
    return found
