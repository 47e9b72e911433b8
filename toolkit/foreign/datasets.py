"""Data sets as Axolotl and LLaMA-Factory describe them, as sources of a recipe.

What a source has is taken out of the description. What remains is named, for the user to state.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.foreign.carry import (
    OFF,
    Carried,
    ForeignSetting,
    Found,
    Settings,
    relative_to_file,
)

Source = dict[str, Any]

_SHAREGPT = {"role": "from", "content": "value"}
_AS_HERE: Mapping[str, tuple[object, ...]] = {
    "message_property_mappings": ({"role": "role", "content": "content"}, _SHAREGPT),
    "train_on_eos": ("turn",),
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "type": ("chat_template", "chat_template.default", "orpo.chat_template"),
}
"""Settings of Axolotl's data sets, and the values with which rows are read and trained as
here."""
_WITHOUT_EFFECT = ("ds_type", "trust_remote_code", "chat_template")
_PAIR_FIELDS = {
    "field_messages": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
_ALPACA = {"instruction": "prompt", "input": "query", "output": "response", "system": "system"}
"""Our columns of the format alpaca, and LLaMA-Factory's words for them."""


def _put(found: Found, key: str, sources: Sequence[Source], at: ForeignSetting) -> None:
    """One source setting by setting, several as a list, each read once in an epoch."""
    if len(sources) == 1:
        for name, value in sources[0].items():
            found.put(f"{key}.{name}", value, at)
    elif sources:
        share = {"epochs": 1} if key == "data.train" else {}
        found.values[key] = Carried([{**source, **share} for source in sources], at)


def _drop_rest(found: Found, at: ForeignSetting, name: object, rest: Mapping[str, Any]) -> None:
    """Name what a source of the recipe does not state of the data set `name`."""
    if left := [one for one, value in rest.items() if value not in OFF]:
        found.drop(at, f"{name}: not as there (docs/data.md): {', '.join(left)}")


def _renamed(columns: Mapping[str, Any]) -> Source:
    """The columns, by our names, that have another name in the data."""
    other = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {"columns": other} if other else {}


def _on(settings: Settings, name: str) -> bool:
    return name in settings and bool(settings[name].value)


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
    prompt = str(given.get("type") or "chat_template").partition(".")[0]
    is_sharegpt = given.get("message_property_mappings") == _SHAREGPT
    objective = found.values.get("training.objective")
    for name in [name for name in given if given[name] in _AS_HERE.get(name, ())]:
        del given[name]
    source: Source = {"path": given.pop("path")}
    source |= {
        name: given.pop(name) for name in ("name", "split", "revision") if given.get(name)
    }
    fields: dict[str, str] = {}
    if objective is not None and objective.at.name == "rl":
        source["kind"], fields = "preference", _PAIR_FIELDS
    elif prompt in ("completion", "pretrain") or _on(settings, "pretraining_dataset"):
        given.pop("type", None)
        field = given.pop("field", None) or given.pop("text_column", None) or "text"
        source |= {"kind": "hf", "text_field": field}
    else:
        shape = "sharegpt" if is_sharegpt else "messages"
        source |= {"kind": "chat", "format": "alpaca" if prompt == "alpaca" else shape}
        fields = {"field_messages": "conversations" if is_sharegpt else "messages"}
        if _on(settings, "train_on_inputs"):
            source["loss_on"] = "all"
    source |= _renamed({ours: given.pop(name, None) or ours for name, ours in fields.items()})
    excess = settings.get("excess_length_strategy")
    if source["kind"] != "hf" and (excess is None or excess.value != "truncate"):
        source["too_long"] = "drop"
    rest = {name: one for name, one in given.items() if name not in _WITHOUT_EFFECT}
    _drop_rest(found, at, source["path"], rest)
    return source


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
            source, rest = _source(one, info, path.parent.absolute(), settings, objective)
            sources.append(source)
            _drop_rest(found, at, one, rest)
        _put(found, key, sources, at)


def _source(
    name: str, info: Mapping[str, Any], folder: Path, settings: Settings, objective: str
) -> tuple[Source, dict[str, Any]]:
    """A source of the recipe, and what of the description it does not have."""
    rest = dict(info)
    columns, tags = (
        dict(value) if isinstance(value := rest.pop(part, {}), Mapping) else {}
        for part in ("columns", "tags")
    )
    file = rest.pop("file_name", None)
    source: Source = {"path": name if file is None else str(folder / str(file))}
    for theirs, ours in (("hf_hub_url", "path"), ("subset", "name"), ("split", "split")):
        source |= {ours: rest.pop(theirs)} if theirs in rest else {}
    is_sharegpt = rest.get("formatting") == "sharegpt"
    if objective == "pretrain":
        source |= {"kind": "hf", "text_field": columns.pop("prompt", "instruction")}
    elif objective in ("dpo", "orpo"):  # a sharegpt answer is one message, here a list or text
        named = {"prompt": "messages" if is_sharegpt else "prompt"}
        named |= {"chosen": "chosen", "rejected": "rejected"}
        rest.pop("ranking", None)
        renamed = {ours: columns.pop(theirs, ours) for ours, theirs in named.items()}
        source |= {"kind": "preference", **_renamed(renamed)}
    elif is_sharegpt:
        openai = tags.items() >= {"role_tag": "role", "content_tag": "content"}.items()
        ours, form = ("messages", "messages") if openai else ("conversations", "sharegpt")
        renamed = {ours: columns.pop("messages", "conversations")}
        source |= {"kind": "chat", "format": form, **_renamed(renamed)}
        rest |= {"formatting": None} if openai or not tags else {"tags": tags}
    else:  # an input follows its instruction after an empty line, there after a line break
        rest |= {"formatting": "alpaca", "tags": tags}
        renamed = {ours: columns.pop(theirs, ours) for ours, theirs in _ALPACA.items()}
        source |= {"kind": "chat", "format": "alpaca", **_renamed(renamed)}
    masks = {"train_on_prompt": "all", "mask_history": "last_assistant"}
    loss_on = [word for key, word in masks.items() if _on(settings, key)]
    if loss_on and source["kind"] == "chat":
        source["loss_on"] = loss_on[0]
    return source, rest | {f"columns.{one}": column for one, column in columns.items()}
