"""From a recipe to one plan: every `auto` decided once, with the reason written down.

The plan is made before anything runs and stored in the run directory. Workers and
restarts read it and never decide again. The decisions are the result of `toolkit.plan.search`.
"""

from toolkit.errors import RecipeError
from toolkit.models.hub import model_config
from toolkit.plan.alternatives import remedies
from toolkit.plan.cost.memory import building_gib, model_states_gib
from toolkit.plan.dimensions import settings
from toolkit.plan.hardware.cluster import Cluster, usual_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.reasons import reasons, with_context
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention, legality
from toolkit.plan.rules import models as model_rules
from toolkit.plan.search import Search, search
from toolkit.recipe.schema import Recipe

_LOSS_SCALE = 2.0**16


def plan_recipe(
    recipe: Recipe, cluster: Cluster | None = None, *, explained: bool = True
) -> Plan:
    """Decide everything that the recipe leaves open.

    `cluster` replaces the recipe's own if links, prices or measured speeds are known.
    `explained`: see `plan_of`. Raises as `explore` does.
    """
    return plan_of(explore(recipe, cluster), explained=explained)


def explore(recipe: Recipe, cluster: Cluster | None = None) -> Search:
    """Every layout of a recipe, the chosen one first.

    Raises PlanError if the batch cannot be spread over the cluster or the model's shape cannot
    be determined, RecipeError if `parallel` is not possible: the recipe was checked at load,
    but its own DeepSpeed file may have set the ZeRO stage since.
    """
    cluster = cluster or usual_cluster(recipe.cluster)
    where = placed_on(recipe, cluster).cluster
    if found := legality.problems(recipe.parallel, where):
        raise RecipeError(found)
    job = PlanRequest.of(recipe, where, model_config(recipe.model))
    if found := model_rules.problems(job):
        raise RecipeError(found)
    return search(job, cluster)


def placed_on(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with a cluster's size and accelerators: workers are started from these."""
    return recipe.with_values(
        {f"cluster.{key}": value for key, value in cluster.section.items()}
    )


def settled(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with every `auto` as `plan` decided it: planned again, it becomes that."""
    decided = settings(plan.layout) | {
        "parallel.engine": plan.engine,
        "parallel.model": plan.model,
    }
    if plan.attention is not None:
        eager = plan.attention == "eager"
        decided["kernels.attention"] = "eager" if eager else plan.attention_kernel
    return recipe.with_values(decided)


def plan_of(found: Search, *, explained: bool = True) -> Plan:
    """The plan for the best layout of a search.

    Without `explained`, it has neither reasons nor remedies: they compare the layout with what
    the planner answers to other recipes, which takes longer than the search itself.
    """
    job, best = found.job, found.best
    training = job.training
    workload, time = best.setup.workload, best.time
    built = building_gib(workload, best.layout)
    kernel, _ = attention.choice(with_context(job, best))
    return Plan(
        engine=best.pair.engine,
        model=best.pair.model,
        layout=best.layout,
        parameters=job.spec.total,
        trainable_parameters=job.spec.trainable,
        flops_per_token=job.spec.flops_per_token(training.sequence_length, causal=True),
        peak_flops_per_gpu=found.cluster.gpu.peak_flops(workload.precision),
        model_states_gib=model_states_gib(workload, best.layout),
        reasons=tuple(reasons(found, built)) if explained else (),
        memory_gib=best.memory_gib,
        fits=found.fits,
        step_time_s=time.total_s,
        tokens_per_s_per_gpu=time.tokens_per_s_per_gpu,
        mfu=time.utilization(),
        attention="eager" if kernel == "eager" else "sdpa",
        attention_kernel=kernel,
        loss_scale=first_loss_scale(training.precision),
        remedies=tuple(remedies(found)) if explained and not found.fits else (),
    )


def first_loss_scale(precision: str) -> float | None:
    """The first loss scale of fp16, None in another precision: DeepSpeed's and torch's default.

    In every engine it applies to the mean loss over the tokens of one rank and step. An engine
    that minimises a sum divides it by their number. A scale that is too high skips steps until
    it fits, so engines with different initial scales would skip different steps.
    """
    return _LOSS_SCALE if precision == "fp16" else None
