"""Starting workers: one class per launcher, by the name that a recipe uses."""

from collections.abc import Callable, Mapping

from toolkit.launchers.base import Launcher
from toolkit.launchers.deepspeed import DeepSpeedLauncher
from toolkit.launchers.local import LocalLauncher
from toolkit.launchers.torchrun import TorchrunLauncher

LAUNCHERS: Mapping[str, Callable[[], Launcher]] = {
    "local": LocalLauncher,
    "torchrun": TorchrunLauncher,
    "deepspeed": DeepSpeedLauncher,
}
