"""The manifests are what Kubernetes' published schemas allow."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from tests.processes import ROOT
from toolkit.cli.check import judge
from toolkit.errors import BackendUnavailable, PlanError
from toolkit.extras.launchers.kubernetes import KubernetesStarter
from toolkit.launchers.base import Job
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, KubernetesSection, LaunchSection

SETTINGS = {"image": "registry.example/dmt:1", "volume_claim": "runs"}
CLUSTERS_OWN = {
    "pod": {
        "containers": [
            {
                "resources": {"requests": {"cpu": "64"}, "limits": {"rdma/ib": "8"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "envFrom": [{"secretRef": {"name": "keys"}}],
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
        LaunchSection(kubernetes=section, max_restarts=3),
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
def test_the_schemas_accept_it(nodes: int, gpu: str, own: dict[str, Any]) -> None:
    made = documents(nodes, gpu, **own)
    kinds = [one["kind"] for one in made]
    assert kinds == (["ConfigMap", "Job"] if nodes == 1 else ["ConfigMap", "Service", "Job"])
    for one in made:
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_every_pod_runs_dmt_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    config, service, job = documents(4, "h100-80gb")
    assert config["data"] == {"recipe.yaml": "name: Tiny_llama.v2\n"}
    spec, name = job["spec"], job["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == (
        "Indexed",
        4,
        4,
    )
    assert spec["backoffLimit"] == 3 * 4, "every pod of a run that failed counts"
    rules = spec["podFailurePolicy"]["rules"]
    actions = [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules]
    assert actions == [("FailJob", [2, 3]), ("Ignore", [75])]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "as such rules need it"
    # The pods of an indexed Job are called NAME-INDEX, and the service makes that a name.
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    assert container["command"] == [
        *("python", "-P", "-m", "toolkit.cli.main", "launch", "/etc/dmt/recipe.yaml"),
        *("--run-dir", "/dmt/runs/tiny", "--launcher", "local"),
        *("--set", f"launch.rendezvous={name}-0.{name}:29400"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert container["env"] == [
        {"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "1"},
        {"name": "WANDB_MODE", "value": "online"},
    ]
    assert pod["terminationGracePeriodSeconds"] == 600


def test_a_clusters_own_fields_are_added_and_never_replace_ours():
    _, job = documents(1, "h100-80gb", **CLUSTERS_OWN)
    pod = job["spec"]["template"]["spec"]
    others = {key: one for key, one in CLUSTERS_OWN["pod"].items() if key != "containers"}
    assert {key: pod[key] for key in others} == others
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "64"},
        "limits": {"nvidia.com/gpu": "8", "rdma/ib": "8"},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
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
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == limits


def test_one_machine_needs_no_meeting_point():
    _, job = documents(1, "cpu")
    (container,) = job["spec"]["template"]["spec"]["containers"]
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
