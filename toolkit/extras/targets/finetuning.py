"""What LLaMA-Factory's and Axolotl's files have in common: both fine-tune with transformers'
Trainer, PEFT and TRL."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets import trainer
from toolkit.extras.targets.known_keys import OLD_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from toolkit.extras.targets.values import Chosen, TableTarget, written_rows
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import ChatSource, HfSource, PreferenceSource, Recipe
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
    Stated,
    TargetKey,
    Unknown,
    changes,
    number,
    shown,
    unknown,
)
from toolkit.targets.options import together
from toolkit.targets.training_arguments import KEYS

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
        return [changes(f"optimizers are {', '.join(OPTIMIZERS.names)}")]
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


def lowest_rate_written(recipe: Recipe) -> dict[str, object]:
    """The schedule in TrainingArguments that ends above 0, if it does."""
    if not (least := recipe.schedule.min_learning_rate):
        return {}
    return {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": least},
    }


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

    def adapt(self, recipe: Recipe) -> Recipe:
        """See `Target`: planned for transformers' model, computed as scripts do."""
        model = {"parallel.model": "hf"} if recipe.parallel.model == "auto" else {}
        return in_scripts(recipe.with_values(model))

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        if problems := [*self.problems(recipe, plan)]:
            raise RecipeError(problems)
        values, notes = self.file(recipe, plan)
        return self.text(recipe, values), notes

    def text(self, recipe: Recipe, values: dict[str, Any]) -> str:
        """See `TableTarget`."""
        return dump(values, flow=False)

    def file(self, recipe: Recipe, plan: Plan) -> tuple[dict[str, Any], Sequence[str]]:
        """The file as plain data, and notes."""
        raise NotImplementedError

    def problem(self, key: str, found: object, instead: object) -> Problem:
        """What the tool cannot express, and what it has instead."""
        fix = f"--set {key}={shown(instead)}, or train it with `dmt launch`"
        return Problem(key, shown(found), f"in {self.tool}, {shown(instead)}", fix)

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """See `TableTarget`: what neither the Trainer has, nor the tools around it."""
        plain = {
            "model.freeze": (), "model.balance": None, "model.resize_embeddings": None,
            "data.stages": (), "optimizer.groups": (),
            "training.batch_ramp": None, "schedule.decay_steps": None, "kernels.mlp": "whole",
        }  # fmt: skip
        values = recipe.model_dump()
        for key, without_it in plain.items():
            section, name = key.split(".")
            if values[section][name] != without_it and key not in self.expressed:
                yield self.problem(key, "one", without_it)
        for key, value in recipe.follows_validation.items():
            yield self.problem(key, value, "cosine" if "schedule" in key else None)
        yield from (self.problem(name, "a section", None) for name in recipe.features)
        targets = recipe.adapter.targets if recipe.adapter else ()
        stated = {targets} if isinstance(targets, str) else {*targets}
        if words := stated & {"attention", "mlp", "experts"}:
            yield self.problem("adapter.targets", ", ".join(words), "all-linear")
        if recipe.model.hub is None or recipe.model.init == "checkpoint":
            yield self.problem("model.hub", "weights of its own", "FOLDER")
        kind, schedule = recipe.optimizer.kind, recipe.schedule
        if (self.elsewhere or self.tool) not in kind.elsewhere:
            yield self.problem("optimizer.name", recipe.optimizer.name, "adamw")
        if (least := schedule.min_learning_rate) and schedule.name != "cosine":
            yield self.problem("schedule.min_learning_rate", least, 0)

    def source_problems(self, recipe: Recipe) -> Iterator[Problem]:
        """Data that both tools around the Trainer have no words for."""
        for key, source in recipe.data.named_sources:
            if not isinstance(source, HfSource | ChatSource | PreferenceSource):
                yield self.problem(f"{key}.kind", source.kind, "hf")
            elif source.weight:
                yield self.problem(f"{key}.weight", source.weight, None)
            elif isinstance(source, ChatSource) and source.format not in FORMATS:
                yield self.problem(f"{key}.format", source.format, "messages")

    def trainer(self, recipe: Recipe, plan: Plan) -> dict[str, Any]:
        """The run in TrainingArguments. Raises PlanError for a layout that no script has."""
        kind, schedule = recipe.optimizer.kind, recipe.schedule
        whole = replace(plan, layout=replace(plan.layout, cp=1))
        words = in_accelerate(recipe, whole)
        config = BACKENDS[plan.engine].render(recipe, plan.layout)
        ratio, steps = schedule.warmup_ratio, recipe.total_steps()
        return {
            **dict(written_rows(_TRAINER, recipe, plan)),
            "optim": kind.elsewhere[self.elsewhere or self.tool],
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


FORMATS = ("messages", "sharegpt", "alpaca")
"""Conversations that both tools read."""
_WRITTEN_SCHEDULES = {"constant": "constant_with_warmup"}
_TRAINER: Mapping[str, Row] = {
    **{name: row for name, row in KEYS.items() if name != "optim"},
    "logging_steps": "logging.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every_steps",
}
