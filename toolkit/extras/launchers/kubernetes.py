"""What the launcher `kubernetes` needs."""

from toolkit.launchers import Launcher, Program

KUBERNETES = Launcher(
    "kubernetes",
    "toolkit.extras.launchers.kubernetes_job:KubernetesStarter",
    here=False,
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
