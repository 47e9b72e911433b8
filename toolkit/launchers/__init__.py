"""Launchers that start the workers: one class each, by its name in a recipe."""

from collections.abc import Callable, Mapping

from toolkit.launchers.accelerate import AccelerateLauncher
from toolkit.launchers.base import Launcher
from toolkit.launchers.deepspeed import DeepSpeedLauncher
from toolkit.launchers.kubernetes import KubernetesLauncher
from toolkit.launchers.local import LocalLauncher
from toolkit.launchers.ray import RayLauncher
from toolkit.launchers.slurm import SlurmLauncher
from toolkit.launchers.torchrun import TorchrunLauncher

LAUNCHERS: Mapping[str, Callable[[], Launcher]] = {
    "local": LocalLauncher,
    "torchrun": TorchrunLauncher,
    "deepspeed": DeepSpeedLauncher,
    "accelerate": AccelerateLauncher,
    "slurm": SlurmLauncher,
    "kubernetes": KubernetesLauncher,
    "ray": RayLauncher,
}
