"""A cluster: nodes of equal accelerators, and the links between them."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import PlanError
from toolkit.plan.hardware.catalogue import Gpu, Surroundings, accelerator
from toolkit.recipe.schema import ClusterSection

Basis = Literal["calibrated", "data sheet", "nominal"]


@dataclass(frozen=True, kw_only=True)
class Cluster(Surroundings):
    """The hardware of a layout. Ranks fill a node before the next one."""

    name: str
    nodes: int
    gpu: Gpu
    price_per_gpu_hour: float | None = None

    def __hash__(self) -> int:
        """Hash only what tells clusters apart, because a search looks one up thousands of
        times."""
        return hash((self.name, self.nodes, self.gpus_per_node))

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.nodes * self.gpus_per_node

    @property
    def basis(self) -> Basis:
        """The basis of predicted times: speeds measured there, data sheets and the shares of
        them that published runs reach, or a nominal CPU, which is no real machine."""
        if self.gpu.measured is not None:
            return "calibrated"
        nominal = self.gpu.generation == "cpu" and self.gpu.fp32 is None
        return "nominal" if nominal else "data sheet"

    @property
    def section(self) -> dict[str, Any]:
        """What a recipe's `cluster` section says of it."""
        name = self.gpu.like or self.gpu.name
        return {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "gpu": name}

    @property
    def island(self) -> int:
        """Accelerators that reach each other over `node_link`."""
        return self.link_domain or self.gpus_per_node


def usual_gpus_per_node(name: str) -> int:
    """Accelerators of a node as vendors sell them. Raises PlanError for unknown names."""
    return _usual(accelerator(name)).gpus_per_node


def _usual(device: Gpu) -> Surroundings:
    assert device.usual is not None, "of the catalogue, or like one of it"
    return device.usual


def default_cluster(nodes: int, gpus_per_node: int, gpu: str | Gpu) -> Cluster:
    """A cluster of an accelerator with the links that usually come with it.

    Raises PlanError for an accelerator that the catalogue lacks.
    """
    device = accelerator(gpu) if isinstance(gpu, str) else gpu
    here = {"gpus_per_node": gpus_per_node, "nodes": nodes, "gpu": device}
    label = f"{nodes}x{gpus_per_node}x{device.name}"
    return Cluster(**(vars(_usual(device)) | here), name=label)


def usual_cluster(where: ClusterSection) -> Cluster:
    """The cluster of a recipe's section, with the usual links of its accelerators.

    Raises PlanError for an accelerator that the catalogue lacks.
    """
    return default_cluster(where.nodes, where.gpus_per_node, where.gpu)


def parse_cluster(text: str) -> Cluster:
    """The cluster of a short form: `4x8xh100-80gb` is 4 nodes of 8. `8xh200` one node of 8.

    Raises PlanError naming what is wrong with the text.
    """
    counted = r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,4})x([a-z][^+]*)"
    match = re.fullmatch(counted, text.lower(), re.ASCII)
    if match is None:
        raise PlanError(
            f"--cluster: found {text[:80]!r}; allowed: NODESxGPUSxNAME, or a YAML file",
            fix="for example `--cluster 4x8xh100-80gb`",
        )
    return default_cluster(int(match[1] or 1), int(match[2]), match[3])
