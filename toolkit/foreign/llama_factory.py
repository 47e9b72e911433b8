"""LLaMA-Factory's YAML: what `llamafactory-cli train` is given.

Names and defaults are those of src/llamafactory/hparams/*.py (0.9.4) and, for the Trainer's,
transformers'. What its data sets are stands in dataset_info.json, in the folder `dataset_dir`.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.foreign.base import (
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Rule,
    Settings,
    Stated,
    TargetKey,
    changes,
    number,
    relative_to_file,
    shown,
)
from toolkit.foreign.finetuning import (
    COMMON,
    TEMPLATE,
    FinetuningTarget,
    adapter_rows,
    held_out,
    listed,
    model_of,
    only_with,
    stated_sources,
)
from toolkit.foreign.options import read_options, together
from toolkit.foreign.trainer import following
from toolkit.foreign.values import Chosen, is_on
from toolkit.recipe.schema import ColumnName

INFO = "dataset_info.json"
STAGES = {"pt": "pretrain", "sft": "sft", "dpo": "dpo"}
LOSS_ON = {"train_on_prompt": "all", "mask_history": "last_assistant"}
PAIRS = {
    "pref_beta": "beta",
    "pref_loss": "loss",
    "pref_ftx": "sft_weight",
    "dpo_label_smoothing": "label_smoothing",
}
"""Its names of the settings of `dpo`; `orpo` has the first alone."""
ALPACA: Mapping[str, ColumnName] = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
}
"""Its words for the columns of the format alpaca, and ours."""
LORA = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
}
"""Its names of the settings of `adapter`."""

OPTIONS = read_options("llama_factory", __file__)
_READ = (
    "hf_hub_url",
    "file_name",
    "subset",
    "split",
    "formatting",
    "columns",
    "tags",
    "ranking",
)
"""Of a data set's description."""


class LlamaFactoryTarget(FinetuningTarget):
    """Stages pt, sft and dpo (of which orpo is a loss), in full or with LoRA."""

    kind = "LLaMA-Factory config"
    form = "a LLaMA-Factory config (YAML)"
    tool = "LLaMA-Factory"
    names = frozenset(
        ("stage", "finetuning_type", "template", "dataset", "cutoff_len", "lora_rank",
         "lora_target", "dataset_dir", "pref_loss", "flash_attn")
    )  # fmt: skip
    must_be: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "stage": (None, *STAGES),
        "finetuning_type": (None, "lora", "full"),
        "do_train": (None, True),
        "do_predict": (None, False),
        "pref_loss": (None, "sigmoid", "ipo", "hinge", "orpo"),
        "quantization_bit": (None,),
        **dict.fromkeys(
            ("image_max_pixels", "video_max_pixels", "audio_sampling_rate"), (None,)
        ),
    }
    defaults: ClassVar[Mapping[str, object]] = {
        "model.init": "pretrained",
        "training.sequence_length": 2048,
        "training.precision": "fp32",
        "training.seed": 42,
        "optimizer.learning_rate": 5e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
        "checkpoint.every_steps": 500,
    }

    def implied(self, values: Mapping[str, Any]) -> Mapping[str, object]:
        """See `FinetuningTarget`."""
        implied: dict[str, object] = {
            "stage": "sft",
            "finetuning_type": "lora",
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "num_train_epochs": 3.0,
        }
        implied |= {"pref_beta": 0.1} if values.get("stage") == "dpo" else {}
        if values.get("finetuning_type", "lora") != "lora":
            return implied
        rank = number(values.get("lora_rank")) or 8
        return {**implied, "lora_rank": 8, "lora_alpha": 2 * rank, "lora_target": "all"}

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `FinetuningTarget`."""
        data = {"dataset": "data.train", "eval_dataset": "data.validation"}
        rows = {name: partial(_datasets, key, file) for name, key in data.items()}
        return {**COMMON, **OPTIONS.rows, **_KEYS, **rows}


TARGET = LlamaFactoryTarget()


def _objective(settings: Settings) -> str | None:
    stage = settings["stage"].value
    orpo = stage == "dpo" and "pref_loss" in settings and settings["pref_loss"].value == "orpo"
    return "orpo" if orpo else STAGES.get(str(stage))


def _stage(setting: ForeignSetting, settings: Settings) -> list[Result]:
    if (objective := _objective(settings)) is None:
        return [changes("sft instead; stages are pt, sft and dpo"),
                Stated("training.objective", "sft", setting)]  # fmt: skip
    return [Stated("training.objective", objective, setting)]


def _method(setting: ForeignSetting, _: Settings) -> list[Result]:
    if setting.value not in ("lora", "full"):
        return [changes("every weight trains; model.freeze names those that do not")]
    return [Stated("adapter.name", "lora", setting)] if setting.value == "lora" else []


def _of_pairs(name: str) -> Rule:
    """A setting of the loss of pairs, in the section of the objective."""

    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        objective = _objective(settings)
        if objective not in ("dpo", "orpo") or (objective == "orpo" and name != "pref_beta"):
            return [] if name == "pref_loss" else [NotCarried("not in effect in this stage")]
        if name == "pref_loss" and setting.value not in ("sigmoid", "ipo", "hinge"):
            return [changes("no such loss; sigmoid instead")]
        return [Stated(f"{objective}.{PAIRS[name]}", setting.value, setting)]

    return rule


def _is_lora(settings: Settings) -> bool:
    return bool(settings["finetuning_type"].value == "lora")


def _targets(value: object) -> object:
    names = listed(value)
    return "all-linear" if names == ["all"] else names


def _packing(setting: ForeignSetting, settings: Settings) -> list[Result]:
    if setting.value is (_objective(settings) == "pretrain") or is_on(settings, "neat_packing"):
        return []
    if setting.value:
        return [changes("no row attends to another here: data.packing: greedy")]
    return [changes("documents are concatenated, and cut at equal lengths")]


_KEYS: Mapping[str, Row] = {
    "model_name_or_path": model_of(),
    "model_revision": model_of(revision=True),
    "train_from_scratch": TargetKey("model.init", lambda on: "random" if on else "pretrained"),
    "early_stopping_steps": following("evaluation.early_stopping.patience"),
    "enable_liger_kernel": Chosen("kernels.fused", {True: "liger"}),
    "disable_gradient_checkpointing": TargetKey(
        "parallel.recompute", lambda off: "none" if off else "full"
    ),
    "stage": _stage,
    "finetuning_type": _method,
    **adapter_rows(LORA, _is_lora),
    "lora_target": only_with(_is_lora, TargetKey("adapter.targets", _targets)),
    **{name: _of_pairs(name) for name in PAIRS},
    "template": Chosen("data.chat_template", {"chatml": "chatml"}, TEMPLATE),
    "val_size": held_out,
    "packing": _packing,
    "neat_packing": Chosen("data.packing", {True: "greedy"}),
    **dict.fromkeys((*LOSS_ON, "dataset_dir"), together),
}


def _datasets(
    key: str, file: JsonFile, setting: ForeignSetting, settings: Settings
) -> Iterator[Result]:
    """The sources that dataset_info.json describes, and what of them is not read."""
    folder = str(settings["dataset_dir"].value) if "dataset_dir" in settings else "data"
    path = relative_to_file(f"{folder}/{INFO}", file.path)
    infos: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):  # no name that a file can have
        infos = read_json(path, INFO).values if path.exists() else {}
    sources = []
    for name in listed(setting.value):
        info = infos.get(name)
        if not isinstance(info, Mapping):
            info = {"hf_hub_url": name} if folder == "ONLINE" else {}
            if not info:
                what = f"complete {key}: no {path.name} in {path.parent} says what {name} is"
                yield changes(f"{what}")
        source, unread = _source(name, info, path.parent.absolute(), settings)
        sources.append(source)
        if unread:
            yield changes(f"{name}: {unread}")
    yield from stated_sources(key, sources, setting)


def _source(
    name: str, info: Mapping[str, Any], folder: Path, settings: Settings
) -> tuple[dict[str, object], str]:
    """A source of the recipe, and what DMT does not read of its rows."""
    columns, tags = (
        value if isinstance(value := info.get(part), Mapping) else {}
        for part in ("columns", "tags")
    )
    local = str(folder / str(info["file_name"])) if "file_name" in info else name
    source: dict[str, object] = {"path": info.get("hf_hub_url", local)}
    for theirs, ours in (("subset", "name"), ("split", "split")):
        source |= {ours: info[theirs]} if theirs in info else {}
    objective, sharegpt = _objective(settings), info.get("formatting") == "sharegpt"
    left = _left(info, columns, str(objective), sharegpt)
    unread = ", ".join(left)
    if objective == "pretrain":
        field = columns.get("prompt", "instruction")
        return {"kind": "hf", **source, "text_field": field}, unread
    if objective in ("dpo", "orpo"):
        if sharegpt:
            left.append("an answer is a list of messages or a text, there one message")
            unread = ", ".join(left)
        prompt = "messages" if sharegpt else "prompt"
        named = {"prompt": columns.get(prompt, "prompt")}
        named |= {one: columns.get(one, one) for one in ("chosen", "rejected")}
        return {"kind": "preference", **source, **_renamed(named)}, unread
    openai = tags.items() >= {"role_tag": "role", "content_tag": "content"}.items()
    if tags and not openai:
        unread = ", ".join([*left, "no messages with such tags are read"])
    elif not sharegpt and not unread:
        unread = (
            "an input follows its instruction after an empty line, there after a line break"
        )
    form = ("messages" if openai else "sharegpt") if sharegpt else "alpaca"
    if sharegpt:
        word = "messages" if openai else "conversations"
        named = {word: columns.get("messages", "conversations")}
    else:
        named = {ours: columns.get(theirs, ours) for theirs, ours in ALPACA.items()}
    masks = [word for key, word in LOSS_ON.items() if is_on(settings, key)]
    loss_on = {"loss_on": masks[0]} if masks else {}
    return {"kind": "chat", **source, "format": form, **_renamed(named), **loss_on}, unread


def _left(
    info: Mapping[str, Any], columns: Mapping[str, str], objective: str, sharegpt: bool
) -> list[str]:
    """What is not read of a data set: columns, and settings of its description."""
    pairs = objective in ("dpo", "orpo")
    read = {"messages"} if sharegpt else {"prompt"} if pairs else {*ALPACA}
    if objective == "pretrain":
        read = {"prompt"}
    read |= {"chosen", "rejected"} if pairs else set()
    left = [
        f"no column {column} is read as {name}"
        for name, column in columns.items()
        if column and name not in read
    ]
    left += [f"{name} {shown(value)}" for name, value in info.items() if name not in _READ]
    if info.get("ranking") and not pairs:
        left.append("ranking is for dpo and orpo")
    return left


def _renamed(columns: Mapping[str, str]) -> dict[str, object]:
    """The setting `columns`, with those that have another name in the data."""
    other = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {"columns": other} if other else {}
