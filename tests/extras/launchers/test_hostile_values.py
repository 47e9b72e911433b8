"""What a recipe says is a text of the manifest, whatever it is."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.launchers.hostile import HOSTILE, refused_at_check
from toolkit.extras.launchers.kubernetes import KubernetesStarter
from toolkit.launchers.base import Job
from toolkit.recipe.schema import ClusterSection, KubernetesSection, LaunchSection


@pytest.mark.parametrize("text", HOSTILE)
def test_a_manifest_is_data(text: str) -> None:
    section = KubernetesSection(image=text, volume_claim="x")
    launch = LaunchSection(kubernetes=section)
    job = Job(Path("/runs/a"), ClusterSection(), launch, name=text, recipe=f"name: {text}\n")
    spec = KubernetesStarter().spec(job)
    ((_, content),) = spec.files.items()
    recipe, made = YAML(typ="safe").load_all(content)
    assert recipe["data"]["recipe.yaml"].split() == job.recipe.split()
    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == text
    assert spec.argv[:3] == ("kubectl", "create", "-f")


def test_names_are_refused_at_check() -> None:
    refused_at_check("launch.kubernetes.volume_claim")
