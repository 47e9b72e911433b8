"""What LLaMA-Factory's and Axolotl's files have in common: both fine-tune with transformers'
Trainer, PEFT and TRL."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import trainer
from toolkit.foreign.base import (
    CHANGES,
    ForeignSetting,
    Nearest,
    NotCarried,
    Result,
    Row,
    Rule,
    Settings,
    SettingSource,
    Stated,
    TargetKey,
    Unknown,
    changes,
    number,
    shown,
    unknown,
)
from toolkit.foreign.options import together
from toolkit.foreign.trainer_keys import OLD_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from toolkit.foreign.training_arguments import KEYS
from toolkit.foreign.values import Chosen, TableTarget
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.recipe.schema import Recipe

TEMPLATE = changes("here data.chat_template, or the tokenizer's own")


def listed(value: object) -> list[str]:
    """Names in a list, or in text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def model_of(revision: bool = False) -> Rule:
    """A row for the model, or its revision, which are the tokenizer's as well."""
    ours = ("model.revision", "data.tokenizer_revision") if revision else ("model.hub",)

    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        own = () if revision or "tokenizer_config" in settings else ("data.tokenizer",)
        return [Stated(key, setting.value, setting) for key in (*ours, *own)]

    return rule


def only_with(switch: Callable[[Settings], bool], row: TargetKey) -> Rule:
    """A row that is in effect where `switch` is on."""

    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        if not switch(settings):
            return [NotCarried("not in effect here")]
        return [Stated(row.ours, row.read(setting.value), setting)]

    return rule


def _optimizer(setting: ForeignSetting, settings: Settings) -> list[Result]:
    word = str(setting.value).lower()
    found = (name for name, kind in OPTIMIZERS.items() if word in (name, *kind.aliases))
    if (name := next(found, None)) is None:
        reason = f"{CHANGES}optimizers are {', '.join(OPTIMIZERS.names)}"
        return [NotCarried(reason, "optimizer.name")]
    kind = OPTIMIZERS[name]
    if not kind.no_adapter or not {"adapter", "lora_rank"} & settings.keys():
        return [Stated("optimizer.name", name, setting)]
    plain = OPTIMIZERS.names[0]
    what = f"with {OPTIMIZERS[plain].title}, where this is {kind.title}: {kind.no_adapter}"
    return [Stated("optimizer.name", Nearest(plain, what), setting)]


def adapter_rows(names: Mapping[str, str], is_on: Callable[[Settings], bool]) -> dict[str, Row]:
    """Rows of settings of `adapter`, which are in effect where there is one."""
    rows = {theirs: TargetKey(f"adapter.{ours}") for theirs, ours in names.items()}
    return {theirs: only_with(is_on, row) for theirs, row in rows.items()}


def held_out(setting: ForeignSetting, _: Settings) -> list[Result]:
    """The row of a share of the data, or of a number of rows."""
    if (number(setting.value) or 0) >= 1:
        return [changes("that is a number of rows; data.validation_fraction, a share")]
    return [Stated("data.validation_fraction", setting.value, setting)]


def lowest_rate(setting: ForeignSetting, _: Settings) -> list[Result]:
    """The row of the options of a schedule."""
    options = setting.value if isinstance(setting.value, Mapping) else {}
    known = trainer.SCHEDULE_OPTIONS
    if not options or options.keys() - known.keys():
        return [changes("of these options, min_lr is schedule.min_learning_rate")]
    return [Stated(known[name], value, setting) for name, value in options.items()]


def stated_sources(
    key: str, sources: Sequence[Mapping[str, object]], at: ForeignSetting
) -> list[Result]:
    """One source setting by setting, several as a list, each read once in an epoch."""
    if len(sources) == 1:
        return [Stated(f"{key}.{name}", value, at) for name, value in sources[0].items()]
    share = {"epochs": 1} if key == "data.train" else {}
    return [Stated(key, [{**source, **share} for source in sources], at)]


_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "reduce_lr_on_plateau": "plateau",
}
COMMON: Mapping[str, Row] = {
    **{name: KEYS[name] for name in KEYS if name not in ("max_seq_length", "data_seed")},
    **trainer.DEPENDENT,
    **dict.fromkeys(trainer.BLOCKS, together),
    "optim": _optimizer,
    "lr_scheduler_type": Chosen("schedule.name", _SCHEDULES, changes("no such schedule")),
    "lr_scheduler_kwargs": lowest_rate,
}
"""Rows of TrainingArguments, whose names both tools have."""


class FinetuningTarget(TableTarget):
    """A YAML file whose settings are the rows of one table, and parts of one engine."""

    known = TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS
    """Every name that the tool knows, as far as its table does not have it."""
    knows_all = False

    def score(self, values: Mapping[str, Any]) -> int:
        """Most of its settings are TrainingArguments as well."""
        own = super().score(values)
        return own and 2 * own + len(self.known & values.keys())

    def implied(self, values: Mapping[str, Any]) -> Mapping[str, object]:
        """Defaults of the tool on which the meaning of other settings depends."""
        return {}

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`; and what the tool implies."""
        stated = super().settings(file, recipe)
        implied = self.implied({name: setting.value for name, setting in stated.items()})
        return {
            name: ForeignSetting(name, value, str(file.path), f"{shown(value)}, by default")
            for name, value in implied.items()
        } | stated

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`."""
        known = self.table(JsonFile(Path(), {}, {}), {}).keys() | self.known
        if setting.name in known:
            return None
        return unknown(setting, known)

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add DeepSpeed's or FSDP's settings, in the file or in one that it names."""
        trainer.add_engine(found, file, *(settings.get(name) for name in trainer.BLOCKS))
