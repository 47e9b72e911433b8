"""From a recipe to its plan, with all that was considered and what the whole run takes."""

from dataclasses import dataclass
from typing import Any

from toolkit.backend import adopt_engine_config
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planner import explore, placed_on, plan_of
from toolkit.plan.search import Search
from toolkit.recipe.schema import Recipe

_SECONDS_PER_DAY = 86400
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Run:
    """A whole run, without restarts and evaluation."""

    steps: int
    step_s: float
    """On average."""
    cluster: Cluster

    @property
    def days(self) -> float:
        return self.steps * self.step_s / _SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        return self.steps * self.step_s * self.cluster.gpus / _SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """In the currency of the cluster file's price. None without one."""
        price = self.cluster.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours

    def __str__(self) -> str:
        unit = "GPU" if self.cluster.gpu.memory_gib is not None else "process"
        hours = f"{self.gpu_hours:,.{'0f' if self.gpu_hours >= 1000 else '3g'}}"
        text = f"{self.steps:,} steps: {self.duration}, {hours} {unit}-hours"
        return text if self.cost is None else f"{text}, cost {self.cost:,.0f}"

    @property
    def duration(self) -> str:
        """`12.3 days`, `4.5 hours`, `36 s`."""
        total_s = self.steps * self.step_s
        if total_s >= _SECONDS_PER_DAY:
            return f"{self.days:,.1f} days"
        if total_s >= _SECONDS_PER_HOUR:
            return f"{total_s / _SECONDS_PER_HOUR:.1f} hours"
        return f"{total_s:.0f} s"

    def machine_output(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
        }


@dataclass(frozen=True)
class Planned:
    """A recipe, planned on a cluster."""

    recipe: Recipe
    search: Search
    """Every layout that was considered, the chosen one first."""
    plan: Plan
    """The chosen one: layout, memory, step time and the reasons."""

    @property
    def cluster(self) -> Cluster:
        return self.search.cluster

    @property
    def run(self) -> Run | None:
        """How long the whole run takes. None where its steps are not known yet."""
        steps, batches = self.recipe.total_steps(), self.recipe.training.batches
        total_s = None if steps is None else self.plan.run_s(batches, steps)
        if steps is None or total_s is None:
            return None
        return Run(steps, total_s / steps, self.cluster)


def plan_recipe(recipe: Recipe, cluster: str | Cluster | None = None) -> Planned:
    """Search every layout of a recipe. Starts nothing and needs no torch.

    `cluster`: as `--cluster`, e.g. `4x8xh100-80gb`. Default: the recipe's. Where nothing fits,
    `plan.fits` is false and `plan.remedies` names what would.

    Raises PlanError if the batch cannot be spread over the cluster, RecipeError if the recipe's
    own settings are not possible there.
    """
    where = None if cluster is None else find_cluster(cluster)
    recipe = adopt_engine_config(recipe)
    if where is not None:
        recipe = placed_on(recipe, where)
    found = explore(recipe, where)
    return Planned(recipe, found, plan_of(found))
