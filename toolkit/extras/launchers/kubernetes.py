"""Kubernetes: the section of a recipe, and what the launcher needs."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from toolkit.launcher import Launcher, Program
from toolkit.recipe.section import NonEmpty, Section, Wording

KubernetesName: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"),
    Wording("lowercase letters, digits, `-` and `.`, as in Kubernetes names"),
]
KubernetesResource: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"),
    Wording("DOMAIN/NAME, e.g. nvidia.com/gpu"),
]
ContainerPath: TypeAlias = Annotated[
    str,
    Field(pattern=r"^/[A-Za-z0-9_./-]*$", max_length=400),
    Wording("an absolute path of letters, digits and `_./-`"),
]


class KubernetesSection(Section):
    """The job that `launcher: kubernetes` creates: Kubeflow's PyTorchJob or TrainJob."""

    kind: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """`pytorchjob`: of Kubeflow's training operator (v1). `trainjob`: of Kubeflow Trainer 2.2
    or later."""
    runtime: KubernetesName = "torch-distributed"
    """With `kind: trainjob`: the ClusterTrainingRuntime that the job is built on."""
    image: NonEmpty | None = None
    """Container image with DMT installed; needed for this launcher."""
    namespace: KubernetesName = "default"
    """Where the job is created."""
    volume_claim: KubernetesName | None = None
    """A PersistentVolumeClaim that all machines can write to; needed for this launcher. It
    holds the run directory and relative paths of `data`."""
    mount_path: ContainerPath = "/dmt"
    """Where that volume is mounted in the containers."""
    env_from: KubernetesName | None = None
    """A Kubernetes Secret whose keys become environment variables, e.g. WANDB_API_KEY."""
    gpu_resource: KubernetesResource = "nvidia.com/gpu"
    """The name under which the cluster offers GPUs."""
    labels: dict[str, str] | None = None
    """Labels of the job, e.g. `{kueue.x-k8s.io/queue-name: research}`."""
    resources: dict[Literal["requests", "limits"], dict[str, str]] | None = None
    """Other resources of each pod, e.g. `{requests: {cpu: "64", memory: 900Gi},
    limits: {rdma/ib: "8"}}`."""
    container: dict[str, Any] | None = None
    """Other fields of the container, as Kubernetes spells them, e.g. `{securityContext:
    {capabilities: {add: [IPC_LOCK]}}}`. Maps are merged; lists are appended."""
    pod: dict[str, Any] | None = None
    """Other fields of each pod's spec, e.g. `{nodeSelector: {…}, tolerations: […],
    imagePullSecrets: [{name: …}]}`, merged in the same way."""


KUBERNETES = Launcher(
    "kubernetes",
    "toolkit.extras.launchers.kubernetes_job:KubernetesStarter",
    section=KubernetesSection,
    oversees="never",
    same_files=False,
    renders=True,
    example=(
        "launch.kubernetes.image=registry.example.com/dmt:latest",
        "launch.kubernetes.volume_claim=training",
    ),
    programs=(
        Program("kubectl", "install it as described in https://kubernetes.io/docs/tasks/tools"),
    ),
)
