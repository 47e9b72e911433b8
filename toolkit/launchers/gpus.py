"""The GPUs of this machine that a run may use, and which of them work."""

import os
import subprocess
import sys
import time
from contextlib import suppress

_PROBE_LIMIT_S = 120.0
_PROBE = "import torch; torch.ones(8, device='cuda').sum().item()"


def visible_gpus(planned: int) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES; without any, those of the first `planned` GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names or [str(index) for index in range(planned)]


def working_gpus(planned: int) -> list[str]:
    """The working GPUs, by their names in CUDA_VISIBLE_DEVICES.

    Each is tested in a separate process, because a broken one may hang or crash it.
    """
    probes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in visible_gpus(planned)
    }
    deadline = time.monotonic() + _PROBE_LIMIT_S
    return [name for name, probe in probes.items() if _succeeds(probe, deadline)]


def _succeeds(probe: "subprocess.Popen[bytes]", deadline: float) -> bool:
    try:
        return probe.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        probe.kill()
        with suppress(subprocess.TimeoutExpired):
            probe.wait(1.0)  # no longer: a hanging driver call cannot be killed
        return False
