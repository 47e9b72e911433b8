"""The model card of an export, and its comparison with the trained model."""

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.checkpoint.conftest import single_rank  # noqa: F401 - a fixture
from tests.checkpoint.making import saved_run
from toolkit.checkpoint.manifest import Manifest
from toolkit.run.directory import RunDirectory
from toolkit.run.model_card import write_card
from toolkit.train.exporting import export_last
from toolkit.train.watchdog import Marks

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With a checkpoint of step 10 of 20."""
    return saved_run(tmp_path, 10)


def test_the_card_is_of_the_run(run: Path) -> None:
    """An edit of it does not make a finished run export again."""
    made = RunDirectory(run)
    export_last(made, 10, Marks(1))
    card = ModelCard.load(run / "export" / "README.md")
    assert card.data.library_name == "transformers"
    for line in ("| steps | 10 |", "| optimizer.learning_rate | 0.001 |", "| torch | 2.13.0 |"):
        assert line in card.content
    assert str(run.parent) not in card.content, "a path of this machine"
    checkpoint = run / "checkpoints" / "step-00000010"
    path = run / "export" / "README.md"
    _train_from(checkpoint, init="pretrained", hub="meta/llama")
    write_card(run / "export", checkpoint)
    assert ModelCard.load(path).data.base_model == "meta/llama"
    start = {"init": "checkpoint", "checkpoint": "/runs/first", "freeze": ["lm_head.*"]}
    _train_from(checkpoint, **start)
    write_card(run / "export", checkpoint)
    for line in ("trained from `first`, with", '| model.freeze | ["lm_head.*"] |'):
        assert line in path.read_text()
    edited = card.content.replace("DMT", "patience")
    path.write_text(edited)
    weights = run / "export" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    export_last(made, 10, Marks(1))
    assert weights.stat().st_mtime_ns == written
    assert path.read_text() == edited


def _train_from(folder: Path, **start: object) -> None:
    """As if the run had begun with these weights."""
    manifest = Manifest.read(folder)
    model = manifest.recipe["model"] | start
    replace(manifest, recipe=manifest.recipe | {"model": model}).write(folder)
