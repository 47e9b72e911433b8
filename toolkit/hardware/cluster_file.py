"""A user's own cluster as YAML: what differs from the usual surroundings of its accelerator.

```yaml
nodes: 16
gpus_per_node: 8
gpu: h100-80gb        # of the catalogue; or {like: h100-80gb, memory_gib: 96, …}
network: {kind: roce, gigabits_per_s: 200}          # of one accelerator
price_per_gpu_hour: 2.5
```
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.hardware.catalogue import GIGA, GPUS, Gpu, described, figures, gpu
from toolkit.hardware.cluster import (
    LINK_KINDS,
    Cluster,
    Link,
    default_cluster,
    link,
    parse_cluster,
)
from toolkit.recipe import yaml_nodes
from toolkit.text.suggest import did_you_mean

COUNT, NUMBER, TEXT, KIND = (
    "an integer ≥ 1",
    "a number > 0",
    "a name",
    f"one of {', '.join(LINK_KINDS)}",
)
_FLOPS = dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "fp8"), NUMBER)
_LINK = {
    "kind": KIND,
    "gigabytes_per_s": NUMBER,
    "gigabits_per_s": NUMBER,
}
_GPU = {
    "like": TEXT,
    "name": TEXT,
    "memory_gib": NUMBER,
    "memory_gigabytes_per_s": NUMBER,
    "tflops": _FLOPS,
}
_MEASURED = {
    "tflops": _FLOPS,
    "memory_gigabytes_per_s": NUMBER,
    "node_link_gigabytes_per_s": NUMBER,
    "network_gigabytes_per_s": NUMBER,
}
KEYS: Mapping[str, Any] = {
    "name": TEXT,
    "nodes": COUNT,
    "gpus_per_node": COUNT,
    "gpu": _GPU,
    "node_link": _LINK,
    "link_domain": COUNT,
    "network": _LINK,
    "host_memory_gib": NUMBER,
    "host_memory_gigabytes_per_s": NUMBER,
    "host_link_gigabytes_per_s": NUMBER,
    "nvme_gigabytes_per_s": NUMBER,
    "nvme_gib": NUMBER,
    "price_per_gpu_hour": NUMBER,
    "measured": _MEASURED,
}
"""Every key of the file and what it takes; bandwidths are each way."""
REQUIRED = ("nodes", "gpus_per_node", "gpu")


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
    root, problems = yaml_nodes.parse(text, str(path))
    if not isinstance(root, yaml_nodes.Mapping):
        allowed = f"a map of {', '.join(KEYS)}"
        raise RecipeError([Problem("(file)", "something else", allowed, "", str(path))])
    problems += [*_problems(root, KEYS, ""), *_missing(root, str(path))]
    if problems:
        raise RecipeError(problems)
    return _cluster(yaml_nodes.to_data(root))


def _problems(
    node: yaml_nodes.Mapping, keys: Mapping[str, Any], above: str
) -> Iterator[Problem]:
    for key, entry in node.entries.items():
        dotted, value = f"{above}{key}", entry.node
        if key not in keys:
            fix = did_you_mean(key, keys, "remove it")
            found = "an unknown key"
            yield Problem(dotted, found, ", ".join(keys), fix, *entry.place)
        elif isinstance(keys[key], Mapping) and isinstance(value, yaml_nodes.Mapping):
            yield from _problems(value, keys[key], f"{dotted}.")
        elif problem := _wrong(dotted, value, keys[key]):
            yield problem


def _missing(root: yaml_nodes.Mapping, file: str) -> Iterator[Problem]:
    """Keys without which there is no cluster, and speeds that are stated twice."""
    for key in REQUIRED:
        if key not in root.entries:
            yield Problem(key, "nothing", _accepted(KEYS[key]), f"add `{key}:`", file)
    for key, entry in root.entries.items():
        inner = entry.node.entries if isinstance(entry.node, yaml_nodes.Mapping) else {}
        if key == "gpu" and inner and "like" not in inner:
            fix = "name the accelerator that comes closest"
            yield Problem("gpu.like", "nothing", ", ".join(GPUS), fix, *entry.place)
        if "gigabytes_per_s" in inner and "gigabits_per_s" in inner:
            found = "both gigabytes_per_s and gigabits_per_s"
            yield Problem(key, found, "one of them", "remove one", *entry.place)


def _wrong(key: str, node: yaml_nodes.Node, accepted: Any) -> Problem | None:
    """What is wrong with a value, if anything."""
    value = node.value if isinstance(node, yaml_nodes.Scalar) else None
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or isinstance(value, float)
    right = {
        COUNT: whole and 1 <= value <= 65536,  # type: ignore[operator]
        NUMBER: number and value > 0,  # type: ignore[operator]
        TEXT: isinstance(value, str) and 0 < len(value) <= 100,
        KIND: value in LINK_KINDS,
    }
    if key == "gpu":
        return _wrong_gpu(key, node)
    if not isinstance(accepted, Mapping) and right[accepted]:
        if key == "gpu.like":
            return _wrong_gpu(key, node)
        return None
    found = node.text if isinstance(node, yaml_nodes.Scalar) else "a list or map"
    return Problem(key, found[:80], _accepted(accepted), "", *node.place)


def _wrong_gpu(key: str, node: yaml_nodes.Node) -> Problem | None:
    """What is wrong with an accelerator's name."""
    name = node.value if isinstance(node, yaml_nodes.Scalar) else None
    try:
        gpu(name if isinstance(name, str) else "")
    except PlanError as error:
        known = error.message.partition("known: ")[2]
        return Problem(key, repr(name)[:80], known, error.fix, *node.place)
    return None


def _accepted(accepted: Any) -> str:
    if accepted is _GPU:
        return "an accelerator of the catalogue, or a map with `like`"
    if isinstance(accepted, Mapping):
        return f"a map of {', '.join(accepted)}"
    return str(accepted)


def _cluster(data: Mapping[str, Any]) -> Cluster:
    """The usual cluster of this accelerator with what the file says in its place."""
    stated = data["gpu"] if isinstance(data["gpu"], dict) else {"like": data["gpu"]}
    measured = data.get("measured", {})
    base = default_cluster(data["nodes"], data["gpus_per_node"], stated["like"])
    changes: dict[str, Any] = {
        "gpu": _gpu(stated, base.gpu, measured),
        "node_link": _link(
            data.get("node_link", {}), base.node_link, measured.get("node_link_gigabytes_per_s")
        ),
        "network": _link(
            data.get("network", {}), base.network, measured.get("network_gigabytes_per_s")
        ),
    }
    plain = "name", "host_memory_gib", "nvme_gib", "price_per_gpu_hour", "link_domain"
    changes |= {key: data[key] for key in plain if key in data}
    for key in ("host_memory", "host_link", "nvme"):
        if f"{key}_gigabytes_per_s" in data:
            changes[f"{key}_bytes_per_s"] = data[f"{key}_gigabytes_per_s"] * GIGA
    return replace(base, **changes)


def _gpu(stated: Mapping[str, Any], base: Gpu, measured: Mapping[str, Any]) -> Gpu:
    """An accelerator of the catalogue with some figures replaced by the user's."""
    found = described(base, stated)
    if speeds := figures(measured):
        found = replace(found, measured=Gpu(f"{base.name} as measured", None, **speeds))
    return found


def _link(stated: Mapping[str, Any], base: Link, measured: float | None) -> Link:
    """A link with some figures replaced by the user's."""
    speed = stated.get("gigabytes_per_s", base.bytes_per_s / GIGA)
    if "gigabits_per_s" in stated:
        speed = stated["gigabits_per_s"] / 8
    found = link(stated.get("kind", base.kind), speed)
    return replace(found, measured_bytes_per_s=measured and measured * GIGA)
