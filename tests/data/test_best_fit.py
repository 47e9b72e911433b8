"""Documents that are not cut: each whole in one sample, unless it is longer than one."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.building import built
from toolkit.batch import IGNORE_INDEX
from toolkit.data import packing
from toolkit.data.build import TrainingData
from toolkit.data.rows import Row

LENGTH = 8
EOS = 256


def build(folder: Path, texts: list[str], **data: Any) -> TrainingData:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    train = {"kind": "text", "files": ["*.txt"]}
    section = {"train": train, "packing": "best_fit", **data}
    return built(folder, section, LENGTH)


def row(data: TrainingData, index: int) -> Row:
    (found,) = data.train.rows(index)
    return found


def predicted(data: TrainingData) -> list[tuple[int, int]]:
    """Every trained pair of a token and the one that follows, of all samples."""
    rows = [row(data, index) for index in range(len(data.train))]
    return sorted(
        (int(token), int(label))
        for one in rows
        for token, label in zip(one.input_ids, one.labels, strict=True)
        if label != IGNORE_INDEX
    )


@given(st.lists(st.integers(1, 3 * LENGTH), min_size=1, max_size=20))
def test_every_token_is_predicted_once_and_short_documents_stay_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    texts = [chr(97 + number) * size for number, size in enumerate(sizes)]
    data = build(tmp_path_factory.mktemp("fit"), texts)
    tokens = [[*text.encode(), EOS] for text in texts]
    expected = [pair for one in tokens for pair in pairwise(one)]
    assert predicted(data) == sorted(expected)
    for text in texts:
        samples = [n for n in range(len(data.train)) if ord(text[0]) in row(data, n).input_ids]
        # Without the EOS token, which may stand alone.
        assert len(samples) <= -(-(len(text) + 1) // LENGTH)


def test_rows(tmp_path: Path) -> None:
    data = build(tmp_path, ["aaaaaa", "b", "cccccccccc", "dd"], isolate_documents=True)
    # 7, 2, 11 = 8 + 3 and 3 tokens: the two of three and the two fill one sample.
    assert len(data.train) == 3
    rows = [bytes(row(data, n).input_ids.clip(0, 255).tolist()) for n in range(3)]
    assert sorted(rows) == sorted([b"cccccccc", b"aaaaaa\xff\0", b"b\xffcc\xffdd\xff"])
    cut, packed = (
        row(data, rows.index(b"cccccccc")),
        row(data, rows.index(b"b\xffcc\xffdd\xff")),
    )
    assert cut.labels[-1] == ord("c"), "the document goes on"
    assert packed.labels.tolist() == [EOS, -100, 99, EOS, -100, 100, EOS, -100]
    assert packed.segments is not None and packed.positions is not None
    assert packed.segments.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    padded = row(data, rows.index(b"aaaaaa\xff\0"))
    assert padded.labels[-2:].tolist() == [-100, -100]
    assert padded.segments is not None
    assert padded.segments[-1] == 1, "padding is no document's"


def test_a_window_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows cut no document, and lose none."""
    texts = [chr(97 + n % 26) * (n % 19 + 1) for n in range(60)]
    whole = predicted(build(tmp_path, texts))
    monkeypatch.setattr(packing, "_WINDOW_TOKENS", 37)
    monkeypatch.setenv("DMT_CACHE", "other")
    assert predicted(build(tmp_path, texts)) == whole
