"""`dmt rehearse`: checks on this machine that a recipe trains identically in every layout."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath, refuse_useless
from toolkit.cli.output import Console, Line, columns, output
from toolkit.cli.progress import progress
from toolkit.cli.rehearse_gpu import dress_rehearsal
from toolkit.cli.selftest import run_self_test
from toolkit.doctor.selftest import NUMBERS, Suite
from toolkit.errors import EXIT_FAILED, RunFailed
from toolkit.intake.load import load_recipe
from toolkit.plan.ledger import named
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import Comparison, Record
from toolkit.rehearse.layouts import RehearsedLayout, select
from toolkit.rehearse.rehearsal import (
    LayoutResult,
    Options,
    Rehearsal,
    RehearsalResult,
    prepare,
    run,
)
from toolkit.run.announce import ledger_of
from toolkit.run.changes import differences, is_stated, shown
from toolkit.text.terminal import tell

_COLOURS = {"exact": "green", "within": "green", "diverged": "bold red", "skipped": "dim"}
_LEAST_LIMIT_S, _STEP_LIMIT_S = 300.0, 60.0
"""A layout that takes longer, with all its steps, counts as hung."""

Layouts = Annotated[
    list[str],
    typer.Option(
        metavar="NAME,NAME", help="Only these layouts; globs such as 'zero*'; default: all."
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, max=1000, help="Optimizer steps; default: 5.")
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="At a time on CPUs, at most; default: 4."),
]
OnDevice = Annotated[
    Literal["cpu", "gpu"],
    typer.Option(
        help="gpu: on this machine's GPUs, in fp32 and in bf16; then a run is killed and "
        "resumed, and a report is written."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Report of --on gpu; default: dmt-selftest.md."),
]
FakeGpus = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Instead, run the recipe's own layout at its true size on GPUs that are not "
        "there: memory of its ranks.",
    ),
]


def rehearse(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    layouts: Layouts = [],  # noqa: B006 - as above
    steps: Steps = None,
    processes: Processes = None,
    on: OnDevice = "cpu",
    out: Report = None,
    gpu: FakeGpus = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model of the recipe's kind in every possible layout and compare.

    Each layout runs the real engine in its own processes on this machine's CPUs, in fp32, for a
    few steps on synthetic tokens with uneven masks. Loss and gradient norm of every step must
    equal those of a plain transformers loop; exit 4 when a layout differs or none can run.

    With --on gpu they run on this machine's GPUs. With --gpu nothing is computed: tensors have
    shapes and no elements; exit 4 when a rank does not fit, or its engine fails.

    Example: `dmt rehearse llama-bytes --layouts 'recipe,zero*' --steps 10`
    """
    refuse_useless(
        {
            "--on": (on == "gpu", not gpu, "without --gpu, which needs no GPUs"),
            "--layouts": (layouts, not gpu, "without --gpu: the recipe's own layout is run"),
            "--steps": (steps, not gpu, "without --gpu, which runs two steps"),
            "--processes": (
                processes,
                on == "cpu" and not gpu,
                "on CPUs; CUDA_VISIBLE_DEVICES picks GPUs",
            ),
            "--out": (out, on == "gpu", "with --on gpu"),
            "--cluster": (cluster, gpu, "with --gpu"),
        }
    )
    if gpu:
        dress_rehearsal(recipe, overrides, cluster, as_json=as_json)
        return
    taken = steps or 5
    options = Options(taken, processes or 4, max(_LEAST_LIMIT_S, _STEP_LIMIT_S * taken))
    patterns = [part.strip() for names in layouts for part in names.split(",")]
    loaded = load_recipe(recipe, overrides)
    if on == "cpu":
        _in_every_layout(loaded, patterns, options, as_json=as_json)
        return
    suite = Suite(loaded, NUMBERS[: 3 if loaded.kernels.fp8 else 2], patterns)
    run_self_test(lambda _: [suite], out, options, as_json=as_json)


def _in_every_layout(
    recipe: Recipe, patterns: Sequence[str], options: Options, *, as_json: bool
) -> None:
    """Rehearse and print. Exits with 4 if a layout differs. Raises RunFailed if none was
    compared."""
    rehearsal = prepare(recipe, options)
    chosen = select(rehearsal.layouts, patterns)
    console = Console(stderr=as_json)
    console.print(_shrunk(rehearsal), soft_wrap=True)
    if note := rehearsal.layouts[0].note:
        console.print(f"the recipe's own layout: {note}", soft_wrap=True)
    result = _run(rehearsal, chosen, options)
    output(as_json, _machine_output(result), _lines(result), wrap=False)
    for one in result.layouts:
        if one.log:
            tell(f"--- the end of {one.candidate.name} ---\n{one.log}")
    verdicts = {one.verdict for one in result.layouts}
    if verdicts == {"skipped"}:
        raise RunFailed("no layout was compared: every chosen one was skipped")
    if "diverged" in verdicts:
        raise typer.Exit(EXIT_FAILED)


def _shrunk(rehearsal: Rehearsal) -> str:
    """Return one line that shows what was made smaller, from → to."""
    changes = [f"rehearsed in {rehearsal.recipe.training.precision}"]
    both = (rehearsal.original.model_dump(), rehearsal.recipe.model_dump())
    for key, was, now in differences(*both):
        section, _, name = key.rpartition(".")
        is_size = section in ("model.config", "training", "optimizer") and was != "auto"
        if is_size and isinstance(now, int | float | str) and is_stated(was):
            changes.append(f"{name} {shown(was)} → {shown(now)}")
    return ", ".join(changes)


def _run(
    rehearsal: Rehearsal, chosen: Sequence[RehearsedLayout], options: Options
) -> RehearsalResult:
    """Run the rehearsal, with a bar on standard error if that is a terminal."""
    following = iter([*(one.name for one in chosen), "done"])
    with progress("reference", len(chosen) + 1) as update:
        return run(
            rehearsal,
            chosen,
            options,
            lambda _: update(advance=1, description=next(following)),
        )


def _machine_output(result: RehearsalResult) -> dict[str, Any]:
    """The data that `--json` prints. A number that is not finite becomes a string."""
    return {
        "reference": asdict(result.reference),
        "layouts": [_entry(one) for one in result.layouts],
    }


def _entry(one: LayoutResult) -> dict[str, Any]:
    plan, comparison = one.plan, one.comparison
    return {
        "name": one.candidate.name,
        "engine": one.candidate.parallel.engine,
        "model": one.candidate.parallel.model,
        "world": one.candidate.processes,
        "layout": plan.layout.to_dict() if plan else None,
        "loss": one.record.loss,
        "grad_norm": one.record.grad_norm,
        "max_rel_loss": comparison.max_rel_loss if comparison else None,
        "max_rel_grad_norm": comparison.max_rel_grad_norm if comparison else None,
        "verdict": one.verdict,
        "why": one.why,
    }


def _row(
    name: str, ranks: int, record: Record, far: Comparison | None = None, verdict: str = ""
) -> list[str]:
    """The last step's numbers, and the largest relative differences of any step."""
    last = (record.loss[-1:], record.grad_norm[-1:])
    largest = (far.max_rel_loss, far.max_rel_grad_norm) if far else ()
    return [
        name,
        str(ranks),
        *("".join(f"{number:.6f}" for number in numbers) for numbers in last),
        *([f"{difference:.0e}" for difference in largest] or ["", ""]),
        verdict,
    ]


def _lines(result: RehearsalResult) -> Iterator[Line]:
    """A row per layout, the reference first. Then the first divergence of each layout, or why
    it was not run."""
    rows = [["layout", "ranks", "loss", "grad norm", "Δ loss", "Δ norm", "verdict"]]
    rows.append(_row("reference", 1, result.reference))
    for one in result.layouts:
        tried = one.candidate
        rows.append(_row(tried.name, tried.processes, one.record, one.comparison, one.verdict))
    colours = ["dim", "dim", *(_COLOURS[one.verdict] for one in result.layouts)]
    yield from map(Text, columns(rows), colours)
    for one in result.layouts:
        if one.why:
            yield Text.assemble((f"{one.candidate.name}  ", _COLOURS[one.verdict]), one.why)
    yield Text("\nthe recipe as planned, against one fp32 process", "dim")
    rehearsal = result.rehearsal
    yield f"  exact but for: {named(ledger_of(rehearsal.original, rehearsal.plan))}"
