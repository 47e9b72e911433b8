"""What the launcher `ray` needs."""

from toolkit.launchers import Launcher, Program

INSTALL = "pip install 'ray>=2.60'"

RAY = Launcher(
    "ray",
    "toolkit.extras.launchers.ray_job:RayStarter",
    here=False,
    elastic=True,
    packages={"ray": "ray"},
    programs=(Program("ray", INSTALL),),
)
