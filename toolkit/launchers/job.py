"""Builds a launcher's job from a planned run."""

import os
from importlib import metadata

from packaging.version import Version

from toolkit.backend import BACKENDS
from toolkit.engines import deterministic
from toolkit.launchers.base import Job
from toolkit.plan.planner import settled
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import Assignment

EXPANDABLE = "expandable_segments:True"
"""Expandable segments of GPU memory avoid fragmentation (docs/cluster.md)."""
EXACT_PINNED = "pinned_max_round_threshold_mb:1"
"""torch rounds pinned buffers up to powers of two. These hold a rank's copy of its training
state. With this setting only those below 1 MiB are rounded."""
_KNOWS_EXACT_PINNED = Version("2.13")
"""The first torch in which the setting was tested. An older one refuses unknown names."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads the first of the last two that is set, and otherwise the first one
(c10/cuda/CUDAAllocatorConfig.h)."""


def gpu_variables(recipe: Recipe) -> dict[str, str]:
    """Variables of every worker on a GPU, for all engines. The user's own values are kept."""
    if recipe.cluster.gpu == "cpu":
        return {}
    fixed = deterministic.variables(os.environ) if recipe.training.deterministic else {}
    own_allocator = any(name in os.environ for name in _ALLOCATOR)
    return fixed if own_allocator else {_ALLOCATOR[0]: _allocator(), **fixed}


def _allocator() -> str:
    """The settings of the allocator that the installed torch knows."""
    known = Version(metadata.version("torch")) >= _KNOWS_EXACT_PINNED
    return f"{EXPANDABLE},{EXACT_PINNED}" if known else EXPANDABLE


def job_of(assignment: Assignment, settle: bool = False) -> Job:
    """The job of a run.

    Planning its recipe again gives the same plan. `settle` writes the decisions out, because
    they depend on a cluster file that only this machine has.
    """
    recipe, plan = assignment.recipe, assignment.plan
    return Job(
        run_dir=assignment.run_dir,
        cluster=recipe.cluster,
        launch=recipe.launch,
        name=recipe.name,
        recipe=dump_recipe(settled(recipe, plan) if settle else recipe),
        env={
            **gpu_variables(recipe),
            **BACKENDS[plan.engine].environment(plan.layout, recipe.cluster.gpu),
        },
    )
