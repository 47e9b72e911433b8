"""The recipe that files of other tools state, as a YAML with the origin of every value."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.data.local import NO_TOKENIZER, PLACEHOLDER
from toolkit.errors import DmtError, PlanError
from toolkit.foreign.base import CHANGES
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.describe import settings
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import LENGTH_SETTINGS, Recipe
from toolkit.starter.data import source_of
from toolkit.starter.draft import Task, as_recipe, draft, draft_of_config, legal_name
from toolkit.starter.from_files import Statements, Uncarried, read_files
from toolkit.text.dotted import nested
from toolkit.text.redact import MASK, looks_secret, redact
from toolkit.text.terminal import printable

COLUMN = 40
"""Where comments begin, unless the setting is longer."""
DRAFTED = "not in the files: dmt init's usual value"
_KINDS = {"pretrain": "hf", "sft": "chat", "lora": "chat", "dpo": "preference"}
_FIX = "change that setting in the file, or write the recipe by hand"


@dataclass(frozen=True)
class Imported:
    """What `dmt init --from` writes."""

    text: str
    uncarried: tuple[Uncarried, ...]
    problem: str = ""
    """Why it cannot be planned as it is; empty where it can."""


def import_files(
    paths: Sequence[Path],
    model: str | None,
    given_cluster: str | None,
    given_task: Task | None,
    data: Path | None,
) -> Imported:
    """The recipe of `paths`. `model`, the cluster, the task and `data` are what the user states
    in addition.

    Raises RecipeError for a file that cannot be read or that contradicts another, PlanError
    where something is missing that only the user knows.
    """
    cluster = None if given_cluster is None else find_cluster(given_cluster)
    found = read_files(paths, cluster.gpus if cluster else None, model is not None)
    _leave_credentials(found)
    cluster = cluster or _stated_cluster(found)
    task = _task(found, given_task)
    base = _base(found, model, cluster, task)
    _place(found, cluster, given_cluster)
    _add_required(found, base, task, given_task is not None, data)
    _add_validation(found)
    _clean_name(found)
    recipe = _valid(found)
    names = ", ".join(str(path) for path in paths)
    body = "\n".join([
        f"# {recipe.name}, written by `dmt init --from` of {names}.",
        "# Settings with a FILE:LINE are those of the files; check the others.",
        *_lines(_nested(found.values), "", found.origins),
    ])  # fmt: skip
    problem = redact(_problem(body))
    uncarried = tuple(_masked(one) for one in found.uncarried)
    after = [f"# {line}" for line in summary(uncarried)]
    after += [f"# not planned: {' '.join(problem.split())}"] if problem else []
    return Imported(redact("\n".join([body, *after])), uncarried, problem)


def summary(uncarried: Sequence[Uncarried]) -> Iterator[str]:
    """What is not carried: first what changes what is learned, then the rest in one line."""
    said = [one for one in uncarried if not one.is_ignored]
    if said:
        yield f"CHANGES WHAT IS LEARNED, or is for you to state ({len(said)}):"
    yield from (f"  {one}" for one in sorted(said, key=lambda one: CHANGES not in one.reason))
    if ignored := [one.name for one in uncarried if one.is_ignored]:
        yield f"ignored ({len(ignored)}): {', '.join(ignored)}"


def _leave_credentials(found: Statements) -> None:
    """Values with a credential in them are not carried."""
    for key, value in [*found.values.items()]:
        text = value if isinstance(value, str) else in_yaml(value)
        if redact(text) != text or (isinstance(value, str) and looks_secret(key, value)):
            place, _, name = found.origins.pop(key).partition(" ")
            del found.values[key]
            reason = "it has a credential, which no recipe states"
            found.uncarried.append(Uncarried(name or key, "", place, reason))


def _masked(one: Uncarried) -> Uncarried:
    """What is not carried, without credentials."""
    secret = MASK in one.written or looks_secret(one.name, one.written)
    inside = re.findall(r"(\w+)['\"]?: (\S+)", one.written)
    secret |= any(looks_secret(key, value) for key, value in inside)
    # `PATH: token VALUE`
    reason = re.sub(
        r"([:,] )(\w+) ([^\s,]+)",
        lambda at: f"{at[1]}{at[2]}" if looks_secret(at[2], at[3]) else at[0],
        one.reason,
    )
    name = redact(one.name)
    return replace(
        one, name=name.lstrip("-") if looks_secret(name, "value") else name,
        written="" if secret else one.written, reason=printable(redact(reason)),
    )  # fmt: skip


def _stated_cluster(found: Statements) -> Cluster:
    if found.values.get("cluster.gpu") == "cpu":
        return find_cluster(f"1x{found.world or 1}xcpu")
    nodes = found.values.get("cluster.nodes", 1)
    per_node = found.values.get("cluster.gpus_per_node") or (found.world or 8) // int(nodes)
    raise PlanError(
        "--cluster: the files do not say which accelerators they are for",
        fix=f"--cluster NODESxGPUSxNAME, e.g. {nodes}x{per_node}xh100-80gb",
    )


def _task(found: Statements, given: Task | None) -> Task:
    objective = found.values.get("training.objective")
    stated: Task | None = {
        "sft": "sft",
        "dpo": "dpo",
        "orpo": "dpo",
        "pretrain": "pretrain",
    }.get(str(objective))  # type: ignore[assignment]
    if any(key.startswith("adapter.") for key in found.values) and stated in ("sft", None):
        stated = "lora"
    if given and stated and given != stated:
        at = found.origins.get("training.objective", "an adapter in the files")
        raise PlanError(
            f"--task: {given}, and the files are for {stated} ({at})",
            fix=f"leave --task out, or --task {stated}",
        )
    return given or stated or "pretrain"


def _base(found: Statements, model: str | None, cluster: Cluster, task: Task) -> Recipe:
    """The recipe that `dmt init` would write for the model, for what the files do not state."""
    config = {
        key.removeprefix("model.config."): found.values.pop(key)
        for key in [*found.values]
        if key.startswith("model.config.")
    }
    hub = found.values.get("model.hub")
    if model is not None:
        if hub is not None and hub != model:
            place = found.origins.pop("model.hub")
            found.uncarried.append(Uncarried("model", str(hub), place, f"MODEL is {model}"))
        elif config:
            place = found.origins.get("model.config.model_type", "the files")
            reason = f"MODEL is {model}"
            found.uncarried.append(Uncarried("the model's shape", "", place, reason))
        found.values.pop("model.hub", None)
        for key in ("data.tokenizer", "data.tokenizer_revision", "model.revision"):
            if (other := found.values.pop(key, None)) is not None:
                place, reason = found.origins.pop(key), f"MODEL is {model}, with its own"
                found.uncarried.append(Uncarried(key, str(other), place, reason))
        return draft(model, cluster, task)
    if config:
        tokenizer = str(found.values.get("data.tokenizer", NO_TOKENIZER))
        origin = next(
            text for key, text in found.origins.items() if key.startswith("model.config.")
        )
        recipe = draft_of_config(config, tokenizer, cluster, task)
        found.put("model.config", recipe.model.config, origin)
        return recipe
    if hub is None:
        raise PlanError(
            "MODEL: the files name no model",
            fix="dmt init MODEL --from FILE: a hub id, a folder, or one of `dmt recipes`",
        )
    return draft(str(hub), cluster, task)


def _place(found: Statements, cluster: Cluster, given: str | None) -> None:
    """The cluster; the files' own, where `--cluster` states another, is not carried."""
    for key, value in cluster.section.items():
        key = f"cluster.{key}"
        stated = found.values.pop(key, value)
        origin = found.origins.pop(key, "")
        if stated != value:
            reason = f"--cluster {given} states it"
            found.uncarried.append(Uncarried(key, str(stated), origin, reason))
            origin = ""
        found.put(key, value, origin or (f"--cluster {given}" if given else DRAFTED))


def _add_required(
    found: Statements, base: Recipe, task: Task, given: bool, data: Path | None
) -> None:
    """What a recipe requires, or a model or task implies, and the files do not state."""
    shown, stated = base.model_dump(exclude_unset=True), {*found.values}
    for key, value in shown["model"].items():
        found.put(f"model.{key}", value, "the model")
    found.put("name", base.name, "")
    hub = found.values.get("model.hub") if "model.hub" in stated else None
    tokenizer = hub or base.data.tokenizer
    origin = "the model's" if hub else DRAFTED
    if tokenizer == NO_TOKENIZER:
        origin = "TO DO: the files name no tokenizer that DMT knows"
    found.put("data.tokenizer", tokenizer, origin)
    if task != "pretrain":
        found.put("data.chat_template", base.data.chat_template, DRAFTED)
    objective = found.values.get("training.objective", base.training.objective)
    for key in ("adapter", "dpo"):
        if key == "dpo" and key != objective:
            continue  # orpo
        inside = (name for name in found.values if name.startswith(f"{key}."))
        if shown.get(key) and not (key == "adapter" and any(inside)):
            for name, value in shown[key].items():
                found.put(f"{key}.{name}", value, DRAFTED)
    training = shown["training"]
    origin = f"--task {task}" if given else DRAFTED
    found.put("training.objective", base.training.objective, origin)
    if not {*LENGTH_SETTINGS} & found.values.keys():
        key = next(key for key in LENGTH_SETTINGS if key.partition(".")[2] in training)
        found.put(key, training[key.partition(".")[2]], DRAFTED)
    for key in ("sequence_length", "global_batch_size", "precision"):
        found.put(f"training.{key}", getattr(base.training, key), DRAFTED)
    found.put("optimizer.learning_rate", base.optimizer.learning_rate, DRAFTED)
    _add_data(found, task, data)


def _add_data(found: Statements, task: Task, data: Path | None) -> None:
    """The data: `--data`, the files', or a placeholder."""
    inside = _inside(found, "data.train.")
    if data is not None:
        old = [(found.values.pop("data.train", None), found.origins.pop("data.train", ""))]
        for value, place in [*old, *inside.values()]:
            if value is not None:
                reason = f"--data {data} states it"
                found.uncarried.append(Uncarried("data.train", str(value), place, reason))
        found.put("data.train", source_of(data, task), f"--data {data}")
    elif inside:
        _put_source(found, "data.train", inside, task)
    found.put(
        "data.train", {"kind": _KINDS[task], "path": PLACEHOLDER},
        "TO DO: the files name no data set (docs/data.md)",
    )  # fmt: skip
    if validation := _inside(found, "data.validation."):
        _put_source(found, "data.validation", validation, task)


def _inside(found: Statements, prefix: str) -> dict[str, tuple[Any, str]]:
    """Values and origins of settings in one section, which are taken out."""
    return {
        key.removeprefix(prefix): (found.values.pop(key), found.origins.pop(key))
        for key in [*found.values]
        if key.startswith(prefix)
    }


def _put_source(
    found: Statements, key: str, inside: Mapping[str, tuple[Any, str]], task: Task
) -> None:
    """One source of data, of settings that the files state one by one."""
    source = {name: value for name, (value, _) in inside.items()}
    kind = "megatron" if "prefix" in source else _KINDS[task]
    source = {"kind": source.pop("kind", kind), **source}
    if not {"path", "prefix", "files"} & source.keys():
        source["path"] = PLACEHOLDER
    found.put(key, source, ", ".join({place: 0 for _, place in inside.values()}))


def _add_validation(found: Statements) -> None:
    """Evaluation needs validation data, which the files may leave to a script."""
    every = found.values.get("evaluation.every_steps")
    sides = ("data.validation_fraction", "data.validation")
    if every is None or any(found.values.get(key) for key in sides):
        return
    found.values.pop("data.validation_fraction", None)
    found.put("data.validation_fraction", 0.01, "for evaluations: the files hold out none")


def _valid(found: Statements) -> Recipe:
    """The recipe; a value that the schema refuses is not carried.

    Raises PlanError where it cannot do without it.
    """
    while True:
        try:
            return Recipe.model_validate(_nested(found.values))
        except ValidationError as error:
            first = error.errors()[0]
        where = [str(step) for step in first["loc"]]
        path = ".".join(where)
        key = next((key for key in found.values if f"{path}.".startswith(f"{key}.")), "")
        setting = settings().get(key)
        if not key or setting is None or setting.info.is_required():
            as_recipe(_nested(found.values), found.origins.get(key, "--from"), _FIX)
            raise AssertionError("refused above")
        as_recipe(_nested(found.values), found.origins[key], _FIX)


def _clean_name(found: Statements) -> None:
    """The run's name, in letters that a folder of runs may have."""
    name = str(found.values["name"])
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        return
    found.values["name"] = legal_name(name, "run")
    found.origins["name"] += printable(f": `{name}` there")


def _problem(body: str) -> str:
    """Why it cannot be checked or planned as it is; empty where it can."""
    with tempfile.TemporaryDirectory(prefix="dmt-init-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(body, encoding="utf-8")
        try:
            plan_recipe(load_recipe(file), explained=False)
        except DmtError as error:
            return str(error).replace(f"{file}:", "line ")
    return ""


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections in the order of the schema."""
    rank = {name: index for index, name in enumerate(Recipe.model_fields)}
    return nested(
        {
            key: values[key]
            for key in sorted(values, key=lambda key: rank.get(key.partition(".")[0], 0))
        }
    )


def _lines(values: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Each setting on a line, with its origin."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        origin = origins.get(key, "")
        if (
            isinstance(value, Mapping)
            and value
            and (key not in origins or key == "model.config")
        ):
            yield _line(f"{indent}{name}:", origin)
            yield from _lines(value, f"{key}.", {} if key == "model.config" else origins)
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            yield _line(f"{indent}{name}:", origin)
            yield from (f"{indent}  - {in_yaml(one)}" for one in value)
        else:
            yield _line(f"{indent}{name}: {in_yaml(value)}", origin)


def _line(setting: str, comment: str) -> str:
    return f"{setting:<{COLUMN}} # {comment}" if comment else setting
