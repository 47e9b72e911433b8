"""docs/support.md shows what rules and planner say now."""

import re

import support

from tests.engines.pairs import FEATURES, LAYOUTS
from tests.processes import ROOT
from toolkit.plan.dimensions import DIMENSIONS

SUPPORT = (ROOT / "docs/support.md").read_text(encoding="utf-8")


def test_support_is_current() -> None:
    """What is refused, and why; which layout trains the rest takes a minute to ask
    (`benchmarks/support.py --check`)."""
    command = "PYTHONPATH=. python benchmarks/support.py --write docs/support.md"
    made = support.untested(support.text(tests=False))
    assert support.untested(SUPPORT) == made, f"run {command}"
    named = {name.partition(",")[0] for name in re.findall("✓ `([^`]+)`", SUPPORT)}
    assert named - {"selftest"} <= LAYOUTS.keys()


def test_support_has_every_dimension() -> None:
    asked = {key for row in support.LAYOUT_ROWS for key in keys(row.settings["parallel"])}
    dimensions = {one.key for one in DIMENSIONS if one.key.startswith("parallel.")}
    assert dimensions <= {f"parallel.{key}" for key in asked}


def test_support_has_every_axis_of_the_comparison() -> None:
    """Those that are no setting of what is trained are left out."""
    tables = [name for name in vars(support) if name.isupper() and name.endswith("_ROWS")]
    rows = [row for name in tables for row in getattr(support, name)]
    shown = {axis for row in [*rows, *support.MODELS] for axis, _ in row.values}
    shown |= {axis for row in support.exchanges() for axis, _ in row.values}
    assert FEATURES.keys() - shown == {"weights", "micro batch"}


def keys(settings: support.Settings, before: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in settings.items():
        inside = keys(value, f"{before}{key}.") if isinstance(value, dict) else set()
        found |= inside or {f"{before}{key}"}
    return found
