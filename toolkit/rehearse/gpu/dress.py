"""Rehearsal at true size: a recipe's ranks on fake GPUs.

Each rank is a separate process, one after the other: the engine is built, trains, evaluates and
saves its state, and its memory, communication, FLOPs and synchronisations are compared with the
plan.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from toolkit.backend import BACKENDS
from toolkit.errors import Problem, RecipeError, RunFailed
from toolkit.hardware.cluster import Cluster, usual_cluster
from toolkit.launchers.process import die_with_parent
from toolkit.layout import Layout
from toolkit.plan.cost.memory import Memory, stage_memory
from toolkit.plan.cost.placement import StagePart
from toolkit.plan.cost.time import rank_flops
from toolkit.plan.estimate import Estimate, estimate_plan
from toolkit.rehearse.gpu.findings import (
    MIXED,
    NOT_NCCL,
    STEP,
    WIDENED,
    GpuFinding,
    Peak,
    RankFindings,
)
from toolkit.run.assignment import Assignment, write
from toolkit.system.interpreter import python
from toolkit.text.redact import redact
from toolkit.text.units import GIB

MICRO_BATCHES = 2
"""Micro batches that are run for each pipeline stage: more would not need more memory."""
_WRONG = (MIXED, NOT_NCCL, WIDENED)


@dataclass(frozen=True)
class DressRehearsal:
    """What is rehearsed: a recipe as planned, with fewer micro batches per step.

    Layers are not compiled, because the result of torch.compile depends on a GPU; nor do they
    have Liger's kernels, which need one.
    """

    assignment: Assignment
    planned: Assignment
    """As it was planned."""
    ranks: tuple[int, ...]
    cluster: Cluster | None = None
    """Where; None: the recipe's own."""

    @classmethod
    def of(
        cls, planned: Assignment, ranks: Sequence[int] = (), cluster: Cluster | None = None
    ) -> "DressRehearsal":
        """Rehearse `ranks`; without any, the first rank of each pipeline stage, and on groups
        of different GPUs the first of each stage on each.

        Raises RecipeError for ranks that the layout does not have, for a recipe that is
        not for GPUs, and for what is offloaded to NVMe.
        """
        layout = planned.plan.layout
        if planned.recipe.cluster.gpu == "cpu":
            fix = "--set cluster.gpu=h100-80gb, or `dmt rehearse` without --gpu"
            raise RecipeError([Problem("cluster.gpu", "'cpu'", "a GPU, with --gpu", fix)])
        problems = [
            Problem(
                f"parallel.zero.{key}",
                "'nvme'",
                "none or cpu, with --gpu: what is swapped is read from files, and fake tensors "
                "have no elements to write there",
                f"--set parallel.zero.{key}=cpu",
            )
            for key in ("offload_optimizer", "offload_parameters")
            if getattr(layout, key) == "nvme"
        ]
        if problems:
            raise RecipeError(problems)
        each = layout.world // layout.pp
        first = {each * stage: None for stage in range(layout.pp)}
        if planned.recipe.cluster.groups:
            where = usual_cluster(planned.recipe.cluster)
            kinds = [(rank // each, where.kind_of(rank)) for rank in range(layout.world)]
            first = {kinds.index(kind): None for kind in dict.fromkeys(kinds)}
        chosen = tuple(ranks) or tuple(first)
        if unknown := [rank for rank in chosen if not 0 <= rank < layout.world]:
            raise RecipeError([Problem("--ranks", str(unknown[0]), f"0 to {layout.world - 1}")])
        return cls(_shortened(planned), planned, chosen, cluster)

    @property
    def layout(self) -> Layout:
        """With the micro batches that are run."""
        return self.assignment.plan.layout

    @cached_property
    def estimate(self) -> Estimate:
        """The planner's figures for what is run."""
        return estimate_plan(self.assignment.recipe, self.assignment.plan, self.cluster)

    def run(self, folder: Path) -> Iterator["RehearsedRank"]:
        """Rehearse rank after rank. `folder` is a scratch folder.

        Raises RunFailed if a rank's engine fails.
        """
        write(replace(self.assignment, run_dir=folder / "run"), ["dmt", *sys.argv[1:]])
        for rank in self.ranks:
            yield self._rehearsed(rank, folder)

    def _rehearsed(self, rank: int, folder: Path) -> "RehearsedRank":
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
        found = TypeAdapter(RankFindings).validate_json(output.read_bytes())
        stage = rank // (self.layout.world // self.layout.pp)
        return RehearsedRank(self, rank, stage, found)


@dataclass(frozen=True)
class RehearsedRank:
    """The findings on one rank, with the plan's predictions."""

    rehearsal: DressRehearsal
    rank: int
    stage: int
    """Its pipeline rank."""
    found: RankFindings

    @property
    def layout(self) -> Layout:
        """As this rank has it: with the samples of its micro batches."""
        layout = self.rehearsal.layout
        samples = layout.micro_batches[layout.data_rank(self.rank)]
        return StagePart(self.cluster, samples).of(layout)

    @property
    def cluster(self) -> Cluster:
        """Where it is: its group of a cluster of several."""
        return self.rehearsal.estimate.setup.cluster.kind_of(self.rank)

    @property
    def planned(self) -> Memory:
        """The planner's memory of its stage."""
        return stage_memory(self.rehearsal.estimate.setup.workload, self.layout, self.stage)

    @property
    def planned_communicators(self) -> int:
        """Those that the planner counts NCCL's buffers of."""
        setup = self.rehearsal.estimate.setup
        return setup.workload.cost.communicators(setup.layout)

    @property
    def planned_flops(self) -> float:
        """The planner's FLOPs of what is run."""
        return rank_flops(self.rehearsal.estimate.setup.workload, self.layout, self.stage)

    @property
    def peak(self) -> Peak:
        """Of the step."""
        return self.found.peaks[STEP]

    @property
    def needed_gib(self) -> float:
        """The minimum of the allocator, plus the memory of CUDA and NCCL, minus the savings of
        compiled layers or Liger's kernels."""
        return (self.found.least + self.planned.context) / GIB - self.compiling_saves_gib

    @property
    def compiling_saves_gib(self) -> float:
        """The planner's saving of compiled layers, or Liger's kernels, compared with those that
        were run."""
        workload, wanted = self.rehearsal.estimate.setup.workload, self.rehearsal.planned
        names = ("compile", "fused", "loss")
        kernels = {name: getattr(wanted.plan.layout, name) for name in names}
        less = stage_memory(workload, replace(self.layout, **kernels), self.stage).allocated
        return (self.planned.allocated - less) / GIB

    @property
    def fits(self) -> bool:
        """On the plan's device."""
        capacity = self.cluster.gpu.memory_gib
        return capacity is None or self.needed_gib <= capacity

    @property
    def save_s(self) -> float | None:
        """Seconds of a save's copies from the GPU, at the planner's link to the host."""
        link = self.cluster.host_link_bytes_per_s
        return None if self.found.saved is None else self.found.saved.from_gpu / link

    @property
    def saved_gib_per_node(self) -> float | None:
        """Host memory of a node's copies, if all its ranks copy as much as this one."""
        ranks = min(
            self.rehearsal.estimate.setup.cluster.gpus_per_node, self.rehearsal.layout.world
        )
        return None if self.found.saved is None else ranks * self.found.saved.nbytes / GIB

    @property
    def wrong(self) -> list[GpuFinding]:
        """Operations that no step on a GPU should contain."""
        return [one for one in self.found.findings if one.what in _WRONG]


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
