"""A DeepSpeed `ds_config.json`. The engine's own renderer writes it (engines/deepspeed)."""

from collections.abc import Mapping
from typing import Any

from toolkit.engines.deepspeed.config import (
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAMETERS,
    OWNED,
    REQUIRED,
    ZERO,
    open_config,
    unknown_keys,
)
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.engines.deepspeed.keys import KNOWN_KEYS
from toolkit.errors import Problem
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import (
    ACCUMULATION,
    AUTO,
    NO_EFFECT,
    ONLY_MEMORY,
    ForeignSetting,
    Misspelt,
    NotCarried,
    OverContext,
    Row,
    SettingSource,
    Target,
    TargetKey,
    Unknown,
    changes,
    device,
    global_batch,
    leaves,
    none_if_zero,
    precisions,
    read_settings,
    translated,
)

_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(value: object) -> object:
    return translated("schedule.name")(_SCHEDULERS.get(str(value), value))


def _batch(value: object) -> object:
    return OverContext(value) if isinstance(value, int) else value


def _offload(value: object) -> object:
    return value if value == AUTO else ("cpu" if value else "none")


_NOT_WRITTEN: Mapping[str, Row] = {
    "scheduler.type": TargetKey("schedule.name", _schedule),
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "scheduler.params.warmup_min_lr": "",
    "scheduler.params.total_num_steps": "training.steps",
    "tensor_parallel.autotp_size": "parallel.tensor",
    "sequence_parallel_size": "parallel.context",
    f"{ZERO}.cpu_offload": TargetKey("parallel.zero.offload_optimizer", _offload),
    f"{ZERO}.cpu_offload_param": TargetKey("parallel.zero.offload_parameters", _offload),
    f"{ZERO}.cpu_offload_use_pin_memory": "",
    "wandb.enabled": "logging.wandb",
    "wandb.project": "logging.wandb.project",
    "wandb.team": "logging.wandb.entity",
    "tensorboard.enabled": "logging.tensorboard",
}
"""Settings that DMT does not write, and what a recipe calls them, if it does."""

KEYS: Mapping[str, Row] = {
    **OWNED,
    **{key: f"deepspeed.{key}" for key in REQUIRED},
    **_NOT_WRITTEN,
    "train_batch_size": TargetKey(OWNED["train_batch_size"], _batch),
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": TargetKey(OWNED["gradient_clipping"], none_if_zero),
    "optimizer.type": TargetKey(OWNED["optimizer.type"], lambda value: str(value).lower()),
    **{
        key: TargetKey(OWNED[key], device)
        for key in (f"{OFFLOAD_OPTIMIZER}.device", f"{OFFLOAD_PARAMETERS}.device")
    },
}

_WHY = {
    NotCarried("only what is printed or measured"): """
        comet comms_logger csv_monitor dump_state flops_profiler log_level memory_breakdown
        steps_per_print tensorboard timers wall_clock_breakdown wandb""",
    NotCarried("under fp16, the loss is scaled alike on every engine"): """
        fp16""",
    changes("schedule.name decides the shape of warm-up and decay"): """
        scheduler""",
    changes("gradients are reduced as fp32 means, in one way"): """
        communication_data_type data_types gradient_predivide_factor prescale_gradients
        seq_parallel_communication_data_type""",
    changes("no engine of DMT's does it"): """
        data_efficiency dataloader_drop_last expert_parallel hybrid_engine weight_quantization
        zero_optimization.zenflow zero_optimization.zero_quantized_nontrainable_weights
        zero_optimization.offload_optimizer.super_offload""",
    ONLY_MEMORY: """
        activation_checkpointing aio autotuning bf16 checkpoint compile datastates_ckpt
        disable_allgather disable_python_gc managed_gradient_accumulation optimizer pipeline
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""",
}
_REASONS = {name: why for why, names in _WHY.items() for name in names.split()}
"""Why settings without a row are not carried, by name or by the block that they are in."""

_DROPPING = frozenset(("", "aio", "data_types", "optimizer"))
"""Blocks whose unknown keys DeepSpeed drops; the others are pydantic models that forbid them,
or, as `optimizer.params`, arguments of a class."""

_PRECISIONS = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}


class DeepSpeedTarget(Target):
    """The one format in which a value may be "auto"."""

    kind = "DeepSpeed config"
    form = "a DeepSpeed config (JSON)"
    tool = "DeepSpeed"
    names = KNOWN_KEYS[""]
    who = (
        "DMT does not read this file (parallel.zero.config would name it): the recipe takes "
        "precedence",
        "HF Trainer refuses batch, accumulation, clipping, optimizer, warm-up and precision "
        "that disagree with its TrainingArguments; for the rest this file takes precedence",
    )

    def score(self, values: Mapping[str, Any]) -> int:
        """A setting that two formats have (`fp16`) is a block for DeepSpeed only."""
        blocks = ("fp16", "bf16", "optimizer")
        return super().score(values) + sum(isinstance(values.get(key), dict) for key in blocks)

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`; `recipe` says whether DMT reads this very file."""
        found = collect(file)
        found.name, found.kind, found.who = str(file.path), self.kind, self.who
        named = None if recipe is None else recipe.parallel.zero.config
        if named is not None and open_config(named).path.resolve() == file.path.resolve():
            found.winner = "refused"
            found.who = (
                'parallel.zero.config names this file: DMT fills each "auto" and refuses a '
                "value that disagrees, so nothing starts",
            )
        return found


TARGET = DeepSpeedTarget()


def collect(file: JsonFile, prefix: str = "") -> SettingSource:
    """Every setting of `file`; `prefix` is put before names, for a config inside another."""
    misspelt = {p.key: p for p in unknown_keys(file) if p.key not in _NOT_WRITTEN}
    settings = {
        key: ForeignSetting(prefix + key, value, file.place(key))
        for key, value in leaves(file.values)
        if not any(key == wrong or key.startswith(f"{wrong}.") for wrong in misspelt)
    }
    in_order = [key for key in settings if key in _PRECISIONS]
    switches = {_PRECISIONS[key]: settings.pop(key) for key in in_order}
    found = read_settings(
        settings, KEYS, lambda one: _reason(one.name.removeprefix(prefix), one.value)
    )
    for key, problem in misspelt.items():
        kind = Unknown if key in KNOWN_KEYS else Misspelt
        found.unknown.append(kind(prefix + key, file.place(key), _hint(problem)))
    found.stated += global_batch(found.stated)
    found.stated += precisions(switches)
    return found


def _reason(name: str, value: object) -> NotCarried | None:
    block = name.partition(".")[0]
    why = _REASONS.get(name) or _REASONS.get(block)
    is_off = value in (None, False, 0, "", AUTO)
    return NO_EFFECT if is_off and why and why.reason.startswith("changes") else why


def _hint(problem: Problem) -> str:
    """What was meant, or what DeepSpeed makes of an unknown key."""
    if problem.key in KNOWN_KEYS:
        return f"not {problem.allowed}"
    if problem.fix.startswith("did you"):
        return problem.fix
    dropped = problem.key.rpartition(".")[0] in _DROPPING
    return "DeepSpeed drops it silently" if dropped else "DeepSpeed refuses it"
