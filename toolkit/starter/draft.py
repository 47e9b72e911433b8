"""A first recipe for a model: a shipped recipe's numbers, or usual ones by its size."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from toolkit.errors import PlanError
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe, valid
from toolkit.models.families import model_spec
from toolkit.models.hub import ShapeUnknown, model_config
from toolkit.models.spec import ModelSpec
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.planner import placed_on
from toolkit.recipe.places import RECIPES, shipped_recipes
from toolkit.recipe.schema import ModelSection, Recipe
from toolkit.recipe.section import legal_name
from toolkit.recipe.yaml_text import Location, Stated
from toolkit.registry import load
from toolkit.text.suggest import did_you_mean

Task = Literal["pretrain", "sft", "lora", "dpo"]

_TOKENS_PER_PARAMETER = 20
"""The best use of a given amount of computation (Hoffmann et al. 2022, arXiv:2203.15556)."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_LONGEST = 4096
"""Tokens of a sequence if the task's shared part states none."""
_SIZES = (
    # Brown et al. 2020, arXiv:2005.14165, table 2.1: parameters, tokens of a batch, peak
    # learning rate.
    (0.35e9, 0.5e6, 6.0e-4),
    (0.76e9, 0.5e6, 3.0e-4),
    (1.3e9, 0.5e6, 2.5e-4),
    (2.7e9, 1.0e6, 2.0e-4),
    (6.7e9, 1.0e6, 1.6e-4),
    (13e9, 2.0e6, 1.2e-4),
    (175e9, 2.0e6, 1.0e-4),
    (float("inf"), 3.2e6, 0.6e-4),
)
"""Usual numbers of models below a size."""


def draft(model: str, cluster: Cluster, task: Task) -> Recipe:
    """The recipe of `model` for `cluster`. Its layout is for the planner.

    `model`: the name or hub id of a shipped size, a local folder or a hub id. Raises PlanError
    when it is none of these.
    """
    size = _shipped_size(model)
    if size is None:
        recipe = _own(model, task)
    elif (own := shipped_sizes()[size]) and task in own:
        recipe = load_recipe(own[task])
    else:
        recipe = _other_task(size, load_recipe(next(iter(own.values()))), task)
    return _placed(recipe, cluster)


def _shipped_size(model: str) -> str | None:
    """The shipped size of this name. If it is no folder either, that of this hub id."""
    sizes = shipped_sizes()
    if model in sizes or Path(model).is_dir():
        return model if model in sizes else None
    return _sizes_by_hub_id().get(model)


@cache
def _sizes_by_hub_id() -> dict[str, str]:
    """The hub ids of all shipped recipes."""
    return {
        hub: size
        for size, files in shipped_sizes().items()
        for file in files.values()
        if (hub := load_recipe(file).model.hub) is not None
    }


def is_tiny(size: str) -> bool:
    """True if the shipped size is one for tests and demonstrations, without any weights."""
    tasks = shipped_sizes().get(size, {})
    return any(file.parent.name == "tiny" for file in tasks.values())


def _other_task(size: str, shipped: Recipe, task: Task) -> Recipe:
    """Usual numbers for the model of a shipped recipe of another task."""
    model = shipped.model.model_dump(exclude_unset=True)
    assert shipped.model.config is not None, "every shipped recipe states its shape"
    template = None if task == "pretrain" else "chatml"
    model.pop("init", None)
    if shipped.model.hub is None and task != "pretrain":
        if not is_tiny(size):
            raise PlanError(
                f"--task: no published weights of {size} are its text model's alone, and "
                f"{task} trains published weights",
                fix=f"name a folder with them: dmt init FOLDER --task {task}",
            )
        model["init"] = "random"
    return _usual_recipe(f"{size}-{task}", model, shipped.data.tokenizer, template, task)


def shipped_sizes() -> dict[str, dict[str, Path]]:
    """The shipped recipes by size and task; not those of a size with longer rows."""
    found: dict[str, dict[str, Path]] = {}
    for file in shipped_recipes().values():
        size, _, task = file.stem.rpartition("-")
        if file.parent.name == "tiny":
            size, task = file.stem, task if task in get_args(Task) else "pretrain"
        elif task not in get_args(Task):
            continue
        found.setdefault(size, {})[task] = file
    return found


def _own(model: str, task: Task) -> Recipe:
    """Usual numbers for a model known only by its config."""
    folder = Path(model)
    if model.startswith((".", "/", "~")) and not folder.is_dir():
        raise PlanError(f"MODEL: there is no folder {model}", fix="check its name")
    source = str(folder.absolute()) if folder.is_dir() else model
    # Keys of every config say nothing about the model's function.
    noise = load("toolkit.models.judge:base_keys")()
    config = {key: value for key, value in _config(model, source).items() if key not in noise}
    if lacks_tokenizer(folder) and task != "pretrain":
        raise PlanError(
            f"MODEL: {folder} holds no tokenizer, and its weights know only their own",
            fix=f"copy the model's {_TOKENIZER_FILES[0]} there, or --task pretrain",
        )
    template = None if task == "pretrain" or _has_template(folder) else "chatml"
    name = legal_name((folder.resolve() if folder.is_dir() else folder).name, "model")[:80]
    stated = {"hub": source, "config": config}
    # `dmt check` refuses a folder without a tokenizer until there is one.
    return _usual_recipe(f"{name}-{task}".lower(), stated, source, template, task)


def draft_of_config(
    config: Mapping[str, Any], tokenizer: str, cluster: Cluster, task: Task
) -> Recipe:
    """Usual numbers for a model that a file of another tool describes."""
    template = None if task == "pretrain" else "chatml"
    name = f"{config['model_type']}-{task}"
    recipe = _usual_recipe(name, {"config": dict(config)}, tokenizer, template, task)
    return _placed(recipe, cluster)


def _usual_recipe(
    name: str, model: Mapping[str, Any], tokenizer: str, template: str | None, task: Task
) -> Recipe:
    """Combine what the recipes of a task share with numbers by the model's size."""
    spec = model_spec(model["config"])
    base = read_layers(RECIPES / "base" / f"{task}.yml", ()).merged.data
    longest = base["training"].get("sequence_length", _LONGEST)
    training = {"sequence_length": min(longest, spec.max_positions or longest)}
    data: dict[str, Any] = {
        **base,
        "name": name,
        "model": {"init": "random", **base.get("model", {}), **model},
        "data": {**base["data"], "tokenizer": tokenizer},
    }
    optimizer: dict[str, float] = {}
    if task == "pretrain":
        training |= _length_of_run(spec, training["sequence_length"])
        optimizer["learning_rate"] = _usual(spec)[1]
        schedule = {"warmup_steps": max(1, min(2000, training["steps"] // 100))}
        data["schedule"] = {**base["schedule"], **schedule}
    else:
        data["data"]["chat_template"] = template
    if "adapter" in base:
        if spec.parameters.experts:  # those of experts take the memory of whole weights
            data["adapter"] = {**base["adapter"], "targets": "attention"}
        if (data["model"].get("balance") or {}).get("kind") == "bias":
            del data["model"]["balance"]  # PEFT's folder has no such bias
    data["training"] = {**base["training"], **training}
    data["optimizer"] = {**base["optimizer"], **optimizer}
    return as_recipe(data, model.get("hub", name))


def as_recipe(values: Mapping[str, Any], source: str) -> Recipe:
    """A drafted recipe. Raises RecipeError with every mistake in it, whose file is `source`."""
    return valid(Stated(values, {(): Location(source, 0)}))


def _config(model: str, source: str) -> Mapping[str, Any]:
    """The model's Hugging Face config. Unknown names and missing caches are different
    errors."""
    try:
        return model_config(ModelSection(hub=source))
    except ShapeUnknown as error:
        sizes = shipped_sizes()
        go = "go online, download its config.json into a folder, or take one of `dmt recipes`"
        fix = did_you_mean(model, sizes, go)
        raise PlanError(
            f"MODEL: {model!r} is no shipped size, no local folder, and not on the hub or in "
            "its cache",
            fix=fix,
        ) from error


def lacks_tokenizer(folder: Path) -> bool:
    """True if a folder holds none of a tokenizer's files."""
    return folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES)


def _has_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template. Unknown for a hub id: training asks then."""
    stated = folder / "tokenizer_config.json"
    if not folder.is_dir() or (folder / "chat_template.jinja").exists():
        return True
    return stated.is_file() and '"chat_template"' in stated.read_text(errors="replace")


def _usual(spec: ModelSpec) -> tuple[float, float]:
    """Tokens of a batch and learning rate of a model of this size."""
    return next(row[1:] for row in _SIZES if spec.parameters.total < row[0])


def _length_of_run(spec: ModelSpec, sequence_length: int) -> dict[str, int]:
    """Steps and global batch."""
    batch = max(1, round(_usual(spec)[0] / sequence_length))
    batch = 1 << (batch.bit_length() - 1)
    tokens = _TOKENS_PER_PARAMETER * spec.parameters.total
    return {"steps": -(-tokens // (batch * sequence_length)), "global_batch_size": batch}


def _placed(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe on `cluster`: a batch that its accelerators can share, a precision that they
    have."""
    precision, batch = recipe.training.precision, recipe.training.global_batch_size
    if cluster.gpu.generation == "cpu":
        precision = "fp32"
    elif cluster.gpu.peak_flops(precision) is None:
        precision = "fp16"  # Volta
    shared = -(-batch // cluster.gpus) * cluster.gpus
    return placed_on(recipe, cluster).with_values(
        {"training.precision": precision, "training.global_batch_size": shared}
    )
