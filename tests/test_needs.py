"""What the machine lacks is named: a skip for a user, a failure where nothing may be."""

import pytest

from tests import needs


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm, and a user of it."""
    monkeypatch.setattr(needs, "SEARCH_PATH", "/nonexistent")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("DMT_TEST_NEEDS", raising=False)


def test_a_test_is_skipped_with_the_packages_named() -> None:
    with pytest.raises(
        pytest.skip.Exception, match=r"^needs: apt-get install slurmd munge, root$"
    ):
        needs.require("slurmd", needs.ROOT, "munge")


def test_ci_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMT_TEST_NEEDS", "all")
    with pytest.raises(pytest.fail.Exception, match="apt-get install slurmd"):
        needs.require("slurmd")
