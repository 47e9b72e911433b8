"""Settings of Hugging Face's `TrainingArguments` that depend on others, and its engines, for
the Trainer's own files and those of the tools around it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.foreign import accelerate, deepspeed
from toolkit.foreign.base import (
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
    TargetKey,
    Unknown,
    changes,
    number,
    precisions,
    relative_to_file,
    shown,
    unknown,
)
from toolkit.foreign.trainer_keys import (
    TRAINER_FSDP,
)
from toolkit.foreign.values import is_on, value_in

BLOCKS = ("deepspeed", "fsdp", "fsdp_config")
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP_NAMES = {"cpu_offload": "fsdp_offload_params"}
_FSDP_1_NAMES = {"reshard_after_forward": "fsdp_sharding_strategy"}
"""Where Accelerate's names are not transformers' with `fsdp_` before them."""
SCHEDULE_OPTIONS = {"min_lr": "schedule.min_learning_rate"} | {
    name: f"schedule.plateau.{name}" for name in ("factor", "patience", "threshold", "cooldown")
}
"""Of `lr_scheduler_kwargs`."""
REPORTS = ("wandb", "tensorboard", "mlflow", "trackio")


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
    """Passes over the data, unless steps are stated; silently if the tool implies both."""
    if (number(value_in(settings, "max_steps")) or 0) > 0:
        return [] if setting.text else [NotCarried("not in effect next to max_steps")]
    advice = "the recipe gives the length in steps or tokens: compare what the runs did"
    return [Stated("training.epochs", setting.value, setting, advice=advice)]


@_numeric
def _warmup(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Steps, or a share of them where below 1; a number of steps decides over a ratio."""
    value, is_ratio = setting.value, setting.name == "warmup_ratio"
    other = "warmup_steps" if is_ratio else "warmup_ratio"
    if is_on(settings, other) and (is_ratio or not value):
        return [NotCarried(f"not in effect next to {other}")]
    if is_ratio and not value and other in settings:
        return [NO_EFFECT]
    if is_ratio and not 0 <= value < 1:
        return [Unknown(setting.name, setting.place, "not a share of the steps")]
    stated = ShareOfSteps(value) if is_ratio or 0 < value < 1 else int(value)
    return [Stated("schedule.warmup_steps", stated, setting)]


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
        for tool in REPORTS
        if tool in tools or "all" in tools
    ]
    other = [str(tool) for tool in tools if tool not in (*REPORTS, "all", "none")]
    return known + [
        NotCarried(f"no {tool}; logging has {', '.join(REPORTS)}") for tool in other
    ]


def following(ours: str, meaning: Callable[[Any], object] = lambda value: value) -> Rule:
    """A row of what depends on validations, which a recipe has at numbers of steps only."""

    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        if not setting.value:
            return [NO_EFFECT]
        names = ("eval_strategy", "save_strategy")
        strategies = [settings[name].value for name in names if name in settings]
        others = any(strategy != "steps" for strategy in strategies)
        every: float | None = 500 if "eval_strategy" in settings else 0
        if "eval_steps" in settings:
            every = number(settings["eval_steps"].value)
        if others or (every or 0) < 1:
            why = f"{ours} needs evaluation.every_steps, a number of steps"
            exported = ours.startswith("checkpoint.")  # which training does not depend on
            return [NotCarried(why) if exported else changes(why)]
        return [Stated(ours, meaning(setting.value), setting)]

    return rule


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
    **_interval("logging", "logging.every_steps"),
    **_interval("eval", "evaluation.every_steps"),
    **_interval("save", "checkpoint.every_steps"),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "use_cpu": lambda setting, _: [
        Stated("cluster.gpu", "cpu", setting) if setting.value else NO_EFFECT
    ],
    "report_to": _reports,
    "load_best_model_at_end": following("checkpoint.keep_best", lambda _: 1),
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
