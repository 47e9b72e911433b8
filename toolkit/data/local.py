"""Checks a run's local files before anything is started.

Does not import torch, transformers or `datasets`, because `dmt check` uses it. Problems on the
hub, and deep in a file, are found when the data is built.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.data.chat.conversations import (
    MalformedRow,
    check_columns,
    check_dropped,
    examples_of,
)
from toolkit.data.columns import check_column
from toolkit.data.listing import find_files
from toolkit.data.readers import columns_of, ending_of, read_rows
from toolkit.data.records import data_files
from toolkit.data.remote import DataFile, check_package
from toolkit.data.sources import blocks_of
from toolkit.data.tokenizers import (
    BYTES,
    check_vocabulary,
    count_tokens,
    stated_template,
)
from toolkit.errors import BackendUnavailable, DataError, PlanError, Problem
from toolkit.launchers import LAUNCHERS
from toolkit.models.hub import model_config
from toolkit.models.model import check_config, read
from toolkit.models.safetensors import INDEX, SINGLE, SafetensorsFolder
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import (
    ChatSource,
    ColumnName,
    DataSection,
    HfSource,
    MegatronSource,
    ModelSection,
    PreferenceSource,
    Recipe,
    RowsSource,
    Source,
    TextSource,
)
from toolkit.removed import removed

_FILES_OF_A_FOLDER = 8
_FIRST_ROWS = 10_000
"""Chats that are parsed: a second."""
_PLACES = ("files", "path", "prefix")
"""The settings that say where a source is, each of other kinds."""


def local_problems(recipe: Recipe) -> Iterator[Problem]:
    """Missing or invalid local files that a recipe names. Keys are dotted.

    None where the ranks have other files, e.g. a volume of a Kubernetes cluster.
    """
    if not LAUNCHERS[recipe.launch.launcher].same_files:
        return
    data = recipe.data
    yield from _weights_problems(recipe.model)
    config: Mapping[str, Any] = {}
    if recipe.model.config is not None or recipe.model.hub is not None:  # else reported at load
        with suppress(PlanError):  # reported by the planner
            config = model_config(recipe.model, download=False)
    yield from _tokenizer_problems(data, _vocabulary(config))
    for key, source in data.named_sources:
        yield from _source_problems(key, source, data)


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    """The model's tokens, also where its config leaves them to the default of its type."""
    size = config.get("vocab_size")
    if size is None and config and not check_config(config):
        size = read(config).spec.vocab
    return size if isinstance(size, int) else None


def _weights_problems(model: ModelSection) -> Iterator[Problem]:
    folder = Path(model.hub or "")
    if model.init != "pretrained" or not folder.is_dir():
        return
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        allowed = f"a folder with {SINGLE} or {INDEX}, for `init: pretrained`"
        fix = "use a model with safetensors weights, or set model.init to random"
        if (folder / "adapter_config.json").is_file():  # PEFT's
            fix = removed().settings["adapter.folder"]
        yield Problem("model.hub", f"{folder}, which has neither", allowed, fix)
        return
    try:  # Opening a file compares its size with what its header says.
        _ = SafetensorsFolder(folder, framework="numpy").files
    except DataError as error:
        allowed = "a folder with all of the model's safetensors files, whole"
        yield Problem("model.hub", error.message, allowed, error.fix)


def _tokenizer_problems(data: DataSection, vocab_size: int | None) -> Iterator[Problem]:
    name = data.tokenizer
    if name == NO_TOKENIZER:
        found = f"{name}, which stands for a tokenizer that dmt init did not know"
        yield Problem("data.tokenizer", found, "a hub id or a folder", "write its name")
        return
    try:
        known = count_tokens(name)
        if known is not None:
            check_vocabulary(name, known, vocab_size)
    except DataError as error:
        allowed = "a tokenizer that can be loaded, with no more tokens than the model"
        yield Problem("data.tokenizer", error.message, allowed, error.fix)


PLACEHOLDER = "REPLACE-ME.jsonl"
"""The path that `dmt init --from` writes where the files name no data."""

NO_TOKENIZER = "REPLACE-ME"
"""The tokenizer that `dmt init --from` writes where the files name none."""


def _source_problems(key: str, source: Source, data: DataSection) -> Iterator[Problem]:
    if Path(source.place).name == PLACEHOLDER:
        yield Problem(
            f"{key}.path",
            f"{PLACEHOLDER}, which stands for the data that dmt init did not know",
            "your data: a file, a glob or a hub id",
            "write its path; kind is hf for documents, chat for conversations, preference for "
            "pairs, megatron (with prefix) for Megatron's indexed format",
        )
        return
    # Remote files are checked when the data is built: no network is used here.
    remote = [place for place in source.places if is_remote(place)]
    setting = f"{key}.{next(name for name in _PLACES if hasattr(source, name))}"
    try:
        allowed = "a path that an installed package reads"
        for place in remote:
            check_package(place)
        if isinstance(source, MegatronSource) and not remote:
            from toolkit.data.indexed import read_indexed

            allowed = "a whole pair of files in Megatron's indexed format"
            read_indexed(Path(source.prefix))
        elif isinstance(source, RowsSource):
            allowed = "a hub id, or data files that can be read"
            files = [] if remote else data_files(source) or []
            needed = source.text_field if isinstance(source, HfSource) else None
            columns, all_seen = _columns(files, needed)
            if isinstance(source, HfSource):
                setting, allowed = f"{key}.text_field", "the name of a column of text"
                if columns:
                    check_column(source, columns)
            elif isinstance(source, ChatSource | PreferenceSource):
                if columns:
                    allowed = "columns of a known format (docs/data.md)"
                    setting, place = f"{key}.columns", setting
                    check_columns(source, columns, all_rows=all_seen)
                    setting, allowed = place, "rows that are conversations (docs/data.md)"
                    _check_first_rows(source, files)
                setting, allowed = "data.chat_template", "a file, a Jinja template, or chatml"
                _check_template(source, data, columns)
        elif isinstance(source, TextSource):
            allowed = "files and globs that each match a file"
            if here := [pattern for pattern in source.files if pattern not in remote]:
                for file in find_files(here):
                    if isinstance(file, Path):
                        next(blocks_of(file), b"")
    except (DataError, BackendUnavailable) as error:
        yield Problem(setting, error.message, allowed, error.fix)


def _check_first_rows(source: ChatSource | PreferenceSource, files: Sequence[DataFile]) -> None:
    """Raise DataError for a malformed row among the first of JSON files, unless such are
    dropped. What a template omits or refuses is found when the data is built."""
    lines = (file for file in files if ending_of(file).startswith(".json"))
    rows = (row for file in lines for row in read_rows(file, source))
    for place, row in islice(rows, _FIRST_ROWS):
        try:
            examples_of(row, source)
        except MalformedRow as error:
            check_dropped(source, f"{place}: {error}")


def _check_template(
    source: ChatSource | PreferenceSource, data: DataSection, columns: Mapping[str, object]
) -> None:
    """Raise DataError for a template that cannot be read, and for conversations without one.
    `columns`: as in `check_column`."""
    answer: ColumnName = "completion" if isinstance(source, ChatSource) else "chosen"
    is_text = isinstance(columns.get(source.column(answer)), str)
    if data.chat_template is not None:
        stated_template(data.chat_template)
    elif data.tokenizer == BYTES and columns and not is_text:
        raise DataError(
            "nothing, and the tokenizer `bytes` has no template of its own",
            fix="write `chat_template: chatml` under `data`",
        )


def _columns(
    files: Sequence[DataFile], needed: str | None = None
) -> tuple[dict[str, object], bool]:
    """Columns of the first files, with examples as in `check_column`, and whether no row has
    others. Empty if unknown.

    Raises DataError if a file lacks the column `needed`, which another has.
    """
    columns: dict[str, object] = {}
    all_seen, lacking = len(files) <= _FILES_OF_A_FOLDER, ""
    for file in files[:_FILES_OF_A_FOLDER]:
        own, whole = columns_of(file)
        if not own:
            return {}, False
        if needed is not None and needed not in own:
            lacking = lacking or f"{file} has no column `{needed}`, as other files have"
        columns = {**own, **columns}
        all_seen = all_seen and whole
    if lacking and needed in columns:
        raise DataError(lacking, fix="name files with the same columns in `path`")
    return columns, all_seen
