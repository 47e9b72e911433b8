"""The model card of an export: README.md, with the metadata that the Hugging Face hub reads.

Its last line states the hash of the text above it. A card without this line, or with another
text, was written or edited by a user, and is never replaced.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.adapters.imported import PEFT_WEIGHTS
from toolkit.checkpoint.checkpoints import CHECKPOINTS
from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import DataError
from toolkit.models.hub import download_file
from toolkit.plan.dimensions import degrees_text
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import OBJECTIVE_SECTIONS, ModelSection, Recipe, RowsSource
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events
from toolkit.system.atomic import write_atomically
from toolkit.system.untrusted import read_bytes
from toolkit.text.redact import redact

CARD = "README.md"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FROM_BASE = ("license", "license_name", "license_link", "language")
"""Metadata of a base model that hold for what is trained from it."""
_HASH = re.compile(r"<!-- dmt replaces this card unless it is edited: ([0-9a-f]{64}) -->\n\Z")


def write_card(folder: Path, checkpoint: Path) -> None:
    """Write README.md into `folder`, the export of a checkpoint, unless a user wrote the one
    that is there. Losses are those of the run that holds the checkpoint.

    Raises DataError if the file cannot be written.
    """
    path = folder / CARD
    try:
        if not path.exists() or is_generated(path.read_bytes()):
            write_atomically(path, _signed(_text(folder, checkpoint)))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def is_generated(card: bytes) -> bool:
    """Whether a card is as DMT wrote it."""
    text = card.decode(errors="replace")
    stated = _HASH.search(text)
    return stated is not None and _digest(text[: stated.start()]) == stated[1]


def _signed(text: str) -> str:
    return f"{text}<!-- dmt replaces this card unless it is edited: {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(folder: Path, checkpoint: Path) -> str:
    manifest = Manifest.read(checkpoint)
    recipe = _recipe_of(manifest)
    run = RunDirectory(checkpoint.absolute().parent.parent)
    validations, metrics = [], []
    if checkpoint.absolute().parent.name == CHECKPOINTS and run.events.exists():
        events = read_events(run.events)
        validations = [event for event in events if event.get("kind") == "evaluation"]
        metrics = jsonl.read(run.metrics)
    validations, metrics = (
        [line for line in lines if 0 <= (line.get("step") or 0) <= manifest.step]
        for lines in (validations, metrics)
    )
    name = str(manifest.recipe.get("name", folder.name))
    is_adapter = (folder / PEFT_WEIGHTS).exists()
    metadata = _metadata(recipe, is_adapter=is_adapter)
    sections = (
        _origin(recipe, manifest, is_adapter=is_adapter),
        _table("Training", ("", ""), _training(manifest, recipe)),
        _table("Data", ("source", "kind", "weight"), _sources(recipe)),
        _table("Loss", ("step", "training", "validation"), _losses(metrics, validations)),
        _table("Versions", ("", ""), manifest.packages.items()),
        _settings(manifest, recipe),
    )
    body = "\n".join(line for section in sections for line in section)
    text = f"---\n{metadata}\n---\n\n# {name}\n\n{body}\n"
    return redact(text)


def _recipe_of(manifest: Manifest) -> Recipe | None:
    """The recipe of a checkpoint; None for one of a release with other settings."""
    with suppress(ValidationError):
        return Recipe.model_validate(manifest.recipe)
    return None


def _metadata(recipe: Recipe | None, *, is_adapter: bool) -> str:
    """The YAML block at the top of the card."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["dmt"] if recipe is None else ["dmt", recipe.training.objective],
        datasets=_hub_datasets(recipe) or None,
        **({} if recipe is None else _base_metadata(recipe.model)),
    )
    return data.to_yaml().strip()


def _base_metadata(model: ModelSection) -> dict[str, Any]:
    """Base model and licence, as far as the base's own card states them."""
    if model.hub is None or model.init == "random":
        return {}
    local = Path(model.hub).is_dir()
    card: Mapping[str, Any] = {}
    with suppress(Exception):  # no card, no network, malformed: stated by nobody
        card = _card_metadata(
            Path(model.hub) / CARD if local else download_file(model.hub, CARD, model.revision)
        )
    kept = {key: card[key] for key in _FROM_BASE if isinstance(card.get(key), str | list)}
    base = card.get("base_model") if local else model.hub
    return {**kept, "base_model": base} if isinstance(base, str | list) else kept


def _card_metadata(path: Path) -> Mapping[str, Any]:
    from huggingface_hub import ModelCard

    text = read_bytes(path).decode()
    data: Any = ModelCard(text, ignore_metadata_errors=True).data
    metadata: dict[str, Any] = data.to_dict()
    return metadata


def _hub_datasets(recipe: Recipe | None) -> list[str]:
    return [
        source.path
        for source in (() if recipe is None else recipe.data.sources)
        if isinstance(source, RowsSource)
        and _HUB_ID.fullmatch(source.path)
        and not Path(source.path).exists()
    ]


def _origin(recipe: Recipe | None, manifest: Manifest, *, is_adapter: bool) -> Iterator[str]:
    """What was trained from what, in one sentence."""
    start = "weights drawn at random"
    if recipe is not None and recipe.model.init != "random":
        start = f"`{_name(str(recipe.model.checkpoint or recipe.model.hub))}`"
    kind = "LoRA adapters of" if is_adapter else "A model trained from"
    yield from (f"{kind} {start}, with DMT {manifest.versions.get('dmt', '')}.", "")


def _training(manifest: Manifest, recipe: Recipe | None) -> Iterator[Sequence[object]]:
    yield "steps", f"{manifest.step:,}"
    yield "sequences", f"{manifest.consumed_samples:,}"
    if manifest.consumed_tokens is not None:
        yield "tokens", f"{manifest.consumed_tokens:,}"
    yield "precision", manifest.precision
    yield "layout", degrees_text(manifest.engine, manifest.model, manifest.layout)
    if recipe is None:
        return
    training, optimizer = recipe.training, recipe.optimizer
    yield "objective", training.objective
    yield "sequence length", f"{training.sequence_length:,}"
    yield "global batch", f"{training.global_batch_size:,} sequences"
    yield "optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}"
    yield "schedule", recipe.schedule.name
    yield "seed", training.seed


def _sources(recipe: Recipe | None) -> Iterator[Sequence[object]]:
    for source in () if recipe is None else recipe.data.sources:
        name = source.place if source.place in _hub_datasets(recipe) else source.title
        yield name, source.kind, "" if source.weight is None else f"{source.weight:g}"


def _losses(
    metrics: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]
) -> Iterator[Sequence[object]]:
    """The first and the last step that are logged, the best and the last validation."""
    trained = {line["step"]: line["loss"] for line in metrics if _is_number(line.get("loss"))}
    validated = {
        event["step"]: event["loss"] for event in validations if _is_number(event.get("loss"))
    }
    best = sorted(validated, key=lambda step: validated[step])[:1]
    ends = *list(trained)[:1], *list(trained)[-1:], *list(validated)[-1:]
    for step in sorted({*ends, *best}):
        losses = (values.get(step) for values in (trained, validated))
        yield f"{step:,}", *("" if loss is None else f"{loss:.4f}" for loss in losses)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


_PUBLISHED = ("model", "training", "optimizer", "schedule", "adapter", *OBJECTIVE_SECTIONS)
"""Sections of the recipe in a card: the others name files, machines and accounts."""


def _settings(manifest: Manifest, recipe: Recipe | None) -> Iterator[str]:
    """What defines the model and its training, without defaults; of folders only the name."""
    stated: dict[str, Any] = dict(manifest.recipe)
    if recipe is not None:
        stated = recipe.model_dump(mode="json", exclude_defaults=True)
    stated = {key: stated[key] for key in _PUBLISHED if key in stated}
    model = stated.get("model", {})
    for key in ("hub", "checkpoint"):
        if model.get(key):
            model[key] = _name(model[key])
    if (stated.get("adapter") or {}).get("folder"):
        stated["adapter"]["folder"] = _name(stated["adapter"]["folder"])
    yield from ("## Recipe", "", "```yaml", dump(stated, flow=False).rstrip(), "```", "")


def _name(place: str) -> str:
    """An id on the hub as it is, of a folder the last part."""
    return Path(place).name if Path(place).is_absolute() else place


def _table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> Iterator[str]:
    """A section with a table; nothing without rows."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    if lines:
        yield from (f"## {title}", "")
        for cells in (header, ["---"] * len(header), *lines):
            yield f"| {' | '.join(cells)} |"
        yield ""
