"""Axolotl's YAML: what `axolotl train` is given.

Names and defaults are those of its pydantic schemas (src/axolotl/utils/schemas/*.py, 0.13) and
of core/builders/base.py. `type: alpaca` and the like are prompts of its own, no chat templates.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import accelerate, trainer
from toolkit.foreign.base import (
    ForeignSetting,
    NotCarried,
    PerReplica,
    Result,
    Row,
    Settings,
    SettingSource,
    ShareOfSteps,
    Stated,
    changes,
    number,
    shown,
)
from toolkit.foreign.finetuning import (
    COMMON,
    TEMPLATE,
    FinetuningTarget,
    adapter_rows,
    held_out,
    model_of,
    stated_sources,
)
from toolkit.foreign.options import read_options, together, unless_off
from toolkit.foreign.trainer import following
from toolkit.foreign.values import Chosen, is_on
from toolkit.recipe.schema import ColumnName, Recipe

RL = {"dpo": ("dpo", "sigmoid"), "ipo": ("dpo", "ipo"), "orpo": ("orpo", None)}
"""`rl`: our objective and its loss."""
RINGS = {"varlen_llama3": "all_gather"}
LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
FIELDS: Mapping[str, ColumnName] = {
    "field_messages": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Of preferences: our columns."""

LORA = {
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_model_dir": "folder",
    "peft_use_rslora": "rslora",
}
"""Its names of the settings of `adapter`."""
OPTIONS = read_options("axolotl", __file__)
_ADAPTERS = ("lora", "qlora")
_DOCUMENTS = ("completion", "pretrain")
_READ = ("ds_type", "trust_remote_code")
"""Keys of a data set that do not change its rows."""
_PAIRS = ("chat_template", "chat_template.default", "orpo.chat_template")
_SHAREGPT = {"role": "from", "content": "value"}
_MAPPINGS: tuple[dict[str, str], ...] = ({}, {"role": "role", "content": "content"}, _SHAREGPT)
_ROLES = {
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt"},
    "system": {"system"},
    "tool": {"tool"},
}
_SAME = NotCarried("without effect on the result")


class AxolotlTarget(FinetuningTarget):
    """Documents, conversations and preferences, in full or with LoRA."""

    kind = "Axolotl config"
    form = "an Axolotl config (YAML)"
    tool = "Axolotl"
    names = frozenset(
        ("base_model", "datasets", "pretraining_dataset", "sequence_len", "sample_packing",
         "micro_batch_size", "num_epochs", "lora_r", "val_set_size", "rl")
    )  # fmt: skip
    must_be: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "rl": (None, False, "", *RL),
        "adapter": (None, False, "", "lora"),
        "load_in_4bit": (None, False),
        **dict.fromkeys(
            ("gptq", "qat", "reward_model", "process_reward_model", "is_multimodal"),
            (None, False),
        ),
        "processor_type": (None, ""),
    }
    defaults: ClassVar[Mapping[str, object]] = {
        "model.init": "pretrained",
        "training.precision": "bf16",
        "training.sequence_length": 512,
        "training.seed": 42,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.0,
        "schedule.warmup_steps": ShareOfSteps(0.03),
        "checkpoint.keep": 4,
    }

    def implied(self, values: Mapping[str, Any]) -> Mapping[str, object]:
        """See `FinetuningTarget`."""
        implied: dict[str, object] = {
            "micro_batch_size": 1,
            "num_epochs": 1.0,
        }
        if "batch_size" not in values:
            implied["gradient_accumulation_steps"] = 1
        if values.get("rl") in ("dpo", "ipo") and "dpo_beta" not in values:
            implied["rl_beta"] = 0.1
        lora = values.get("adapter") in _ADAPTERS
        return implied | ({"lora_r": 8, "lora_alpha": 8} if lora else {})

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `FinetuningTarget`."""
        return {**COMMON, **OPTIONS.rows, **_KEYS}

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """See `FinetuningTarget`; FSDP's settings have Accelerate's names."""
        trainer.add_engine(found, file, settings.get("deepspeed"), None, None)
        at = settings.get("fsdp_config") or settings.get("fsdp")
        if at is None or not at.value:
            return
        config = at.value if isinstance(at.value, Mapping) else {}
        named = {
            name if name.startswith("fsdp_") else f"fsdp_{name}": ForeignSetting(
                f"{at.name}.{name}", value, file.place(f"{at.name}.{name}")
            )
            for name, value in config.items()
            if value is not None
        }
        named |= {name: settings[name] for name in ("fsdp_version",) if name in settings}
        named["distributed_type"] = ForeignSetting(at.name, "FSDP", at.place, shown(at.value))
        found.add(accelerate.collect(named, file.path))


TARGET = AxolotlTarget()


def _sources(key: str, setting: ForeignSetting, settings: Settings) -> Iterator[Result]:
    """The sources of a list of data sets, and what of them is not read."""
    listed = setting.value if isinstance(setting.value, list) else [setting.value]
    made = [_source(dict(one), settings) for one in listed if isinstance(one, Mapping)]
    for source, unread in made:
        for reason in unread:
            yield changes(f"{source['path']}: {reason}")
    sources = [source for source, _ in made]
    yield from stated_sources(key, sources, setting)
    kinds = {str(source["kind"]) for source in sources}
    if key == "data.train" and "rl" not in settings:
        objective = "pretrain" if kinds == {"hf"} else "sft"
        yield Stated("training.objective", objective, setting)
    if key == "data.train" and is_on(settings, "sample_packing"):
        at = settings["sample_packing"]
        yield Stated("data.packing", "best_fit" if kinds == {"hf"} else "greedy", at)
        if kinds == {"hf"}:
            yield Stated("data.isolate_documents", True, at)
    elif kinds == {"hf"}:
        yield changes("documents are concatenated; there each is a padded row")


def _source(given: dict[str, Any], settings: Settings) -> tuple[dict[str, object], list[str]]:
    """A source of the recipe, and what of it DMT does not read."""
    unread = []
    prompt = str(given.pop("type", "chat_template"))
    form, _, _ = prompt.partition(".")
    mapped, trained = _usual(given)
    files = given.pop("data_files", None)
    source: dict[str, object] = {"path": given.pop("path")}
    source |= {
        name: given.pop(name) for name in ("name", "split", "revision") if given.get(name)
    }
    if files is not None:
        unread.append(f"data_files {files}: write them as path")
    columns: dict[str, str] = {}
    if "rl" in settings:
        source["kind"] = "preference"
        if prompt not in _PAIRS:
            unread.append(f"type {prompt}: columns are prompt, chosen and rejected")
        fields = FIELDS
    elif form in _DOCUMENTS or "pretraining_dataset" in settings:
        source["kind"] = "hf"
        source["text_field"] = given.pop("field", given.pop("text_column", "text"))
        fields = {}
    else:
        sharegpt = mapped == _SHAREGPT
        word: ColumnName = "conversations" if sharegpt else "messages"
        shape = "sharegpt" if sharegpt else "messages"
        source |= {"kind": "chat", "format": "alpaca" if form == "alpaca" else shape}
        fields = {"field_messages": word}
        if form != "chat_template":
            unread.append(f"its prompt {form} is another template: see data.chat_template")
        if is_on(settings, "train_on_inputs") or "user" in trained:
            source["loss_on"] = "all"
    for theirs, ours in fields.items():
        if (name := given.pop(theirs, ours)) != ours:
            columns[ours] = name
    if columns:
        source["columns"] = columns
    if source["kind"] != "hf" and _excess(settings) != "truncate":
        source["too_long"] = "drop"
    unread += [
        f"{name} {value}" for name, value in given.items() if value and name not in _READ
    ]
    return source, unread


def _usual(given: dict[str, Any]) -> tuple[Any, Any]:
    """How messages are named, and the roles that train. What means the same here is popped."""
    mapped, trained = given.get("message_property_mappings") or {}, given.get("roles_to_train")
    roles = given.get("roles")
    usual = {
        "message_property_mappings": mapped in _MAPPINGS,
        "train_on_eos": given.get("train_on_eos") == "turn",
        "roles_to_train": isinstance(trained, list)
        and ({*trained} <= _ROLES["assistant"] or {"user", "assistant"} <= {*trained}),
        "roles": isinstance(roles, dict)
        and all({*names} <= _ROLES.get(role, set()) for role, names in roles.items()),
    }
    for name, is_usual in usual.items():
        if is_usual:
            given.pop(name, None)
    return mapped, trained or ()


def _excess(settings: Settings) -> object:
    name = "excess_length_strategy"
    return settings[name].value if name in settings else "drop"


def _batch(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Of each rank: the accumulation is this over the micro batch, rounded down."""
    micro = int(settings["micro_batch_size"].value)
    sequences = int(setting.value) // micro * micro
    return [Stated("training.global_batch_size", PerReplica(sequences), setting)]


def _rl(setting: ForeignSetting, _: Settings) -> list[Result]:
    if str(setting.value) not in RL:
        return [changes("objectives on pairs are dpo and orpo")]
    objective, loss = RL[str(setting.value)]
    found: list[Result] = [Stated("training.objective", objective, setting)]
    return found + ([Stated("dpo.loss", loss, setting)] if loss else [])


def _beta(setting: ForeignSetting, settings: Settings) -> list[Result]:
    orpo = setting.name == "orpo_alpha"
    if ("rl" in settings and settings["rl"].value == "orpo") is orpo:
        return [Stated("orpo.beta" if orpo else "dpo.beta", setting.value, setting)]
    return [NotCarried("not in effect with this rl")]


def _is_lora(settings: Settings) -> bool:
    return "adapter" in settings and settings["adapter"].value in _ADAPTERS


def _adapter(setting: ForeignSetting, settings: Settings) -> list[Result]:
    if setting.value not in _ADAPTERS:
        return [changes("every weight trains: the only adapter is lora")]
    found: list[Result] = [Stated("adapter.name", "lora", setting)]
    if is_on(settings, "lora_target_linear"):
        found.append(Stated("adapter.targets", "all-linear", settings["lora_target_linear"]))
    return found


def _targets(setting: ForeignSetting, settings: Settings) -> list[Result]:
    if not _is_lora(settings):
        return [NotCarried("not in effect here")]
    if is_on(settings, "lora_target_linear"):
        return []  # PEFT gets both, of which the linear layers are more
    value = setting.value if isinstance(setting.value, list) else [setting.value]
    return [
        Stated("adapter.targets", "all-linear" if value == ["all-linear"] else value, setting)
    ]


def _precision(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """bf16 is auto without a statement, and then true on GPUs that have it."""
    if setting.name == "bf16" and setting.value:
        return [Stated("training.precision", "bf16", setting)]
    bf16 = settings["bf16"].value if "bf16" in settings else "auto"
    if setting.name == "fp16" and setting.value and not bf16:
        return [Stated("training.precision", "fp16", setting)]
    if setting.name == "bf16" and not is_on(settings, "fp16"):
        return [Stated("training.precision", "fp32", setting)]
    return []


def _recompute(setting: ForeignSetting, _: Settings) -> list[Result]:
    if not setting.value:
        return []
    return [Stated("parallel.recompute", "full", setting)]


def _warmup(setting: ForeignSetting, settings: Settings) -> Iterable[Result]:
    """0 is no statement there: the default is taken."""
    rule = COMMON["warmup_steps"]
    assert callable(rule)
    return rule(setting, settings) or () if setting.value else ()


def _lowest_rate(setting: ForeignSetting, settings: Settings) -> list[Result]:
    peak = number(settings["learning_rate"].value) if "learning_rate" in settings else None
    share = number(setting.value)
    if peak is None or share is None:
        return [changes("no learning rate that it is a share of")]
    return [Stated("schedule.min_learning_rate", peak * share, setting)]


_KEYS: Mapping[str, Row] = {
    "base_model": model_of(),
    "revision_of_model": model_of(revision=True),
    "datasets": partial(_sources, "data.train"),
    "pretraining_dataset": partial(_sources, "data.train"),
    "test_datasets": partial(_sources, "data.validation"),
    "val_set_size": held_out,
    **dict.fromkeys(
        (
            "sample_packing",
            "train_on_inputs",
            "lora_target_linear",
            "fsdp_version",
            "excess_length_strategy",
        ),
        together,
    ),
    "chat_template": Chosen(
        "data.chat_template", {"chatml": "chatml", "tokenizer_default": None}, TEMPLATE
    ),
    "batch_size": _batch,
    "rl": _rl,
    **dict.fromkeys(("rl_beta", "dpo_beta", "orpo_alpha"), _beta),
    "adapter": _adapter,
    **adapter_rows(LORA, _is_lora),
    "lora_target_modules": _targets,
    "peft_init_lora_weights": Chosen(
        "adapter.init",
        {True: "kaiming", "gaussian": "gaussian"},
        changes("no such start of A"),
    ),
    "num_epochs": COMMON["num_train_epochs"],
    "optimizer": COMMON["optim"],
    "lr_scheduler": COMMON["lr_scheduler_type"],
    "early_stopping_patience": following("evaluation.early_stopping.patience"),
    "cosine_min_lr_ratio": _lowest_rate,
    "warmup_steps": _warmup,
    "bf16": _precision,
    "fp16": _precision,
    "tf32": unless_off(changes("products of fp32 are exact")),
    "fp8": unless_off(changes("write the section fp8")),
    "gradient_checkpointing": _recompute,
    **dict.fromkeys(("activation_offloading", "tiled_mlp"), _SAME),
    **dict.fromkeys(LIGER, Chosen("kernels.fused", {True: "liger"})),
    "liger_fused_linear_cross_entropy": Chosen("kernels.loss", {True: "liger"}),
    "ring_attn_func": Chosen("kernels.context", RINGS, _SAME),
}
