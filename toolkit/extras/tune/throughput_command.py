"""`dmt tune`: from the command line's words to the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.bars import count_progress
from toolkit.cli.output import output
from toolkit.errors import RunFailed
from toolkit.extras.tune.candidates import Candidates
from toolkit.extras.tune.report import Tuned, lines, planned_lines
from toolkit.extras.tune.throughput import (
    Measurement,
    Tuning,
    calibration,
    fastest,
    measure,
    searched,
)
from toolkit.extras.tune.tuned import (
    check_tuned,
    check_tuned_path,
    tuned_path,
    tuned_recipe,
)
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.run.assignment import check_local_files
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.text.terminal import tell
from toolkit.text.units import seconds


@dataclass(frozen=True)
class ThroughputRequest:
    """What was typed."""

    recipe: Path
    overrides: Sequence[str]
    cluster: str | None
    folder: Path | None
    trials: int
    steps: int
    hang_s: float


def list_layouts(request: ThroughputRequest, as_json: bool) -> None:
    """Print what would be measured if every prediction were right."""
    loaded = load_recipe(request.recipe, request.overrides, request.cluster)
    where = None if request.cluster is None else find_cluster(request.cluster)
    expected = Candidates(searched(loaded, where)[1], request.trials).expected()
    data = [
        {**one.pair._asdict(), "layout": one.layout.to_dict(), "predicted_s": one.step_s}
        for one in expected
    ]
    output(as_json, data, planned_lines(expected))


def tune_throughput(request: ThroughputRequest, out: Path | None, as_json: bool) -> None:
    """Measure layouts and print the result. Raises RunFailed if none could be measured."""
    loaded = load_recipe(request.recipe, request.overrides, request.cluster)
    folder = request.folder or Path("runs") / f"{loaded.name}-tune"
    file = out or tuned_path(request.recipe)
    check_tuned_path(file)
    check_local_files(loaded, request.recipe, request.overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(RunDirectory(folder)):
        named = request.cluster
        where = None if named is None else find_cluster(named)
        tuning = Tuning(
            request.recipe,
            request.overrides,
            *searched(loaded, where),
            folder,
            request.trials,
            request.steps,
            request.hang_s,
            [] if named is None else ["--cluster", named],
        )
        tuned = _run(tuning, file)
    output(as_json, tuned.machine_output(), lines(tuned), wrap=False)
    best = fastest(tuned.results)
    if best is None:
        logs = f"{folder}/trials/*/launch.log"
        raise RunFailed(
            "no layout could be measured",
            fix=f"the reasons are in {logs}; the same command tries again",
        )
    check_tuned(tuning, best, file, where)


def _run(tuning: Tuning, file: Path) -> Tuned:
    """Measure, and write the recipe."""
    done = len(tuning.kept())
    if done:
        tell(f"{done} layouts were measured before, in {tuning.results}")
    if tuning.started_locally:
        name = tuning.recipe.launch.launcher
        tell(f"launch.launcher: {name} hands its jobs over; the trials are started by local")
    total = min(tuning.trials, len(tuning.search.fitting))
    with count_progress(total) as update:
        update(completed=done)
        for result in measure(tuning, lambda _, text: update(description=text)):
            done += 1
            update(completed=done)
            tell(f"{done} of {total}: {_line(result)}")
    results = tuning.read()
    best = fastest(results)
    if best is not None:
        write_atomically(file, tuned_recipe(tuning, best, file))
    return Tuned(tuning, results, file, calibration(tuning, results))


def _line(result: Measurement) -> str:
    time = "" if result.step_time_s is None else f", {seconds(result.step_time_s)} per step"
    why = f": {result.reason}" if result.reason else ""
    ending = result.ending.replace("_", " ")
    return f"trial {result.number}, {result.layout}: {ending}{time}{why}"
