"""What the launchers `kubernetes` and `ray` need."""

from toolkit.launchers import Launcher

INSTALL_RAY = "pip install 'ray>=2.60'"

KUBERNETES = Launcher(
    "kubernetes",
    "toolkit.extras.launchers.kubernetes:KubernetesStarter",
    here=False,
    same_files=False,
    renders=True,
    programs={"kubectl": "install it as described in https://kubernetes.io/docs/tasks/tools"},
)
RAY = Launcher(
    "ray",
    "toolkit.extras.launchers.ray:RayStarter",
    here=False,
    elastic=True,
    packages={"ray": "ray"},
    programs={"ray": INSTALL_RAY},
)
