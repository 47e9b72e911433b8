"""`dmt init --data`: the data section of a file, and a batch and a length that it allows."""

import math
from pathlib import Path
from typing import Any

from toolkit.data.columns import is_chat
from toolkit.data.readers import columns_of, ending_of, read_rows
from toolkit.data.tokenizers import count_tokens
from toolkit.errors import DataError, PlanError
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import ChatRowsSource, Recipe
from toolkit.starter.draft import Task, as_recipe

BYTES_PER_TOKEN = 4
"""Bytes of English text per token, for a tokenizer that is not here."""
COUNTED_BYTES = 8 * 2**20
"""A larger file is not tokenised for this."""
UPDATES = 20
"""An epoch has at least so many steps, where the data allows it."""
WARMUP = 0.1
"""Share of the steps."""
_KINDS: dict[Task, str] = {
    "pretrain": "text",
    "sft": "chat",
    "lora": "chat",
    "dpo": "preference",
}
_COLUMNS = {"chat": ("instruction", "output"), "preference": ("prompt", "chosen", "rejected")}
"""The columns that hold a row's texts, by the kind of data."""


def with_data(recipe: Recipe, data: Path, task: Task) -> Recipe:
    """The recipe, to be trained on `data` for an epoch.

    Raises PlanError if it is no file with what the task trains on, or has too little of it.
    """
    shown = recipe.model_dump(exclude_unset=True)
    train = source_of(data, task)
    # A file of plain text is one document, which cannot be divided.
    fraction = 0.05 if task == "pretrain" and train["kind"] != "text" else 0.0
    shown["data"] = _without(shown["data"], "validation", "stages")
    shown["data"] |= {"train": train, "validation_fraction": fraction}
    shown["training"] = _without(shown["training"], "steps", "tokens") | {"epochs": 1}
    schedule = _without(shown.get("schedule", {}), "warmup_steps", "warmup_ratio")
    shown["schedule"] = schedule
    if not fraction:
        shown.pop("evaluation", None)
    samples, ranks = _samples(as_recipe(shown, "--data"), data), recipe.cluster.world_size
    usual = recipe.training.global_batch_size
    batch = max(min(usual, samples // UPDATES // ranks * ranks), ranks)
    if samples < batch:
        raise PlanError(
            f"--data: {data} makes {samples} sample{'s' * (samples != 1)} of "
            f"{recipe.training.sequence_length} tokens, and {ranks} processes need one each",
            fix="use more data, or fewer GPUs (--cluster), or a task with shorter sequences",
        )
    steps = -(-samples // batch)
    usual = recipe.schedule.warmup_steps
    fits = 0 < usual <= WARMUP * steps
    shown["training"]["global_batch_size"] = batch
    shown["schedule"] |= {"warmup_steps": usual} if fits else {"warmup_ratio": WARMUP}
    return as_recipe(shown, "--data")


def _without(section: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in names}


def source_of(data: Path, task: Task) -> dict[str, Any]:
    """The source to read the file with, chosen by the names and contents of its columns."""
    if not data.is_file():
        raise PlanError(f"--data: {data} is no file", fix="name a file of text, or of rows")
    columns, _ = columns_of(data)
    if not columns and ending_of(data):
        raise PlanError(
            f"--data: {data} has no rows that can be read",
            fix="write an object of JSON on each line, or name a .txt file",
        )
    path = str(data.absolute())
    rows: dict[str, Any] = {"path": path}
    texts = [name for name, value in columns.items() if isinstance(value, str)]
    chats = [name for name, value in columns.items() if is_chat(value)]
    if {"chosen", "rejected"} <= columns.keys():
        kind = "preference"
    elif chats or {"instruction", "output"} <= columns.keys():
        kind = "chat"
        if chats and chats[0] not in ("messages", "conversations"):
            rows["columns"] = {"messages": chats[0]}
    elif {"prompt", "completion"} <= columns.keys():
        kind = "chat"
    elif not columns or data.suffix == ".txt":
        kind, rows = "text", {"kind": "text", "files": [path]}
    elif "text" in texts or len(texts) == 1:
        kind = "text"
        rows |= {"kind": "hf"} | ({} if "text" in texts else {"text_field": texts[0]})
    else:
        kind = "unknown"
    if kind == _KINDS[task]:
        return {"kind": kind, **rows}
    tasks = [one for one, trained in _KINDS.items() if trained == kind]
    usual = _COLUMNS.get(_KINDS[task], ())
    if tasks:
        fix = f"--task {' or '.join(tasks)}, or name a file with {_KINDS[task]} data"
    elif usual and len(texts) >= len(usual):
        named = in_yaml(dict(zip(usual, texts, strict=False)))
        fix = "write the recipe without --data, and state in it `data.train: {kind: "
        fix += f"{_KINDS[task]}, path: {data}, columns: {named}}}`"
    else:
        fix = "write the recipe without --data, and state data.train in it (docs/data.md)"
    held = ", ".join(columns) or "text"
    raise PlanError(f"--data: {data} has {held}, which is not what {task} trains on", fix=fix)


def count_samples(recipe: Recipe, data: Path) -> int | None:
    """Count the samples of the file. The run finds their tokens in the cache. None if the file
    is large or its tokenizer is not here."""
    if data.stat().st_size > COUNTED_BYTES:
        return None
    try:
        if count_tokens(recipe.data.tokenizer) is None:
            return None
    except DataError:  # the recipe says that its tokenizer is missing
        return None
    from toolkit.data.build import build_data  # numpy and tokenizers

    one = {"training.global_batch_size": 1, "training.batch_ramp": None}
    recipe, vocab_size = recipe.with_values(one), recipe.model.stated_vocabulary
    try:
        return build_data(recipe.data, recipe.training, vocab_size).samples_per_epoch
    except DataError as error:
        raise PlanError(f"--data: {error.message}", fix=error.fix) from error


def _samples(recipe: Recipe, data: Path) -> int:
    """Count the samples of the file, or estimate them by its size if it is large or its
    tokenizer is not here."""
    if (counted := count_samples(recipe, data)) is not None:
        return counted
    train = recipe.data.train
    packed = recipe.data.packing != "none"
    of_json = ending_of(data).startswith(".json")
    if isinstance(train, ChatRowsSource) and not packed and of_json:
        return sum(1 for _ in read_rows(data, train))
    tokens = data.stat().st_size / BYTES_PER_TOKEN * (1 - recipe.data.validation_fraction)
    samples = tokens / recipe.training.sequence_length
    # Rows of conversations are padded; of documents, the rest is not trained.
    return math.ceil(samples) if isinstance(train, ChatRowsSource) else int(samples)
