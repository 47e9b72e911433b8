"""Settings that two places state: a recipe, and what other tools read (docs/conflicts.md).

A `Target` (base.py) reads a file into `Stated`s, in the recipe's words, and environment.py the
environment; `facts.py` says what the recipe and its plan state; `compare.py` judges.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.errors import PlanError
from toolkit.foreign import environment
from toolkit.foreign.compare import Report, SettingComparison, compare
from toolkit.foreign.environment import Starting
from toolkit.foreign.facts import Places, facts, places_in
from toolkit.foreign.files import read_source
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe

__all__ = [
    "Report",
    "SettingComparison",
    "against",
    "environment_conflicts",
    "places_in",
    "preflight",
]

ENVIRONMENT = environment.NAME
"""Name of the current environment, instead of a file."""

_MOST_NAMED = 6
"""Maximum number of conflicts named in the line at a start."""


def against(
    other: str, recipe: Recipe, plan: Plan | None, places: Places = lambda _: ""
) -> list[Report]:
    """Compare a recipe with the file `other`, or with the environment (`env`).

    Without a plan, what the recipe leaves at `auto` is not judged. Raises RecipeError when
    the file cannot be read or is of no known kind.
    """
    if other == ENVIRONMENT:
        sources = environment.read(recipe, os.environ)
    else:
        sources = [read_source(Path(other), recipe)]
    known = facts(recipe, plan, places)
    return [compare(source, known) for source in sources]


def environment_conflicts(
    recipe: Recipe,
    plan: Plan | None = None,
    starting: Starting | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[SettingComparison, ...]:
    """What the environment states differently from a recipe, before anything starts.

    Includes Accelerate's default config file, except in a worker started by another launcher:
    the file's settings are then variables, or unused. `environ` is os.environ unless given.
    Raises RecipeError when a DeepSpeed config that it names cannot be read.
    """
    sources = environment.read(recipe, os.environ if environ is None else environ, starting)
    known = facts(recipe, plan)
    return tuple(row for source in sources for row in compare(source, known).conflicts)


def preflight(
    recipe: Recipe, plan: Plan, starting: Starting, tell: Callable[[str], None]
) -> None:
    """Report settings of the environment that disagree with the recipe.

    Raises PlanError for those that would fail or silently change training. `tell` gets one line
    for each winner of the rest.
    """
    found = environment_conflicts(recipe, plan, starting)
    if breaking := [row for row in found if row.breaks]:
        raise PlanError(
            f"the environment disagrees with the recipe: {_named(breaking)}",
            fix="; ".join(dict.fromkeys(row.advice for row in breaking)),
        )
    for winner in dict.fromkeys(row.winner for row in found):
        rows = [row for row in found if row.winner == winner]
        tell(
            f"dmt: the environment disagrees, and the {winner} takes precedence: "
            f"{_named(rows)}; see `dmt check RECIPE --against env`"
        )


def _named(rows: list[SettingComparison]) -> str:
    """`ACCELERATE_MIXED_PRECISION=fp16 (training.precision is bf16), …`."""
    texts = [f"{_place(row)}={row.other} ({row.key} is {row.recipe})" for row in rows]
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _place(row: SettingComparison) -> str:
    return row.name if row.name == row.place else f"{row.place} {row.name}"
