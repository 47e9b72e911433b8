"""Hugging Face `TrainingArguments`, as `to_json_string` writes them or a script reads them."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.extras.targets.known_keys import (
    OLD_TRAINING_ARGUMENTS,
    TRAINER_FSDP,
    TRAINING_ARGUMENTS,
)
from toolkit.extras.targets.values import read_options
from toolkit.intake.foreign import foreign
from toolkit.recipe.schema import Recipe
from toolkit.targets import accelerate, deepspeed
from toolkit.targets.base import (
    ACCUMULATION,
    NO_EFFECT,
    ForeignSetting,
    Leftover,
    NotCarried,
    OneOf,
    Result,
    Row,
    Rule,
    Settings,
    SettingSource,
    ShareOfSteps,
    Stated,
    Target,
    TargetKey,
    Unknown,
    changes,
    global_batch,
    number,
    precisions,
    read_settings,
    relative_to_file,
    shown,
    unknown,
)
from toolkit.targets.training_arguments import KEYS

_KNOWN = TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS
BLOCKS = ("deepspeed", "fsdp", "fsdp_config")
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP_NAMES = {"cpu_offload": "fsdp_offload_params"}
_FSDP_1_NAMES = {"reshard_after_forward": "fsdp_sharding_strategy"}
"""Where Accelerate's names are not transformers' with `fsdp_` before them."""
_RENAMED = {"evaluation_strategy": "eval_strategy"}
SCHEDULE_OPTIONS = {"min_lr": "schedule.min_learning_rate"} | {
    name: f"schedule.plateau.{name}" for name in ("factor", "patience", "threshold", "cooldown")
}
"""Of `lr_scheduler_kwargs`."""
_PAIRS = {
    "beta": "dpo.beta",
    "loss_type": "dpo.loss",
    "label_smoothing": "dpo.label_smoothing",
}
_LOSSES = ("sigmoid", "ipo", "hinge")
_REPORTS = ("wandb", "tensorboard", "mlflow", "trackio")


class TrainerTarget(Target):
    """`toolkit.accelerate.training_arguments` makes the object."""

    kind = "TrainingArguments"
    form = "TrainingArguments (JSON or YAML)"
    tool = "the Trainer"
    names = _KNOWN
    defaults: ClassVar[Mapping[str, object]] = {
        "training.micro_batch_size": 8,
        ACCUMULATION: 1,
        "training.epochs": 3.0,
        "training.precision": "fp32",
        "training.seed": 42,
        "optimizer.learning_rate": 5e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
        "model.init": "pretrained",
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.context": 1,
        "checkpoint.every_steps": 500,
        "logging.every_steps": 500,
    }
    who = (
        "DMT does not read this file: the recipe takes precedence",
        "HF Trainer reads only this file: there it takes precedence",
    )

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`. Rows are in the order of the tables, whatever that of the file."""
        settings = {
            _RENAMED.get(key, key): ForeignSetting(key, value, file.place(key))
            for key, value in file.values.items()
            if value not in (None, [], {}, "")  # transformers writes every default out
        }
        options = file.values.get("lr_scheduler_kwargs")
        if isinstance(options, dict) and options.keys() & SCHEDULE_OPTIONS.keys():
            del settings["lr_scheduler_kwargs"]
            for option in SCHEDULE_OPTIONS.keys() & options.keys():
                name = f"lr_scheduler_kwargs.{option}"
                settings[name] = ForeignSetting(name, options[option], file.place(name))
        found = SettingSource(str(file.path), self.kind, self.who)
        for table in (KEYS, DEPENDENT):
            names = [name for name in table if name in settings]
            found.add(read_settings(settings, table, names=names))
            found.stated += global_batch(found.stated) if table is KEYS else ()
        add_engine(found, file, *(settings.get(key) for key in BLOCKS))
        rest = [key for key in settings if key not in {*KEYS, *DEPENDENT, *BLOCKS}]
        found.add(read_settings(settings, _without_row(), _judge, rest))
        return found


def _of_pairs(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """A setting of TRL's DPOConfig, of whose names only the losses tell that it is one."""
    loss = settings["loss_type"].value if "loss_type" in settings else None
    if (loss[0] if isinstance(loss, list) and len(loss) == 1 else loss) not in _LOSSES:
        return [changes("write training.objective, and its section")]
    value = setting.value[0] if isinstance(setting.value, list) else setting.value
    found: list[Result] = [Stated(_PAIRS[setting.name], value, setting)]
    if setting.name == "loss_type":
        found.append(Stated("training.objective", "dpo", setting, certain=False))
    return found


@cache
def _without_row() -> Mapping[str, Row]:
    """What no recipe has, and names of transformers' script for language models."""
    return {
        **read_options("trainer").rows,
        "config_name": lambda setting, _: [
            Stated("model.hub", setting.value, setting),
            Stated("model.init", "random", setting),
        ],
        "tokenizer_name": "data.tokenizer",
        "dataset_name": "data.train.path",
        "dataset_config_name": "data.train.name",
        **dict.fromkeys(_PAIRS, _of_pairs),
        **dict.fromkeys(("block_size", "model_max_length"), "training.sequence_length"),
    }


def _judge(setting: ForeignSetting) -> Unknown | None:
    is_known = setting.name in _KNOWN or foreign(setting.name)
    return None if is_known else unknown(setting, _KNOWN)


def _numeric(rule: Rule) -> Rule:
    """The rule for a number; anything else is reported."""

    def checked(setting: ForeignSetting, settings: Settings) -> Iterable[Result] | None:
        if number(setting.value) is None:
            return [Unknown(setting.name, setting.place, "not a number")]
        return rule(setting, settings)

    return checked


def _precision(setting: ForeignSetting, settings: Settings) -> list[Stated]:
    switches = {key: settings[key] for key in ("bf16", "fp16") if key in settings}
    return [stated for stated in precisions(switches) if stated.at is setting]


def _tf32(setting: ForeignSetting, settings: Settings) -> list[Stated] | None:
    """Products of fp32 matrices in TF32 have ten bits."""
    in_16_bits = any(
        key in settings and settings[key].value is True for key in ("bf16", "fp16")
    )
    if setting.value is not True or in_16_bits:
        return None
    return [Stated("training.precision", "tf32", setting)]


@_numeric
def _steps(setting: ForeignSetting, _: Settings) -> list[Result]:
    is_on = setting.value > 0
    return [Stated("training.steps", setting.value, setting) if is_on else NO_EFFECT]


@_numeric
def _epochs(setting: ForeignSetting, settings: Settings) -> list[Result]:
    if _total_steps(settings) > 0:
        return [NotCarried("not in effect next to max_steps")]
    advice = "the recipe gives the length in steps or tokens: compare what the runs did"
    return [Stated("training.epochs", setting.value, setting, advice=advice)]


def _total_steps(settings: Settings) -> float:
    return number(settings["max_steps"].value) or 0 if "max_steps" in settings else 0


@_numeric
def _warmup(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """A share of all steps where below 1: `warmup_steps` takes one, too."""
    key, value = "schedule.warmup_steps", setting.value
    ratio = settings.get("warmup_ratio")
    if value == 0 and ratio and (setting is ratio or ratio.value):
        return [NO_EFFECT]
    if setting is ratio and not 0 <= value < 1:
        return [Unknown(setting.name, setting.place, "not a share of the steps")]
    if not 0 < value < 1:
        return [Stated(key, int(value), setting)]
    if (steps := _total_steps(settings)) > 0:
        return [Stated(key, int(-(-steps * value // 1)), setting)]
    return [Stated(key, ShareOfSteps(value), setting)]


def _interval(name: str, ours: str) -> dict[str, Row]:
    strategy = f"{name}_strategy"

    def by_strategy(setting: ForeignSetting, settings: Settings) -> list[Result]:
        if setting.value == "no" and ours != "logging.every_steps":
            return [Stated(ours, None, setting)]
        if setting.value == "steps" and name == "eval" and "eval_steps" not in settings:
            every = settings.get("logging_steps")  # which is then that of evaluations
            return [Stated(ours, every.value if every else 500, setting)]
        return [] if setting.value == "steps" else [NotCarried(f"{ours} is a number of steps")]

    @_numeric
    def by_steps(setting: ForeignSetting, settings: Settings) -> list[Result] | None:
        counts = strategy not in settings or settings[strategy].value == "steps"
        every = setting.value
        if not counts:
            return [NotCarried(f"not in effect: {strategy} is not steps")]
        if every <= 0:
            return [NO_EFFECT]
        return [Stated(ours, int(every), setting)] if every >= 1 else None  # a share of all

    return {strategy: by_strategy, f"{name}_steps": by_steps}


def _reports(setting: ForeignSetting, _: Settings) -> list[Result]:
    tools = setting.value if isinstance(setting.value, list) else [setting.value]
    known: list[Result] = [
        Stated(f"logging.{tool}", True, setting)
        for tool in _REPORTS
        if tool in tools or "all" in tools
    ]
    other = [str(tool) for tool in tools if tool not in (*_REPORTS, "all", "none")]
    return known + [
        NotCarried(f"no {tool}; logging has {', '.join(_REPORTS)}") for tool in other
    ]


def _best(setting: ForeignSetting, _: Settings) -> list[Result]:
    return [Stated("checkpoint.keep_best", 1, setting) if setting.value else NO_EFFECT]


def _metric(setting: ForeignSetting, _: Settings) -> list[Result]:
    """What decides which checkpoint is the best one, and whether a run stops early."""
    is_loss = setting.value in ("loss", "eval_loss")
    return [NO_EFFECT if is_loss else changes("the best one has the lowest validation loss")]


_RECOMPUTE = TargetKey(
    # `selective` has no name there: a plain "off" does not exclude it.
    "parallel.recompute",
    lambda value: "full" if value else OneOf(("none", "selective")),
)

DEPENDENT: Mapping[str, Row] = {
    "bf16": _precision,
    "fp16": _precision,
    "tf32": _tf32,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    **{f"lr_scheduler_kwargs.{name}": ours for name, ours in SCHEDULE_OPTIONS.items()},
    **_interval("logging", "logging.every_steps"),
    **_interval("eval", "evaluation.every_steps"),
    **_interval("save", "checkpoint.every_steps"),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "use_cpu": lambda setting, _: [
        Stated("cluster.gpu", "cpu", setting) if setting.value else NO_EFFECT
    ],
    "report_to": _reports,
    "load_best_model_at_end": _best,
    "metric_for_best_model": _metric,
}
"""Settings whose meaning depends on others."""


def add_engine(
    found: SettingSource,
    file: JsonFile,
    config: ForeignSetting | None,
    switch: ForeignSetting | None,
    options: ForeignSetting | None,
) -> None:
    """DeepSpeed's config, in the file or next to it, or FSDP."""
    if config is not None:
        engine = accelerate.ENGINES["DEEPSPEED"]
        found.stated.append(Stated("parallel.engine", engine, config))
        found.add(deepspeed.collect(*_block(file, "deepspeed", config.value)))
    if switch is not None and switch.value and switch.value != "false":
        block = _block(file, "fsdp_config", options.value if options else {})
        found.add(_fsdp(switch, *block))
    elif options is not None and options.value:
        found.leftovers.append(Leftover(options, "not in effect: fsdp is off"))


def _block(file: JsonFile, key: str, config: object) -> tuple[JsonFile, str]:
    """Settings in this file, or in one that it names, and what to put before their names.

    Raises RecipeError when the file that is named cannot be read.
    """
    if not isinstance(config, dict):
        return read_json(relative_to_file(str(config), file.path), f"{key} file"), ""
    start = f"{key}."
    lines = {
        name.removeprefix(start): line
        for name, line in file.lines.items()
        if name.startswith(start)
    }
    return JsonFile(file.path, config, lines), start


def _fsdp(switch: ForeignSetting, file: JsonFile, prefix: str) -> SettingSource:
    """FSDP's settings by Accelerate's names, as transformers passes them on."""
    found = SettingSource()
    stated = {}
    for key, value in file.values.items():
        setting = ForeignSetting(prefix + key, value, file.place(key))
        if (name := key.removeprefix("fsdp_")) not in TRAINER_FSDP:
            found.unknown.append(unknown(setting, TRAINER_FSDP))
        elif value is not None:
            stated[name] = setting
    second = "version" not in stated or str(stated["version"].value) == "2"
    implied = {
        key: ForeignSetting(switch.name, value, switch.place, shown(switch.value))
        for key, value in _fsdp_words(switch.value, second)
    }
    names = _FSDP_NAMES if second else {**_FSDP_NAMES, **_FSDP_1_NAMES}
    settings = {names.get(key, f"fsdp_{key}"): row for key, row in (implied | stated).items()}
    found.add(accelerate.collect(settings, file.path))
    return found


def _fsdp_words(switch: object, second: bool) -> Iterator[tuple[str, object]]:
    """What `fsdp` itself says: true, or the words that it had before transformers 5."""
    words = switch.split() if isinstance(switch, str) else switch
    words = words if isinstance(words, list) else []
    strategy = next((word for word in words if word in _STRATEGIES), "full_shard")
    yield "version", 2
    yield "reshard_after_forward", strategy == "full_shard" if second else strategy
    if "offload" in words:
        yield "cpu_offload", True
