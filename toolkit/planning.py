"""From a recipe to its plan with all that was considered: `dmt plan`, and the Python API's."""

from toolkit.backend import adopt_engine_config
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.plan.planned import Planned
from toolkit.plan.planner import explore, placed_on, plan_of
from toolkit.recipe.schema import Recipe


def plan_recipe(recipe: Recipe, cluster: str | Cluster | None = None) -> Planned:
    """Search every layout of a recipe; starts nothing and needs no torch.

    `cluster`: as `--cluster`, e.g. `4x8xh100-80gb`; default: the recipe's. Where nothing fits,
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
