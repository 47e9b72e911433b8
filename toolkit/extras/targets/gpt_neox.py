"""GPT-NeoX's YAML files: what `deepy.py train.py` is given, several of them read as one.

Names and defaults are those of its configs/neox_arguments.md; a name may have - for _. Sections
that it hands to DeepSpeed have the rows of DeepSpeed's table.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets import gpt_neox_model
from toolkit.extras.targets.values import (
    ONLY_MEMORY,
    Implied,
    JoinedFiles,
    changes,
    chunk_problems,
    leaves,
    malformed,
    path_stated,
    read_each,
    read_options,
    refuse_what_is_not_expressed,
    together,
    value_in,
    without_chunks,
    without_words,
    written_rows,
)
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import MegatronSource, Recipe
from toolkit.targets import deepspeed
from toolkit.targets.base import (
    ACCUMULATION,
    ForeignSetting,
    NotCarried,
    PerReplica,
    Row,
    Rule,
    Settings,
    SettingSource,
    ShareOfSteps,
    Stated,
    Target,
    TargetKey,
    Unknown,
    as_yaml,
    global_batch,
    none_if_zero,
    number,
    precisions,
    unknown,
)

NAMES, _NOT_CARRIED = read_options(Path(__file__).with_name("gpt_neox_options.txt"))
_ZERO = "zero_optimization"
_SECTIONS = ("optimizer", _ZERO, "fp16", "bf16")
_OWN = frozenset(("pos_emb", "gpt_j_residual", "num_attention_heads", "train_iters", "warmup"))
"""Names by which it is recognised, as by every name with -."""


_ADAMS = dict.fromkeys(("Adam", "AdamW", "adam", "cpu_adam"), "adamw")
"""FusedAdam, of Apex and DeepSpeed, decouples the weight decay."""


def _optimizer(value: object, _: Settings) -> object:
    return _ADAMS.get(str(value)) or changes(f"no {value}: adamw is taken")


def _style(value: object, _: Settings) -> object:
    if value in ("linear", "cosine", "constant"):
        return value
    return changes(f"no {value} decay: linear is taken; cosine, constant and wsd exist")


def _decay_steps(value: object, settings: Settings) -> NotCarried:
    steps = value_in(settings, "train_iters")
    if value == steps or value_in(settings, "lr_decay_style") == "constant":
        return NotCarried("every decay ends with the run, as here")
    return changes(f"every decay ends with the run, here after {steps} steps")


def _every(value: Any, settings: Settings) -> object:
    is_log = value_in(settings, "checkpoint_scale", "linear") == "log"
    return NotCarried("checkpoints are equally far apart") if is_log else value


def _held_out(value: object, settings: Settings) -> object:
    """`969, 30, 1` are shares of training, validation and test; no run tests."""
    shares = [number(as_yaml(share.strip())) for share in str(value).split(",")]
    if None in shares:
        hint = "not shares such as `969, 30, 1`"
        return Unknown("split", settings["split"].place, hint)
    total = sum(share or 0 for share in shares)
    return round(1 - (shares[0] or 0) / total, 12)


def _sources(key: str, weights: str) -> Rule:
    def rule(setting: ForeignSetting, settings: Settings) -> list[Stated]:
        paths = setting.value if isinstance(setting.value, list) else [setting.value]
        if len(paths) == 1:
            return [path_stated(f"{key}.prefix", paths[0], setting)]
        shares = value_in(settings, weights) or [1] * len(paths)
        sources = [
            {"kind": "megatron", "prefix": path, "weight": float(share)}
            for path, share in zip(paths, shares, strict=False)
        ]
        advice = "compare the sources one by one"
        return [Stated(key, sources, setting, certain=False, advice=advice)]

    return rule


def _tracked(value: object, settings: Settings) -> object:
    return value if value_in(settings, "use_wandb") else NotCarried("use_wandb is not true")


KEYS: Mapping[str, Row] = {
    **dict.fromkeys(NAMES & {*gpt_neox_model.NAMES}, together),
    **_NOT_CARRIED,
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "batch_size": TargetKey("training.micro_batch_size", write=None),
    "train_batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": ACCUMULATION,
    "gas": TargetKey(ACCUMULATION, write=None),
    "seq_length": "training.sequence_length",
    "train_iters": "training.steps",
    "train_epochs": TargetKey("training.epochs", write=None),
    "seed": "training.seed",
    "optimizer.type": Implied("optimizer.name", _optimizer),
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": TargetKey("optimizer.weight_decay", write=None),
    "weight_decay": "optimizer.weight_decay",
    "gradient_clipping": TargetKey(
        "optimizer.clip_grad_norm", none_if_zero, lambda norm: norm or 0.0
    ),
    "clip_grad": TargetKey("optimizer.clip_grad_norm", none_if_zero, None),
    "min_lr": "schedule.min_learning_rate",
    "warmup": Implied("schedule.warmup_steps", lambda share, _: ShareOfSteps(share)),
    "lr_decay_style": Implied("schedule.name", _style),
    "lr_decay_iters": Implied("", _decay_steps),
    "precision": TargetKey(
        "training.precision",
        lambda name: {"bfloat16": "bf16"}.get(name, name),
        lambda name: {"bf16": "bfloat16"}.get(name, name),
    ),
    f"{_ZERO}.stage": "parallel.zero.stage",
    "zero_stage": TargetKey("parallel.zero.stage", write=None),
    "model_parallel_size": "parallel.tensor",
    "pipe_parallel_size": TargetKey("parallel.pipeline", lambda stages: max(1, stages)),
    "sequence_parallel": "parallel.sequence",
    "checkpoint_activations": TargetKey(
        "parallel.recompute",
        lambda on: "full" if on else "none",
        lambda way: way != "none",
    ),
    "checkpoint_factor": Implied("checkpoint.every_steps", _every),
    "keep_last_n_checkpoints": "checkpoint.keep",
    "eval_interval": "evaluation.every_steps",
    "eval_iters": "evaluation.batches",
    "log_interval": "logging.every_steps",
    "num_nodes": TargetKey("cluster.nodes", write=None),
    "num_gpus": TargetKey("cluster.gpus_per_node", write=None),
    "data_path": _sources("data.train", ""),
    "train_data_paths": _sources("data.train", "train_data_weights"),
    "valid_data_paths": _sources("data.validation", "valid_data_weights"),
    **dict.fromkeys(("train_data_weights", "valid_data_weights", "checkpoint_scale"), together),
    "split": Implied("data.validation_fraction", _held_out, is_number=False),
    "use_wandb": TargetKey("logging.wandb", write=None),
    "wandb_project": Implied("logging.wandb.project", _tracked),
    "wandb_team": Implied("logging.wandb.entity", _tracked),
    "tensorboard_dir": TargetKey("logging.tensorboard", bool, None),
}


class GptNeoxTarget(Target):
    """One file, or several that state each setting once."""

    kind = "GPT-NeoX config"
    form = "a GPT-NeoX config (YAML)"
    tool = "GPT-NeoX"
    rendered = True
    who = (
        "DMT does not read this file (`dmt render --to gpt-neox` writes one): the recipe takes "
        "precedence",
        "GPT-NeoX's deepy.py reads only its files: there they take precedence",
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

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`."""
        file = file if isinstance(file, JoinedFiles) else _underscored(file)
        found = SettingSource(str(file.path), self.kind, self.who)
        inside = {key: section for key, section in file.values.items() if key in _SECTIONS}
        flat = dict(leaves(inside)) | {
            key: value for key, value in file.values.items() if key not in _SECTIONS
        }
        settings = {
            name: ForeignSetting(name, value, file.place(name))
            for name, value in flat.items()
            if value is not None
        }
        settings, found.unknown = without_words(settings, KEYS, gpt_neox_model.NUMBERS)
        switches = {
            kind: settings.pop(name)
            for kind in ("fp16", "bf16")
            if (name := f"{kind}.enabled") in settings
        }
        found.add(read_each(settings, {**_of_deepspeed(settings), **KEYS}, _judge))
        found.stated += precisions(switches)
        with malformed(found, "num_layers", file.place("num_layers")):
            gpt_neox_model.add_model(found, settings, file, recipe)
        if recipe is None and "data_path" in settings and "split" not in settings:
            at = ForeignSetting("split (default)", "969, 30, 1", str(file.path))
            found.stated.append(Stated("data.validation_fraction", 0.031, at))
        found.stated += global_batch(found.stated) or _batch(settings)
        return found

    def adapt(self, recipe: Recipe) -> Recipe:
        """See `Target`."""
        return without_chunks(recipe)

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        limits = {
            "optimizer.name": ("adamw",),
            "schedule.name": ("cosine", "linear", "constant"),
            "model.init": ("random",),
        }
        more = [*gpt_neox_model.problems(recipe), *_problems(recipe, plan)]
        refuse_what_is_not_expressed("GPT-NeoX", recipe, KEYS, limits, more)
        flat = dict(written_rows(KEYS, recipe, plan)) | dict(_run(recipe))
        values: dict[str, Any] = {key: value for key, value in flat.items() if "." not in key}
        values["optimizer"] = {
            "type": "Adam",
            "params": {
                name: flat[f"optimizer.params.{name}"] for name in ("lr", "betas", "eps")
            },
        }
        layout = plan.layout
        values[_ZERO] = {"stage": layout.zero_stage}
        if layout.offload_optimizer == "none":
            values[_ZERO]["cpu_offload"] = False
        for name, device in (
            ("optimizer", layout.offload_optimizer),
            ("param", layout.offload_parameters),
        ):
            if device != "none":
                values[_ZERO][f"offload_{name}"] = {"device": device}
        notes = (
            "initial weights, data order and held-out documents are GPT-NeoX's own draw",
            "its warm-up begins at 0: each of its steps has the rate of DMT's step before",
            "set vocab_file (and merge_file) to the tokenizer's files on your machines",
        )
        return dump(values | gpt_neox_model.written(recipe, plan.layout.tp), flow=False), notes


TARGET = GptNeoxTarget()


def _underscored(file: JsonFile) -> JsonFile:
    lines = {}
    for key, line in file.lines.items():
        name, dot, rest = key.partition(".")
        lines[name.replace("-", "_") + dot + rest] = line
    values = {key.replace("-", "_"): value for key, value in file.values.items()}
    return JsonFile(file.path, values, lines)


def _judge(setting: ForeignSetting) -> Unknown | None:
    section, dot, _ = setting.name.partition(".")
    return None if dot or section in NAMES else unknown(setting, NAMES)


def _of_deepspeed(settings: Settings) -> dict[str, Row]:
    """Rows of the settings in DeepSpeed's sections."""
    scale = NotCarried("fp16 has a dynamic loss scale of DMT's own")
    return {
        name: deepspeed.KEYS.get(name, ONLY_MEMORY if name.startswith(_ZERO) else scale)
        for name in settings
        if name.partition(".")[0] in (_ZERO, "fp16", "bf16")
    }


def _batch(settings: Settings) -> list[Stated]:
    """Without accumulation and a global batch, that is one micro batch per replica."""
    micro = settings.get("train_micro_batch_size_per_gpu")
    if micro is None or "train_batch_size" in settings:
        return []
    text = f"{micro.written} · dp"
    at = ForeignSetting(f"{micro.name} · dp", micro.value, micro.place, text)
    return [Stated("training.global_batch_size", PerReplica(micro.value), at)]


def _problems(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    if not all(isinstance(source, MegatronSource) for source in recipe.data.sources):
        fix = "write the data in Megatron's indexed format"
        yield Problem("data.train.kind", recipe.data.kind, "in GPT-NeoX, megatron", fix)
    yield from chunk_problems("GPT-NeoX", plan)
    if plan.layout.cp > 1:
        yield Problem("parallel.context", str(plan.layout.cp), "in GPT-NeoX, 1", "set it to 1")


def _run(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Settings that are not one value of the recipe."""
    steps, data = recipe.total_steps(), recipe.data
    assert steps is not None, "refused"
    yield "lr_decay_style", recipe.schedule.name
    yield "lr_decay_iters", steps
    yield "warmup", recipe.schedule.warmup(steps) / steps
    if recipe.checkpoint.every_steps is not None:
        yield "checkpoint_factor", recipe.checkpoint.every_steps
    if recipe.logging.tensorboard:
        yield "tensorboard_dir", f"runs/{recipe.name}/tensorboard"
    if (wandb := recipe.logging.wandb) is not None:
        yield "use_wandb", wandb.mode != "disabled"
        yield "wandb_project", wandb.project
    if not data.validation_sources and len(data.sources) == 1:
        yield "data_path", data.sources[0].place
        share = data.validation_fraction
        yield "split", f"{1 - share:.12g},{share:.12g},0"
        return
    for name, sources in (("train", data.sources), ("valid", data.validation_sources)):
        yield f"{name}_data_paths", [source.place for source in sources]
        if len(sources) > 1:
            yield f"{name}_data_weights", [source.weight for source in sources]
