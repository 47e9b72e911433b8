"""Training data of a hub, by `datasets` and `huggingface_hub` themselves, over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data import hub
from tests.data.hub import NAME, TOKEN, Hub

TEXTS = [f"document {number} of the hub" for number in range(400)]
FILES = ("data/0.parquet", "data/1.parquet", "held-out.parquet")
CARD = b"""---
configs:
- config_name: all
  data_files:
  - {split: train, path: "data/*.parquet"}
  - {split: test, path: held-out.parquet}
---
"""
SCRIPT = """
import json, sys
from toolkit.data.build import build_data
from toolkit.recipe.schema import DataSection, TrainingSection

for train in json.loads(sys.argv[1]):
    data = DataSection.model_validate({"train": {"kind": "hf", **train}})
    training = TrainingSection(sequence_length=8, global_batch_size=1, seed=0)
    built = build_data(data, training, 257)
    train = built.sources[0].train
    tokens = train.stream.read(0, len(train.stream))[0].tolist()
    found = bytes(0 if token == 256 else token for token in tokens).decode()
    print(json.dumps([found.split("\\0")[:-1], built.fingerprint]))
"""
pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Hub]:
    with hub.running() as found:
        rows = TEXTS[:150], TEXTS[150:300], TEXTS[300:]
        for name, part in zip(FILES, rows, strict=True):
            table = pa.table({"id": range(len(part)), "text": part})
            parquet.write_table(table, tmp_path / "rows", row_group_size=40, compression="none")
            found.files[name] = (tmp_path / "rows").read_bytes()
        found.files["README.md"] = CARD
        yield found


def built(folder: Path, found: Hub, *sources: dict[str, str]) -> list[Any]:
    """Texts and fingerprint of each source, as a new process sees the hub."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        **found.environment,
        "HF_HOME": str(folder / "home"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(sources)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert TOKEN not in ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_files_and_ids_of_a_hub(tmp_path: Path, repository: Hub) -> None:
    """By URL, too; what a branch becomes later is other data."""
    files = {"path": f"hf://datasets/{NAME}/data/*.parquet"}
    named = {"path": NAME, "name": "all"}
    (texts, before), (by_name, _) = built(tmp_path, repository, files, named)
    assert texts == by_name == TEXTS[:300]
    repository.files["data/1.parquet"] = repository.files["held-out.parquet"]
    ((texts, after),) = built(tmp_path, repository, files)
    assert texts == TEXTS[:150] + TEXTS[300:] and after != before
