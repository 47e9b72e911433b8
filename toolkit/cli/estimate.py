"""`dmt estimate`: memory and step time of a fixed layout, by part; starts nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.bars import memory_lines, time_lines
from toolkit.cli.extras import option
from toolkit.cli.options import AsJson, ClusterOption, Overrides
from toolkit.cli.output import output
from toolkit.errors import PlanError
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.dimensions import batch_text, recompute_text
from toolkit.plan.estimate import Estimate, estimate_plan, machine_output
from toolkit.plan.plan import Plan
from toolkit.run.assignment import decide


def estimate(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe YAML.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    cluster: ClusterOption = None,
    cases: Annotated[Path | None, typer.Option(help="JSON list of published cases.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the results of --cases go.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and step time of a recipe's layout, or of a list of cases.

    Example: `dmt estimate recipes/llama/llama-3.1-8b-pretrain.yaml --set parallel.tensor=2`
    """
    if (recipe is None) == (cases is None) or (cases is None) != (out is None):
        raise PlanError(
            "dmt estimate: needs either a recipe or --cases with --out",
            fix="`dmt estimate RECIPE` or `dmt estimate --cases CASES.json --out RESULTS.json`",
        )
    if cases is not None and cluster is not None:
        raise PlanError("--cluster: every case of --cases names its own", fix="leave it out")
    if recipe is None:
        option("estimate --cases")(cases, out, overrides)
        return
    where = None if cluster is None else find_cluster(cluster)
    assignment = decide(load_recipe(recipe, overrides, where), None, where, explained=False)
    name, plan = assignment.recipe.name, assignment.plan
    found = estimate_plan(assignment.recipe, plan, where)
    data = {"id": name} | machine_output(found)
    output(as_json, data, _lines(name, plan, found))


def _lines(name: str, plan: Plan, found: Estimate) -> Iterator[str | Text]:
    """Memory by part, then time by part, with bars."""
    layout = plan.layout
    yield Text.assemble((name, "bold"), f"  {plan.engine}, {plan.model}")
    degrees = ("dp", "tp", "pp", "vpp", "cp", "ep")
    split = " · ".join(f"{key} {getattr(layout, key):,}" for key in degrees)
    yield f"  {split} · zero {layout.zero_stage} · recompute {recompute_text(layout)}"
    yield f"  {batch_text(layout)}"
    yield ""
    yield from memory_lines(found)
    yield ""
    yield from time_lines(found)
