"""`dmt rehearse`: checks on this machine that a recipe trains identically in every layout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.bars import count_progress
from toolkit.cli.console import Console
from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.cli.output import Line, output
from toolkit.cli.rehearse_gpu import dress_rehearsal
from toolkit.errors import EXIT_FAILED, Problem, RecipeError, RunFailed
from toolkit.intake.load import load_recipe
from toolkit.plan.ledger import summary
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.layouts import select
from toolkit.rehearse.rehearsal import LayoutResult, Rehearsal, rehearse_recipe
from toolkit.rehearse.table import machine_output, reasons, shrunk, table
from toolkit.run.announce import ledger_of
from toolkit.text.terminal import tell

OnGpus = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Instead, run the recipe's own layout at its true size on GPUs that are not "
        "there: memory of its ranks.",
    ),
]
RanksOfGpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="With --gpu: these; default: the first of each pipeline stage."
    ),
]


def rehearse(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    layouts: Annotated[
        list[str],
        typer.Option(
            metavar="NAME,NAME", help="Only these layouts; globs such as 'zero*'; default: all."
        ),
    ] = [],  # noqa: B006 - as above
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
    does not fit, or its engine fails.

    Example: dmt rehearse recipes/tiny/llama-bytes.yaml --layouts 'recipe,zero*' --steps 10
    """
    _check_options(layouts, ranks, cluster, gpu=gpu)
    if gpu:
        dress_rehearsal(recipe, overrides, ranks, cluster, as_json=as_json)
        return
    patterns = [part.strip() for names in layouts for part in names.split(",")]
    with ExitStack() as stack:
        result = rehearse_recipe(
            load_recipe(recipe, overrides),
            patterns,
            steps=steps,
            processes=processes,
            time_limit_s=time_limit,
            report=_Progress(Console(stderr=as_json), patterns, stack),
        )
    reference, outcomes = result.reference, result.layouts
    kept = summary(ledger_of(result.rehearsal.original, result.rehearsal.plan))
    data = machine_output(reference, outcomes)
    output(as_json, data, _lines(reference, outcomes, kept), wrap=False)
    for outcome in outcomes:
        if outcome.failure is not None:
            tell(f"--- the end of {outcome.candidate.name} ---\n{outcome.failure.log}")
    verdicts = {outcome.verdict for outcome in outcomes}
    if verdicts == {"skipped"}:
        raise RunFailed("no layout was compared: every chosen one was skipped")
    if "diverged" in verdicts:
        raise typer.Exit(EXIT_FAILED)


def _check_options(
    layouts: Sequence[str], ranks: str | None, cluster: str | None, *, gpu: bool
) -> None:
    """Raises RecipeError for an option that the other kind of rehearsal has."""
    if gpu and layouts:
        allowed = "without --gpu: there, the recipe's own layout is run"
        found = ", ".join(layouts)
        raise RecipeError([Problem("--layouts", found, allowed, "use --set parallel.…")])
    for name, value in (("--ranks", ranks), ("--cluster", cluster)):
        if value is not None and not gpu:
            raise RecipeError([Problem(name, repr(value), "only with --gpu", "add --gpu")])


def _lines(
    reference: Record, outcomes: Sequence[LayoutResult], kept: Sequence[str]
) -> Iterator[Line]:
    yield table(reference, outcomes)
    if below := reasons(outcomes):
        yield below
    yield Text("\nthe recipe as planned, against one fp32 process", "dim")
    yield from (f"  {line}" for line in kept)


class _Progress:
    """Prints what is made small, then a bar on standard error where that is a terminal."""

    def __init__(self, out: Console, patterns: Sequence[str], stack: ExitStack) -> None:
        self._out, self._patterns, self._stack = out, patterns, stack
        self._names: list[str] = []
        self._update: Callable[..., None] = lambda **_: None
        self._done = 0

    def __call__(self, item: Rehearsal | Record | LayoutResult) -> None:
        if isinstance(item, Rehearsal):
            self._begin(item)
        else:
            self._done += 1
        self._update(completed=self._done, description=self._names[self._done])

    def _begin(self, rehearsal: Rehearsal) -> None:
        self._out.print(shrunk(rehearsal), soft_wrap=True)
        if note := rehearsal.layouts[0].note:
            self._out.print(f"the recipe's own layout: {note}", soft_wrap=True)
        chosen = select(rehearsal.layouts, self._patterns)
        self._names = ["reference", *(one.name for one in chosen), "done"]
        self._update = self._stack.enter_context(count_progress(len(chosen) + 1))
