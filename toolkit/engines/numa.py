"""Keeps a rank on the cores of its GPU's NUMA node, where its pinned memory then lies, too."""

import os
from pathlib import Path
from typing import Any

import torch

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind(device: torch.device) -> None:
    """Restrict this process to those of its cores that are next to its GPU.

    Does nothing where the kernel states none, or where the launcher chose only others.
    """
    gpu: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = _cores((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, or a virtual machine
        return
    if here := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, here)


def _cores(text: str) -> set[int]:
    """The cores of a list such as `0-31,64-95`."""
    ranges = [part.partition("-") for part in text.strip().split(",")]
    return {
        core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
    }
