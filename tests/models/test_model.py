"""The one reader of a model: what is kept of it, and what that saves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.models import model
from toolkit.models.judge import examine
from toolkit.recipe.places import shipped_recipes

TINY = {
    "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 31,
    "num_attention_heads": 2, "intermediate_size": 8,
}  # fmt: skip


def shipped() -> dict[str, Any]:
    """The models of all shipped recipes, by the digest of their configs."""
    found = {}
    for recipe in sorted(shipped_recipes().values()):
        if config := load_recipe(recipe).model.config:
            digest = model.digest_of(model.text_of(config))
            if digest not in found:
                problems, read = examine(config)
                assert read is not None, problems
                found[digest] = model.entry_of(read)
    return found


def test_the_shapes_of_shipped_recipes_are_those_that_are_counted() -> None:
    entries = shipped()
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        rows = (f"{json.dumps(digest)}: {json.dumps(entries[digest])}" for digest in entries)
        model.SHAPES.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    assert json.loads(model.SHAPES.read_text(encoding="utf-8")) == entries


def test_a_new_config_is_read_once_and_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; from toolkit.models.model import read; "
        f"print(read({TINY}).spec, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "DMT_CACHE": str(tmp_path)}
    run = [sys.executable, "-c", code]
    first, again = (
        subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    )
    spec, torch = first.stdout.rsplit(maxsplit=1)
    assert torch == "True" and "reading a new model config" in first.stderr
    assert again.stdout.rsplit(maxsplit=1) == [spec, "False"] and again.stderr == ""


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"spec": {"parameters": 1}}'])
def test_a_damaged_file_of_the_cache_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv("DMT_CACHE", str(tmp_path))
    model._examined.cache_clear()
    found = model.read(TINY)
    (file,) = tmp_path.glob("models/*.json")
    whole = file.read_bytes()
    file.write_bytes(damage)
    model._examined.cache_clear()
    assert model.read(TINY) == found
    assert file.read_bytes() == whole
