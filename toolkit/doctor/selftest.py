"""The self-test (`dmt rehearse RECIPE --on gpu`, `dmt doctor --gpu-selftest`): small models on
this machine's own devices against plain transformers, and a run that is killed and resumed.

A part that fails is a check of the report, and the next part follows.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from toolkit import __version__
from toolkit.doctor import accelerators, packages
from toolkit.doctor.calibrate import Machine, closest, this_machine
from toolkit.doctor.needs import Needs
from toolkit.errors import (
    EXIT_FAILED,
    BackendUnavailable,
    PlanError,
    RunFailed,
)
from toolkit.intake.load import load_recipe
from toolkit.launchers.process import die_with_parent
from toolkit.recipe.places import RECIPES
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import TOLERANCE, Bounds, relative_difference
from toolkit.rehearse.layouts import STANDARD, RehearsedLayout, on_one_process, select
from toolkit.rehearse.rehearsal import (
    LayoutResult,
    Options,
    Rehearsal,
    prepare,
    run_layout,
    run_reference,
)
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
"""A part that takes longer hangs."""
SEQUENCE = 128
"""Tokens of a sequence: fused attention has kernels for it."""
BOUNDS: Mapping[Numbers, Bounds] = {
    "fp32": TOLERANCE,
    "bf16": Bounds(5e-4, 2e-2),
    "fp8": Bounds(1e-3, 5e-2),
}
"""Relative differences from plain transformers in fp32: in 16 and 8 bits five to ten times the
largest one of any layout on a processor (docs/cluster.md)."""
STEPS, SAVED, KILLED = 12, 5, 9
"""Of the run that is killed: its steps, after which step it saves, and in which one a rank is
killed. Too few steps follow the checkpoint for the resumed run to be killed again."""
DENSE = RECIPES / "tiny" / "llama-bytes.yaml"
EXPERTS = RECIPES / "tiny" / "mixtral-bytes.yaml"
EXPERT_LAYOUTS = ("ddp", "megatron-ep2", "ddp-dp1", "megatron-dp1")
"""One for either implementation of experts, on several processes and on one."""
_QUIET = (
    "logging.wandb=null", "logging.every_steps=1", "evaluation.every_steps=null",
    "evaluation.batches=1", "checkpoint.export=false", "schedule.warmup_steps=0",
)  # fmt: skip
_TAIL_LINES = 20


@dataclass(frozen=True)
class Check:
    """One part of the self-test."""

    step: str
    """What is compared, e.g. `llama-bytes bf16`."""
    name: str
    """In what, e.g. a layout."""
    verdict: CheckVerdict
    found: str
    """One line: numbers, or why it failed or was not run."""
    bound: str = ""
    """The bound of `found`."""
    tail: str = ""
    """The end of a failed part's output."""


@dataclass(frozen=True)
class Suite:
    """A recipe that is made small and compared."""

    recipe: Recipe
    numbers: Sequence[Numbers] = NUMBERS[:2]
    patterns: Sequence[str] = ()
    """Names and globs of layouts; empty: all for which there are enough devices."""


@dataclass(frozen=True)
class SelfTest:
    """What is tested, and where."""

    suites: Sequence[Suite]
    machine: Machine
    folder: Path
    """Every part has a folder under `runs`; the report is next to it."""
    options: Options

    def checks(self) -> Iterator[Check]:
        """Run everything."""
        for suite in self.suites:
            yield from self._isolated(suite.recipe.name, self.losses(suite))
        yield from self._isolated("resume", self._resume())

    def _isolated(self, step: str, checks: Iterator[Check]) -> Iterator[Check]:
        """The checks of a part, and a failed one if it raises."""
        try:
            yield from checks
        except Exception as error:  # noqa: BLE001 - a part is isolated, whatever it raises
            text = redact(str(error) or type(error).__name__).strip()
            first, _, tail = text.partition("\n")
            yield Check(step, "", "failed", first, tail=tail)

    def losses(self, suite: Suite) -> Iterator[Check]:
        """Train the reference and then every layout, in each kind of numbers."""
        rehearsal = self._small(suite.recipe)
        folder = self.folder / "runs" / suite.recipe.name
        reference = run_reference(rehearsal, self.options, folder / "reference")
        layouts = chosen_layouts(rehearsal.layouts[0], self.options.processes, suite.patterns)
        for numbers in suite.numbers:
            changes = {
                "training.precision": "fp32" if numbers == "fp32" else "bf16",
                "kernels.fp8": "rowwise" if numbers == "fp8" else None,
            }
            recipe = rehearsal.recipe.with_values(changes)
            step, bounds = f"{suite.recipe.name} {numbers}", BOUNDS[numbers]
            skipped = []
            for layout in layouts:
                at = folder / numbers / layout.name
                result = run_layout(recipe, layout, reference, self.options, at, bounds)
                if result.verdict == "skipped":
                    skipped.append(result.why)
                else:
                    yield _check(step, result, bounds)
            if len(skipped) == len(layouts):
                yield Check(step, "", "skipped", skipped[0])

    def _small(self, recipe: Recipe) -> Rehearsal:
        rehearsal = prepare(recipe.with_values({"kernels.fp8": None}), self.options)
        longer = {"training.sequence_length": SEQUENCE}
        return replace(rehearsal, recipe=rehearsal.recipe.with_values(longer))

    def _resume(self) -> Iterator[Check]:
        """Kill a rank of a run, start the run again, and compare the steps done twice."""
        ranks = self.machine.processes
        kill = {VARIABLE: f"step=kill@rank{ranks - 1},hit{KILLED}"}
        code = self._launch(kill)
        before = self._run_losses()
        last = max(before, default=0)
        if code != EXIT_FAILED or last <= SAVED:
            raise self._run_failed(f"the killed run ended with {code} after step {last}")
        if code := self._launch({}):
            raise self._run_failed(f"the resumed run ended with {code}")
        events = jsonl.read(self._run.events)
        resumed = [event["step"] for event in events if event["kind"] == "resume"]
        after = self._run_losses()
        twice = {step: loss for step, loss in before.items() if step > SAVED}
        far = max(relative_difference(after[step], loss) for step, loss in twice.items())
        whole = resumed == [SAVED] and max(after) == STEPS
        steps = ", ".join(map(str, twice))
        yield Check(
            "resume",
            f"rank {ranks - 1} killed",
            "ok" if whole and far <= TOLERANCE.loss else "failed",
            f"resumed from step {resumed}, repeated {steps}: loss {far:.0e}, then to "
            f"{max(after)}",
            f"from {SAVED}, loss {TOLERANCE.loss:g}, to {STEPS}",
        )

    @property
    def _run(self) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / "resume" / "run")

    def _launch(self, environment: Mapping[str, str]) -> int:
        """`dmt launch` of the tiny recipe on this machine; its exit code."""
        machine = self.machine
        settings = [
            *_QUIET, f"training.steps={STEPS}", f"checkpoint.every_steps={SAVED}",
            f"training.global_batch_size={4 * machine.processes}", "cluster.nodes=1",
            "checkpoint.asynchronous=false", f"cluster.gpus_per_node={machine.processes}",
            f"cluster.gpu={machine.gpu}",
        ]  # fmt: skip
        command = [*python(), "-m", "toolkit.cli.main", "launch", str(DENSE)]
        command += ["--run-dir", str(self._run.path), *(f"--set={one}" for one in settings)]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                return subprocess.run(
                    command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, timeout=LIMIT_S, check=False,
                    preexec_fn=die_with_parent(signal.SIGTERM),
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise self._run_failed(f"no end after {LIMIT_S:g} s") from error

    @property
    def _log(self) -> Path:
        return self._run.path.parent / "log"

    def _run_losses(self) -> dict[int, float]:
        """Step → loss of the run's logged steps."""
        return {one["step"]: float(one["loss"]) for one in jsonl.read(self._run.metrics)}

    def _run_failed(self, what: str) -> RunFailed:
        text = self._log.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return RunFailed("\n".join([what, *lines[-_TAIL_LINES:]]))


def _check(step: str, result: LayoutResult, bounds: Bounds) -> Check:
    bound = f"loss {bounds.loss:g}, norm {bounds.grad_norm:g}"
    verdict: CheckVerdict = "failed" if result.verdict == "diverged" else "ok"
    text = [result.why] if result.why else []
    if far := result.comparison:
        text.append(f"loss {far.max_rel_loss:.0e}, norm {far.max_rel_grad_norm:.0e}")
    name = result.candidate.name
    return Check(step, name, verdict, "; ".join(text), bound, result.log)


def chosen_layouts(
    recipes_own: RehearsedLayout, processes: int, patterns: Sequence[str] = ()
) -> list[RehearsedLayout]:
    """The recipe's own layout and every engine's, for which `processes` devices are enough and
    nothing is compiled first. Raises RecipeError for a pattern that matches none."""
    offered = on_one_process() if processes == 1 else iter(STANDARD)
    others = [one for one in offered if one.parallel.zero.offload_optimizer == "none"]
    found = [recipes_own, *(one for one in others if one.parallel != recipes_own.parallel)]
    return select([one for one in found if one.processes <= processes], patterns)


def self_test(
    suites: Sequence[Suite], folder: Path | None, processes: int | None, options: Options
) -> SelfTest:
    """The test of this machine's GPUs, its folder made (default: dmt-selftest).

    Raises BackendUnavailable without a GPU, or with one older than all of the hardware
    catalogue; PlanError for more processes than GPUs, or a folder that holds something else.
    """
    machine = this_machine(processes)
    if machine.gpu == "cpu":
        raise BackendUnavailable(
            "the self-test needs a GPU, and torch sees none on this machine",
            fix="`dmt doctor` says why; `dmt rehearse RECIPE` compares layouts on CPUs",
        )
    machine = closest(machine, "the self-test")
    folder = folder or Path("dmt-selftest")
    claim(folder)
    options = replace(options, processes=machine.processes, gpu=machine.gpu)
    return SelfTest(suites, machine, folder.resolve(), options)


def claim(folder: Path) -> None:
    """Empty the folder of an earlier self-test. Raises PlanError if it holds something else."""
    report = folder / "report.md"
    ours = report.is_file() and report.read_text("utf-8", errors="replace").startswith(MARK)
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(
            f"--folder: {folder} exists and was not written by this command",
            fix="name another folder, or remove it",
        )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    try:
        (folder / "runs").mkdir(parents=True)
        report.write_text(f"{MARK}: not finished\n", "utf-8")  # the folder is ours from here on
    except OSError as error:
        raise PlanError(f"--folder: cannot write: {error}", fix="name another") from error


def machine_suites(processes: int) -> list[Suite]:
    """What so many GPUs are tested with: a dense model, and one with experts."""
    names = {one.name for one in (on_one_process() if processes == 1 else STANDARD)}
    return [
        Suite(load_recipe(DENSE), NUMBERS),
        Suite(load_recipe(EXPERTS), ("bf16",), [one for one in EXPERT_LAYOUTS if one in names]),
    ]


def write_report(
    folder: Path, machine: Machine, checks: Sequence[Check], took_s: float
) -> Path:
    """Write `report.md`, for a person or an issue: no secrets, no names of this machine."""
    file = folder / "report.md"
    home, text = str(Path.home()), "\n".join(_report(machine, checks, took_s))
    file.write_text(redact(text if home == "/" else text.replace(home, "~")) + "\n", "utf-8")
    return file


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
