"""`dmt tune`: measures layouts of a recipe on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.bars import count_progress
from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.cli.output import output
from toolkit.errors import PlanError, RunFailed
from toolkit.extras.tune.candidates import Candidates
from toolkit.extras.tune.report import Tuned, lines, planned_table, write_page
from toolkit.extras.tune.throughput import (
    Measurement,
    Tuning,
    calibration,
    fastest,
    measure,
    searched,
)
from toolkit.extras.tune.tuned import (
    calibrated_cluster,
    check_out,
    rescaled,
    tuned_path,
    write_tuned,
)
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.run import jsonl
from toolkit.run.assignment import check_local_files
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.text.terminal import tell
from toolkit.text.units import seconds


def tune(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Measure layouts, and keep the fastest.")
    ] = False,
    trials: Annotated[int, typer.Option(min=1, max=1000, help="Layouts to measure.")] = 12,
    steps: Annotated[
        int, typer.Option(min=1, max=10_000, help="Measured steps of each, after 2 others.")
    ] = 10,
    hang_seconds: Annotated[
        float, typer.Option(min=1, help="A step that takes longer counts as hanging.")
    ] = 300,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Results and trials; default: runs/NAME-tune."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default: RECIPE.tuned.yaml."),
    ] = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the layouts; write and start nothing.")
    ] = False,
) -> None:
    """Find the fastest layout of a recipe on this machine by training a few steps in each.

    The best predicted layout of every strategy is measured, then those that differ little from
    the fastest. A layout that runs out of memory, fails or hangs is a result. The same command
    continues a tuning that was stopped or killed.

    Example: dmt tune recipes/tiny/llama-bytes.yaml --set parallel.engine=auto --throughput
    """
    if not throughput:
        raise PlanError("dmt tune: nothing is asked for", fix="add --throughput")
    loaded = load_recipe(recipe, overrides, cluster)
    folder = folder or Path("runs") / f"{loaded.name}-tune"
    if dry_run:
        stated = None if cluster is None else find_cluster(cluster)
        search = searched(loaded, stated)[1]
        expected = Candidates(search, trials).expected()
        data = [{**one.pair._asdict(), "layout": one.layout, "predicted_s": one.step_s}
                for one in expected]  # fmt: skip
        output(as_json, data, [planned_table(expected)])
        return
    file = out or tuned_path(recipe)
    check_out(file)
    check_local_files(loaded, recipe, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(RunDirectory(folder)):
        speeds = calibrated_cluster(folder, loaded, cluster)
        named = cluster if speeds is None else str(speeds)
        stated = None if named is None else find_cluster(named)
        options = [] if named is None else ["--cluster", named]
        found = searched(loaded, stated)
        tuning = Tuning(recipe, overrides, *found, folder, trials, steps, hang_seconds, options)
        tuned = _run(tuning, file, speeds, stated)
    output(as_json, tuned.machine_output(), lines(tuned), wrap=False)
    if fastest(tuned.results) is None:
        raise RunFailed(
            "no layout could be measured", fix=f"logs: {folder}/trials/*/launch.log"
        )


def _run(tuning: Tuning, file: Path, speeds: Path | None, where: Cluster | None) -> Tuned:
    """Measure, and write the recipe, the cluster file and the page."""
    done = len(tuning.read())
    if done:
        tell(f"{done} layouts were measured before, in {tuning.results}")
    total = min(tuning.trials, len(tuning.search.fitting))
    with count_progress(total) as update:
        update(completed=done)
        for result in measure(tuning, lambda _, text: update(description=text)):
            update(completed=result.number + 1)
            tell(_line(result, total))
    results = tuning.read()
    best, factor, cluster = fastest(results), calibration(results), None
    if best is not None:
        write_tuned(tuning, best, file, where)
    if speeds is not None and factor is not None:
        cluster = tuning.folder / "cluster.yaml"
        note = f"dmt tune: measured speeds × {factor:.4g}, of {tuning.recipe.name}"
        text = rescaled(speeds.read_text(encoding="utf-8"), factor, [note])
        jsonl.write_atomically(cluster, text)
    tuned = Tuned(tuning, results, file, factor, cluster)
    write_page(tuned)
    return tuned


def _line(result: Measurement, total: int) -> str:
    time = "" if result.step_time_s is None else f", {seconds(result.step_time_s)} per step"
    why = f": {result.reason}" if result.reason else ""
    ending = result.ending.replace("_", " ")
    return f"{result.number + 1} of {total}: {result.layout}: {ending}{time}{why}"
