"""From a decided run to the job that a launcher is asked to start."""

from toolkit.launchers.base import Job
from toolkit.plan.planner import settled
from toolkit.recipe.dump import dump_recipe
from toolkit.run.assignment import Assignment


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
        env=plan.backend.environment(plan.layout, str(recipe.cluster.gpu)),
    )
