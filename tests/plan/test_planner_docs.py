"""docs/planner.md shows what the planner says now."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "planner.md"


def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks/scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_current() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    command = "python benchmarks/scaling.py --write docs/planner.md"
    assert scaling().updated(text) == text, f"run {command}"


def test_published_layouts_are_layouts_of_their_clusters() -> None:
    study = scaling()
    for one in study.PUBLISHED:
        layout, gpus = one.layout, study.parse_cluster(one.cluster).gpus
        assert layout.world == gpus
        assert one.batch % (layout.dp * layout.micro_batch) == 0
