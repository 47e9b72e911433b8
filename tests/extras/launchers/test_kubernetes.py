"""The jobs are what Kubeflow's and Kubernetes' published schemas allow."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
from kubeflow.training import models
from kubeflow.training.models import KubeflowOrgV1PyTorchJob
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from kubernetes.client import ApiClient
from ruamel.yaml import YAML

from tests.processes import ROOT
from toolkit.cli.check import judge
from toolkit.errors import BackendUnavailable, PlanError
from toolkit.extras.launchers.kubernetes_job import KubernetesStarter
from toolkit.launchers.base import Job
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, KubernetesSection, LaunchSection

SETTINGS = {"image": "registry.example/dmt:1", "volume_claim": "runs", "env_from": "keys"}
CLUSTERS_OWN = {
    "pod": {
        "containers": [
            {
                "resources": {"requests": {"cpu": "64"}, "limits": {"rdma/ib": "8"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            }
        ],
        "nodeSelector": {"pool": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
    },
}
"""What a cluster may demand of a job: resources, capabilities, nodes, pull secrets."""


def documents(nodes: int, gpu: str, run: str = "tiny", **settings: Any) -> list[Any]:
    section = KubernetesSection(**{**SETTINGS, **settings})
    job = Job(
        Path("/home/me/runs") / run,
        ClusterSection(nodes=nodes, gpus_per_node=8, gpu=gpu),
        LaunchSection(kubernetes=section, max_restarts=3, grace_s=120.0),
        name="Tiny_llama.v2",
        recipe="name: Tiny_llama.v2\n",
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    spec = KubernetesStarter().spec(job)
    (text,) = spec.files.values()
    assert spec.argv == ("kubectl", "create", "-f", str(next(iter(spec.files))))
    return list(YAML(typ="safe").load_all(text))


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("gpu, own", [("cpu", {}), ("h100-80gb", CLUSTERS_OWN)])
def test_the_schemas_accept_it(nodes, gpu, own):
    config, job = documents(nodes, gpu, **own)
    kubernetes_validate.validate(config, "1.31", strict=True)
    # The SDK's classes are generated from the operator's schema. They drop what they do
    # not know: nothing may be missing from what they give back.
    client = ApiClient()
    client_models = {**vars(models), **vars(__import__("kubernetes").client.models)}
    read = _reader(client_models).deserialize(
        SimpleNamespace(data=json.dumps(job)), KubeflowOrgV1PyTorchJob
    )
    assert client.sanitize_for_serialization(read) == job
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        kubernetes_validate.validate(
            {**pod, "spec": {**replica["template"]["spec"], "restartPolicy": "OnFailure"}},
            "1.31",
            strict=True,
        )


def _reader(classes: dict[str, Any]) -> ApiClient:
    """A client that finds the operator's classes beside Kubernetes' own."""
    client = ApiClient()
    private = "_ApiClient__deserialize"
    own = getattr(client, private)

    def deserialize(data: Any, kind: Any) -> Any:
        if isinstance(kind, str) and kind in classes:
            kind = classes[kind]
        return own(data, kind)

    setattr(client, private, deserialize)
    return client


def test_every_pod_runs_dmt_launch():
    config, job = documents(4, "h100-80gb")
    assert config["data"] == {"recipe.yaml": "name: Tiny_llama.v2\n"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {
        "Master": 1,
        "Worker": 3,
    }
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        *("python", "-P", "-m", "toolkit.cli.main", "launch", "/etc/dmt/recipe.yaml"),
        *("--run-dir", "/dmt/runs/tiny", "--launcher", "local"),
        *("--set", f"launch.rendezvous={config['metadata']['name']}-master-0:29400"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["env"] == [{"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "1"}]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert job["spec"]["runPolicy"]["backoffLimit"] == 3


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("gpu", ["cpu", "h100-80gb"])
def test_kubeflow_trainers_schema_accepts_the_train_job(nodes, gpu):
    _, job = documents(nodes, gpu, kind="trainjob", **{**CLUSTERS_OWN, "env_from": None})
    read = TrainerV1alpha1TrainJob.from_dict(job)  # its fields are optional: compare them all
    assert read is not None and read.to_dict() == job
    trainer = job["spec"]["trainer"]
    assert trainer["command"][:3] == ["env", "--chdir=/dmt", "python"]
    assert trainer["resourcesPerNode"]["requests"] == {"cpu": "64"}
    ((patch,),) = [
        one["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        for one in job["spec"]["runtimePatches"]
    ]
    pod = patch["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert [one["name"] for one in pod["volumes"]] == ["work", "recipe", "shm"]


def test_a_train_job_refuses_what_it_cannot_set():
    with pytest.raises(PlanError, match="TrainJob cannot set `envFrom`"):
        documents(1, "cpu", kind="trainjob")
    with pytest.raises(PlanError, match="TrainJob cannot set `hostNetwork`"):
        documents(1, "cpu", kind="trainjob", env_from=None, pod={"hostNetwork": True})


def test_a_clusters_own_fields_are_added_and_never_replace_ours():
    _, job = documents(1, "h100-80gb", **CLUSTERS_OWN)
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    others = {key: one for key, one in CLUSTERS_OWN["pod"].items() if key != "containers"}
    assert {key: pod[key] for key in others} == others
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "64"},
        "limits": {"nvidia.com/gpu": "8", "rdma/ib": "8"},
    }
    with pytest.raises(PlanError, match=r"launch\.kubernetes\.pod\.containers\.image"):
        documents(1, "cpu", pod={"containers": [{"image": "other"}]})
    with pytest.raises(PlanError, match=r"resources\.limits\.nvidia\.com/gpu"):
        limits = {"limits": {"nvidia.com/gpu": "4"}}
        documents(1, "h100-80gb", pod={"containers": [{"resources": limits}]})


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("amd.com/gpu", {"amd.com/gpu": "8"}),
        ("rdma/ib", {"rdma/ib": "8", "nvidia.com/gpu": "8"}),
    ],
)
def test_gpus_of_another_name_replace_ours(name: str, limits: dict[str, str]) -> None:
    own = {"containers": [{"resources": {"limits": {name: "8"}}}]}
    _, job = documents(1, "mi300x", pod=own)
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == limits


def test_one_machine_needs_no_meeting_point():
    _, job = documents(1, "cpu")
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
        "containers"
    ]
    assert container["command"][-2:] == ["--launcher", "local"]
    assert "resources" not in container


@pytest.mark.parametrize("key", ["image", "volume_claim"])
def test_what_the_cluster_must_be_told_is_asked_for(key):
    with pytest.raises(PlanError, match=rf"--set launch\.kubernetes\.{key}=NAME"):
        documents(1, "cpu", **{key: None})


@pytest.mark.parametrize("name", ["a b", "$(WANDB_API_KEY)", "-x", "ü"])
def test_run_directories_that_kubernetes_would_read_are_refused(name):
    with pytest.raises(PlanError, match="--run-dir runs/NAME"):
        documents(1, "cpu", run=name)


def test_without_kubectl_the_command_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job(
        tmp_path, ClusterSection(), LaunchSection(kubernetes=KubernetesSection(**SETTINGS))
    )
    launcher = KubernetesStarter()
    with pytest.raises(BackendUnavailable, match="kubectl create -f"):
        launcher.run(launcher.spec(job), StopSignals())


def test_files_on_its_volume_are_not_looked_for() -> None:
    recipe, missing = ROOT / "recipes/tiny/llama-bytes.yaml", "data.train.files=[./no.txt]"
    assert judge(recipe, (missing,)).problems
    assert not judge(recipe, (missing, "launch.launcher=kubernetes")).problems
