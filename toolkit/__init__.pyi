from toolkit.errors import DmtError as DmtError
from toolkit.intake.load import load_recipe as load_recipe
from toolkit.launchers.launching import LaunchResult as LaunchResult
from toolkit.launchers.launching import launch_recipe as launch_recipe
from toolkit.plan.planned import Planned as Planned
from toolkit.plan.planned import plan_recipe as plan_recipe
from toolkit.recipe.schema import Recipe as Recipe
from toolkit.rehearse.rehearsal import RehearsalResult as RehearsalResult
from toolkit.rehearse.rehearsal import rehearse_recipe as rehearse_recipe

__version__: str
__all__ = [
    "DmtError",
    "LaunchResult",
    "Planned",
    "Recipe",
    "RehearsalResult",
    "launch_recipe",
    "load_recipe",
    "plan_recipe",
    "rehearse_recipe",
]
