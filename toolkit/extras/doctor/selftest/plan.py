"""The self-test of a machine: its steps, one after the other, also if one fails."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit.backend import BACKENDS
from toolkit.doctor import calibrate
from toolkit.errors import BackendUnavailable, PlanError, RunFailed
from toolkit.extras.doctor.selftest import runs
from toolkit.extras.doctor.selftest.check import Check, LoggedFailure, Workplace
from toolkit.extras.doctor.selftest.losses import Losses
from toolkit.recipe.places import RECIPES
from toolkit.rehearse.layouts import STANDARD, RehearsedLayout, on_one_process
from toolkit.text.redact import redact

DENSE = RECIPES / "tiny" / "llama-bytes.yaml"
EXPERTS = RECIPES / "tiny" / "mixtral-bytes.yaml"
EXPERT_LAYOUTS = ("ddp", "megatron-ep2", "ddp-dp1", "megatron-dp1")
"""One for either implementation of experts, on several processes and on one."""
BILLION = RECIPES / "llama" / "llama-3.2-1b-pretrain.yaml"
_LOCAL_TEXT = ("data.train={kind: text, files: ['{stdlib}/*.py']}", "data.tokenizer=bytes")
"""Instead of a download."""
CHECKS = "checks.jsonl"
"""In the self-test's folder: each check, as soon as it has ended."""
MARK = "# DMT self-test"
"""How a report begins."""


@dataclass(frozen=True)
class Step:
    """A part of the self-test that does not depend on the others."""

    title: str
    run: Callable[[], Iterator[Check]]
    measures: bool = False
    """Whether it measures speed, which needs the machine for itself."""


def workplace(gpu_only: bool, processes: int | None, folder: Path) -> Workplace:
    """Where to test: on this machine's GPUs, or its processor where it has none.

    Raises BackendUnavailable with `gpu_only` and no GPU, or for a GPU older than all of the
    hardware catalogue; PlanError when `folder` holds something else than a self-test.
    """
    machine = calibrate.this_machine(processes)
    if gpu_only and machine.gpu == "cpu":
        raise BackendUnavailable(
            "--gpu-selftest: torch sees no GPU on this machine",
            fix="dmt doctor says why; --selftest tests the processor",
        )
    machine = calibrate.closest(machine, "--gpu-selftest" if gpu_only else "--selftest")
    report = folder / "report.md"
    ours = report.is_file() and report.read_text("utf-8", errors="replace").startswith(MARK)
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(
            f"--folder: {folder} exists and was not written by this command",
            fix="name another folder, or remove it",
        )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    try:
        (folder / CHECKS).unlink(missing_ok=True)
        (folder / "runs").mkdir(parents=True)
        report.write_text(f"{MARK}: not finished\n", "utf-8")  # the folder is ours from here on
    except OSError as error:
        raise PlanError(f"--folder: cannot write: {error}", fix="name another") from error
    return Workplace(machine, (folder / "runs").resolve())


def losses(processes: int) -> list[Losses]:
    """The models and precisions that are compared with the reference, in every layout for which
    there are enough devices."""
    layouts = layouts_for(processes)
    experts = tuple(one for one in layouts if one.name in EXPERT_LAYOUTS)
    layouts = tuple(one for one in layouts if one.parallel.expert == 1)
    eight = tuple(one for one in layouts if _in_8_bits(one))
    compared = [
        Losses("losses fp32", DENSE, layouts),
        Losses("losses bf16", DENSE, layouts, "bf16"),
        Losses("losses fp8", DENSE, eight, "bf16", "rowwise"),
        Losses("experts bf16", EXPERTS, experts, "bf16"),
    ]
    return [one for one in compared if one.layouts]


def steps(place: Workplace, cluster: Path | None) -> list[Step]:
    """What is tested. `cluster`: the cluster file that is measured and written first."""
    compared = losses(place.machine.processes)
    found = [Step(one.title, partial(one.checks, place)) for one in compared]
    found += [
        Step("resume", partial(runs.resume, place, DENSE)),
        Step("bandwidth", partial(runs.bandwidth, place), measures=True),
    ]
    if cluster is not None:
        measure = partial(runs.calibration, place, cluster)
        found.append(Step("calibrate", measure, measures=True))
    return found + _speeds(place, cluster)


def _speeds(place: Workplace, cluster: Path | None) -> list[Step]:
    """Every engine's speed next to its plan, for which a GPU needs a data sheet."""
    if place.machine.device:
        why = f"no data sheet of {place.machine.device} (docs/cluster.md states one)"
        return [Step("speed", lambda: iter([Check("speed", "", "skipped", why)]))]
    shape, settings = _timed(place)
    return [
        Step(
            f"speed {engine}",
            partial(runs.speed, place, engine, shape, settings, cluster),
            measures=True,
        )
        for engine in BACKENDS.names
    ]


def chosen(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """The steps whose titles begin with one of `only`; without any, all.

    Raises PlanError for one with which no title begins.
    """
    for wanted in only:
        if not any(step.title.startswith(wanted) for step in steps):
            known = ", ".join(step.title for step in steps)
            raise PlanError(
                f"--only: found {wanted!r}; the steps here: {known}",
                fix="name one of these, or how several begin, e.g. --only losses",
            )
    return [step for step in steps if not only or step.title.startswith(tuple(only))]


def layouts_for(processes: int) -> tuple[RehearsedLayout, ...]:
    """What every engine can be tried in with so many ranks, without what is compiled first."""
    if processes == 1:
        offered = on_one_process()
    else:
        offered = (one for one in STANDARD if one.processes <= processes)
    return tuple(one for one in offered if one.parallel.zero.offload_optimizer == "none")


def _in_8_bits(layout: RehearsedLayout) -> bool:
    parallel = layout.parallel
    supports = BACKENDS[parallel.engine].supports.items()
    return any(
        model == parallel.model and parallel.zero.stage in support.kernel_stages
        for model, support in supports
    )


def _timed(place: Workplace) -> tuple[Path, Sequence[str]]:
    """What is timed: on GPUs a model of 1B parameters, on a processor the tiny one."""
    ranks = place.machine.processes
    if not place.on_gpu:
        return DENSE, ("training.steps=20", f"training.global_batch_size={8 * ranks}")
    sizes = "training.sequence_length=8192", f"training.global_batch_size={4 * ranks}"
    return BILLION, (*_LOCAL_TEXT, *sizes, "training.tokens=null", "training.steps=12")


def run(todo: Sequence[Step], place: Workplace) -> Iterator[Check]:
    """Run every step. One that fails yields a failed check, and the next one follows."""
    for step in todo:
        try:
            yield from step.run()
        except LoggedFailure as error:
            log = str(error.log.relative_to(place.folder.parent))
            yield Check(step.title, "", "failed", error.message, log=log, tail=error.tail)
        except Exception as error:  # noqa: BLE001 - a step is isolated, whatever it raises
            said, _, tail = redact(str(error) or type(error).__name__).strip().partition("\n")
            log = place.folder.name if isinstance(error, RunFailed) else ""
            yield Check(step.title, "", "failed", said, log=log, tail=tail)
