"""From a decided run to the job that a launcher is asked to start."""

import os

from toolkit.engines import deterministic
from toolkit.launchers.base import Job
from toolkit.plan.planner import settled
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import Assignment

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Segments of GPU memory that grow, where others leave gaps that no tensor fits into."""
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads the first of the latter two that is there, and otherwise the first
(c10/cuda/CUDAAllocatorConfig.h)."""


def gpu_variables(recipe: Recipe) -> dict[str, str]:
    """What every worker on a GPU gets, whatever its engine; the user's own values stay."""
    if recipe.cluster.gpu == "cpu":
        return {}
    fixed = deterministic.variables(os.environ) if recipe.training.deterministic else {}
    own_allocator = any(name in os.environ for name in _ALLOCATOR_NAMES)
    return fixed if own_allocator else {**ALLOCATOR, **fixed}


def job_of(assignment: Assignment, settle: bool = False) -> Job:
    """The job of a run.

    Whoever plans its recipe again decides the same. `settle` writes the decisions out, which
    were made with what only this machine knows: a cluster file.
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
            **plan.backend.environment(plan.layout, str(recipe.cluster.gpu)),
        },
    )
