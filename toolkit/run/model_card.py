"""The model card of an export: README.md, with the metadata that the Hugging Face hub reads."""

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import DataError
from toolkit.models.adapters.lora import PEFT_WEIGHTS
from toolkit.plan.dimensions import degrees_text
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import OBJECTIVE_SECTIONS
from toolkit.system.atomic import write_atomically
from toolkit.text.dotted import leaves
from toolkit.text.redact import redact

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PUBLISHED = ("training", "optimizer", "schedule", "adapter", *OBJECTIVE_SECTIONS)
"""Sections of the recipe in a card: the others name files, machines and accounts."""
_OF_MODEL = ("freeze", "balance")
"""Settings of the model that its config.json does not have."""


def write_card(folder: Path, checkpoint: Path) -> None:
    """Write README.md into `folder`, the export of a checkpoint. Raises DataError if the file
    cannot be written."""
    path = folder / "README.md"
    try:
        write_atomically(path, redact(_text(folder, Manifest.read(checkpoint))))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def _text(folder: Path, manifest: Manifest) -> str:
    from huggingface_hub import ModelCardData

    recipe = manifest.recipe
    model, train = recipe["model"], recipe["data"]["train"]
    sources = train if isinstance(train, list) else [train]
    pretrained = model["init"] == "pretrained"
    is_adapter = (folder / PEFT_WEIGHTS).exists()
    metadata = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["dmt", recipe["training"]["objective"]],
        datasets=[one["path"] for one in sources if _on_hub(one.get("path"))] or None,
        base_model=model["hub"] if pretrained and _on_hub(model["hub"]) else None,
    )
    start = "weights drawn at random"
    if model["init"] != "random":
        start = f"`{_name(model['checkpoint'] or model['hub'])}`"
    kind = "LoRA adapters of" if is_adapter else "A model trained from"
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(manifest))
    return (
        f"---\n{metadata.to_yaml().strip()}\n---\n\n# {recipe['name']}\n\n"
        f"{kind} {start}, with DMT {manifest.versions.get('dmt', '')}.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n"
    )


def _on_hub(path: str | None) -> bool:
    return path is not None and bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


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
    recipe = manifest.recipe
    published = {name: recipe.get(name) for name in _PUBLISHED}
    published["model"] = {name: recipe["model"].get(name) for name in _OF_MODEL}
    for key, value in leaves(published):
        if value not in (None, []):
            yield key, in_yaml(value).replace("|", r"\|")


def _name(place: str) -> str:
    """An id on the hub as it is, of a folder the last part."""
    return Path(place).name if Path(place).is_absolute() else place
