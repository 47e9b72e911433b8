"""Files that are replaced as a whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.data.files import write_cached
from toolkit.system.atomic import write_atomically


def test_atomic_write_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_: Path) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="killed here"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_writers_of_one_process_number(tmp_path: Path) -> None:
    """Two machines with one data cache may have equal ones; as two threads do."""
    path = tmp_path / "cache" / "memo"
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda n: write_cached(path, f"{n % 10}" * 99), range(999)))
    assert len(path.read_text()) == 99
    assert [file.name for file in path.parent.iterdir()] == ["memo"]
