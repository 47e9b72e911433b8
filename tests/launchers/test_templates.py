"""The jobs in `launch/` are what the launchers write today."""

import pytest

from toolkit.launchers import LAUNCHERS, job
from toolkit.launchers.templates import ROOT, example


@pytest.mark.parametrize("launcher", [n for n in LAUNCHERS.names if LAUNCHERS[n].example])
def test_the_file_is_current(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_allocator", lambda: f"{job.EXPANDABLE},{job.EXACT_PINNED}")
    path, text = example(LAUNCHERS[launcher])
    assert path.read_text() == text, "python -m toolkit.launchers.templates"
    assert str(ROOT) not in text
