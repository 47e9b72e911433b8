"""Rehearsal at true size: a recipe's ranks on fake GPUs.

Each rank is a separate process, one after the other: the engine is built and trains, and its
memory is compared with the plan.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from toolkit.backend import BACKENDS
from toolkit.errors import Problem, RecipeError, RunFailed
from toolkit.launchers.process import die_with_parent
from toolkit.layout import Layout
from toolkit.plan.cost.memory import Memory, stage_memory
from toolkit.plan.cost.workload import Setup
from toolkit.plan.estimate import estimate_plan
from toolkit.plan.hardware.cluster import Cluster
from toolkit.rehearse.gpu import Peak
from toolkit.run.assignment import Assignment, write
from toolkit.system.interpreter import python
from toolkit.text.redact import redact
from toolkit.text.units import GIB

MICRO_BATCHES = 2
"""Micro batches that are run for each pipeline stage: more would not need more memory."""


@dataclass(frozen=True)
class RehearsedRank:
    """A rank's memory in a step, with the plan's prediction."""

    rank: int
    stage: int
    """The pipeline rank."""
    peak: Peak
    planned: Memory
    """The planner's memory of its stage."""
    compiling_saves_gib: float
    """The planner's saving of compiled layers, or Liger's kernels, compared with those that
    were run."""
    capacity_gib: float | None
    """Memory of the plan's device."""

    @property
    def needed_gib(self) -> float:
        """The peak, plus the memory of CUDA and NCCL, minus `compiling_saves_gib`."""
        return (self.peak.nbytes + self.planned["context"]) / GIB - self.compiling_saves_gib

    @property
    def fits(self) -> bool:
        """On the plan's device."""
        return self.capacity_gib is None or self.needed_gib <= self.capacity_gib


@dataclass(frozen=True)
class DressRehearsal:
    """What is rehearsed: a recipe as planned, with fewer micro batches per step.

    Layers are not compiled, because the result of torch.compile depends on a GPU; nor do they
    have Liger's kernels, which need one.
    """

    assignment: Assignment
    planned: Assignment
    """The assignment as it was planned."""
    setup: Setup
    """The planner's view of what is run."""

    @classmethod
    def of(cls, planned: Assignment, cluster: Cluster | None = None) -> "DressRehearsal":
        """The rehearsal of a plan. `cluster`: by default, the recipe's own.

        Raises RecipeError for a recipe that is not for GPUs, for what is offloaded to NVMe, and
        for updates of whole matrices of which ranks hold parts.
        """
        layout = planned.plan.layout
        if planned.recipe.cluster.gpu == "cpu":
            fix = "--set cluster.gpu=h100-80gb, or `dmt rehearse` without --gpu"
            raise RecipeError([Problem("cluster.gpu", "'cpu'", "a GPU, with --gpu", fix)])
        for key in ("offload_optimizer", "offload_parameters"):
            if getattr(layout, key) == "nvme":
                allowed = "none or cpu, with --gpu: fake tensors have no elements to write"
                setting = f"parallel.zero.{key}"
                raise RecipeError([Problem(setting, "'nvme'", allowed, f"--set {setting}=cpu")])
        if planned.recipe.optimizer.kind.whole and (layout.zero_stage or layout.tp > 1):
            found, fix = repr(planned.recipe.optimizer.name), "--set optimizer.name=adamw"
            allowed = "adamw, with --gpu: a rank alone has parts of a matrix, not all of it"
            raise RecipeError([Problem("optimizer.name", found, allowed, fix)])
        run = _shortened(planned)
        setup = estimate_plan(run.recipe, run.plan, cluster).setup
        return cls(run, planned, setup)

    @property
    def layout(self) -> Layout:
        """The layout that is run, with its micro batches."""
        return self.assignment.plan.layout

    @property
    def ranks(self) -> range:
        """The first rank of each pipeline stage."""
        return range(0, self.layout.world, self.layout.world // self.layout.pp)

    def run(self, folder: Path) -> Iterator[RehearsedRank]:
        """Rehearse rank after rank. `folder` is a scratch folder.

        Raises RunFailed if a rank's engine fails.
        """
        write(replace(self.assignment, run_dir=folder / "run"), ["dmt", *sys.argv[1:]])
        for rank in self.ranks:
            yield self.compared(rank, _peak(rank, folder))

    def compared(self, rank: int, peak: Peak) -> RehearsedRank:
        """A rank's peak with the plan's prediction for what was run."""
        layout, setup = self.layout, self.setup
        stage = rank // (layout.world // layout.pp)
        wanted = self.planned.plan.layout
        kernels = {name: getattr(wanted, name) for name in ("compile", "fused", "loss")}
        planned, less = (
            stage_memory(setup.workload, one, stage)
            for one in (layout, replace(layout, **kernels))
        )
        saved = (planned.allocated - less.allocated) / GIB
        return RehearsedRank(rank, stage, peak, planned, saved, setup.cluster.gpu.memory_gib)


def _peak(rank: int, folder: Path) -> Peak:
    """Run a rank of the run directory in `folder`. Raises RunFailed."""
    output = folder / f"rank-{rank}.json"
    command = [*python(), "-m", "toolkit.rehearse.gpu", str(folder / "run")]
    done = subprocess.run(
        [*command, str(rank), str(output)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    if done.returncode or not output.exists():
        said = redact(done.stdout).strip().splitlines()
        raise RunFailed(
            f"rank {rank} failed on a GPU that is not there: {said[-1] if said else ''}"
            + "".join(f"\n  {line}" for line in said[-20:-1]),
            retry=False,
        )
    return TypeAdapter(Peak).validate_json(output.read_bytes())


def _shortened(planned: Assignment) -> Assignment:
    """The same layout, not compiled and without Liger's kernels, with as many micro batches as
    the peak of a step needs."""
    plan, recipe = planned.plan, planned.recipe
    most = MICRO_BATCHES * plan.layout.pp
    layout = replace(
        plan.layout,
        gradient_accumulation=min(most, plan.layout.gradient_accumulation),
        compile="none",
        fused="none" if plan.layout.fused == "liger" else plan.layout.fused,
        loss="chunked" if plan.layout.loss == "liger" else plan.layout.loss,
    )
    changed: dict[str, object] = {
        "training.global_batch_size": layout.global_batch,
        "training.batch_ramp": None,
    }
    if recipe.model.config:  # weights are not read: nothing is fetched
        changed |= {"model.init": "random", "model.checkpoint": None}
    recipe = recipe.with_values(changed)
    return replace(
        planned,
        recipe=recipe,
        plan=replace(plan, layout=layout),
        engine_config=BACKENDS[plan.engine].render(recipe, layout),
    )
