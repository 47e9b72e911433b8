"""Ray: the section of a recipe, and what the launcher needs."""

from toolkit.launcher import Launcher, Program
from toolkit.recipe.section import NonEmpty, Section


class RaySection(Section):
    """The cluster that `launcher: ray` uses."""

    address: NonEmpty | None = None
    """`auto`, or the address of a running cluster; null starts Ray on this machine."""


RAY = Launcher(
    "ray",
    "toolkit.extras.launchers.ray_job:RayStarter",
    section=RaySection,
    oversees="never",
    elastic=True,
    packages={"ray[train]": "ray"},
    programs=(Program("ray", "pip install 'ray[train]'"),),
)
