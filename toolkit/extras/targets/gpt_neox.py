"""GPT-NeoX's YAML files: what `deepy.py train.py` is given, several of them read as one.

Names and defaults are those of its configs/neox_arguments.md; a name may have - for _. Sections
that it hands to DeepSpeed have the rows of DeepSpeed's table.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets import gpt_neox_model
from toolkit.extras.targets.values import (
    Chosen,
    Implied,
    JoinedFiles,
    TableTarget,
    indexed,
    malformed,
    per_replica,
    validation_share,
    value_in,
)
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import MegatronSource, Recipe
from toolkit.targets import deepspeed
from toolkit.targets.base import (
    CLIPPING,
    ONLY_MEMORY,
    ForeignSetting,
    Leftover,
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
    none_if_zero,
    precisions,
    unknown,
)
from toolkit.targets.options import read_options
from toolkit.text.dotted import leaves, nested

OPTIONS = read_options("gpt_neox", __file__)
NAMES = OPTIONS.names
_ZERO = "zero_optimization"
_SECTIONS = ("optimizer", _ZERO, "fp16", "bf16")
_OWN = frozenset(("pos_emb", "gpt_j_residual", "num_attention_heads", "train_iters", "warmup"))
"""Names by which it is recognised, as by every name with -."""


_FLOOR = changes("a linear decay goes to 0 and stops at min_lr; here it ends at min_lr")


def _decay_steps(value: object, settings: Settings) -> NotCarried:
    steps = value_in(settings, "train_iters")
    if value == steps or value_in(settings, "lr_decay_style") == "constant":
        return NotCarried("every decay ends with the run, as here")
    return changes(f"every decay ends with the run, here after {steps} steps")


def _every(value: Any, settings: Settings) -> object:
    is_log = value_in(settings, "checkpoint_scale", "linear") == "log"
    return NotCarried("checkpoints are equally far apart") if is_log else value


def _held_out(value: object, settings: Settings) -> object:
    wrong = Unknown("split", settings["split"].place, "not shares such as `969, 30, 1`")
    share = validation_share(value)
    return wrong if share is None else share


def _sources(key: str, weights: str = "") -> Rule:
    def rule(setting: ForeignSetting, settings: Settings) -> list[Result]:
        paths = setting.value if isinstance(setting.value, list) else [setting.value]
        return indexed(key, setting, paths, value_in(settings, weights) or ())

    return rule


def _precision(stated: Stated) -> Rule:
    return lambda _, __: [stated]


def _tracked(value: object, settings: Settings) -> object:
    return value if value_in(settings, "use_wandb") else NotCarried("use_wandb is not true")


KEYS: Mapping[str, Row] = {
    **OPTIONS.rows,
    "optimizer.type": Chosen(  # FusedAdam, of Apex and DeepSpeed, decouples the weight decay
        "optimizer.name",
        dict.fromkeys(("Adam", "AdamW", "adam", "cpu_adam"), "adamw"),
        changes("no {}: adamw is taken"),
    ),
    "gradient_clipping": CLIPPING,
    "clip_grad": TargetKey("optimizer.clip_grad_norm", none_if_zero, None),
    "warmup": Implied("schedule.warmup_steps", lambda share, _: ShareOfSteps(share)),
    "lr_decay_style": Chosen(
        "schedule.name",
        {name: name for name in ("linear", "cosine", "constant")},
        changes("no {} decay: linear is taken; cosine, constant and wsd exist"),
    ),
    "lr_decay_iters": Implied("", _decay_steps),
    "precision": TargetKey(
        "training.precision",
        lambda name: {"bfloat16": "bf16"}.get(name, name),
        lambda name: {"bf16": "bfloat16"}.get(name, name),
    ),
    "pipe_parallel_size": TargetKey("parallel.pipeline", lambda stages: max(1, stages)),
    "checkpoint_activations": TargetKey(
        "parallel.recompute",
        lambda on: "full" if on else "none",
        lambda recompute: recompute != "none",
    ),
    "checkpoint_factor": Implied("checkpoint.every_steps", _every, lambda steps: steps),
    "data_path": _sources("data.train"),
    "train_data_paths": _sources("data.train", "train_data_weights"),
    "valid_data_paths": _sources("data.validation", "valid_data_weights"),
    "split": Implied("data.validation_fraction", _held_out, is_number=False),
    "wandb_project": Implied("logging.wandb.project", _tracked),
    "wandb_team": Implied("logging.wandb.entity", _tracked),
    "tensorboard_dir": TargetKey("logging.tensorboard", bool, None),
}


class GptNeoxTarget(TableTarget):
    """One file, or several that state each setting once."""

    kind = "GPT-NeoX config"
    form = "a GPT-NeoX config (YAML)"
    tool = "GPT-NeoX"
    numbers = gpt_neox_model.NUMBERS
    limits: ClassVar[Mapping[str, Iterable[str]]] = {"model.init": ("random",)}
    notes = (
        "initial weights, data order and held-out documents are GPT-NeoX's own draw",
        "its warm-up begins at 0: each of its steps has the rate of DMT's step before",
        "set vocab_file (and merge_file) to the tokenizer's files on your machines",
    )
    defaults: ClassVar[Mapping[str, object]] = {
        "schedule.name": "linear",
        "schedule.warmup_steps": ShareOfSteps(0.01),
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "training.precision": "fp32",
        "evaluation.every_steps": 1000,
        "evaluation.batches": 100,
        "logging.every_steps": 100,
    }

    def score(self, values: Mapping[str, Any]) -> int:
        """See `Target`; a single name may be another tool's as well (`num_nodes`)."""
        found = sum(
            (name.replace("-", "_") in NAMES) + ("-" in name or name in _OWN) for name in values
        )
        return found if found > 1 else 0

    def join(self, files: Sequence[JsonFile]) -> JsonFile:
        """Several files as one. Raises RecipeError for a setting in two: so does GPT-NeoX."""
        plain = [_underscored(file) for file in files]
        for index, file in enumerate(plain):
            stated = {key for other in plain[:index] for key in other.values}
            if twice := sorted(stated & file.values.keys()):
                raise RecipeError(
                    [
                        file.problem(key, file.values[key], "in one of the files")
                        for key in twice
                    ]
                )
        return JoinedFiles.of(plain)

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`; those inside of DeepSpeed's sections by dotted names."""
        file = file if isinstance(file, JoinedFiles) else _underscored(file)
        inside = {key: section for key, section in file.values.items() if key in _SECTIONS}
        whole = {key: value for key, value in file.values.items() if key not in _SECTIONS}
        flat = JsonFile(file.path, dict(leaves(inside)) | whole, file.lines)
        return {
            name: ForeignSetting(name, one.value, file.place(name))
            for name, one in super().settings(flat, recipe).items()
        }

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `TableTarget`; DeepSpeed's sections have the rows of its own table."""
        switches = {
            kind: settings[name]
            for kind in ("fp16", "bf16")
            if (name := f"{kind}.enabled") in settings
        }
        rows = {
            f"{kind}.enabled": _precision(stated)
            for kind, stated in zip(switches, precisions(switches), strict=True)
        }
        scale = NotCarried("fp16 has a dynamic loss scale of DMT's own")
        return {
            **{
                name: deepspeed.KEYS.get(name, ONLY_MEMORY if name.startswith(_ZERO) else scale)
                for name in settings
                if name.partition(".")[0] in (_ZERO, "fp16", "bf16")
            },
            **rows,
            **KEYS,
        }

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`."""
        section, dot, _ = setting.name.partition(".")
        return None if dot or section in NAMES else unknown(setting, NAMES)

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add the model, the share of data that is held out, and the global batch."""
        file = file if isinstance(file, JoinedFiles) else _underscored(file)
        with malformed(found, "num_layers", file.place("num_layers")):
            gpt_neox_model.add_model(found, settings, file, recipe)
        if recipe is None and "data_path" in settings and "split" not in settings:
            at = ForeignSetting("split (default)", "969, 30, 1", str(file.path))
            found.stated.append(Stated("data.validation_fraction", 0.031, at))
        micro = settings.get("train_micro_batch_size_per_gpu")
        stated = {"train_batch_size", "gradient_accumulation_steps", "gas"} & settings.keys()
        if micro is not None and not stated:
            found.stated.append(per_replica(micro))
        floor = settings.get("min_lr")
        if floor and floor.value and value_in(settings, "lr_decay_style", "linear") == "linear":
            found.leftovers.append(Leftover(floor, _FLOOR.reason))

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """See `TableTarget`."""
        yield from gpt_neox_model.problems(recipe)
        if not all(isinstance(source, MegatronSource) for source in recipe.data.sources):
            fix = "write the data in Megatron's indexed format"
            yield Problem("data.train.kind", recipe.data.kind, "in GPT-NeoX, megatron", fix)
        if plan.layout.cp > 1:
            yield Problem("parallel.context", str(plan.layout.cp), "in GPT-NeoX, 1")
        schedule = recipe.schedule
        if schedule.name == "linear" and schedule.min_learning_rate:
            rate = str(schedule.min_learning_rate)
            allowed = "in GPT-NeoX, 0 for a linear decay, which is cut off at it"
            yield Problem("schedule.min_learning_rate", rate, allowed)

    def values(self, recipe: Recipe, plan: Plan) -> Iterator[tuple[str, object]]:
        """See `TableTarget`."""
        steps, data, layout = recipe.total_steps(), recipe.data, plan.layout
        assert steps is not None, "refused"
        yield "lr_decay_iters", steps
        yield "warmup", recipe.schedule.warmup(steps) / steps
        if layout.offload_optimizer == "none":
            yield f"{_ZERO}.cpu_offload", False
        else:
            yield f"{_ZERO}.offload_optimizer.device", layout.offload_optimizer
        if layout.offload_parameters != "none":
            yield f"{_ZERO}.offload_param.device", layout.offload_parameters
        if recipe.logging.tensorboard:
            yield "tensorboard_dir", f"runs/{recipe.name}/tensorboard"
        if (wandb := recipe.logging.wandb) is not None:
            yield "use_wandb", wandb.mode != "disabled"
            yield "wandb_project", wandb.project
        yield from gpt_neox_model.written(recipe, layout.tp).items()
        if not data.validation_sources and len(data.sources) == 1:
            yield "data_path", data.sources[0].place
            share = data.validation_fraction
            yield "split", f"{1 - share:.12g},{share:.12g},0"
            return
        for name, sources in (("train", data.sources), ("valid", data.validation_sources)):
            yield f"{name}_data_paths", [source.place for source in sources]
            if len(sources) > 1:
                yield f"{name}_data_weights", [source.weight for source in sources]

    def text(self, recipe: Recipe, values: dict[str, Any]) -> str:
        """See `TableTarget`."""
        return dump(nested(values), flow=False)


TARGET = GptNeoxTarget()


def _underscored(file: JsonFile) -> JsonFile:
    lines = {}
    for key, line in file.lines.items():
        name, dot, rest = key.partition(".")
        lines[name.replace("-", "_") + dot + rest] = line
    values = {key.replace("-", "_"): value for key, value in file.values.items()}
    return JsonFile(file.path, values, lines)
