"""The recipe that files of other tools state, as a YAML with the origin of every value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.data.local import NO_TOKENIZER, PLACEHOLDER
from toolkit.errors import DmtError, PlanError, RecipeError
from toolkit.foreign.carry import Carried, ForeignSetting, Found, Left, left_lines
from toolkit.foreign.megatron import config_of
from toolkit.foreign.statements import complete, ranks_of, read_together
from toolkit.foreign.tables import tool
from toolkit.intake.load import judged, valid
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import commented
from toolkit.recipe.schema import LENGTH_SETTINGS, Recipe
from toolkit.recipe.yaml_text import KeyPath, Location, Stated
from toolkit.starter.data import source_of
from toolkit.starter.draft import Task, draft, draft_of_config
from toolkit.text.dotted import nested
from toolkit.text.redact import looks_secret, redact
from toolkit.text.terminal import printable

DRAFTED = "not in the files: dmt init's usual value"
_KINDS = {"pretrain": "hf", "sft": "chat", "lora": "chat", "dpo": "preference"}
_TASKS: dict[str, Task] = {"sft": "sft", "dpo": "dpo", "orpo": "dpo", "pretrain": "pretrain"}


@dataclass(frozen=True)
class Imported:
    """The answer of `dmt init --from`."""

    text: str
    left: tuple[str, ...]
    """Settings that are not carried, one per line."""
    problem: str = ""
    """Why the recipe cannot be planned as it is. Empty if it can."""


def import_files(
    paths: Sequence[Path],
    model: str | None,
    given_cluster: str | None,
    given_task: Task | None,
    data: Path | None,
) -> Imported:
    """The recipe of the files in `paths`. `model`, the cluster, the task and `data` are stated
    by the user.

    Raises RecipeError for a file that cannot be read, is not understood or contradicts another.
    Raises PlanError if only the user knows what is missing.
    """
    cluster = None if given_cluster is None else find_cluster(given_cluster)
    found = read_together(paths, "--from")
    config = {} if model is not None else _shape(found)
    ranks = ranks_of(found)
    complete(found, cluster.gpus if cluster else None)
    _leave_credentials(found)
    cluster = cluster or _stated_cluster(found, ranks)
    task = _task(found, given_task)
    base = _base(found, model, config, cluster, task)
    origin = f"--cluster {given_cluster}" if given_cluster else DRAFTED
    for name, value in cluster.section.items():
        if found.value(f"cluster.{name}", value) != value:
            found.remove(f"cluster.{name}", f"--cluster {given_cluster} states it")
        _put(found, f"cluster.{name}", value, origin)
    _add_required(found, base, task, given_task is not None)
    _add_data(found, task, data)
    _say_loss(found)
    _add_validation(found)
    recipe = _valid(found)
    origins = {key: printable(_origin(one)) for key, one in found.values.items()}
    body = "\n".join([
        f"# {recipe.name}, written by `dmt init --from` of {', '.join(map(str, paths))}.",
        "# Settings with a FILE:LINE are those of the files; check the others.",
        *commented(_nested(found), origins),
    ])  # fmt: skip
    problem = redact(_problem(found))
    left = (*left_lines([_masked(one) for one in found.left]),)
    after = [f"# {line}" for line in left]
    after += [f"# not planned: {' '.join(problem.split())}"] if problem else []
    return Imported(redact("\n".join([body, *after])), left, problem)


def _put(found: Found, key: str, value: object, origin: str) -> None:
    """Put a value, unless a file states one."""
    found.values.setdefault(key, Carried(value, ForeignSetting(origin, None, "")))


def _origin(one: Carried) -> str:
    note = f": {one.note}" if one.note else ""
    return f"{f'{one.at.place} '.lstrip()}{one.at.name}{note}"


def _shape(found: Found) -> dict[str, Any]:
    """The config of the model that the files describe. Raises RecipeError where no config here
    describes it."""
    if "model.hub" in found.values:
        return {}
    config, problems = config_of(found)
    if problems:
        raise RecipeError(problems)
    return config


def _leave_credentials(found: Found) -> None:
    """Leave out values that hold a credential."""
    for key, one in [*found.values.items()]:
        if _is_secret(key, one.value):
            del found.values[key]
            found.drop(one.at, "it has a credential, which no recipe states")


def _is_secret(name: str, value: object) -> bool:
    """Whether a value is a credential, or has one in it."""
    if isinstance(value, Mapping):
        return any(_is_secret(str(key), one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return any(_is_secret(name, one) for one in value)
    return looks_secret(name, value) or (isinstance(value, str) and redact(value) != value)


def _masked(one: Left) -> Left:
    """A setting that is not carried, without credentials."""
    value = None if _is_secret(one.at.name, one.at.value) else one.at.value
    name = redact(one.at.name)
    name = name.lstrip("-") if looks_secret(name, "value") else name
    reason = printable(redact(one.reason))
    return replace(one, at=replace(one.at, name=name, value=value), reason=reason)


def _stated_cluster(found: Found, ranks: int | None) -> Cluster:
    """The cluster if the files name CPUs. Otherwise only the user knows the accelerators."""
    nodes = found.number("cluster.nodes")
    per_node = found.number("cluster.gpus_per_node", max(1, (ranks or 8) // nodes))
    if found.value("cluster.gpu") == "cpu":
        return find_cluster(f"{nodes}x{per_node if ranks else 1}xcpu")
    raise PlanError(
        "--cluster: the files do not say which accelerators they are for",
        fix=f"--cluster NODESxGPUSxNAME, e.g. {nodes}x{per_node}xh100-80gb",
    )


def _task(found: Found, given: Task | None) -> Task:
    stated = _TASKS.get(str(found.value("training.objective")))
    if any(key.startswith("adapter.") for key in found.values) and stated in ("sft", None):
        stated = "lora"
    if given and stated and given != stated:
        one = found.values.get("training.objective")
        at = _origin(one) if one else "an adapter in the files"
        raise PlanError(
            f"--task: {given}, and the files are for {stated} ({at})",
            fix=f"leave --task out, or --task {stated}",
        )
    return given or stated or "pretrain"


def _base(
    found: Found, model: str | None, config: Mapping[str, Any], cluster: Cluster, task: Task
) -> Recipe:
    """The recipe of `dmt init` for the model. It fills what the files do not state."""
    hub = found.value("model.hub")
    shape = next(iter(found.shape.values()), None)
    if model is not None:
        if hub == model:
            del found.values["model.hub"]
        for key in ("model.hub", "model.revision", "data.tokenizer", "data.tokenizer_revision"):
            found.remove(key, f"MODEL is {model}, with its own")
        if shape is not None:
            at = ForeignSetting("the model's shape", None, shape.file, shape.line)
            found.drop(at, f"MODEL is {model}")
        return draft(model, cluster, task)
    if config and shape is not None:
        tokenizer = str(found.value("data.tokenizer", NO_TOKENIZER))
        recipe = draft_of_config(config, tokenizer, cluster, task)
        origin = f"{shape.place} and the other settings of the model"
        _put(found, "model.config", recipe.model.config, origin)
        return recipe
    if hub is None:
        raise PlanError(
            "MODEL: the files name no model",
            fix="dmt init MODEL --from FILE: a hub id, a folder, or one of `dmt recipes`",
        )
    return draft(str(hub), cluster, task)


def _add_required(found: Found, base: Recipe, task: Task, given: bool) -> None:
    """Add what a recipe requires, or a model or task implies, if the files do not state it."""
    dumped = base.model_dump(exclude_unset=True)
    for key, value in dumped["model"].items():
        _put(found, f"model.{key}", value, "the model")
    _put(found, "name", base.name, "")
    is_known = base.data.tokenizer != NO_TOKENIZER
    origin = DRAFTED if is_known else "TO DO: the files name no tokenizer that DMT knows"
    _put(found, "data.tokenizer", base.data.tokenizer, origin)
    if task != "pretrain":
        _put(found, "data.chat_template", base.data.chat_template, DRAFTED)
    objective = found.value("training.objective", base.training.objective)
    for key in ("adapter", "dpo"):
        if key == "adapter" and any(name.startswith("adapter.") for name in found.values):
            continue
        if key == "dpo" and objective != "dpo":  # orpo
            continue
        for name, value in (dumped.get(key) or {}).items():
            _put(found, f"{key}.{name}", value, DRAFTED)
    origin = f"--task {task}" if given else DRAFTED
    _put(found, "training.objective", base.training.objective, origin)
    if not {*LENGTH_SETTINGS} & found.values.keys():
        lengths = {f"training.{name}": value for name, value in dumped["training"].items()}
        key = next(key for key in LENGTH_SETTINGS if key in lengths)
        _put(found, key, lengths[key], DRAFTED)
    for key in ("sequence_length", "global_batch_size", "precision"):
        _put(found, f"training.{key}", getattr(base.training, key), DRAFTED)
    _put(found, "optimizer.learning_rate", base.optimizer.learning_rate, DRAFTED)


def _add_data(found: Found, task: Task, data: Path | None) -> None:
    """Add the data: from `--data`, from the files, or a placeholder."""
    if data is not None:
        for key in [key for key in found.values if f"{key}.".startswith("data.train.")]:
            found.remove(key, f"--data {data} states it")
        _put(found, "data.train", source_of(data, task), f"--data {data}")
    for key in ("data.train", "data.validation"):
        names = [name for name in found.values if name.startswith(f"{key}.")]
        inside = {name.removeprefix(f"{key}."): found.values.pop(name) for name in names}
        if not inside or key in found.values:
            continue
        source = {name: one.value for name, one in inside.items()}
        kind = "megatron" if "prefix" in source else _KINDS[task]
        source = {"kind": source.pop("kind", kind), **source}
        if not {"path", "prefix", "files"} & source.keys():
            source["path"] = PLACEHOLDER
        places = dict.fromkeys(_origin(one) for one in inside.values())
        _put(found, key, source, ", ".join(places))
    todo = "TO DO: the files name no data set (docs/data.md)"
    _put(found, "data.train", {"kind": _KINDS[task], "path": PLACEHOLDER}, todo)


def _say_loss(found: Found) -> None:
    """Of chats, TRL's scripts train on more than a recipe, unless they are told otherwise."""
    source = found.values["data.train"].value
    is_chat = isinstance(source, Mapping) and source.get("kind") == "chat"
    if is_chat and "loss_on" not in source and tool("trainer") in found.tools:
        what = "TRL then trains on whole conversations: write `loss_on: all` in data.train, or "
        what += "`completion` if rows have a prompt and a completion"
        found.drop(ForeignSetting("assistant_only_loss", None, "not stated"), what)


def _add_validation(found: Found) -> None:
    """Add validation data, which evaluation needs and the files may leave to a script."""
    sides = ("data.validation_fraction", "data.validation")
    if found.value("evaluation.every_steps") and not any(map(found.value, sides)):
        found.values.pop("data.validation_fraction", None)
        _put(found, sides[0], 0.01, "for evaluations: the files hold out none")


def _valid(found: Found) -> Recipe:
    """The recipe. Raises RecipeError, with the places of values that the schema refuses."""
    places: dict[KeyPath, Location] = {
        tuple(key.split(".")): Location(one.at.file or one.at.name, one.at.line)
        for key, one in found.values.items()
    }
    return valid(Stated(_nested(found), {(): Location("--from", 0), **places}))


def _problem(found: Found) -> str:
    """Why it cannot be checked or planned as it is. Empty where it can."""
    try:
        plan_recipe(judged(Stated(_nested(found), {(): Location("", 0)})), explained=False)
    except DmtError as error:
        return str(error)
    return ""


def _nested(found: Found) -> dict[str, Any]:
    """The values in sections, in the order of the schema."""
    rank = {name: index for index, name in enumerate(Recipe.model_fields)}
    order = sorted(found.values, key=lambda key: rank.get(key.partition(".")[0], 0))
    return nested({key: found.values[key].value for key in order})
