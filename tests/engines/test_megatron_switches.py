"""docs/gpu.md compares published settings of Megatron with what is rendered now."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from toolkit.launchers import job

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.usefixtures("megatron_core")
COMMAND = "python benchmarks/megatron_switches.py --write docs/gpu.md"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script; it looks for the document's tables next to itself."""
    for name in (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job, "_allocator", lambda: f"{job.EXPANDABLE},{job.EXACT_PINNED}")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    file = BENCHMARKS / "megatron_switches.py"
    spec = importlib.util.spec_from_file_location("megatron_switches", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_difference_has_a_reason_and_nothing_else(study: ModuleType) -> None:
    for name in study.PUBLISHED:
        found = list(study.switches(name))
        assert len(found) > 20
        for switch, ours in found:
            assert bool(switch.why) == (ours != switch.theirs), (name, switch, ours)


def test_the_table_is_current(study: ModuleType) -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert study.updated(text) == text, f"run {COMMAND}"
