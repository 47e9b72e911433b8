"""A user's own cluster as YAML: what differs from the usual surroundings of its accelerator.

```yaml
nodes: 16
gpus_per_node: 8
gpu: h100-80gb        # of the catalogue; or {like: h100-80gb, memory_gib: 96, …}
network: {kind: roce, gigabits_per_s: 200}          # of one accelerator
price_per_gpu_hour: 2.5
```
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, ValidationError

from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.plan.hardware.catalogue import (
    GIGA,
    TERA,
    Gpu,
    Link,
    LinkKind,
    accelerator,
    link,
)
from toolkit.plan.hardware.cluster import Cluster, default_cluster, parse_cluster
from toolkit.recipe import yaml_text
from toolkit.recipe.mistakes import explain
from toolkit.recipe.section import Degree, NonEmpty, PositiveFloat, Section, Wording

Tflops: TypeAlias = Annotated[
    dict[Literal["fp32", "tf32", "fp16", "bf16", "fp8"], PositiveFloat],
    Wording("a map of TFLOP/s > 0 by fp32, tf32, fp16, bf16, fp8"),
]


class GpuSection(Section):
    """An accelerator that is not in the hardware catalogue, described by the closest one."""

    like: NonEmpty
    """Name in the catalogue. Its values are used for everything that is not set."""
    name: NonEmpty | None = None
    """Name to show."""
    memory_gib: PositiveFloat | None = None
    """Total that the driver reports: `torch.cuda.get_device_properties(0).total_memory`."""
    memory_gigabytes_per_s: PositiveFloat | None = None
    """Memory bandwidth."""
    tflops: Tflops | None = None
    """Peak throughput without sparsity."""


GPU_NAME, GPU_MAP = "(name)", "(map)"
"""pydantic's names of the two forms of `gpu`. Error texts do not show them."""


GpuChoice: TypeAlias = Annotated[
    Annotated[NonEmpty, Tag(GPU_NAME)] | Annotated[GpuSection, Tag(GPU_MAP)],
    Discriminator(lambda value: GPU_MAP if isinstance(value, dict | Section) else GPU_NAME),
]


class LinkFigures(Section):
    """What differs from the usual link."""

    kind: LinkKind | None = None
    gigabytes_per_s: PositiveFloat | None = None
    gigabits_per_s: PositiveFloat | None = None


class MeasuredSection(Section):
    """Speeds that were measured on the machine."""

    tflops: Tflops | None = None
    memory_gigabytes_per_s: PositiveFloat | None = None
    node_link_gigabytes_per_s: PositiveFloat | None = None
    network_gigabytes_per_s: PositiveFloat | None = None


class ClusterFile(Section):
    """Every key of the file. Bandwidths are each way."""

    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    nodes: Degree
    gpus_per_node: Degree
    gpu: GpuChoice
    node_link: LinkFigures = LinkFigures()
    link_domain: Degree | None = None
    network: LinkFigures = LinkFigures()
    host_memory_gib: PositiveFloat | None = None
    host_memory_gigabytes_per_s: PositiveFloat | None = None
    host_link_gigabytes_per_s: PositiveFloat | None = None
    nvme_gigabytes_per_s: PositiveFloat | None = None
    nvme_gib: PositiveFloat | None = None
    price_per_gpu_hour: PositiveFloat | None = None
    measured: MeasuredSection = MeasuredSection()


def find_cluster(text: str | Cluster) -> Cluster:
    """The cluster of `--cluster`: a short form (`4x8xh100-80gb`) or the name of a YAML file.

    Raises PlanError or RecipeError with every mistake.
    """
    if isinstance(text, Cluster):
        return text
    if text.lower().endswith((".yaml", ".yml")) or Path(text).is_file():
        return load_cluster(Path(text))
    return parse_cluster(text)


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file.

    Raises PlanError when it cannot be read, RecipeError with every mistake in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"--cluster: cannot read {path}: {error}",
            fix="name a YAML file, or write NODESxGPUSxNAME, e.g. 4x8xh100-80gb",
        ) from error
    root, problems = yaml_text.parse(text, str(path))
    if not isinstance(root.data, dict):
        allowed = f"a map of {', '.join(ClusterFile.model_fields)}"
        found = "an empty file" if root.data is None else root.text(())
        fix = "write `key: value` lines, e.g. as `dmt doctor --calibrate` does"
        raise RecipeError([Problem(yaml_text.TOP, found, allowed, fix, *root.place(()))])
    try:
        stated = ClusterFile.model_validate(root.data)
    except ValidationError as error:
        problems += explain(error, root, ClusterFile)
    problems += _disagreeing(root)
    if problems:
        raise RecipeError(list({(one.key, one.line): one for one in problems}.values()))
    return _cluster(stated)


def _disagreeing(root: yaml_text.Stated) -> Iterator[Problem]:
    """An accelerator that the catalogue lacks, and speeds that are stated twice."""
    data = root.data
    for key in ("node_link", "network"):
        speeds = {"gigabytes_per_s", "gigabits_per_s"}
        if isinstance(data.get(key), dict) and speeds <= data[key].keys():
            found = "both gigabytes_per_s and gigabits_per_s"
            yield Problem(key, found, "one of them", "remove one", *root.place((key,)))
    stated = data.get("gpu")
    key, name = (
        ("gpu.like", stated.get("like")) if isinstance(stated, dict) else ("gpu", stated)
    )
    if isinstance(name, str) and name:
        try:
            default_cluster(1, 1, name)
        except PlanError as error:
            known = error.message.partition("known: ")[2]
            yield Problem(key, repr(name)[:80], known, error.fix, *root.place(("gpu",)))


def _cluster(stated: ClusterFile) -> Cluster:
    """The usual cluster of this accelerator with what the file says in its place."""
    base = default_cluster(stated.nodes, stated.gpus_per_node, _described(stated.gpu))
    measured, like = stated.measured, base.gpu.like or base.gpu.name
    changes: dict[str, Any] = {
        "node_link": _link(
            stated.node_link, base.node_link, measured.node_link_gigabytes_per_s
        ),
        "network": _link(stated.network, base.network, measured.network_gigabytes_per_s),
    }
    if speeds := _figures(measured):
        speed = Gpu(f"{like} as measured", None, **speeds)
        changes["gpu"] = replace(base.gpu, measured=speed)
    for key in ("name", "host_memory_gib", "nvme_gib", "price_per_gpu_hour", "link_domain"):
        changes[key] = getattr(stated, key) or getattr(base, key)
    for key in ("host_memory", "host_link", "nvme"):
        if speed := getattr(stated, f"{key}_gigabytes_per_s"):
            changes[f"{key}_bytes_per_s"] = speed * GIGA
    return replace(base, **changes)


def _described(stated: str | GpuSection) -> Gpu:
    """The accelerator that `gpu` names, or describes by what differs from one of the
    catalogue."""
    if isinstance(stated, str):
        return accelerator(stated)
    base, changes = accelerator(stated.like), _figures(stated)
    if stated.name is not None:
        changes |= {"name": stated.name, "like": base.name}
    if stated.memory_gib is not None:
        changes["memory_gib"] = stated.memory_gib
    return replace(base, **changes)


def _figures(stated: GpuSection | MeasuredSection) -> dict[str, Any]:
    """Speeds of an accelerator, in the units of `Gpu`."""
    speed = stated.memory_gigabytes_per_s
    found: dict[str, Any] = {} if speed is None else {"memory_bytes_per_s": speed * GIGA}
    return found | {name: value * TERA for name, value in (stated.tflops or {}).items()}


def _link(stated: LinkFigures, base: Link, measured: float | None) -> Link:
    """A link with some figures replaced by the user's."""
    speed = stated.gigabytes_per_s or base.bytes_per_s / GIGA
    if stated.gigabits_per_s:
        speed = stated.gigabits_per_s / 8
    found = link(stated.kind or base.kind, speed)
    return replace(found, measured_bytes_per_s=measured and measured * GIGA)
