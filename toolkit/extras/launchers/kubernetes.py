"""`kubernetes`: an indexed Job, in whose pods, one per machine, `dmt launch` runs.

The manifest is data, not text: no part of the recipe is interpreted by a shell. The recipe is
passed in a ConfigMap, secrets in a Secret that the user created.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from toolkit.errors import EXIT_RESUMABLE, PlanError
from toolkit.launchers.base import DMT, Job, LaunchSpec, submit
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import StopSignals
from toolkit.system.interpreter import SAFE
from toolkit.text.terminal import tell

PORT = 29400
"""The rendezvous port, on the first pod."""
MOUNT = "/dmt"
"""Where the volume is mounted in the containers."""
CONFIG = PurePosixPath("/etc/dmt")
"""The recipe's path in the containers."""

_GRACE_S = 600
"""Time that a pod has to save and exit, unless the recipe's `pod` states another."""
_CONTAINER = "dmt"
_NVIDIA = "nvidia.com/gpu"
_LONGEST_NAME = 30
"""Longest part of a recipe's name in ours, which has 11 more. A pod's has an index, too. A host
name may have 63 characters."""
_PASSED_ON = (
    *("REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"),
    *("WANDB_ENTITY", "WANDB_MODE", "WANDB_TAGS"),
)
"""Variables of `dmt launch` that decide what a run does, and hold no secret."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)

Manifest = dict[str, Any]


class KubernetesStarter:
    """`kubectl create`. Returns when the job is accepted."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the submission, with the manifest as its file. See Starter. Raises PlanError
        if `launch.kubernetes` lacks a setting, or states a field that DMT sets."""
        for key in ("image", "volume_claim"):
            if getattr(job.launch.kubernetes, key) is None:
                raise PlanError(
                    f"launch.kubernetes.{key}: nothing, and launcher kubernetes needs it",
                    fix=f"--set launch.kubernetes.{key}=NAME",
                )
        manifest = job.run_dir / "launch" / "job.yaml"
        yaml, text = YAML(), StringIO()
        yaml.dump_all([*_documents(job)], text)
        return LaunchSpec(
            argv=("kubectl", "create", "-f", str(manifest)),
            run_dir=job.run_dir,
            files={manifest: text.getvalue()},
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> int:
        """Submit. Raises BackendUnavailable without `kubectl`."""
        del signals
        code = submit("kubernetes", spec, f"where it is: {shlex.join(spec.argv)}")
        if code:
            again = shlex.join(("kubectl", "delete", *spec.argv[2:]))
            tell(f"  fix: if the job of an earlier start is in the way: {again}")
        return code


def _documents(job: Job) -> Iterator[Manifest]:
    """The recipe, the names of the pods, and the Job (batch/v1) with one pod per machine."""
    name, nodes = _name(job), job.cluster.nodes
    metadata = {"name": name}
    recipe = LiteralScalarString(_portable(job.recipe))
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"recipe.yaml": recipe},
    }
    if nodes > 1:
        names = {
            "clusterIP": "None",
            "selector": {"job-name": name},
            "publishNotReadyAddresses": True,  # they wait for each other before they are
        }
        yield {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": names}
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # If the run fails, each of its pods does.
        "backoffLimit": job.launch.max_restarts * nodes,
        "podFailurePolicy": {
            "rules": [_rule("FailJob", *USER_CODES), _rule("Ignore", EXIT_RESUMABLE)]
        },
        "template": {"spec": _pod(job, name)},
    }
    yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _rule(action: str, *codes: int) -> Manifest:
    """The rule for pods that end with these codes. Without one, the end counts as a failure."""
    which = {"containerName": _CONTAINER, "operator": "In", "values": [*codes]}
    return {"action": action, "onExitCodes": which}


def _pod(job: Job, name: str) -> Manifest:
    settings = job.launch.kubernetes
    env = {**job.env, **{key: os.environ[key] for key in _PASSED_ON if key in os.environ}}
    container: Manifest = {
        "name": _CONTAINER,
        "image": settings.image,
        "command": ["python", *SAFE, *DMT, *_arguments(job, name)],
        "workingDir": MOUNT,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "volumeMounts": [
            {"name": "work", "mountPath": MOUNT},
            {"name": "recipe", "mountPath": str(CONFIG), "readOnly": True},
            # NCCL and data loading need more than a container's usual 64 MiB.
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    more = dict(settings.pod or {})
    stated, *sidecars = more.pop("containers", None) or [{}]
    if job.cluster.gpu != "cpu" and not _names_gpus(stated):
        gpus = {_NVIDIA: str(job.cluster.gpus_per_node)}
        container["resources"] = {"limits": gpus}
    container = _merged(container, stated, "pod.containers")
    pod = _merged(
        {
            "restartPolicy": "Never",  # another pod, which a policy for failures needs
            "subdomain": name,
            "containers": [container, *sidecars],
            "volumes": [
                {"name": "work", "persistentVolumeClaim": {"claimName": settings.volume_claim}},
                {"name": "recipe", "configMap": {"name": name}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        },
        more,
        "pod",
    )
    return {"terminationGracePeriodSeconds": _GRACE_S, **pod}


def _names_gpus(container: Mapping[Any, Any]) -> bool:
    """Whether a stated container's limits name GPUs in another way than ours."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    names = limits if isinstance(limits, Mapping) else ()
    return any("/gpu" in str(name) and name != _NVIDIA for name in names)


def _merged(own: Manifest, more: Mapping[Any, Any], where: str) -> Manifest:
    """Merge DMT's fields with the recipe's: maps are merged, lists appended.

    Raises PlanError for a field for which both state a different value.
    """
    merged = dict(own)
    for key, value in more.items():
        ours = own.get(key)
        if isinstance(ours, dict) and isinstance(value, Mapping):
            merged[key] = _merged(ours, value, f"{where}.{key}")
        elif isinstance(ours, list) and isinstance(value, (list, tuple)) and key != "command":
            merged[key] = [*ours, *value]
        elif ours in (None, value):
            merged[key] = value
        else:
            raise PlanError(
                f"launch.kubernetes.{where}.{key}: {value!r}, and DMT sets it to {ours!r}",
                fix="remove it from the recipe",
            )
    return merged


def _arguments(job: Job, name: str) -> list[str]:
    if not _RUN_NAME.fullmatch(job.run_dir.name):
        raise PlanError(
            f"the run directory is called {job.run_dir.name!r}; in a container its name needs "
            "letters, digits, `.`, `_` and `-`",
            fix="--run-dir runs/NAME",
        )
    run_dir = PurePosixPath(MOUNT) / "runs" / job.run_dir.name
    arguments = ["launch", str(CONFIG / "recipe.yaml"), "--run-dir", str(run_dir)]
    arguments += ["--launcher", "local"]
    if job.cluster.nodes > 1:
        arguments += ["--set", f"launch.rendezvous={name}-0.{name}:{PORT}"]
    return arguments


def _portable(recipe: str) -> str:
    """The recipe with the paths below this folder relative to the volume."""
    here = f"{Path.cwd()}/"
    return recipe if here == "//" else recipe.replace(here, "")


def _name(job: Job) -> str:
    """The recipe's name in Kubernetes' format, with a hash of recipe and run directory. The
    hash keeps a job from starting with another one's ConfigMap."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:_LONGEST_NAME].strip("-")
    which_ = sha256(f"{job.run_dir.name}\n{_portable(job.recipe)}".encode()).hexdigest()
    return f"dmt-{plain}-{which_[:6]}"
