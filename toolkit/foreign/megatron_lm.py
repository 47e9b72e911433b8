"""Arguments of Megatron-LM's `pretrain_gpt.py`: a list of them, or the script that passes them.

Names and meaning are those of core_v0.16.1. `pretrain_gpt.py` writes them; torchrun's own flags
in a script that is read count as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import megatron_flags
from toolkit.foreign import megatron_lm_rules as rules
from toolkit.foreign.base import (
    ACCUMULATION,
    ForeignSetting,
    NotCarried,
    OneOf,
    Row,
    Settings,
    SettingSource,
    ShareOfSteps,
    Stated,
    TargetKey,
    Unknown,
    as_yaml,
    changes,
    none_if_zero,
    number,
    translated,
    unknown,
)
from toolkit.foreign.megatron_flags import OPTIMIZER_KEYS, RUN_KEYS, WSD_DECAYS
from toolkit.foreign.options import read_options
from toolkit.foreign.shell_flags import read_flags
from toolkit.foreign.values import Chosen, Implied, TableTarget, value_in
from toolkit.recipe.schema import Recipe

_OPTIONS = read_options("megatron_lm", __file__)

_GIVEN = "given"
"""How a flag without a value is shown."""
_DATA = {
    "--data-path": "data.train",
    "--train-data-path": "data.train",
    "--valid-data-path": "data.validation",
}
"""Flags of several words."""


class MegatronLmTarget(TableTarget):
    """The arguments, one per line; a shell script is read as well."""

    kind = "Megatron-LM arguments"
    form = "Megatron-LM arguments (text)"
    tool = "Megatron-LM"
    defaults: ClassVar[Mapping[str, object]] = {
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "schedule.name": "linear",
        "training.precision": "fp32",
        "parallel.engine": "megatron",
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.zero.stage": 0,
        "parallel.recompute": "none",
        "evaluation.every_steps": 1000,
        "evaluation.batches": 100,
        "logging.every_steps": 100,
        ACCUMULATION: 1,
    }

    def parse(self, text: str, path: Path) -> JsonFile | None:
        """See `Target`. Raises RecipeError where the arguments are no shell words."""
        if not any(word.startswith("--") for word in text.split()):
            return None
        # argparse takes a name with either kind of dash, and the last of several.
        flags = {flag.name.replace("_", "-"): flag for flag in read_flags(text, str(path))}
        return JsonFile(path, flags, {name: flag.line for name, flag in flags.items()})

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`."""
        return {
            name: ForeignSetting(
                flag.name,
                _read(name, flag.values),
                file.place(name),
                " ".join(flag.values if name in _DATA else flag.values[:1]) or _GIVEN,
            )
            for name, flag in file.values.items()
        }

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `TableTarget`: the rows of the model, and above those, the run's own."""
        return _table()

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`. A flag of another program is no misspelt one."""
        setting = replace(setting, name=setting.name.replace("_", "-"))
        known = _table().keys()
        guess = unknown(setting, known)
        return None if setting.name in known or not guess.hint else guess

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add what `pretrain_gpt.py` derives, and what to do about switches and variables."""
        if recipe is None:
            found.stated += rules.model_defaults(settings, str(file.path))
        found.stated = [_with_advice(stated) for stated in found.stated]


TARGET = MegatronLmTarget()


def _read(name: str, words: Sequence[str]) -> Any:
    """A flag's value, true for a switch; every word of a blend."""
    if name in _DATA and len(words) > 1:
        return list(words)
    return as_yaml(words[0]) if words else True


def _with_advice(stated: Stated) -> Stated:
    at = stated.at
    if at.written == _GIVEN:
        advice = f"remove `{at.name}` at {at.place}, or change the recipe"
        return replace(stated, advice=advice)
    if "$" in at.written:
        return replace(stated, certain=False, advice=f"only the shell knows {at.written}")
    return stated


def _says(ours: str, meaning: object) -> TargetKey:
    """A flag that says one thing, whatever its value."""
    return TargetKey(ours, lambda _: meaning, None)


@cache
def _table() -> Mapping[str, Row]:
    fields = {**megatron_flags.TRANSFORMER_VALUES, **megatron_flags.GPT_VALUES}
    switches = {**megatron_flags.TRANSFORMER_SWITCHES, **megatron_flags.GPT_SWITCHES}
    return {
        **{flag: f"megatron.{name}" for name, flag in fields.items()},
        **{
            flag: _says(f"megatron.{name}", value)
            for name, (value, flag) in switches.items()
            # Not of a model, but of its layout and precision.
            if not flag.startswith(("--no-", "--moe", "--calculate-per-token-loss"))
        },
        **OPTIMIZER_KEYS,
        **RUN_KEYS,
        **_OPTIONS.rows,
        **_DEPENDENT,
        **_ONLY_READ,
    }


_ONLY_READ: Mapping[str, Row] = {
    "--lr-decay-iters": lambda setting, flags: [
        Stated("training.steps", setting.value, setting)
        if _number(flags, "--train-iters") in (None, setting.value)
        else changes("every decay ends with the run")
    ],
    "--sequence-parallel": lambda setting, flags: [
        Stated("parallel.sequence", True, setting)
        if (_number(flags, "--tensor-model-parallel-size") or 1) > 1
        else NotCarried("not in effect without tensor parallel")
    ],
    "--cp-comm-type": Chosen(
        "kernels.context",
        {word: exchange for exchange, word in megatron_flags.EXCHANGES.items()},
        NotCarried("without effect on the result"),
    ),
    "--tokenizer-model": TargetKey("data.tokenizer", str),
    **{flag: rules.sources(ours) for flag, ours in _DATA.items()},
    "--tokenizer-type": rules.tokenizer,
    # Megatron-LM's adam decouples the weight decay unless an argument says not to.
    "--optimizer": TargetKey("optimizer.name", translated("optimizer.name")),
    "--clip-grad": TargetKey("optimizer.clip_grad_norm", none_if_zero),
    "--use-distributed-optimizer": _says("parallel.zero.stage", 1),
    "--recompute-activations": _says("parallel.recompute", "selective"),
    "--checkpoint-activations": _says("parallel.recompute", "full"),  # of earlier releases
    "--use-rotary-position-embeddings": _says("megatron.position_embedding_type", "rope"),
    "--bf16": _says("training.precision", "bf16"),
    "--fp16": _says("training.precision", "fp16"),
    "--tensorboard-dir": _says("logging.tensorboard", True),
    "--split": rules.split,
    "--vocab-size": lambda setting, flags: (
        NotCarried("--padded-vocab-size decides")
        if "--padded-vocab-size" in flags
        else Stated("megatron.vocab_size", setting.value, setting),
    ),
}


def _number(flags: Settings, name: str) -> float | None:
    """The value of a flag, if present and a number."""
    return number(value_in(flags, name))


def _steps_of(samples: object, flags: Settings) -> object:
    count, batch = number(samples), _number(flags, "--global-batch-size")
    return math.ceil(count / batch) if count and batch else None


def _warmup(value: object, flags: Settings) -> object:
    """A warm-up that begins at DMT's first rate is one step shorter than one from 0."""
    steps, first, peak = (
        number(value),
        *(_number(flags, n) for n in ("--lr-warmup-init", "--lr")),
    )
    if steps and first and peak and math.isclose(first * (steps + 1), peak, rel_tol=1e-6):
        return int(steps) + 1
    return OneOf((0, 1)) if steps == 0 else steps


def _warmup_share(share: object, _: Settings) -> object:
    return None if number(share) is None else ShareOfSteps(number(share) or 0.0)


def _style(style: object, flags: Settings) -> object:
    if style != "WSD":
        return str(style)
    shape = value_in(flags, "--lr-wsd-decay-style")
    return "wsd" if shape else "wsd with an exponential decay"


def _wsd_decay(shape: object, flags: Settings) -> object:
    ours = {theirs: name for name, theirs in WSD_DECAYS.items()}
    is_wsd = value_in(flags, "--lr-decay-style") == "WSD"
    return ours.get(str(shape), str(shape)) if is_wsd else None


def _interval(value: object, flags: Settings) -> object:
    """An interval of the whole run is what a recipe calls null: only at the end."""
    whole = value is not None and value == _number(flags, "--train-iters")
    return OneOf((None, value)) if whole else value


def _recompute(granularity: object, flags: Settings) -> object:
    layers = _number(flags, "--recompute-num-layers")
    some = granularity == "full" and value_in(flags, "--recompute-method") == "block"
    return int(layers) if some and layers else granularity


def _chunks(chunk: object, flags: Settings) -> object:
    layers, stages, size = (
        _number(flags, "--num-layers"),
        _number(flags, "--pipeline-model-parallel-size"),
        number(chunk),
    )
    return int(layers // (stages * size)) if layers and stages and size else None


def _chunks_of_layout(text: object, flags: Settings) -> object:
    stages = _number(flags, "--pipeline-model-parallel-size")
    return int((str(text).count("|") + 1) // stages) if stages and text else None


_DEPENDENT: Mapping[str, Row] = {
    "--recompute-granularity": Implied("parallel.recompute", _recompute, is_number=False),
    "--train-samples": Implied("training.steps", _steps_of),
    "--lr-warmup-iters": Implied("schedule.warmup_steps", _warmup),
    "--lr-warmup-samples": Implied("schedule.warmup_steps", _steps_of),
    "--lr-warmup-fraction": Implied("schedule.warmup_steps", _warmup_share),
    "--lr-decay-style": Implied("schedule.name", _style),
    "--lr-wsd-decay-style": Implied("schedule.decay", _wsd_decay),
    "--eval-interval": Implied("evaluation.every_steps", _interval),
    "--save-interval": Implied("checkpoint.every_steps", _interval),
    "--eval-iters": Implied("evaluation.batches", lambda batches, _: batches or None),
    "--num-layers-per-virtual-pipeline-stage": Implied("parallel.virtual_pipeline", _chunks),
    "--pipeline-model-parallel-layout": Implied(
        "parallel.virtual_pipeline", _chunks_of_layout, is_number=False
    ),
}
"""Flags whose meaning depends on others."""
