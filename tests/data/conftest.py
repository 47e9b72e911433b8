"""Everything offline, every cache in the test's own folder, where relative paths start."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from toolkit.data.indexed import read_indexed, write_indexed
from toolkit.data.tokenized import TokenizedData


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-datasets")
    monkeypatch.setenv("DMT_CACHE", str(tmp_path / "dmt-cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenized(tmp_path: Path) -> Callable[[Sequence[Sequence[int]]], TokenizedData]:
    """Write documents, given as token ids, and map them."""

    def write(documents: Sequence[Sequence[int]]) -> TokenizedData:
        prefix = tmp_path / "given"
        write_indexed(prefix, np.uint16, documents)
        return TokenizedData(read_indexed(prefix), "fingerprint", str(prefix))

    return write
