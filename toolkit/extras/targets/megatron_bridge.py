"""Megatron-Bridge (NeMo): overrides `key.path=value` of one of its recipes, as words or YAML.

The recipe's own values come from its Python code: of the recipes in `RECIPES` they are known
(src/megatron/bridge/recipes of 0.4). Names are those of ConfigContainer and its sections.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets.megatron_lm import megatron_options
from toolkit.extras.targets.values import (
    ONLY_MEMORY,
    Implied,
    JoinedFiles,
    changes,
    leaves,
    path_stated,
    read_each,
    refuse_what_is_not_expressed,
    together,
    unless_off,
    value_in,
    without_words,
    written_rows,
)
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import MegatronSource, Recipe
from toolkit.targets.base import (
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Settings,
    SettingSource,
    Stated,
    Target,
    TargetKey,
    Unknown,
    as_yaml,
    none_if_zero,
    read_settings,
    shown,
    translated,
    unknown,
)

_GROUPS = """
    model train optimizer scheduler dataset logger tokenizer checkpoint dist ddp rng
    profiling peft comm_overlap mixed_precision inprocess_restart validation
"""
SECTIONS = frozenset(_GROUPS.split())
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.\w+)*)=(.*)", re.DOTALL)

_LLAMA_3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip
_LONG = {"train.train_iters": 1168251, "train.global_batch_size": 512,
         "train.micro_batch_size": 1, "scheduler.lr_warmup_iters": 2000,
         "validation.eval_interval": 2000, "dataset.seq_length": 8192}  # fmt: skip
RECIPES: Mapping[str, tuple[str | Mapping[str, object], Mapping[str, object]]] = {
    "llama32_1b": ("meta-llama/Llama-3.2-1B", _LONG),
    "llama32_3b": ("meta-llama/Llama-3.2-3B", _LONG),
    "llama3_8b": (_LLAMA_3_8B, {**_LONG, "model.context_parallel_size": 2}),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", {}),
}
"""Beginning of a recipe's name → its model, on the hub or by config, and its own values."""
_COMMON: Mapping[str, object] = {
    "train.train_iters": 300000, "train.global_batch_size": 32, "train.micro_batch_size": 2,
    "optimizer.lr": 3e-4, "optimizer.min_lr": 3e-5, "optimizer.adam_eps": 1e-5,
    "scheduler.lr_warmup_iters": 500, "validation.eval_interval": 500,
    "validation.eval_iters": 32, "checkpoint.save_interval": 500, "dataset.seq_length": 4096,
}  # fmt: skip
"""What all pretraining recipes begin with (recipes/common.py, `_pretrain_common`)."""
_SHORT = {
    "ms": "train.train_iters", "max_steps": "train.train_iters",
    "gb": "train.global_batch_size", "global_batch_size": "train.global_batch_size",
    "mb": "train.micro_batch_size", "micro_batch_size": "train.micro_batch_size",
    "sl": "dataset.seq_length", "seq_length": "dataset.seq_length", "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr", "warmup_iters": "scheduler.lr_warmup_iters",
    "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size", "ep": "model.expert_model_parallel_size",
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size", "save_dir": "checkpoint.save",
    "nodes": "nodes", "gpus_per_node": "gpus_per_node", "recipe": "recipe", "model": "recipe",
    "mode": "mode", "dataset": "dataset", "nnodes": "nodes", "nproc_per_node": "gpus_per_node",
    "account": "launcher", "partition": "launcher", "container_image": "launcher",
}  # fmt: skip
"""Options of run_recipe.py and of torchrun."""
_RENAMED = {
    "train.eval_interval": "validation.eval_interval",
    "train.eval_iters": "validation.eval_iters",
    "model.seq_length": "dataset.seq_length",
    "dataset.sequence_length": "dataset.seq_length",
}
"""Names of earlier versions, and two of one setting."""


def _value(text: str) -> Any:
    """As Hydra reads it: a list in brackets, or one value."""
    if text.startswith("[") and text.endswith("]"):
        return [as_yaml(part.strip().strip("'\"")) for part in text[1:-1].split(",")]
    return as_yaml(text)


def _of_its_recipe(settings: Settings, file: JsonFile) -> dict[str, ForeignSetting]:
    """What the recipe states below the overrides. Raises RecipeError where it is unknown."""
    named = str(value_in(settings, "recipe", file.path.stem)).replace("_moe_", "_")
    kinds = [kind for kind in RECIPES if named.startswith(kind)]
    if (
        not kinds
        or "sft" in named
        or "peft" in named
        or value_in(settings, "mode", "pretrain") != "pretrain"
    ):
        allowed = ", ".join(f"{kind}_pretrain_config" for kind in RECIPES)
        fix = "name the recipe by `--recipe`, or state its values in a recipe of DMT's"
        raise RecipeError([Problem("recipe", named, allowed, fix, str(file.path))])
    model, own = RECIPES[max(kinds, key=len)]
    values = {**_COMMON, **own}
    at = str(file.path)
    return {
        name: ForeignSetting(f"{name} ({max(kinds, key=len)})", value, at)
        for name, value in values.items()
        if name not in settings
    } | {"recipe": ForeignSetting("recipe", model, at, named)}


def _judge(setting: ForeignSetting) -> Unknown | None:
    """`model.` has megatron-core's fields, most of which are options of Megatron-LM."""
    section, _, key = setting.name.partition(".")
    options = {option.removeprefix("--").replace("-", "_") for option in megatron_options()}
    names = {row.rpartition(".")[2] for row in KEYS if row.startswith(f"{section}.")}
    if key in options or section not in ("model", "train", "optimizer", "scheduler", "logger"):
        return None
    guess = unknown(setting, names | options)
    return guess if guess.hint else None


def _recipe(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Its model, without what the overrides state themselves."""
    model = setting.value
    if isinstance(model, str) and "/" not in model:  # only the name: compared with a recipe
        return [NotCarried("its values are those of Megatron-Bridge's code")]
    config = {"model.hub": model, "data.tokenizer": model}
    if not isinstance(model, str):
        config = {f"model.config.{key}": value for key, value in model.items()}
    overridden = {ours for theirs, ours in _SIZES.items() if theirs in settings}
    values = {**config, "model.init": "random"}
    return [Stated(key, values[key], setting) for key in values if key not in overridden]


def _sizes(settings: Settings) -> list[str]:
    return [name for name in settings if name in _SIZES]


def _data(setting: ForeignSetting, _: Settings) -> list[Result]:
    paths = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    if len(paths) == 1:
        return [path_stated("data.train.prefix", paths[0], setting)]
    sources = [{"kind": "megatron", "prefix": path, "weight": 1.0} for path in paths]
    return [Stated("data.train", sources, setting, certain=False,
                   advice="compare the sources one by one")]  # fmt: skip


def _precision(value: object, _: Settings) -> object:
    word = str(value).replace("-", "_")
    if word in ("bf16", "bf16_mixed", "16_mixed", "fp16", "fp16_mixed"):
        return "bf16" if "bf" in word else "fp16"
    return changes("fp8 and fp4 of Transformer Engine; `fp8` has torchao's scaling")


def _decay(value: object, settings: Settings) -> object:
    if value == value_in(settings, "train.train_iters"):
        return NotCarried("the same as train.train_iters: every decay ends with the run")
    return changes("the decay ends with the run")


def _style(value: object, _: Settings) -> object:
    words = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    return words.get(str(value)) or changes("no such decay of the learning rate")


def _stage(value: object, _: Settings) -> int:
    return 1 if value else 0


def _evaluations(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Without batches there is no evaluation."""
    on = value_in(settings, "validation.eval_iters", 1)
    return [Stated("evaluation.every_steps", setting.value if on else None, setting)]


_SIZES: Mapping[str, str] = {
    f"model.{theirs}": f"model.config.{ours}"
    for theirs, ours in {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rotary_base": "rope_theta",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    }.items()
}
KEYS: Mapping[str, Row] = {
    "recipe": _recipe,
    "mode": together,
    "dataset": NotCarried("state the data in data.train"),
    "nodes": TargetKey("cluster.nodes", write=None),
    "gpus_per_node": TargetKey("cluster.gpus_per_node", write=None),
    "launcher": NotCarried("the section `launch` says how a run starts"),
    "train.train_iters": TargetKey("training.steps", write=None),
    "train.global_batch_size": "training.global_batch_size",
    "train.micro_batch_size": "training.micro_batch_size",
    "validation.eval_interval": _evaluations,
    "validation.eval_iters": Implied("evaluation.batches", lambda batches, _: batches or None),
    "train.rampup_batch_size": unless_off(changes("the global batch does not change")),
    "train.train_samples": changes("state train.train_iters"),
    "dataset.seq_length": "training.sequence_length",
    **_SIZES,
    "model.hidden_dropout": unless_off(changes("no dropout of the residual in these models")),
    "model.tensor_model_parallel_size": "parallel.tensor",
    "model.pipeline_model_parallel_size": "parallel.pipeline",
    "model.virtual_pipeline_model_parallel_size": TargetKey(
        "parallel.virtual_pipeline", write=lambda chunks: chunks if chunks > 1 else None
    ),
    "model.context_parallel_size": "parallel.context",
    "model.cp_comm_type": TargetKey("kernels.context", translated("kernels.context"), None),
    "model.expert_model_parallel_size": "parallel.expert",
    "model.sequence_parallel": "parallel.sequence",
    "model.recompute_granularity": TargetKey("parallel.recompute", write=None),
    "model.moe_aux_loss_coeff": unless_off(changes("model.balance has the balancing losses")),
    "model.calculate_per_token_loss": NotCarried("every loss is the mean over all tokens"),
    "optimizer.optimizer": TargetKey("optimizer.name", translated("optimizer.name"), None),
    "optimizer.lr": "optimizer.learning_rate",
    "optimizer.min_lr": "schedule.min_learning_rate",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.adam_beta1": "optimizer.betas[0]",
    "optimizer.adam_beta2": "optimizer.betas[1]",
    "optimizer.adam_eps": "optimizer.eps",
    "optimizer.clip_grad": TargetKey(
        "optimizer.clip_grad_norm", none_if_zero, lambda norm: norm or 0.0
    ),
    "optimizer.use_distributed_optimizer": Implied("parallel.zero.stage", _stage),
    "ddp.use_distributed_optimizer": Implied("parallel.zero.stage", _stage),
    "scheduler.lr_warmup_iters": "schedule.warmup_steps",
    "scheduler.lr_decay_iters": Implied("", _decay),
    "scheduler.lr_decay_style": Implied("schedule.name", _style),
    "scheduler.min_lr": NotCarried("no field of SchedulerConfig: it is optimizer.min_lr"),
    "mixed_precision": Implied("training.precision", _precision),
    "mixed_precision.dtype": Implied("training.precision", _precision),
    "mixed_precision.fp8": unless_off(changes("`fp8` has torchao's scaling")),
    "rng.seed": "training.seed",
    "checkpoint.save_interval": "checkpoint.every_steps",
    "checkpoint.most_recent_k": TargetKey("checkpoint.keep", write=None),
    "checkpoint.save": NotCarried("a run is written to runs/NAME"),
    "checkpoint.load": NotCarried("`dmt checkpoint import` reads its checkpoints"),
    "checkpoint.pretrained_checkpoint": changes("model.init: pretrained reads model.hub"),
    "logger.log_interval": "logging.every_steps",
    "logger.wandb_project": "logging.wandb.project",
    "logger.wandb_exp_name": "name",
    "tokenizer.tokenizer_type": NotCarried("a tokenizer is one of Hugging Face, or `bytes`"),
    "tokenizer.tokenizer_model": TargetKey(
        "data.tokenizer", write=lambda name: None if name == "bytes" else name
    ),
    "dataset.data_path": _data,
    "dataset.blend": changes("state the sources and their weights in data.train"),
    "dataset.random_seed": TargetKey("training.seed", write=None),
    "dataset.num_workers": ONLY_MEMORY,
    "dataset.split": NotCarried("data.validation_fraction holds out a share"),
    "dataset.eod_mask_loss": unless_off(changes("the loss counts the end of a document")),
    "dataset.reset_attention_mask": TargetKey("data.isolate_documents", write=None),
    "ddp.grad_reduce_in_fp32": unless_off(changes("gradients are reduced in fp32"), True),
    **dict.fromkeys(
        ("dist.use_megatron_fsdp", "dist.use_torch_fsdp2", "model.expert_tensor_parallel_size",
         "ddp.data_parallel_sharding_strategy", "model.init_model_with_meta_device"),
        ONLY_MEMORY,
    ),
    "peft": unless_off(changes("state the adapter in `adapter`")),
}  # fmt: skip


class MegatronBridgeTarget(Target):
    """Words or YAML; the recipe is named by --recipe, or by the name of the YAML file."""

    kind = "Megatron-Bridge overrides"
    form = "overrides of a Megatron-Bridge recipe (`key.path=value`, or YAML)"
    tool = "Megatron-Bridge"
    rendered = True
    engine = "megatron"
    who = (
        "DMT does not read these overrides (`dmt render --to megatron-bridge` writes them): "
        "the recipe takes precedence",
        "Megatron-Bridge applies them to its own recipe: there they take precedence",
    )
    defaults: ClassVar[Mapping[str, object]] = {
        "parallel.engine": "megatron",
        "data.validation_fraction": 0.001,
    }

    def score(self, values: Mapping[str, Any]) -> int:
        """Sections of ConfigContainer, which recipes and other tools have not so many of."""
        own = {
            name
            for name in SECTIONS - {"model", "optimizer"}
            if isinstance(values.get(name), dict)
        }
        return 2 * len(own) if "train" in own else 0

    def parse(self, text: str, path: Path) -> JsonFile | None:
        """See `Target`."""
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        first: dict[str, int] = {}
        for number, row in enumerate(text.splitlines(), 1):
            for word in row.split():
                first.setdefault(word.strip("'\""), number)
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise RecipeError(
                [Problem("overrides", str(error), "shell words", "", str(path))]
            ) from error
        for index, word in enumerate(words):
            if match := _OVERRIDE.fullmatch(word):
                name, value = match[1], _value(match[2])
            elif (
                word.startswith("-")
                and (option := word.lstrip("-").replace("-", "_")) in _SHORT
            ):
                name, value = _SHORT[option], _value(words[index + 1])
            else:
                continue
            values[name], lines[name] = value, first.get(word, 0)
        is_ours = any(_OVERRIDE.fullmatch(word) for word in words) or "run_recipe" in text
        return JsonFile(path, values, lines) if is_ours and values else None

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`."""
        found = SettingSource(str(file.path), self.kind, self.who)
        settings = {
            _RENAMED.get(name, name): ForeignSetting(name, value, file.place(name))
            for name, value in leaves(file.values)
            if value is not None and not (value == {} and name in SECTIONS)
        }
        if recipe is None:
            settings |= _of_its_recipe(settings, file)
        settings, found.unknown = without_words(settings, KEYS, _SIZES)
        if isinstance(model := value_in(settings, "recipe"), str) and "/" in model:
            row = changes(f"the model is {model}: state all of it in model.config")
            found.add(
                read_settings(settings, dict.fromkeys(_SIZES, row), names=_sizes(settings))
            )
            settings = {name: one for name, one in settings.items() if name not in _SIZES}
        found.add(read_each(settings, KEYS, _judge))
        return found

    def join(self, files: Sequence[JsonFile]) -> JsonFile:
        """A YAML file and the command that names it: words take precedence."""
        is_yaml = [file.path.suffix in (".yaml", ".yml") for file in files]
        parts = [JsonFile(file.path, dict(leaves(file.values)), file.lines) for file in files]
        in_order = sorted(zip(is_yaml, parts, strict=True), key=lambda pair: not pair[0])
        return JoinedFiles.of(file for _, file in in_order)

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        limits = {
            "optimizer.name": ("adamw",),
            "schedule.name": ("cosine", "linear", "constant"),
            "training.precision": ("bf16", "fp16"),
            "model.init": ("random",),
        }
        refuse_what_is_not_expressed("Megatron-Bridge", recipe, KEYS, limits, _problems(recipe))
        base = _recipe_of(recipe)
        assert base is not None, "refused by `_problems`"
        keys = {**KEYS}
        if recipe.model.hub == RECIPES[base][0]:
            keys |= dict.fromkeys(_SIZES, "")
        values = dict(written_rows(keys, recipe, plan)) | dict(_run(recipe, plan))
        words = [
            shlex.quote(f"{name}={shown(value).replace(' ', '')}")
            for name, value in values.items()
            if value is not None
        ]
        text = "\n".join((f"--recipe {base}_pretrain_config", *words))
        notes = (
            "start it with: xargs run_recipe.py --mode pretrain < overrides.txt",
            "initial weights and data order are Megatron-Bridge's own, not DMT's",
            "without dataset.data_path, add one: it reads Megatron's indexed format alone",
        )
        return text + "\n", notes


TARGET = MegatronBridgeTarget()


def _recipe_of(recipe: Recipe) -> str | None:
    for name, (model, _) in RECIPES.items():
        if model == recipe.model.hub or (
            isinstance(model, Mapping)
            and (recipe.model.config or {}).get("model_type") == model["model_type"]
            and (recipe.model.config or {}).get("vocab_size") == model["vocab_size"]
        ):
            return name
    return None


def _problems(recipe: Recipe) -> Iterator[Problem]:
    if _recipe_of(recipe) is None:
        known = ", ".join(RECIPES)
        yield Problem("model", str(recipe.model.hub), f"of Megatron-Bridge's recipes: {known}")


def _run(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, object]]:
    """Settings that are not one value of the recipe."""
    steps = recipe.total_steps()
    yield "train.train_iters", steps
    yield "scheduler.lr_decay_style", recipe.schedule.name
    yield "scheduler.lr_decay_iters", steps
    yield (
        "mixed_precision",
        {"bf16": "bf16_mixed", "fp16": "16_mixed"}.get(recipe.training.precision),
    )
    yield "ddp.use_distributed_optimizer", plan.layout.zero_stage == 1
    yield "validation.eval_interval", recipe.evaluation.every_steps
    yield (
        "validation.eval_iters",
        recipe.evaluation.batches if recipe.evaluation.every_steps else 0,
    )
    if all(isinstance(source, MegatronSource) for source in recipe.data.sources):
        paths = [source.place for source in recipe.data.sources]
        yield "dataset.data_path", paths if len(paths) > 1 else paths[0]
