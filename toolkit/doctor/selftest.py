"""The self-test (`dmt rehearse RECIPE --on gpu`, `dmt doctor --gpu-selftest`): small models on
this machine's own devices against plain transformers, and a run that is killed and resumed.

A part that fails is a check of the report, and the next part follows.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit import __version__
from toolkit.doctor import accelerators, packages
from toolkit.doctor.calibrate import Machine, closest, this_machine
from toolkit.doctor.needs import Needs
from toolkit.errors import EXIT_FAILED, BackendUnavailable, RunFailed
from toolkit.intake.load import load_recipe
from toolkit.launchers.process import die_with_parent
from toolkit.recipe.places import RECIPES
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import TOLERANCE, Bounds, relative_difference
from toolkit.rehearse.layouts import STANDARD, RehearsedLayout, on_one_process, select
from toolkit.rehearse.rehearsal import Options, prepare, run_layout, run_reference
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.system.failpoints import VARIABLE
from toolkit.system.interpreter import python
from toolkit.text.redact import redact

Numbers = Literal["fp32", "bf16", "fp8"]
NUMBERS: tuple[Numbers, ...] = ("fp32", "bf16", "fp8")
CheckVerdict = Literal["ok", "skipped", "failed"]

MARK = "# DMT self-test"
"""How a report begins."""
LIMIT_S = 900.0
"""A part that takes longer than so many seconds hangs."""
SEQUENCE = 128
"""Tokens of a sequence. Fused attention has kernels for this length."""
BOUNDS: Mapping[Numbers, Bounds] = {
    "fp32": TOLERANCE,
    "bf16": Bounds(5e-4, 2e-2),
    "fp8": Bounds(1e-3, 5e-2),
}
"""Relative differences from plain transformers in fp32: in 16 and 8 bits five to ten times the
largest one of any layout on a processor (docs/cluster.md)."""
STEPS, SAVED, KILLED = 12, 5, 9
"""Steps of the killed run: all, the one it saves after, and the one a rank is killed in. Too
few follow the checkpoint for the resumed run to be killed again."""
DENSE = RECIPES / "tiny" / "llama-bytes.yaml"
EXPERTS = RECIPES / "tiny" / "mixtral-bytes.yaml"
EXPERT_LAYOUTS = ("ddp", "megatron-ep2", "ddp-dp1", "megatron-dp1")
"""A layout for each implementation of experts, on several processes and on one."""
_QUIET = (
    "logging.trackers=[]", "logging.every_steps=1", "evaluation.every_steps=null",
    "evaluation.batches=1", "checkpoint.export=false", "schedule.warmup_steps=0",
)  # fmt: skip
_TAIL_LINES = 20


@dataclass(frozen=True)
class Check:
    """One part of the self-test."""

    step: str
    """Which recipe is compared, e.g. `llama-bytes bf16`."""
    name: str
    """What it is compared in, e.g. a layout."""
    verdict: CheckVerdict
    found: str
    """One line: numbers, or why it failed or was not run."""
    bound: str = ""
    """The bound of `found`."""
    tail: str = ""
    """The end of a failed part's output."""


class Suite(NamedTuple):
    """A recipe that is made small and compared."""

    recipe: Recipe
    numbers: Sequence[Numbers] = NUMBERS[:2]
    patterns: Sequence[str] = ()
    """Names and globs of layouts. Empty: all for which there are enough devices."""


def machine_suites(processes: int) -> list[Suite]:
    """The suites for so many GPUs: a dense model, and one with experts."""
    names = {one.name for one in (on_one_process() if processes == 1 else STANDARD)}
    return [
        Suite(load_recipe(DENSE), NUMBERS),
        Suite(load_recipe(EXPERTS), ("bf16",), [one for one in EXPERT_LAYOUTS if one in names]),
    ]


def gpu_machine() -> Machine:
    """This machine's GPUs.

    Raises BackendUnavailable without a GPU, or as `closest` does.
    """
    machine = this_machine()
    if machine.gpu == "cpu":
        raise BackendUnavailable(
            "the self-test needs a GPU, and torch sees none on this machine",
            fix="`dmt doctor` says why; `dmt rehearse RECIPE` compares layouts on CPUs",
        )
    return closest(machine, "the self-test")


def self_test(
    suites: Sequence[Suite], machine: Machine, folder: Path, options: Options
) -> Iterator[Check]:
    """Run all parts, each in its own subfolder of `folder`."""
    options = replace(options, processes=machine.processes, gpu=machine.gpu)
    parts = {suite.recipe.name: losses(suite, folder, options) for suite in suites}
    for step, checks in (parts | {"resume": resume(machine, folder / "resume")}).items():
        try:
            yield from checks
        except Exception as error:  # noqa: BLE001 - a part is isolated, whatever it raises
            text = redact(str(error) or type(error).__name__).strip()
            first, _, tail = text.partition("\n")
            yield Check(step, "", "failed", first, tail=tail)


def losses(suite: Suite, folder: Path, options: Options) -> Iterator[Check]:
    """Train the reference and then every layout, in each precision."""
    rehearsal = prepare(suite.recipe.with_values({"kernels.fp8": None}), options)
    small = rehearsal.recipe.with_values({"training.sequence_length": SEQUENCE})
    folder = folder / suite.recipe.name
    reference = run_reference(replace(rehearsal, recipe=small), options, folder / "reference")
    layouts = chosen_layouts(rehearsal.layouts[0], options.processes, suite.patterns)
    for numbers in suite.numbers:
        changes = {
            "training.precision": "fp32" if numbers == "fp32" else "bf16",
            "kernels.fp8": "rowwise" if numbers == "fp8" else None,
        }
        recipe, bounds = small.with_values(changes), BOUNDS[numbers]
        step = f"{suite.recipe.name} {numbers}"
        bound = f"loss {bounds.loss:g}, norm {bounds.grad_norm:g}"
        skipped = []
        for layout in layouts:
            at = folder / numbers / layout.name
            result = run_layout(recipe, layout, reference, options, at, bounds)
            if result.verdict == "skipped":
                skipped.append(result.why)
                continue
            verdict: CheckVerdict = "failed" if result.verdict == "diverged" else "ok"
            said = [result.why] if result.why else []
            if far := result.comparison:
                said.append(f"loss {far.max_rel_loss:.0e}, norm {far.max_rel_grad_norm:.0e}")
            yield Check(step, layout.name, verdict, "; ".join(said), bound, result.log)
        if len(skipped) == len(layouts):
            yield Check(step, "", "skipped", skipped[0])


def chosen_layouts(
    recipes_own: RehearsedLayout, processes: int, patterns: Sequence[str] = ()
) -> list[RehearsedLayout]:
    """The recipe's own layout, and each engine's standard layouts that need at most `processes`
    devices. Layouts that compile an operator first are left out. Raises RecipeError for a
    pattern that matches none."""
    offered = on_one_process() if processes == 1 else iter(STANDARD)
    others = [one for one in offered if one.parallel.zero.offload_optimizer == "none"]
    found = [recipes_own, *(one for one in others if one.parallel != recipes_own.parallel)]
    return select([one for one in found if one.processes <= processes], patterns)


def resume(machine: Machine, folder: Path) -> Iterator[Check]:
    """Kill a rank of a run, start the run again, and compare the steps done twice."""
    run, last_rank = RunDirectory(folder / "run"), machine.processes - 1
    code, said = _launch(run, machine, {VARIABLE: f"step=kill@rank{last_rank},hit{KILLED}"})
    before = _logged_losses(run)
    last = max(before, default=0)
    if code != EXIT_FAILED or last <= SAVED:
        raise RunFailed(f"the killed run ended with {code} after step {last}\n{said}")
    code, said = _launch(run, machine, {})
    if code:
        raise RunFailed(f"the resumed run ended with {code}\n{said}")
    resumed = [event["step"] for event in jsonl.read(run.events) if event["kind"] == "resume"]
    after = _logged_losses(run)
    twice = {step: loss for step, loss in before.items() if step > SAVED}
    far = max(relative_difference(after[step], loss) for step, loss in twice.items())
    whole = resumed == [SAVED] and max(after) == STEPS
    yield Check(
        "resume",
        f"rank {last_rank} killed",
        "ok" if whole and far <= TOLERANCE.loss else "failed",
        f"resumed from step {resumed}, repeated {', '.join(map(str, twice))}: loss {far:.0e}, "
        f"then to {max(after)}",
        f"from {SAVED}, loss {TOLERANCE.loss:g}, to {STEPS}",
    )


def _launch(
    run: RunDirectory, machine: Machine, environment: Mapping[str, str]
) -> tuple[int, str]:
    """`dmt launch` of the tiny recipe on this machine. Returns its exit code and last lines.
    Raises RunFailed for one that hangs."""
    settings = [
        *_QUIET, f"training.steps={STEPS}", f"checkpoint.every_steps={SAVED}",
        f"training.global_batch_size={4 * machine.processes}", "cluster.nodes=1",
        "checkpoint.asynchronous=false", f"cluster.gpus_per_node={machine.processes}",
        f"cluster.gpu={machine.gpu}",
    ]  # fmt: skip
    command = [*python(), "-m", "toolkit.cli.main", "launch", str(DENSE)]
    command += ["--run-dir", str(run.path), *(f"--set={one}" for one in settings)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            preexec_fn=die_with_parent(signal.SIGTERM), text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"no end after {LIMIT_S:g} s") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, "\n".join(lines[-_TAIL_LINES:])


def _logged_losses(run: RunDirectory) -> dict[int, float]:
    """The logged losses, by step."""
    return {one["step"]: float(one["loss"]) for one in jsonl.read(run.metrics)}


def report(machine: Machine, checks: Sequence[Check], took_s: float) -> str:
    """Markdown for a person or an issue: no secrets, no names of this machine."""
    home, text = str(Path.home()), "\n".join(_report(machine, checks, took_s))
    return redact(text if home == "/" else text.replace(home, "~")) + "\n"


def _report(machine: Machine, checks: Sequence[Check], took_s: float) -> Iterator[str]:
    yield f"{MARK}: {machine.processes} × {machine.device or machine.gpu}\n"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"{when}, {took_s / 60:.1f} minutes, DMT {__version__}.\n"
    yield "| step | what | verdict | found | bound |"
    yield "|---|---|---|---|---|"
    for check in checks:
        cells = check.step, check.name, check.verdict, check.found, check.bound
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield "\nBounds are relative differences from plain transformers in fp32 on the CPU."
    for check in checks:
        if check.tail:
            yield f"\n## {check.step} {check.name}\n\n~~~\n{check.tail}\n~~~"
    yield "\n## This machine\n"
    for finding in (*packages.check(Needs()), *accelerators.check(Needs())):
        yield f"- {finding.name}: {finding.found}"
