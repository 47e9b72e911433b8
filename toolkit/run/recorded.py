"""Schemas of the files in a run directory that are read again.

A file may come from an older release, another machine or a damaged disk. It is validated once,
when it is read; what the schemas do not name stays as it is.
"""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from toolkit.errors import RecipeError
from toolkit.hardware.cluster import Basis
from toolkit.recipe import yaml_nodes
from toolkit.run import jsonl

Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""A measured or predicted quantity."""
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Mappings = list[dict[str, Any]]
_open = with_config(ConfigDict(extra="allow"))
_NO_MAPPING = "Input should be a valid dictionary", "not a mapping of names to values"
T = TypeVar("T")


@_open
class PredictionLine(TypedDict, total=False):
    """Of a plan; an older one may lack any."""

    step_time_s: Amount
    memory_gib: Amount
    basis: Basis


@_open
class _PredictionInEvent(TypedDict):
    step_time_s: Amount
    memory_gib: Amount
    basis: Basis
    reserved_gib: NotRequired[Amount | None]
    outside_gib: NotRequired[Amount | None]


@_open
class _MeasurementInEvent(TypedDict):
    step_time_s: Amount
    memory_gib: Amount | None
    process_gib: Amount | None
    reserved_gib: NotRequired[Amount | None]
    outside_gib: NotRequired[Amount | None]
    retries: NotRequired[_Whole | None]


@_open
class _Ratios(TypedDict):
    step_time: Amount | None
    memory: Amount | None


@_open
class Event(TypedDict, total=False):
    """A line of events.jsonl: what its readers compute with."""

    kind: str
    rank: _Whole | None
    world: _Whole | None
    step: _Whole | None
    exit_code: _Whole | None
    predicted: _PredictionInEvent
    measured: _MeasurementInEvent
    measured_over_predicted: _Ratios
    files: dict[str, _Whole]


@_open
class MetricsLine(TypedDict):
    """A line of metrics.jsonl."""

    step: _Whole


@_open
class PlanFile(TypedDict, total=False):
    """plan.json."""

    predicted: PredictionLine | None
    layout: dict[str, Any]


@_open
class _Stage(TypedDict, total=False):
    weights: dict[str, Any] | None


@_open
class _Data(TypedDict, total=False):
    train: _Mappings | dict[str, Any]
    stages: list[_Stage] | None


@_open
class RecipeFile(TypedDict, total=False):
    """recipe.yaml, of any release."""

    training: dict[str, Any]
    logging: dict[str, Any]
    data: _Data


EVENT: TypeAdapter[Any] = TypeAdapter(Event)
METRICS: TypeAdapter[Any] = TypeAdapter(MetricsLine)
PLAN: TypeAdapter[Any] = TypeAdapter(PlanFile)
RECIPE: TypeAdapter[Any] = TypeAdapter(RecipeFile)
MAPPING: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def checked(schema: TypeAdapter[T], value: Any) -> T:
    """`value` as the schema has it. Raises ValueError: where, and what is wrong."""
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        key = ".".join(str(part) for part in first["loc"])
        more = f" ({len(others)} more)" if others else ""
        what = first["msg"].replace(*_NO_MAPPING)
        raise ValueError(f"{key}: {what}{more}".removeprefix(": ")) from None


def read_events(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The events from byte `offset` on; a malformed one is left out, as by every reader."""
    return [event for line in jsonl.read(path, offset) if (event := valid_event(line))]


def valid_event(line: dict[str, Any]) -> dict[str, Any] | None:
    """The event of a line; None for a malformed one."""
    return valid(EVENT, line)


def valid(schema: TypeAdapter[Any], line: dict[str, Any]) -> dict[str, Any] | None:
    """A line as the schema has it; None for a malformed one."""
    try:
        found: dict[str, Any] = schema.validate_python(line)
    except ValidationError:
        return None
    return found


def parse_recipe(text: str) -> dict[str, Any]:
    """The values of a recorded recipe, within the bounds of a user's. Raises ValueError."""
    try:
        root, problems = yaml_nodes.parse(text, "recipe.yaml")
    except RecipeError as error:
        problems = list(error.problems)
    if problems:
        raise ValueError(f"line {problems[0].line}: found {problems[0].found}")
    recipe: dict[str, Any] = checked(RECIPE, yaml_nodes.to_data(root))
    return recipe
