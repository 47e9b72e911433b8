"""`kubernetes`: a PyTorchJob or TrainJob of Kubeflow in which every pod runs `dmt launch`.

The manifest is data, not text: no part of the recipe is interpreted by a shell. The recipe is
passed in a ConfigMap, secrets in a Secret that the user created.
"""

import re
import shlex
from collections.abc import Mapping
from hashlib import sha256
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from toolkit.errors import PlanError
from toolkit.launchers.base import DMT, Job, LaunchSpec, Outcome
from toolkit.launchers.process import StopSignals
from toolkit.launchers.submission import submit
from toolkit.recipe.schema import KubernetesSection
from toolkit.system.interpreter import SAFE
from toolkit.text.terminal import tell

PORT = 29400
"""The rendezvous port, on the first pod."""
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that a TrainJob is built on."""
MOUNT = "/dmt"
"""Where the volume is mounted in the containers."""
CONFIG = PurePosixPath("/etc/dmt")
"""The recipe's path in the containers."""
DEFAULT_GRACE_S = 600
"""Default time that a pod has to save and exit."""

_NVIDIA = "nvidia.com/gpu"
_LONGEST_NAME = 30
"""Ours has 11 characters more; the operator adds up to 22 for the pods, which may have 63."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)

_PATCHED_CONTAINER = ("securityContext", "volumeMounts")
_PATCHED_POD = frozenset(
    {
        *("affinity", "imagePullSecrets", "nodeSelector", "schedulingGates", "securityContext"),
        *("serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes"),
    }
)
"""What a TrainJob may patch of its runtime's container and pods (Kubeflow Trainer 2.3)."""

Manifest = dict[str, Any]


class KubernetesStarter:
    """`kubectl create`; returns when the job is accepted."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the submission, with the manifest as its file; see Starter."""
        settings = _settings(job)
        for key in ("image", "volume_claim"):
            if getattr(settings, key) is None:
                raise PlanError(
                    f"launch.kubernetes.{key}: nothing, and launcher kubernetes needs it",
                    fix=f"--set launch.kubernetes.{key}=NAME",
                )
        manifest = job.run_dir / "launch" / f"{settings.kind}.yaml"
        made = train_job(job) if settings.kind == "trainjob" else pytorch_job(job)
        yaml, text = YAML(), StringIO()
        yaml.representer.ignore_aliases = lambda _: True  # read by kubectl, not by people
        yaml.dump_all([_config_map(job), made], text)
        return LaunchSpec(
            argv=("kubectl", "create", "-f", str(manifest)),
            run_dir=job.run_dir,
            files={manifest: text.getvalue()},
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Submit; raises BackendUnavailable without `kubectl`."""
        del signals
        outcome = submit("kubernetes", spec, f"where it is: {shlex.join(spec.argv)}")
        if outcome.exit_code:
            again = shlex.join(("kubectl", "delete", *spec.argv[2:]))
            tell(f"  fix: if the job of an earlier start is in the way: {again}")
        return outcome


def _settings(job: Job) -> KubernetesSection:
    return job.launch.kubernetes


def pytorch_job(job: Job) -> Manifest:
    """The PyTorchJob (kubeflow.org/v1): one pod per machine.

    Raises PlanError if `launch.kubernetes` states a field that DMT sets.
    """
    replica = {"restartPolicy": "OnFailure", "template": {"spec": _pod(job)}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.cluster.nodes > 1:
        replicas["Worker"] = {"replicas": job.cluster.nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job),
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "None",
                "backoffLimit": job.launch.max_restarts,
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _pod(job: Job) -> Manifest:
    settings = _settings(job)
    name = _name(job)
    container: Manifest = {
        "name": "pytorch",  # The operator looks for this name.
        "image": settings.image,
        "command": ["python", *SAFE, *DMT, *_arguments(job)],
        "workingDir": MOUNT,
        "env": [{"name": key, "value": value} for key, value in job.env.items()],
        "volumeMounts": [
            {"name": "work", "mountPath": MOUNT},
            {"name": "recipe", "mountPath": str(CONFIG), "readOnly": True},
            # NCCL and data loading need more than a container's usual 64 MiB.
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if settings.env_from is not None:
        container["envFrom"] = [{"secretRef": {"name": settings.env_from}}]
    more = dict(settings.pod or {})
    stated, *sidecars = more.pop("containers", None) or [{}]
    if job.cluster.gpu != "cpu" and not _names_gpus(stated):
        gpus = {_NVIDIA: str(job.cluster.gpus_per_node)}
        container["resources"] = {"limits": gpus}
    container = _merged(container, stated, "pod.containers")
    return _merged(
        {
            "terminationGracePeriodSeconds": int(job.launch.grace_s or DEFAULT_GRACE_S),
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


def _names_gpus(container: Mapping[Any, Any]) -> bool:
    """Whether the limits of a stated container have GPUs by another name than ours."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    names = limits if isinstance(limits, Mapping) else ()
    return any("/gpu" in str(name) and name != _NVIDIA for name in names)


def train_job(job: Job) -> Manifest:
    """The TrainJob (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2.2): one pod per machine,
    as a patch of the runtime `launch.kubernetes.runtime`.

    Raises PlanError for a field that a TrainJob cannot set, or that DMT sets itself.
    """
    pod = _pod(job)
    container, *sidecars = pod.pop("containers")
    start = ["env", f"--chdir={container['workingDir']}", *container["command"]]
    trainer = {
        "numNodes": job.cluster.nodes,
        "image": container["image"],
        "command": start,
        "env": container["env"],
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    patched = {key: container[key] for key in _PATCHED_CONTAINER if key in container}
    known = {"name", "workingDir", "command", "image", "env", "resources", *patched}
    extras = [*(container.keys() - known), *(pod.keys() - _PATCHED_POD)]
    for extra in [*extras, *["a second container"] * bool(sidecars)]:
        raise PlanError(
            f"launch.kubernetes: a TrainJob cannot set `{extra}` of its pods",
            fix="set it in the ClusterTrainingRuntime, or choose "
            "--set launch.kubernetes.kind=pytorchjob",
        )
    spec = {**pod, "containers": [{"name": "node", **patched}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": spec}}}}
    patch = {
        "manager": "dmt/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": trainer,
            "runtimePatches": [patch],
        },
    }


def _merged(own: Manifest, more: Mapping[Any, Any], where: str) -> Manifest:
    """Fields of DMT and of the recipe: maps merged, lists appended.

    Raises PlanError for a field of which both state a different value.
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


def _arguments(job: Job) -> list[str]:
    if not _RUN_NAME.fullmatch(job.run_dir.name):
        raise PlanError(
            f"the run directory is called {job.run_dir.name!r}; in a container its name needs "
            "letters, digits, `.`, `_` and `-`",
            fix="--run-dir runs/NAME",
        )
    run_dir = PurePosixPath(MOUNT) / "runs" / job.run_dir.name
    arguments = ["launch", str(CONFIG / "recipe.yaml"), "--run-dir", str(run_dir)]
    arguments += ["--launcher", "local"]
    if job.cluster.nodes == 1:
        return arguments
    name = _name(job)
    trains = _settings(job).kind == "trainjob"
    first = f"{name}-node-0-0.{name}" if trains else f"{name}-master-0"
    meeting = f"launch.rendezvous={first}:{PORT}"
    return [*arguments, "--set", meeting]


def _config_map(job: Job) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {"recipe.yaml": LiteralScalarString(_portable(job.recipe))},
    }


def _portable(recipe: str) -> str:
    """The recipe with the paths below this folder relative to the volume."""
    here = f"{Path.cwd()}/"
    return recipe if here == "//" else recipe.replace(here, "")


def _metadata(job: Job) -> Manifest:
    return {"name": _name(job), "namespace": _settings(job).namespace}


def _name(job: Job) -> str:
    """The recipe's name in Kubernetes' format, with a hash of recipe and run directory, so that
    no job starts with the ConfigMap of another."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:_LONGEST_NAME].strip("-")
    which_ = sha256(f"{job.run_dir.name}\n{_portable(job.recipe)}".encode()).hexdigest()
    return f"dmt-{plain}-{which_[:6]}"
