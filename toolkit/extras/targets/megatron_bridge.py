"""Megatron-Bridge (NeMo): overrides `key.path=value` of one of its recipes, as words or YAML.

The recipe's own values come from its Python code: of the recipes in `RECIPES` they are known
(src/megatron/bridge/recipes of 0.4). Names are those of ConfigContainer and its sections.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets.megatron_lm import megatron_options
from toolkit.extras.targets.values import (
    Chosen,
    Implied,
    JoinedFiles,
    TableTarget,
    indexed,
    value_in,
)
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import MegatronSource, Recipe
from toolkit.targets.base import (
    CLIPPING,
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Settings,
    Stated,
    TargetKey,
    Unknown,
    as_yaml,
    changes,
    shown,
    translated,
    unknown,
)
from toolkit.targets.options import read_options, unless_off
from toolkit.text.dotted import leaves

OPTIONS = read_options("megatron_bridge", __file__)
_GROUPS = """
    model train optimizer scheduler dataset logger tokenizer checkpoint dist ddp rng
    profiling peft comm_overlap mixed_precision inprocess_restart validation
"""
SECTIONS = frozenset(_GROUPS.split())
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.\w+)*)=(.*)", re.DOTALL)

RECIPES: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("megatron_bridge_recipes.json").read_text(encoding="utf-8")
)
"""Beginning of a recipe's name → its model (`recipe`), on the hub or by config, and its own
values; "": what all pretraining recipes begin with (recipes/common.py, `_pretrain_common`)."""
_NAMES = [name for name in RECIPES if name]


def _value(text: str) -> Any:
    """As Hydra reads it: a list in brackets, or one value."""
    if text.startswith("[") and text.endswith("]"):
        return [as_yaml(part.strip().strip("'\"")) for part in text[1:-1].split(",")]
    return as_yaml(text)


def _of_its_recipe(settings: Settings, file: JsonFile) -> dict[str, ForeignSetting]:
    """What the recipe states below the overrides. Raises RecipeError where it is unknown."""
    named = str(value_in(settings, "recipe", file.path.stem)).replace("_moe_", "_")
    base = max((name for name in _NAMES if named.startswith(name)), key=len, default=None)
    is_other = "sft" in named or "peft" in named
    if base is None or is_other or value_in(settings, "mode", "pretrain") != "pretrain":
        allowed = ", ".join(f"{name}_pretrain_config" for name in _NAMES)
        fix = "name the recipe by `--recipe`, or state its values in a recipe of DMT's"
        raise RecipeError([Problem("recipe", named, allowed, fix, str(file.path))])
    at = str(file.path)
    values = {**RECIPES[""], **RECIPES[base]}
    model = values.pop("recipe")
    return {
        name: ForeignSetting(f"{name} ({base})", value, at)
        for name, value in values.items()
        if name not in settings
    } | {"recipe": ForeignSetting("recipe", model, at, named)}


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


def _data(setting: ForeignSetting, _: Settings) -> list[Result]:
    paths = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    return indexed("data.train", setting, paths)


def _decay(value: object, settings: Settings) -> object:
    if value == value_in(settings, "train.train_iters"):
        return NotCarried("the same as train.train_iters: every decay ends with the run")
    return changes("the decay ends with the run")


def _evaluations(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """Without batches there is no evaluation."""
    on = value_in(settings, "validation.eval_iters", 1)
    return [Stated("evaluation.every_steps", setting.value if on else None, setting)]


_PRECISIONS = "bf16_mixed 16_mixed bf16-mixed 16-mixed bf16 fp16 fp16_mixed fp16-mixed"
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
_PRECISION = Chosen(
    "training.precision",
    {word: "bf16" if "bf" in word else "fp16" for word in _PRECISIONS.split()},
    changes("fp8 and fp4 of Transformer Engine; `fp8` has torchao's scaling"),
)
_SHARDED = Implied(
    "parallel.zero.stage", lambda on, _: 1 if on else 0, lambda stage: stage == 1
)
KEYS: Mapping[str, Row] = {
    **OPTIONS.rows,
    **_SIZES,
    "recipe": _recipe,
    "validation.eval_interval": _evaluations,
    "validation.eval_iters": Implied("evaluation.batches", lambda batches, _: batches or None),
    "model.virtual_pipeline_model_parallel_size": TargetKey(
        "parallel.virtual_pipeline", write=lambda chunks: chunks if chunks > 1 else None
    ),
    "model.cp_comm_type": TargetKey("kernels.context", translated("kernels.context"), None),
    "optimizer.optimizer": TargetKey("optimizer.name", translated("optimizer.name"), None),
    "optimizer.clip_grad": CLIPPING,
    "optimizer.use_distributed_optimizer": Implied("parallel.zero.stage", _SHARDED.meaning),
    "ddp.use_distributed_optimizer": _SHARDED,
    "ddp.grad_reduce_in_fp32": unless_off(changes("gradients are reduced in fp32"), True),
    "scheduler.lr_decay_iters": Implied("", _decay),
    "scheduler.lr_decay_style": Chosen(
        "schedule.name",
        {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"},
        changes("no such decay of the learning rate"),
    ),
    "mixed_precision": _PRECISION,
    "mixed_precision.dtype": _PRECISION.__call__,  # only read
    "tokenizer.tokenizer_model": TargetKey(
        "data.tokenizer", write=lambda name: None if name == "bytes" else name
    ),
    "dataset.data_path": _data,
}


class MegatronBridgeTarget(TableTarget):
    """Words or YAML; the recipe is named by --recipe, or by the name of the YAML file."""

    kind = "Megatron-Bridge overrides"
    form = "overrides of a Megatron-Bridge recipe (`key.path=value`, or YAML)"
    tool = "Megatron-Bridge"
    engine = "megatron"
    knows_all = False
    interleaves = True
    numbers = tuple(_SIZES)
    limits: ClassVar[Mapping[str, Iterable[str]]] = {
        "optimizer.name": ("adamw",),
        "schedule.name": ("cosine", "linear", "constant"),
        "model.init": ("random",),
    }
    notes = (
        "start it with: xargs run_recipe.py --mode pretrain < overrides.txt",
        "initial weights and data order are Megatron-Bridge's own, not DMT's",
        "without dataset.data_path, add one: it reads Megatron's indexed format alone",
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
            option = OPTIONS.old.get(word.lstrip("-").replace("-", "_"), "")
            if match := _OVERRIDE.fullmatch(word):
                name, value = match[1], _value(match[2])
            elif word.startswith("-") and option:
                name, value = option, _value(words[index + 1])
            else:
                continue
            values[name], lines[name] = value, first.get(word, 0)
        is_ours = any(_OVERRIDE.fullmatch(word) for word in words) or "run_recipe" in text
        return JsonFile(path, values, lines) if is_ours and values else None

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`; below them those of the recipe that they override."""
        settings = {
            OPTIONS.old.get(name, name): ForeignSetting(name, value, file.place(name))
            for name, value in leaves(file.values)
            if value is not None and not (value == {} and name in SECTIONS)
        }
        return settings | (_of_its_recipe(settings, file) if recipe is None else {})

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `TableTarget`; of a model on the hub, the sizes are its config's."""
        if isinstance(model := value_in(settings, "recipe"), str) and "/" in model:
            row = changes(f"the model is {model}: state all of it in model.config")
            return {**KEYS, **dict.fromkeys(_SIZES, row)}
        return KEYS

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`. `model.` has megatron-core's fields, most of which are options of
        Megatron-LM."""
        section, _, key = setting.name.partition(".")
        options = {option.removeprefix("--").replace("-", "_") for option in megatron_options()}
        names = {row.rpartition(".")[2] for row in KEYS if row.startswith(f"{section}.")}
        groups = ("model", "train", "optimizer", "scheduler", "logger")
        if key in options or section not in groups:
            return None
        guess = unknown(setting, names | options)
        return guess if guess.hint else None

    def join(self, files: Sequence[JsonFile]) -> JsonFile:
        """A YAML file and the command that names it: words take precedence."""
        is_yaml = [file.path.suffix in (".yaml", ".yml") for file in files]
        parts = [JsonFile(file.path, dict(leaves(file.values)), file.lines) for file in files]
        in_order = sorted(zip(is_yaml, parts, strict=True), key=lambda pair: not pair[0])
        return JoinedFiles.of(file for _, file in in_order)

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """See `TableTarget`."""
        if _recipe_of(recipe) is None:
            known = ", ".join(_NAMES)
            yield Problem(
                "model", str(recipe.model.hub), f"of Megatron-Bridge's recipes: {known}"
            )

    def values(self, recipe: Recipe, plan: Plan) -> Iterator[tuple[str, object]]:
        """See `TableTarget`."""
        base = _recipe_of(recipe)
        assert base is not None, "refused by `problems`"
        yield "recipe", base
        if recipe.model.hub == RECIPES[base]["recipe"]:
            yield from dict.fromkeys(_SIZES).items()
        steps, every = recipe.total_steps(), recipe.evaluation.every_steps
        yield "train.train_iters", steps
        yield "scheduler.lr_decay_iters", steps
        yield "validation.eval_interval", every
        yield "validation.eval_iters", recipe.evaluation.batches if every else 0
        if all(isinstance(source, MegatronSource) for source in recipe.data.sources):
            paths = [source.place for source in recipe.data.sources]
            yield "dataset.data_path", paths if len(paths) > 1 else paths[0]

    def text(self, recipe: Recipe, values: dict[str, Any]) -> str:
        """See `TableTarget`."""
        base = values.pop("recipe")
        words = [
            shlex.quote(f"{name}={shown(value).replace(' ', '')}")
            for name, value in values.items()
            if value is not None
        ]
        return "\n".join((f"--recipe {base}_pretrain_config", *words)) + "\n"


TARGET = MegatronBridgeTarget()


def _recipe_of(recipe: Recipe) -> str | None:
    """The recipe of the same model."""
    config = recipe.model.config or {}
    for name in _NAMES:
        model = RECIPES[name]["recipe"]
        if isinstance(model, str):
            is_same = model == recipe.model.hub
        else:
            is_same = all(config.get(key) == model[key] for key in ("model_type", "vocab_size"))
        if is_same:
            return name
    return None
