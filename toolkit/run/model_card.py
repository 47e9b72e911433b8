"""The model card of an export: README.md, with the metadata that the Hugging Face hub reads.

Its last line states the hash of the text above it. A card without this line, or with another
text, was written or edited by a user, and is never replaced.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import DataError
from toolkit.models.adapters.lora import PEFT_WEIGHTS
from toolkit.plan.dimensions import degrees_text
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import OBJECTIVE_SECTIONS, Recipe, RowsSource
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import redact

CARD = "README.md"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PUBLISHED = ("model", "training", "optimizer", "schedule", "adapter", *OBJECTIVE_SECTIONS)
"""Sections of the recipe in a card: the others name files, machines and accounts."""
_READ = ("name", "data", *_PUBLISHED)
"""Sections that a card is written from. Another release may know the others differently."""
_HASH = re.compile(r"<!-- dmt replaces this card unless it is edited: ([0-9a-f]{64}) -->\n\Z")


def write_card(folder: Path, checkpoint: Path) -> None:
    """Write README.md into `folder`, the export of a checkpoint, unless a user wrote the one
    that is there. Raises DataError if the file cannot be written.
    """
    path = folder / CARD
    try:
        if not path.exists() or is_generated(path.read_bytes()):
            text = redact(_text(folder, Manifest.read(checkpoint)))
            signature = f"<!-- dmt replaces this card unless it is edited: {_digest(text)} -->"
            write_atomically(path, f"{text}{signature}\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def is_generated(card: bytes) -> bool:
    """Whether a card is as DMT wrote it."""
    text = card.decode(errors="replace")
    stated = _HASH.search(text)
    return stated is not None and _digest(text[: stated.start()]) == stated[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(folder: Path, manifest: Manifest) -> str:
    from huggingface_hub import ModelCardData

    recipe = None  # of a release with other settings
    shown = {key: manifest.recipe[key] for key in _READ if key in manifest.recipe}
    with suppress(ValidationError):
        recipe = Recipe.model_validate(shown)
    is_adapter = (folder / PEFT_WEIGHTS).exists()
    metadata = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["dmt", *([recipe.training.objective] if recipe else [])],
        **(_metadata(recipe) if recipe else {}),
    )
    kind = "LoRA adapters of" if is_adapter else "A model trained from"
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(manifest))
    name = manifest.recipe.get("name", folder.name)
    origin = f"{kind} {_start(recipe)}, with DMT {manifest.versions.get('dmt', '')}."
    text = f"---\n{metadata.to_yaml().strip()}\n---\n\n# {name}\n\n{origin}\n\n"
    text += f"| | |\n| --- | --- |\n{rows}\n"
    return text if recipe is None else f"{text}\n## Recipe\n\n```yaml\n{_settings(recipe)}```\n"


def _metadata(recipe: Recipe) -> dict[str, Any]:
    """Data sets and base model, as far as they are on the hub."""
    paths = [one.path for one in recipe.data.sources if isinstance(one, RowsSource)]
    datasets = [path for path in paths if _on_hub(path)]
    base = recipe.model.hub if recipe.model.init == "pretrained" else None
    return {"datasets": datasets or None, "base_model": base if _on_hub(base or "") else None}


def _on_hub(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def _start(recipe: Recipe | None) -> str:
    """What the model was trained from."""
    if recipe is None or recipe.model.init == "random":
        return "weights drawn at random"
    return f"`{_name(str(recipe.model.checkpoint or recipe.model.hub))}`"


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "steps", f"{manifest.step:,}"
    yield "sequences", f"{manifest.consumed_samples:,}"
    if manifest.consumed_tokens is not None:
        yield "tokens", f"{manifest.consumed_tokens:,}"
    if manifest.recent_losses:
        yield "training loss", f"{manifest.recent_losses[-1]:.4f}"
    yield "precision", manifest.precision
    yield "layout", degrees_text(manifest.engine, manifest.model, manifest.layout)
    yield from ((name, str(version)) for name, version in manifest.packages.items())


def _settings(recipe: Recipe) -> str:
    """Settings that define the model and its training, without defaults. Folders: name only."""
    stated: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    model = stated.get("model") or {}
    for key in ("hub", "checkpoint"):
        if model.get(key):
            model[key] = _name(model[key])
    return dump({key: stated[key] for key in _PUBLISHED if key in stated}, flow=False)


def _name(place: str) -> str:
    """An id on the hub as it is, of a folder the last part."""
    return Path(place).name if Path(place).is_absolute() else place
