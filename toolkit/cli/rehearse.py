"""`dmt rehearse`: checks on this machine that a recipe trains identically in every layout."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.console import Console
from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.cli.output import Line, output
from toolkit.cli.rehearse_gpu import OnGpus, RanksOfGpus, dress_rehearsal, rehearsing
from toolkit.errors import EXIT_FAILED, RunFailed
from toolkit.intake.load import load_recipe
from toolkit.plan.ledger import summary
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.layouts import RehearsedLayout, select
from toolkit.rehearse.rehearsal import LayoutResult, Options, Rehearsal, prepare, run
from toolkit.rehearse.table import machine_output, reasons, shrunk, table, verdict
from toolkit.run.announce import ledger_of
from toolkit.text.terminal import tell


def rehearse(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help="Only these layouts; globs such as 'zero*'; default: all."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Optimizer steps.")] = 5,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Largest number of processes at a time.")
    ] = 4,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which a layout counts as hanging.")
    ] = 300,
    gpu: OnGpus = False,
    ranks: RanksOfGpus = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model of the recipe's kind in every possible layout and compare.

    Each layout runs the real engine in its own processes on this machine's CPUs, in fp32, for a
    few steps on synthetic tokens with uneven masks. Loss and gradient norm of every step must
    equal those of a plain transformers loop; exit 4 when a layout differs or none can run.

    With --gpu nothing is computed: tensors have shapes and no elements. Exit 4 when a rank
    mixes devices, widens 16-bit activations or does not fit.

    Example: dmt rehearse recipes/tiny/llama-bytes.yaml --layouts 'recipe,zero*' --steps 10
    """
    if gpu or ranks or cluster:
        dress_rehearsal(recipe, overrides, ranks, cluster, layouts, as_json, gpu=gpu)
        return
    options = Options(steps, processes, time_limit)
    rehearsal = prepare(load_recipe(recipe, overrides), options)
    patterns = [part.strip() for part in layouts.split(",")] if layouts else []
    chosen = select(rehearsal.layouts, patterns)
    kept = summary(ledger_of(rehearsal.original, rehearsal.plan))
    out = Console(stderr=as_json)
    out.print(shrunk(rehearsal), soft_wrap=True)
    if note := rehearsal.layouts[0].note:
        out.print(f"the recipe's own layout: {note}", soft_wrap=True)
    reference, outcomes = _run(rehearsal, chosen, options)
    data = machine_output(reference, outcomes)
    output(as_json, data, _lines(reference, outcomes, kept), wrap=False)
    for outcome in outcomes:
        if outcome.failure is not None:
            tell(f"--- the end of {outcome.candidate.name} ---\n{outcome.failure.log}")
    verdicts = {verdict(outcome) for outcome in outcomes}
    if verdicts == {"skipped"}:
        raise RunFailed("no layout was compared: every chosen one was skipped")
    if "diverged" in verdicts:
        raise typer.Exit(EXIT_FAILED)


def _lines(
    reference: Record, outcomes: Sequence[LayoutResult], kept: Sequence[str]
) -> Iterator[Line]:
    yield table(reference, outcomes)
    if below := reasons(outcomes):
        yield below
    yield Text("\nthe recipe as planned, against one fp32 process", "dim")
    yield from (f"  {line}" for line in kept)


def _run(
    rehearsal: Rehearsal, chosen: list[RehearsedLayout], options: Options
) -> tuple[Record, list[LayoutResult]]:
    """Run everything, with a bar on standard error where that is a terminal."""
    names = ["reference", *(candidate.name for candidate in chosen)]
    outcomes: list[LayoutResult] = []
    reference = Record()
    with rehearsing(names) as (folder, done):
        for count, item in enumerate(run(rehearsal, chosen, options, folder), 1):
            if isinstance(item, LayoutResult):
                outcomes.append(item)
            else:
                reference = item
            done(count)
    return reference, outcomes
