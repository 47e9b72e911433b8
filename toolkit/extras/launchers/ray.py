"""What the launcher `ray` needs."""

from toolkit.launchers import Launcher, Program

INSTALL = "pip install 'ray[train]>=2.60'"

RAY = Launcher(
    "ray",
    "toolkit.extras.launchers.ray_job:RayStarter",
    here=False,
    elastic=True,
    packages={"ray[train]": "ray"},
    programs=(Program("ray", INSTALL),),
)
