"""What LLaMA-Factory's and Axolotl's files have in common: both fine-tune with transformers'
Trainer, PEFT and TRL."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import PlanError
from toolkit.extras.targets import trainer
from toolkit.extras.targets.known_keys import OLD_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from toolkit.extras.targets.values import Chosen, TableTarget, is_on, together, written_rows
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import Recipe
from toolkit.targets.accelerate_file import in_accelerate, in_scripts
from toolkit.targets.base import (
    ForeignSetting,
    Nearest,
    NotCarried,
    Result,
    Row,
    Rule,
    Settings,
    SettingSource,
    ShareOfSteps,
    Stated,
    TargetKey,
    Unknown,
    changes,
    number,
    shown,
    unknown,
)
from toolkit.targets.training_arguments import KEYS

NO_ROW = "not in DMT's table: it may change training"
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


def _epochs(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Passes over the data, unless steps are stated; in silence if the tool implies both."""
    if is_on(settings, "max_steps") and settings["max_steps"].value != -1:
        return [] if setting.text else [NotCarried("not in effect next to max_steps")]
    if number(setting.value) is None:
        return [Unknown(setting.name, setting.place, "not a number")]
    return [Stated("training.epochs", setting.value, setting)]


def _warmup(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """A number of steps, or a share of them, which is not in effect next to the number."""
    key, value = "schedule.warmup_steps", number(setting.value)
    if value is None:
        return [Unknown(setting.name, setting.place, "not a number")]
    others = {"warmup_ratio", "warmup_steps"} - {setting.name}
    if is_on(settings, others.pop()) and (setting.name == "warmup_ratio" or not value):
        return [NotCarried("not in effect next to the other one")]
    share = setting.name == "warmup_ratio" or 0 < value < 1
    return [Stated(key, ShareOfSteps(value) if share else int(value), setting)]


def _optimizer(setting: ForeignSetting, settings: Settings) -> list[Result]:
    word = str(setting.value).lower()
    found = (name for name, kind in OPTIMIZERS.items() if word in (name, *kind.aliases))
    if (name := next(found, None)) is None:
        return [changes(f"optimizers are {', '.join(OPTIMIZERS.names)}")]
    kind = OPTIMIZERS[name]
    if not kind.no_adapter or not {"adapter", "lora_rank"} & settings.keys():
        return [Stated("optimizer.name", name, setting)]
    plain = OPTIMIZERS.names[0]
    what = f"with {OPTIMIZERS[plain].title}, where this is {kind.title}: {kind.no_adapter}"
    return [Stated("optimizer.name", Nearest(plain, what), setting)]


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
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), _warmup),
    "num_train_epochs": _epochs,
    "optim": _optimizer,
    "lr_scheduler_type": Chosen("schedule.name", _SCHEDULES, changes("no such schedule")),
    "lr_scheduler_kwargs": lowest_rate,
}
"""Rows of TrainingArguments, whose names both tools have."""


class FinetuningTarget(TableTarget):
    """A YAML file whose settings are the rows of one table, and parts of one engine."""

    known = TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS
    """Every name that the tool knows, as far as its table does not have it."""
    elsewhere: ClassVar[str] = ""
    """Whose words `OptimizerKind.elsewhere` has for it, if not the tool's."""
    expressed: ClassVar[frozenset[str]] = frozenset()
    """Settings that only one of the tools can express."""

    def score(self, values: Mapping[str, Any]) -> int:
        """Most of its settings are TrainingArguments as well."""
        own = super().score(values)
        return own and 2 * own + len(self.known & values.keys())

    def implied(self, values: Mapping[str, Any]) -> Mapping[str, object]:
        """Defaults of the tool on which the meaning of other settings depends."""
        raise NotImplementedError

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`; and what the tool implies."""
        stated = super().settings(file, recipe)
        implied = self.implied({name: setting.value for name, setting in stated.items()})
        return {
            name: ForeignSetting(name, value, str(file.path), f"{shown(value)}, by default")
            for name, value in implied.items()
        } | stated

    def judge(self, setting: ForeignSetting) -> Unknown | NotCarried | None:
        """See `TableTarget`. A name outside of the table may well be one of the tool's."""
        known = self.table(JsonFile(Path(), {}, {}), {}).keys() | self.known
        if setting.name in known:
            return None
        wrong = unknown(setting, known)
        return wrong if wrong.hint else NotCarried(NO_ROW)

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add DeepSpeed's or FSDP's settings, in the file or in one that it names."""
        trainer.add_engine(found, file, *(settings.get(name) for name in trainer.BLOCKS))

    def adapt(self, recipe: Recipe) -> Recipe:
        """See `Target`: planned for transformers' model, computed as scripts do."""
        model = {"parallel.model": "hf"} if recipe.parallel.model == "auto" else {}
        return in_scripts(recipe.with_values(model))

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        self._refuse(recipe, plan, {})
        values, notes = self.file(recipe, plan)
        return dump(values, flow=False), notes

    def file(self, recipe: Recipe, plan: Plan) -> tuple[dict[str, object], Sequence[str]]:
        """The file as plain data, and notes."""
        raise NotImplementedError

    def refuse(self, recipe: Recipe, what: str, instead: str) -> PlanError:
        """The error of a recipe that has something which the tool cannot express."""
        fix = f"--set {instead}; or train with `dmt launch`"
        return PlanError(f"{recipe.name} has {what}, which {self.tool} cannot express", fix=fix)

    def _refuse(self, recipe: Recipe, plan: Plan, table: Mapping[str, Row]) -> None:
        """Raise PlanError where training depends on what neither tool has."""
        plain = {
            "model.freeze": (), "model.balance": None, "model.resize_embeddings": None,
            "data.stages": (), "optimizer.groups": (), "optimizer.layer_decay": None,
            "schedule.decay_steps": None, "kernels.mlp": "whole",
        }  # fmt: skip
        values = recipe.model_dump()
        for key, without_it in plain.items():
            section, name = key.split(".")
            if values[section][name] != without_it and key not in self.expressed:
                raise self.refuse(recipe, key, f"{key}={shown(without_it)}")
        for key in recipe.follows_validation:
            raise self.refuse(recipe, key, f"{key}={'cosine' if 'schedule' in key else 'null'}")
        if features := recipe.features:
            raise self.refuse(recipe, ", ".join(features), f"{next(iter(features))}=null")
        targets = recipe.adapter.targets if recipe.adapter else ()
        stated = {targets} if isinstance(targets, str) else {*targets}
        if words := stated & {"attention", "mlp", "experts"}:
            what = f"adapter.targets {', '.join(words)}"
            raise self.refuse(recipe, what, "adapter.targets=all-linear")
        if recipe.model.hub is None or recipe.model.init == "checkpoint":
            raise self.refuse(recipe, "weights of its own", "model.hub=FOLDER")

    def trainer(self, recipe: Recipe, plan: Plan) -> dict[str, Any]:
        """The run in TrainingArguments.

        Raises PlanError naming what a Trainer cannot do.
        """
        kind, schedule = recipe.optimizer.kind, recipe.schedule
        if (name := self.elsewhere or self.tool) not in kind.elsewhere:
            raise self.refuse(recipe, f"the optimizer {kind.title}", "optimizer.name=adamw")
        if schedule.min_learning_rate and schedule.name != "cosine":
            raise self.refuse(recipe, "a lowest rate", "schedule.min_learning_rate=0")
        whole = replace(plan, layout=replace(plan.layout, cp=1))
        words = in_accelerate(recipe, whole)
        config = BACKENDS[plan.engine].render(recipe, plan.layout)
        ratio, steps = schedule.warmup_ratio, recipe.total_steps()
        return {
            **dict(written_rows(_TRAINER, recipe, plan)),
            "optim": kind.elsewhere[name],
            **({"max_steps": steps} if steps else {"num_train_epochs": recipe.training.epochs}),
            "lr_scheduler_type": _WRITTEN_SCHEDULES.get(schedule.name, schedule.name),
            **({"warmup_ratio": ratio} if ratio else {"warmup_steps": schedule.warmup_steps}),
            "bf16": recipe.training.precision == "bf16",
            "fp16": recipe.training.precision == "fp16",
            **({} if recipe.checkpoint.every_steps else {"save_strategy": "no"}),
            **({"eval_strategy": "steps"} if recipe.evaluation.every_steps else {}),
            "gradient_checkpointing": plan.layout.recompute == "full",
            **words.training_arguments(whole.layout, config),
        }


_WRITTEN_SCHEDULES = {"constant": "constant_with_warmup"}
_TRAINER: Mapping[str, Row] = {
    **{name: row for name, row in KEYS.items() if name != "optim"},
    "logging_steps": "logging.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every_steps",
}
