"""Which files a folder of shards, of `save_to_disk` or of data files is streamed from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from toolkit.data.listing import list_files
from toolkit.data.sources import open_source
from toolkit.data.streaming.chunks import Chunks
from toolkit.data.streaming.source import texts
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource

TEXTS = [f"document {number} {'é' * (number % 7)}" for number in range(50)]
ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]


def source(path: str, **settings: str) -> HfSource:
    return HfSource.model_validate({"kind": "hf", "path": path, **settings})


def read(what: HfSource, base: Path, target: int = 10**9) -> list[str]:
    """All texts of the chunks of about `target` bytes."""
    chunks = Chunks(list_files(what, base), target, whole=False)
    parts = [part for number in range(len(chunks)) for part in chunks[number]]
    return ["".join(one) for part in parts for one in texts(what, part)]


def expected(folder: Path, split: str | None = None, **settings: Any) -> list[str]:
    """What `datasets` itself reads."""
    if split is None:
        return list(datasets.load_from_disk(str(folder))["text"])
    return list(datasets.load_dataset(str(folder), split=split, **settings)["text"])


@pytest.fixture
def stored() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield lambda folder: store.put(str(folder), f"/bucket/{folder.name}", recursive=True)
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def test_what_save_to_disk_wrote(tmp_path: Path, stored: Any) -> None:
    rows = datasets.Dataset.from_list(ROWS).shuffle(seed=3)
    rows.save_to_disk(tmp_path / "one", num_shards=12)
    whole = expected(tmp_path / "one")
    assert sorted(whole) == sorted(TEXTS) and whole != TEXTS
    assert len(list_files(source("one"), tmp_path)) == 12
    assert read(source("one"), tmp_path, 1) == whole
    splits = datasets.DatasetDict({"train": rows.select([3, 1]), "test": rows.select([7])})
    splits.save_to_disk(tmp_path / "two")
    assert read(source("two", split="test"), tmp_path) == [whole[7]]
    stored(tmp_path / "two")
    assert read(source("memory://bucket/two"), tmp_path) == [whole[3], whole[1]]
    with pytest.raises(DataError, match="`two` was saved with train, test"):
        list_files(source("two", split="held_out"), tmp_path)
    (tmp_path / "one" / "data-00005-of-00012.arrow").unlink()
    with pytest.raises(DataError, match=r"`one` lacks data-00005-of-00012\.arrow, which"):
        list_files(source("one"), tmp_path)


@pytest.mark.parametrize("outside", ["../secret.arrow", "/secret.arrow", "..", 5, None])
def test_files_outside_of_a_saved_folder_are_refused(tmp_path: Path, outside: object) -> None:
    rows = datasets.Dataset.from_list([{"text": "secret"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    (tmp_path / "two" / "train" / "data-00000-of-00001.arrow").rename(tmp_path / "secret.arrow")
    state = tmp_path / "two" / "train" / "state.json"
    stated = json.loads(state.read_text())
    absolute = str(tmp_path / "secret.arrow") if outside == "/secret.arrow" else outside
    stated["_data_files"] = [{"filename": absolute}]
    state.write_text(json.dumps(stated))
    for path in ("two", "two/train"):
        what = source(path)
        said = rf"`{path}` is not what `save_to_disk` writes \(_data_files\.0\.filename: "
        with pytest.raises(DataError, match=said):
            list_files(what, tmp_path)
        with pytest.raises(DataError, match=said):
            list(open_source(what, base=tmp_path, cache=tmp_path))
    assert list(open_source(source("two", split="test"), base=tmp_path, cache=tmp_path))


def test_a_folder_whose_card_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "data" / "b").mkdir(parents=True)
    for number, name in enumerate(("b/1.parquet", "0.parquet", "b/0.parquet", "test.parquet")):
        rows = datasets.Dataset.from_list(ROWS[number * 10 : number * 10 + 10])
        rows.to_parquet(tmp_path / "data" / name)
    (tmp_path / "data" / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: all\n  data_files:\n"
        "  - {split: train, path: ['b/*.parquet', 0.parquet]}\n"
        "  - {split: test, path: test.parquet}\n"
        "- config_name: small\n  data_files: 0.parquet\n---\n"
    )
    for name, split in (("all", "train"), ("all", "test"), ("small", "train")):
        what = source("data", name=name, split=split)
        assert read(what, tmp_path, 100) == expected(tmp_path / "data", split, name=name)
    with pytest.raises(DataError, match=r"Config name is missing|cannot load `data`"):
        list_files(source("data"), tmp_path)


@pytest.mark.parametrize("setting", ["sample_by: paragraph", "keep_linebreaks: true"])
def test_rows_that_a_card_takes_apart(tmp_path: Path, setting: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a\n\nb\n")
    (tmp_path / "data" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: a.txt\n  {setting}\n---\n"
    )
    with pytest.raises(DataError, match=f"(?i)`{setting}` in its card"):
        list_files(source("data"), tmp_path)
