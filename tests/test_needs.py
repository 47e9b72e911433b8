"""What the machine lacks is named: a skip for a user, a failure where nothing may be."""

import pytest

from tests import needs


def test_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without Slurm, a user skips a test, and CI does not."""
    monkeypatch.setattr(needs, "SEARCH_PATH", "/nonexistent")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("DMT_TEST_NEEDS", raising=False)
    lacking = "apt-get install slurmd munge, root$"
    with pytest.raises(pytest.skip.Exception, match=f"^needs: {lacking}"):
        needs.require("slurmd", needs.ROOT, "munge")
    monkeypatch.setenv("DMT_TEST_NEEDS", "all")
    with pytest.raises(pytest.fail.Exception, match="apt-get install slurmd"):
        needs.require("slurmd")
