"""Data sets as Axolotl and LLaMA-Factory describe them, as sources of a recipe."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.foreign.carry import (
    Carried,
    ForeignSetting,
    Found,
    Settings,
    relative_to_file,
)

Source = dict[str, Any]

_PAIRS = ("chat_template", "chat_template.default", "orpo.chat_template")
_SHAREGPT = {"role": "from", "content": "value"}
_AS_HERE: Mapping[str, tuple[object, ...]] = {
    "message_property_mappings": (None, {"role": "role", "content": "content"}, _SHAREGPT),
    "train_on_eos": (None, "turn"),
    "roles_to_train": (None, ["assistant"], ["gpt"], ["assistant", "gpt"]),
}
"""Settings of Axolotl's chats, and the values with which messages are read and trained as
here."""
_PAIR_FIELDS = {
    "field_messages": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
"""LLaMA-Factory's words for the columns of the format alpaca, and ours."""
_DESCRIBED = (
    *("hf_hub_url", "file_name", "subset", "split", "formatting", "columns", "tags"),
    "ranking",
)


def _put(found: Found, key: str, sources: Sequence[Source], at: ForeignSetting) -> None:
    """One source setting by setting, several as a list, each read once in an epoch."""
    if len(sources) == 1:
        for name, value in sources[0].items():
            found.put(f"{key}.{name}", value, at)
    elif sources:
        share = {"epochs": 1} if key == "data.train" else {}
        found.values[key] = Carried([{**source, **share} for source in sources], at)


# Axolotl


def axolotl(found: Found, settings: Settings) -> None:
    """`datasets`, `pretraining_dataset` and `test_datasets`."""
    sides = {"datasets": "data.train", "pretraining_dataset": "data.train",
             "test_datasets": "data.validation"}  # fmt: skip
    for name, key in sides.items():
        at = settings.get(name)
        if at is None or not at.value:
            continue
        listed = at.value if isinstance(at.value, list) else [at.value]
        if not all(
            isinstance(one, Mapping) and isinstance(one.get("path"), str) for one in listed
        ):
            found.problems.append(at.problem("a list of data sets, each with a path"))
            continue
        sources = [_axolotl_source(dict(one), settings, at, found) for one in listed]
        _put(found, key, sources, at)
        if key == "data.train":
            _objective(found, settings, {source["kind"] for source in sources}, at)


def _objective(found: Found, settings: Settings, kinds: set[str], at: ForeignSetting) -> None:
    documents, packing = kinds == {"hf"}, settings.get("sample_packing")
    if "training.objective" not in found.values:
        found.put("training.objective", "pretrain" if documents else "sft", at)
    if packing is not None and packing.value:
        found.put("data.packing", "best_fit" if documents else "greedy", packing)
        if documents:
            found.put("data.isolate_documents", True, packing)
    elif documents:
        found.drop(at, "documents are concatenated; there each is a padded row")


def _axolotl_source(
    given: dict[str, Any], settings: Settings, at: ForeignSetting, found: Found
) -> Source:
    unread: list[str] = []
    prompt = str(given.pop("type", None) or "chat_template")
    is_sharegpt = given.get("message_property_mappings") == _SHAREGPT
    for name, usual in _AS_HERE.items():
        if given.get(name) in usual:
            given.pop(name, None)
    source: Source = {"path": given.pop("path")}
    source |= {
        name: given.pop(name) for name in ("name", "split", "revision") if given.get(name)
    }
    if (files := given.pop("data_files", None)) is not None:
        unread.append(f"data_files {files}: write them as path")
    fields: dict[str, str] = {}
    if (
        "training.objective" in found.values
        and found.values["training.objective"].at.name == "rl"
    ):
        source["kind"] = "preference"
        if prompt not in _PAIRS:
            unread.append(f"type {prompt}: columns are prompt, chosen and rejected")
        fields = _PAIR_FIELDS
    elif prompt.partition(".")[0] in ("completion", "pretrain") or _on(
        settings, "pretraining_dataset"
    ):
        field = given.pop("field", None) or given.pop("text_column", None) or "text"
        source |= {"kind": "hf", "text_field": field}
    else:
        word = "conversations" if is_sharegpt else "messages"
        form = prompt.partition(".")[0]
        shape = "sharegpt" if is_sharegpt else "messages"
        source |= {"kind": "chat", "format": "alpaca" if form == "alpaca" else shape}
        fields = {"field_messages": word}
        if form != "chat_template":
            unread.append(f"its prompt {form} is another template: see data.chat_template")
        if _on(settings, "train_on_inputs"):
            source["loss_on"] = "all"
    named = {ours: given.pop(theirs, None) or ours for theirs, ours in fields.items()}
    if columns := {ours: name for ours, name in named.items() if name != ours}:
        source["columns"] = columns
    excess = settings.get("excess_length_strategy")
    if source["kind"] != "hf" and (excess is None or excess.value != "truncate"):
        source["too_long"] = "drop"
    plain = ("ds_type", "trust_remote_code", "chat_template")
    unread += [name for name, one in given.items() if one and name not in plain]
    for reason in unread:
        found.drop(at, f"{source['path']}: {reason}")
    return source


def _on(settings: Settings, name: str) -> bool:
    return name in settings and bool(settings[name].value)


# LLaMA-Factory


def llama_factory(found: Found, settings: Settings, file: JsonFile, objective: str) -> None:
    """`dataset` and `eval_dataset`, which dataset_info.json describes."""
    given = settings.get("dataset_dir")
    folder = str(given.value) if given is not None and given.value else "data"
    path = relative_to_file(f"{folder}/dataset_info.json", file.path)
    infos: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):  # no name that a file can have
        infos = read_json(path, path.name).values if path.exists() else {}
    for name, key in {"dataset": "data.train", "eval_dataset": "data.validation"}.items():
        at = settings.get(name)
        if at is None or not at.value:
            continue
        names = at.value if isinstance(at.value, list) else str(at.value).split(",")
        sources = []
        for one in (str(name).strip() for name in names):
            info = infos.get(one)
            if not isinstance(info, Mapping):
                info = {"hf_hub_url": one} if folder == "ONLINE" else {}
                if not info:
                    what = f"no {path.name} in {path.parent} says what {one} is"
                    found.drop(at, f"complete {key}: {what}")
            source, unread = _source(one, info, path.parent.absolute(), settings, objective)
            sources.append(source)
            if unread:
                found.drop(at, f"{one}: {', '.join(unread)}")
        _put(found, key, sources, at)


def _source(
    name: str, info: Mapping[str, Any], folder: Path, settings: Settings, objective: str
) -> tuple[Source, list[str]]:
    """A source of the recipe, and what DMT does not read of its rows."""
    columns, tags = (
        value if isinstance(value := info.get(part), Mapping) else {}
        for part in ("columns", "tags")
    )
    local = str(folder / str(info["file_name"])) if "file_name" in info else name
    source: Source = {"path": info.get("hf_hub_url", local)}
    for theirs, ours in (("subset", "name"), ("split", "split")):
        source |= {ours: info[theirs]} if theirs in info else {}
    sharegpt, pairs = info.get("formatting") == "sharegpt", objective in ("dpo", "orpo")
    unread = _unread(info, columns, objective, sharegpt)
    if objective == "pretrain":
        return {
            "kind": "hf",
            **source,
            "text_field": columns.get("prompt", "instruction"),
        }, unread
    if pairs:
        if sharegpt:
            unread.append("an answer is a list of messages or a text, there one message")
        prompt = "messages" if sharegpt else "prompt"
        named = {"prompt": columns.get(prompt, "prompt")}
        named |= {one: columns.get(one, one) for one in ("chosen", "rejected")}
        return {"kind": "preference", **source, **_renamed(named)}, unread
    openai = tags.items() >= {"role_tag": "role", "content_tag": "content"}.items()
    if tags and not openai:
        unread.append("no messages with such tags are read")
    elif not sharegpt and not unread:
        unread.append(
            "an input follows its instruction after an empty line, there after a line break"
        )
    if sharegpt:
        named = {
            "messages" if openai else "conversations": columns.get("messages", "conversations")
        }
        form = "messages" if openai else "sharegpt"
    else:
        named = {ours: columns.get(theirs, ours) for theirs, ours in _ALPACA.items()}
        form = "alpaca"
    masks = {"train_on_prompt": "all", "mask_history": "last_assistant"}
    loss_on = [word for key, word in masks.items() if _on(settings, key)][:1]
    source |= {
        "format": form,
        **_renamed(named),
        **({"loss_on": loss_on[0]} if loss_on else {}),
    }
    return {"kind": "chat", **source}, unread


def _unread(
    info: Mapping[str, Any], columns: Mapping[str, Any], objective: str, sharegpt: bool
) -> list[str]:
    """Columns, and settings of the description."""
    pairs = objective in ("dpo", "orpo")
    read = {"messages"} if sharegpt else {"prompt"} if pairs else {*_ALPACA}
    read = {"prompt"} if objective == "pretrain" else read
    read |= {"chosen", "rejected"} if pairs else set()
    left = [
        f"no column {column} is read as {name}"
        for name, column in columns.items()
        if column and name not in read
    ]
    left += [name for name in info if name not in _DESCRIBED]
    if info.get("ranking") and not pairs:
        left.append("ranking is for dpo and orpo")
    return left


def _renamed(columns: Mapping[str, Any]) -> Source:
    other = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {"columns": other} if other else {}
