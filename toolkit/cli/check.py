"""`dmt check`: read recipes and report every mistake at once.

A recipe that reads well is also planned and rendered, because some mistakes only appear there:
a DeepSpeed file that is missing, misspelt or disagrees with the recipe. Local files that it
names are checked. `--against` compares it with other tools' configuration. Nothing is
downloaded or written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.backend import adopt_engine_config
from toolkit.cli.options import AsJson, Overrides
from toolkit.cli.output import Console, Line, output, problem_list
from toolkit.data.local import local_problems
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, PlanError, Problem, RecipeError
from toolkit.foreign.carry import left_lines
from toolkit.foreign.compare import FileComparison, against
from toolkit.intake.layers import places_of
from toolkit.intake.load import load_recipe, placed
from toolkit.models.hub import ShapeUnknown, ignored_keys, model_config
from toolkit.plan.plan import Plan
from toolkit.plan.rules.models import position_notes
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide
from toolkit.text.terminal import printable
from toolkit.text.units import human


@dataclass(frozen=True)
class Verdict:
    """The result for one recipe file."""

    file: str
    recipe: Recipe | None
    """None when there are problems."""
    problems: tuple[Problem, ...] = ()
    note: str | None = None
    """Remarks: what could not be checked and why, what nothing reads, what may be a mistake."""
    parameters: int | None = None
    """Parameters of the model. None if its shape is not known on this machine."""
    reports: tuple[FileComparison, ...] = ()
    """One for each file that the recipe was compared with."""

    @property
    def good(self) -> bool:
        """True if the recipe has no mistake and no disagreement."""
        return not self.problems and all(report.agrees for report in self.reports)


def check(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE", help="Files, or names of `dmt recipes`.")
    ],
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    others: Annotated[
        list[Path] | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="Compare a recipe without mistakes with another tool's file, e.g. a DeepSpeed "
            "config; repeat it. Exit 2 when a setting disagrees.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check recipes and report every mistake at once. Exit 2 when there is any.

    Example: `dmt check recipe.yaml --set parallel.zero.stage=3`

    Example: `dmt check recipe.yaml --against ds_config.json`
    """
    verdicts = [judge(path, overrides, others or ()) for path in recipes]
    output(
        as_json,
        {"recipes": [_record(verdict) for verdict in verdicts]},
        _lines(verdicts),
        wrap=False,
        exit_code=EXIT_DONE if all(one.good for one in verdicts) else EXIT_USER_ERROR,
    )


def judge(path: Path, overrides: Sequence[str] = (), others: Sequence[Path] = ()) -> Verdict:
    """Load, plan and render one recipe. Its mistakes become part of the verdict."""
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        return Verdict(str(path), None, tuple(error.problems), "; ".join(error.notes) or None)
    note, found, plan = None, list[Problem](), None
    try:
        plan, note = _plan(recipe)
    except RecipeError as error:
        found += error.problems
    except PlanError as error:
        key, _, reason = error.message.partition(": ")
        found.append(Problem(key, reason, "a recipe that can be planned", error.fix))
    found += local_problems(recipe)
    reports: list[FileComparison] = []
    for other in () if found else others:
        try:
            places = {key: str(at) for key, at in places_of(path, overrides).items()}
            reports.append(against(other, recipe, plan, places))
        except RecipeError as error:
            found += error.problems
    problems = tuple(placed(problem, path, overrides) for problem in found)
    parameters = None if plan is None else plan.parameters
    good = None if problems else recipe
    note = "; ".join(filter(None, (note, *recipe.notes))) or None
    return Verdict(str(path), good, problems, note, parameters, tuple(reports))


def _plan(recipe: Recipe) -> tuple[Plan | None, str | None]:
    """Plan and render without the network. Returns the plan, and a note or why there is none.

    Raises RecipeError or PlanError when the recipe is wrong.
    """
    try:
        config = model_config(recipe.model, download=False)
        note = ignored_keys(recipe.model, download=False)
    except ShapeUnknown as error:
        adopt_engine_config(recipe)
        return None, f"not planned: {error.message}"
    notes = (note, *position_notes(config, recipe.training.sequence_length))
    recipe = recipe.with_values({"model.config": config})
    plan = decide(recipe, None, download=False, explained=False).plan
    return plan, "; ".join(filter(None, notes)) or None


def summary(recipe: Recipe, parameters: int | None) -> str:
    """One line: what is trained, for how long, in which batches."""
    training = recipe.training
    parts = [str(recipe.model.hub)] if recipe.model.config is None else []
    parts += [f"{human(parameters)} parameters"] if parameters else []
    parts.append(_length(recipe))
    rows = " × 2" if training.rows_per_sample == 2 else ""
    ramp = training.batch_ramp
    start = f"{ramp.start} → " if ramp is not None else ""
    size, length = training.global_batch_size, training.sequence_length
    parts.append(f"batch {start}{size}{rows} × {length}")
    parts.append(training.precision)
    parts.append(f"{recipe.cluster.world_size} × {recipe.cluster.gpu}")
    return ", ".join(parts)


def _length(recipe: Recipe) -> str:
    training, steps = recipe.training, recipe.total_steps()
    if steps is None:
        return f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'}"
    tokens = training.batches.tokens(steps)
    return f"{human(tokens)} tokens in {steps} steps"


def _record(verdict: Verdict) -> dict[str, object]:
    fields: dict[str, object] = {
        "file": verdict.file,
        "ok": verdict.good,
        "problems": verdict.problems,
        "note": verdict.note,
    }
    if verdict.reports:
        fields["against"] = [_compared(report) for report in verdict.reports]
    return fields


def _lines(verdicts: Sequence[Verdict]) -> Iterator[Line]:
    """Good recipes, one line each. Problems go to standard error.

    Lines are never wrapped, so that a terminal finds `file:line`.
    """
    err = Console(stderr=True)
    width = max((len(verdict.recipe.name) for verdict in verdicts if verdict.recipe), default=0)
    for verdict in verdicts:
        if verdict.recipe:
            yield Text.assemble(
                ("✓ ", "green"),
                (verdict.recipe.name.ljust(width), "bold"),
                f"  {summary(verdict.recipe, verdict.parameters)}",
                (f"  {printable(verdict.file)}", "dim"),
                (f"\n  note  {verdict.note}" if verdict.note else "", "yellow"),
            )
        else:
            err.print(problem_list(verdict.file, verdict.problems), soft_wrap=True)
            if verdict.note:
                err.print(Text(f"  note  {verdict.note}", "yellow"), soft_wrap=True)
        for report in verdict.reports:
            yield from _comparison(report)


def _compared(report: FileComparison) -> dict[str, object]:
    """Return one comparison as plain data."""
    return {
        "source": report.source,
        "kind": report.kind,
        "agrees": report.agrees,
        "settings": report.settings,
        "left": [
            {
                "name": one.at.name,
                "place": one.at.place,
                "reason": one.reason,
                "changes": one.changes,
            }
            for one in (*report.misspelt, *report.left)
        ],
    }


def _comparison(report: FileComparison) -> Iterator[Line]:
    """Lines of one comparison: settings that disagree, misspelt names, and what is missing
    here."""
    conflicts = [row for row in report.settings if not row.agrees]
    sign = Text("✓ ", "green") if report.agrees else Text("✗ ", "red")
    count = f"{len(report.settings) - len(conflicts)} settings agree, {len(conflicts)} disagree"
    yield Text.assemble("  ", sign, (report.source, "bold"), f"  {report.kind}: {count}")
    for row in conflicts:
        ours = f"{row.recipe} ({row.recipe_place})" if row.recipe_place else row.recipe
        values = f"  {row.name}: {row.other}, the recipe {ours}\n      fix  "
        where, key = (f"  {row.place}", "cyan"), (f"  {row.key}", "bold")
        yield Text.assemble(where, key, values, (row.fix, "green"))
    for one in report.misspelt:
        yield Text(f"  {one.at.place}  {one.at.name}: {one.reason}", "red")
    for line in left_lines(report.left):
        yield Text(f"  {line}", "dim")
