"""torchtitan's job configs: the TOML of its `train_configs`, and `--section.key value`.

Names and defaults are those of its JobConfig (torchtitan 0.1 and 0.2). Its later configs are
Python code, which is not run: they are refused.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem
from toolkit.extras.targets import torchtitan_file
from toolkit.extras.targets.torchtitan_file import NAMES, OPTIONS
from toolkit.extras.targets.values import (
    Chosen,
    Implied,
    TableTarget,
    malformed,
    path_stated,
    per_replica,
    value_in,
)
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import HfSource, Recipe
from toolkit.targets.base import (
    CLIPPING,
    ForeignSetting,
    Leftover,
    NotCarried,
    PerReplica,
    Result,
    Row,
    Rule,
    Settings,
    SettingSource,
    Stated,
    Unknown,
    changes,
    unknown,
)

MODELS: Mapping[str, str | Mapping[str, object]] = json.loads(
    Path(__file__).with_name("torchtitan_models.json").read_text(encoding="utf-8")
)
"""`model.name` and `model.flavor` → the same model on the hub, or its config."""
_DATASETS = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
    "c4_test": ("tests/assets/c4_test", None, "train"),
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
_SHARDED = NotCarried(
    "with tensor, pipeline or expert parallel, the plan decides what data-parallel ranks shard"
)
_KEPT = NotCarried(
    "memory and speed only: which products are kept; parallel.recompute is left to the plan"
)
_NORMS = changes("torchtitan decays the weights of norms, too; a recipe never does")


def _model(setting: ForeignSetting, settings: Settings) -> list[Result]:
    name = value_in(settings, "model.name", "llama3")
    flavor = value_in(settings, "model.flavor", "debugmodel")
    model = MODELS.get(f"{name} {flavor}")
    if model is None:
        hint = f"{name} {flavor} is none of {', '.join(MODELS)}"
        return [Unknown(setting.name, setting.place, hint)]
    stated: list[Result] = []
    if isinstance(model, str):
        stated.append(Stated("model.hub", model, setting))
    else:
        positions = value_in(settings, "training.seq_len", 2048)
        shape = {**model, "max_position_embeddings": positions}
        stated += [
            Stated(f"model.config.{key}", value, setting) for key, value in shape.items()
        ]
    if not value_in(settings, "checkpoint.initial_load_path"):
        stated.append(Stated("model.init", "random", setting))
    return stated


def _tokenizer(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """The folder's name is that of the model on the hub, where a script downloaded it."""
    name, flavor = (value_in(settings, f"model.{key}", "") for key in ("name", "flavor"))
    model = MODELS.get(f"{name} {flavor}")
    if isinstance(model, str):
        return [Stated("data.tokenizer", model, setting)]
    return [path_stated("data.tokenizer", setting.value, setting)]


def _initial(_: object, settings: Settings) -> object:
    if value_in(settings, "checkpoint.initial_load_in_hf"):
        return "pretrained"
    return changes("`dmt checkpoint import RECIPE FOLDER` reads DCP checkpoints")


def _dataset(key: str, enabled: str = "") -> Rule:
    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        if enabled and not value_in(settings, enabled, False):
            return [NotCarried(f"{enabled} is not true")]
        path, name, split = _DATASETS.get(setting.value, (None, None, "train"))
        path = value_in(settings, f"{setting.name.partition('.')[0]}.dataset_path") or path
        if path is None:
            return [changes("state the data in data.train: torchtitan's code registers it")]
        values = {"kind": "hf", "path": path, "name": name, "split": split}
        return [
            Stated(f"{key}.{field}", value, setting)
            for field, value in values.items()
            if value is not None and not (field == "split" and split == "train")
        ]

    return rule


def _is_parallel(settings: Settings) -> bool:
    degrees = ("tensor", "pipeline", "expert")
    return any(
        value_in(settings, f"parallelism.{name}_parallel_degree", 1) != 1 for name in degrees
    )


def _shards(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """FSDP2 of the transformers model, which here has no tensor and pipeline parallel."""
    if _is_parallel(settings):
        return [_SHARDED]
    if setting.value == 1:
        if value_in(settings, "parallelism.data_parallel_replicate_degree", 1) == 1:
            return []
        return [Stated("parallel.engine", "ddp", setting)]
    never = value_in(settings, "parallelism.fsdp_reshard_after_forward") == "never"
    return [
        Stated("parallel.engine", "fsdp", setting),
        Stated("parallel.zero.stage", 2 if never else 3, setting),
    ]


def _replicas(value: object, settings: Settings) -> object:
    shards = value_in(settings, "parallelism.data_parallel_shard_degree", -1)
    return None if shards == 1 or _is_parallel(settings) else value


def _converters(setting: ForeignSetting, settings: Settings) -> list[Result]:
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    results: list[Result] = []
    for word in filter(None, words):
        if str(word).endswith("float8"):
            names = ("float8.recipe_name", "quantize.linear.float8.recipe_name")
            scaling = next((v for n in names if (v := value_in(settings, n))), "tensorwise")
            results.append(Stated("fp8.recipe", scaling, setting))
        else:
            results.append(changes(f"no converter {word}: products are in 16 bits"))
    return results


def _checkpoints(value: object, settings: Settings) -> object:
    return value if value_in(settings, "checkpoint.enable", False) else None


def _evaluation(value: Any, settings: Settings) -> object:
    if not value_in(settings, "validation.enable", False):
        return NotCarried("validation.enable is not true")
    return value if value > 0 else NotCarried("evaluation.batches is a number")


def _kept(value: Any, _: Settings) -> object:
    return value or NotCarried("checkpoint.keep is a number: 0 keeps all")


def _schedule(settings: Settings) -> Iterator[Stated]:
    """The learning rate: theirs is constant between warm-up and a decay of its own length."""
    prefix = "lr_scheduler"
    lr = settings.get("optimizer.lr")
    least = settings.get(f"{prefix}.min_lr_factor")
    if least is not None:
        peak = lr.value if lr else TARGET.defaults["optimizer.learning_rate"]
        minimum = float(f"{least.value * peak:.12g}")
        yield Stated("schedule.min_learning_rate", minimum, least)
    steps = value_in(settings, "training.steps", 10000)
    warmup = value_in(settings, f"{prefix}.warmup_steps", 200)
    ratio, kind = settings.get(f"{prefix}.decay_ratio"), settings.get(f"{prefix}.decay_type")
    shape = _DECAYS.get(kind.value if kind else "linear")
    at = ratio or kind
    if at is None or shape is None:
        return
    if ratio is None and shape != "1-sqrt":
        yield Stated("schedule.name", shape, at)
        return
    whole = steps - warmup
    yield Stated("schedule.name", "wsd", at)
    yield Stated("schedule.decay", shape, at)
    decay = min(whole, round(steps * ratio.value)) if ratio else whole
    yield Stated("schedule.decay_steps", decay, at)


KEYS: Mapping[str, Row] = {
    **OPTIONS.rows,
    "model.flavor": _model,
    "model.hf_assets_path": _tokenizer,
    "model.converters": _converters,
    "optimizer.name": Chosen(
        "optimizer.name",
        {"AdamW": "adamw"},
        changes("optimizer.name has other settings for it; adamw is taken"),
    ),
    "training.dataset": _dataset("data.train"),
    "training.max_norm": CLIPPING,
    "training.mixed_precision_param": Chosen(
        "training.precision",
        {"bfloat16": "bf16", "float32": "fp32"},
        changes("no {}: training.precision is taken"),
    ),
    "training.enable_cpu_offload": Implied(
        "parallel.zero.offload_optimizer", lambda on, _: "cpu" if on else "none"
    ),
    "parallelism.data_parallel_shard_degree": _shards,
    "parallelism.data_parallel_replicate_degree": Implied("parallel.replicate", _replicas),
    "activation_checkpoint.mode": Implied(
        "parallel.recompute", lambda mode, _: mode if mode in ("none", "full") else _KEPT
    ),
    "compile.enable": Implied(
        "kernels.compile", lambda on, _: "layers" if on else "none", lambda it: it == "layers"
    ),
    "checkpoint.interval": Implied("checkpoint.every_steps", _checkpoints, lambda it: it),
    "checkpoint.async_mode": Implied(
        "checkpoint.asynchronous",
        lambda mode, _: mode != "disabled",
        lambda on: "async" if on else "disabled",
    ),
    "checkpoint.keep_latest_k": Implied("checkpoint.keep", _kept, lambda it: it),
    "checkpoint.initial_load_path": Implied("model.init", _initial),
    "validation.dataset": _dataset("data.validation", "validation.enable"),
    "validation.freq": Implied("evaluation.every_steps", _evaluation),
    "validation.steps": Implied("evaluation.batches", _evaluation),
}


class TorchtitanTarget(TableTarget):
    """TOML files and overrides, which are read as one; overrides take precedence."""

    kind = "torchtitan config"
    form = "a torchtitan config (TOML, or `--section.key value`)"
    tool = "torchtitan"
    numbers = (
        "lr_scheduler.decay_ratio",
        "lr_scheduler.min_lr_factor",
        "training.global_batch_size",
    )
    limits: ClassVar[Mapping[str, Iterable[str]]] = {
        "schedule.name": ("cosine", "linear", "wsd"),
        "model.init": ("random", "pretrained"),
    }
    notes = (
        "initial weights and data order are torchtitan's own, not DMT's",
        "torchtitan decays the weights of norms, too; DMT never does",
        "set model.hf_assets_path to the tokenizer's folder on your machines",
    )
    defaults: ClassVar[Mapping[str, object]] = {
        "optimizer.learning_rate": 8e-4,
        "schedule.name": "linear",
        "schedule.warmup_steps": 200,
        "training.steps": 10000,
        "training.sequence_length": 2048,
        "training.micro_batch_size": 8,
        "training.global_batch_size": PerReplica(8),
    }

    def score(self, values: Mapping[str, Any]) -> int:
        """It has no JSON and no YAML."""
        return 0

    parse = staticmethod(torchtitan_file.parse)
    join = staticmethod(torchtitan_file.join)

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`; by their later names."""
        stated = super().settings(file, recipe)
        return {OPTIONS.old.get(name, name): setting for name, setting in stated.items()}

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `TableTarget`."""
        return KEYS

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`."""
        name = OPTIONS.old.get(setting.name, setting.name)
        if name in NAMES or name.startswith("quantize."):
            return None
        section = name.rpartition(".")[0]
        near = {known.rpartition(".")[2] for known in NAMES if known.startswith(f"{section}.")}
        return unknown(setting, near)

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add the learning rate, the global batch and the decay of norms."""
        with malformed(found, "lr_scheduler", str(file.path)):
            found.stated += _schedule(settings)
        whole, micro = (
            settings.get(f"training.{name}_batch_size") for name in ("global", "local")
        )
        if whole is not None and whole.value != -1:
            found.stated.append(Stated("training.global_batch_size", whole.value, whole))
        elif micro is not None:
            found.stated.append(per_replica(micro))
        if (decay := settings.get("optimizer.weight_decay")) is None or decay.value:
            name = "optimizer.weight_decay (default)"
            at = decay or ForeignSetting(name, 0.1, str(file.path))
            found.leftovers.append(Leftover(at, _NORMS.reason))

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """See `TableTarget`."""
        if _flavor(recipe) is None:
            model = str(recipe.model.hub or (recipe.model.config or {}).get("model_type"))
            yield Problem("model", model, f"in torchtitan, one of {', '.join(MODELS)}")
        if _dataset_of(recipe.data.train) is None:
            known = ", ".join(path for path, *_ in _DATASETS.values())
            yield Problem("data.train", recipe.data.kind, f"in torchtitan, one of {known}")

    def values(self, recipe: Recipe, plan: Plan) -> Iterator[tuple[str, object]]:
        """See `TableTarget`."""
        layout, schedule, steps = plan.layout, recipe.schedule, recipe.total_steps()
        name, _, flavor = (_flavor(recipe) or "").partition(" ")
        assert steps is not None and flavor, "refused by `problems`"
        yield "model.name", name
        yield "model.flavor", flavor
        model = recipe.data.tokenizer
        is_hub = model == recipe.model.hub
        yield "model.hf_assets_path", f"./assets/hf/{Path(model).name}" if is_hub else model
        yield "training.global_batch_size", recipe.training.global_batch_size
        yield "training.dataset", _dataset_of(recipe.data.train)
        least = schedule.min_learning_rate / recipe.optimizer.learning_rate
        yield "lr_scheduler.min_lr_factor", float(f"{least:.12g}")
        if schedule.name == "wsd":
            theirs = {ours: name for name, ours in _DECAYS.items()}
            yield "lr_scheduler.decay_type", theirs[schedule.decay]
            yield "lr_scheduler.decay_ratio", (schedule.decay_steps or 0) / steps
        else:
            yield "lr_scheduler.decay_type", schedule.name
        replicas = layout.dp if layout.zero_stage == 0 else layout.replicate
        prefix = "parallelism"
        yield f"{prefix}.data_parallel_replicate_degree", replicas
        yield f"{prefix}.data_parallel_shard_degree", -1 if layout.zero_stage else 1
        if layout.zero_stage in (1, 2):
            yield f"{prefix}.fsdp_reshard_after_forward", "never"
        mode = layout.recompute
        yield "activation_checkpoint.mode", mode if mode in ("none", "full") else "selective"
        yield "checkpoint.enable", recipe.checkpoint.every_steps is not None
        if recipe.model.init == "pretrained":
            yield "checkpoint.initial_load_path", recipe.model.hub
            yield "checkpoint.initial_load_in_hf", True
        if (fp8 := recipe.features.get("fp8")) is not None:
            yield "model.converters", ["float8"]
            yield "float8.recipe_name", str(fp8)
        if recipe.evaluation.every_steps and recipe.data.validation is not None:
            yield "validation.enable", True
            yield "validation.freq", recipe.evaluation.every_steps
            yield "validation.steps", recipe.evaluation.batches
            yield "validation.dataset", _dataset_of(recipe.data.validation)

    def text(self, recipe: Recipe, values: dict[str, Any]) -> str:
        """See `TableTarget`."""
        by_section: dict[str, list[str]] = {}
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            by_section.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
        parts = ("\n".join((f"[{name}]", *rows)) for name, rows in by_section.items())
        return "\n\n".join(parts) + "\n"


TARGET = TorchtitanTarget()


def _flavor(recipe: Recipe) -> str | None:
    config = recipe.model.config or {}
    for pair, model in MODELS.items():
        if model == recipe.model.hub or (
            isinstance(model, Mapping) and all(config.get(k) == v for k, v in model.items())
        ):
            return pair
    return None


def _dataset_of(source: object) -> str | None:
    if not isinstance(source, HfSource):
        return None
    stated = source.path, source.name, source.split
    return next((name for name, row in _DATASETS.items() if row == stated), None)
