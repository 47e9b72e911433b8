"""The recipe that files of other tools state, as a YAML with the origin of every value."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.data.local import NO_TOKENIZER, PLACEHOLDER
from toolkit.errors import DmtError, PlanError, RecipeError
from toolkit.foreign.carry import Carried, ForeignSetting, Found, Left, left_lines, shown
from toolkit.foreign.megatron import config_of
from toolkit.foreign.statements import complete, ranks_of, read_together
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import LENGTH_SETTINGS, Recipe
from toolkit.starter.data import source_of
from toolkit.starter.draft import Task, as_recipe, draft, draft_of_config, legal_name
from toolkit.text.dotted import nested
from toolkit.text.redact import MASK, looks_secret, redact
from toolkit.text.terminal import printable

COLUMN = 40
"""Where comments begin, unless the setting is longer."""
DRAFTED = "not in the files: dmt init's usual value"
_KINDS = {"pretrain": "hf", "sft": "chat", "lora": "chat", "dpo": "preference"}
_TASKS: dict[str, Task] = {"sft": "sft", "dpo": "dpo", "orpo": "dpo", "pretrain": "pretrain"}
_FIX = "change that setting in the file, or write the recipe by hand"


@dataclass(frozen=True)
class Imported:
    """The answer of `dmt init --from`."""

    text: str
    left: tuple[str, ...]
    """Settings that are not carried, one a line."""
    problem: str = ""
    """Why it cannot be planned as it is; empty where it can."""


@dataclass
class _Draft:
    """The recipe in the making."""

    found: Found
    values: dict[str, Any]
    origins: dict[str, str]

    def put(self, key: str, value: object, origin: str) -> None:
        """A value, unless one is there."""
        if key not in self.values:
            self.values[key], self.origins[key] = value, printable(origin)

    def replace(self, key: str, reason: str) -> None:
        """Take a value out that something else states."""
        if key in self.values:
            one = self.found.values[key]
            del self.values[key], self.origins[key]
            self.found.drop(one.at, reason)

    def inside(self, prefix: str) -> dict[str, tuple[Any, str]]:
        """Take out the settings of one section, with their origins."""
        keys = [key for key in self.values if key.startswith(prefix)]
        return {
            key.removeprefix(prefix): (self.values.pop(key), self.origins.pop(key))
            for key in keys
        }


def import_files(
    paths: Sequence[Path],
    model: str | None,
    given_cluster: str | None,
    given_task: Task | None,
    data: Path | None,
) -> Imported:
    """The recipe of `paths`. `model`, the cluster, the task and `data` are what the user states
    in addition.

    Raises RecipeError for a file that cannot be read, has what is not understood or contradicts
    another, PlanError where something is missing that only the user knows.
    """
    cluster = None if given_cluster is None else find_cluster(given_cluster)
    found = read_together(paths, "--from")
    config = {} if model is not None else _shape(found)
    ranks = ranks_of(found)
    complete(found, cluster.gpus if cluster else None)
    _leave_credentials(found)
    made = _Draft(
        found,
        {key: one.value for key, one in found.values.items()},
        {key: printable(_origin(one)) for key, one in found.values.items()},
    )
    cluster = cluster or _stated_cluster(made, ranks)
    task = _task(made, given_task)
    base = _base(made, model, config, cluster, task)
    _place(made, cluster, given_cluster)
    _add_required(made, base, task, given_task is not None)
    _add_data(made, task, data)
    _add_validation(made)
    _clean_name(made)
    recipe = _valid(made)
    body = "\n".join([
        f"# {recipe.name}, written by `dmt init --from` of {', '.join(map(str, paths))}.",
        "# Settings with a FILE:LINE are those of the files; check the others.",
        *_lines(_nested(made.values), "", made.origins),
    ])  # fmt: skip
    problem = redact(_problem(body))
    left = (*left_lines([_masked(one) for one in found.left]),)
    after = [f"# {line}" for line in left]
    after += [f"# not planned: {' '.join(problem.split())}"] if problem else []
    return Imported(redact("\n".join([body, *after])), left, problem)


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
    """Values with a credential in them are not carried."""
    for key, one in [*found.values.items()]:
        value = one.value
        text = value if isinstance(value, str) else in_yaml(value)
        if redact(text) != text or (isinstance(value, str) and looks_secret(key, value)):
            del found.values[key]
            at = ForeignSetting(one.at.name, None, one.at.file, one.at.line)
            found.drop(at, "it has a credential, which no recipe states")


def _masked(one: Left) -> Left:
    """A setting that is not carried, without credentials."""
    at, written = one.at, shown(one.at.value)
    secret = MASK in redact(written) or looks_secret(at.name, written)
    inside = re.findall(r"(\w+)['\"]?: (\S+)", written)
    secret |= any(looks_secret(key, value) for key, value in inside)
    reason = re.sub(  # `PATH: token VALUE`
        r"([:,] )(\w+) ([^\s,]+)",
        lambda at: f"{at[1]}{at[2]}" if looks_secret(at[2], at[3]) else at[0],
        one.reason,
    )
    name = redact(at.name)
    name = name.lstrip("-") if looks_secret(name, "value") else name
    value = "" if secret or at.value is None else at.value
    at = ForeignSetting(name, value, at.file, at.line)
    return Left(at, printable(redact(reason)), one.changes, one.unknown)


def _stated_cluster(made: _Draft, ranks: int | None) -> Cluster:
    """On CPUs, as far as the files say so; otherwise only the user knows the accelerators."""
    nodes = made.values.get("cluster.nodes") or 1
    per_node = made.values.get("cluster.gpus_per_node") or max(1, (ranks or 8) // int(nodes))
    if made.values.get("cluster.gpu") == "cpu":
        return find_cluster(f"{nodes}x{per_node if ranks else 1}xcpu")
    raise PlanError(
        "--cluster: the files do not say which accelerators they are for",
        fix=f"--cluster NODESxGPUSxNAME, e.g. {nodes}x{per_node}xh100-80gb",
    )


def _task(made: _Draft, given: Task | None) -> Task:
    stated = _TASKS.get(str(made.values.get("training.objective")))
    if any(key.startswith("adapter.") for key in made.values) and stated in ("sft", None):
        stated = "lora"
    if given and stated and given != stated:
        at = made.origins.get("training.objective", "an adapter in the files")
        raise PlanError(
            f"--task: {given}, and the files are for {stated} ({at})",
            fix=f"leave --task out, or --task {stated}",
        )
    return given or stated or "pretrain"


def _base(
    made: _Draft, model: str | None, config: Mapping[str, Any], cluster: Cluster, task: Task
) -> Recipe:
    """The recipe that `dmt init` would write for the model, for what the files do not state."""
    hub = made.values.get("model.hub")
    if model is not None:
        if hub == model:
            del made.values["model.hub"], made.origins["model.hub"]
        for key in ("model.hub", "model.revision", "data.tokenizer", "data.tokenizer_revision"):
            made.replace(key, f"MODEL is {model}, with its own")
        if made.found.shape:
            first = next(iter(made.found.shape.values()))
            at = ForeignSetting("the model's shape", None, first.file, first.line)
            made.found.drop(at, f"MODEL is {model}")
        return draft(model, cluster, task)
    if config:
        first = next(iter(made.found.shape.values()))
        tokenizer = str(made.values.get("data.tokenizer", NO_TOKENIZER))
        recipe = draft_of_config(config, tokenizer, cluster, task)
        origin = f"{first.place} and the other settings of the model"
        made.put("model.config", recipe.model.config, origin)
        return recipe
    if hub is None:
        raise PlanError(
            "MODEL: the files name no model",
            fix="dmt init MODEL --from FILE: a hub id, a folder, or one of `dmt recipes`",
        )
    return draft(str(hub), cluster, task)


def _place(made: _Draft, cluster: Cluster, given: str | None) -> None:
    """The cluster; the files' own, where `--cluster` states another, is not carried."""
    for name, value in cluster.section.items():
        key = f"cluster.{name}"
        if made.values.get(key, value) != value:
            made.replace(key, f"--cluster {given} states it")
        made.put(key, value, f"--cluster {given}" if given else DRAFTED)


def _add_required(made: _Draft, base: Recipe, task: Task, given: bool) -> None:
    """Add what a recipe requires, or a model or task implies, and the files do not state."""
    dumped, values = base.model_dump(exclude_unset=True), made.values
    for key, value in dumped["model"].items():
        made.put(f"model.{key}", value, "the model")
    made.put("name", base.name, "")
    tokenizer = base.data.tokenizer
    origin = DRAFTED
    if tokenizer == NO_TOKENIZER:
        origin = "TO DO: the files name no tokenizer that DMT knows"
    made.put("data.tokenizer", tokenizer, origin)
    if task != "pretrain":
        made.put("data.chat_template", base.data.chat_template, DRAFTED)
    objective = values.get("training.objective", base.training.objective)
    for key in ("adapter", "dpo"):
        if key == "dpo" and key != objective:
            continue  # orpo
        stated = any(name.startswith(f"{key}.") for name in values)
        if dumped.get(key) and not (key == "adapter" and stated):
            for name, value in dumped[key].items():
                made.put(f"{key}.{name}", value, DRAFTED)
    training = dumped["training"]
    origin = f"--task {task}" if given else DRAFTED
    made.put("training.objective", base.training.objective, origin)
    if not {*LENGTH_SETTINGS} & values.keys():
        key = next(key for key in LENGTH_SETTINGS if key.partition(".")[2] in training)
        made.put(key, training[key.partition(".")[2]], DRAFTED)
    for key in ("sequence_length", "global_batch_size", "precision"):
        made.put(f"training.{key}", getattr(base.training, key), DRAFTED)
    made.put("optimizer.learning_rate", base.optimizer.learning_rate, DRAFTED)


def _add_data(made: _Draft, task: Task, data: Path | None) -> None:
    """The data: `--data`, the files', or a placeholder."""
    if data is not None:
        for key in [key for key in made.values if f"{key}.".startswith("data.train.")]:
            made.replace(key, f"--data {data} states it")
        made.put("data.train", source_of(data, task), f"--data {data}")
    for key in ("data.train", "data.validation"):
        inside = made.inside(f"{key}.")
        if not inside or key in made.values:
            continue
        source = {name: value for name, (value, _) in inside.items()}
        kind = "megatron" if "prefix" in source else _KINDS[task]
        source = {"kind": source.pop("kind", kind), **source}
        if not {"path", "prefix", "files"} & source.keys():
            source["path"] = PLACEHOLDER
        made.put(key, source, ", ".join({place: 0 for _, place in inside.values()}))
    todo = "TO DO: the files name no data set (docs/data.md)"
    made.put("data.train", {"kind": _KINDS[task], "path": PLACEHOLDER}, todo)


def _add_validation(made: _Draft) -> None:
    """Evaluation needs validation data, which the files may leave to a script."""
    sides = ("data.validation_fraction", "data.validation")
    if made.values.get("evaluation.every_steps") and not any(map(made.values.get, sides)):
        made.values.pop("data.validation_fraction", None)
        made.put("data.validation_fraction", 0.01, "for evaluations: the files hold out none")


def _valid(made: _Draft) -> Recipe:
    """The recipe. Raises PlanError, with the place of a value that the schema refuses."""
    try:
        return Recipe.model_validate(_nested(made.values))
    except ValidationError as error:
        path = ".".join(map(str, error.errors()[0]["loc"]))
        key = next((key for key in made.values if f"{path}.".startswith(f"{key}.")), "")
        return as_recipe(_nested(made.values), made.origins.get(key, "--from"), _FIX)


def _clean_name(made: _Draft) -> None:
    """The run's name, in letters that a folder of runs may have."""
    name = str(made.values["name"])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        made.values["name"] = legal_name(name, "run")
        made.origins["name"] += printable(f": `{name}` there")


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
    order = sorted(values, key=lambda key: rank.get(key.partition(".")[0], 0))
    return nested({key: values[key] for key in order})


def _lines(values: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Each setting on a line, with its origin."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        origin = origins.get(key, "")
        is_section = isinstance(value, Mapping) and value
        if is_section and (key not in origins or key == "model.config"):
            yield _line(f"{indent}{name}:", origin)
            yield from _lines(value, f"{key}.", {} if key == "model.config" else origins)
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            yield _line(f"{indent}{name}:", origin)
            yield from (f"{indent}  - {in_yaml(one)}" for one in value)
        else:
            yield _line(f"{indent}{name}: {in_yaml(value)}", origin)


def _line(setting: str, comment: str) -> str:
    return f"{setting:<{COLUMN}} # {comment}" if comment else setting
