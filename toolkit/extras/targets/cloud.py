"""Tasks of SkyPilot and dstack that run a recipe on machines of a cloud; they are only written.

SkyPilot's fields are those of `get_task_schema` and `get_resources_schema` in
sky/utils/schemas.py (0.14), dstack's those of its `TaskConfiguration` (0.22). The recipe stands
in the task itself, and its data, if it is in this folder, is uploaded with it.
"""

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

import toolkit
from toolkit.errors import PlanError
from toolkit.hardware.catalogue import accelerator
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import ClusterSection, Recipe
from toolkit.system.install import NAME, source
from toolkit.targets.base import Target
from toolkit.text.redact import redact

PORT = 29400
"""The rendezvous, on the first machine."""

_SAME = "h200 b200 gh200 l40s l4 rtx4090 rtx5090 rtx3090 a10 a10g t4 mi300x"
_SKYPILOT = {
    "h100-80gb": "H100",
    "a100-80gb": "A100-80GB",
    "a100-40gb": "A100",
    "v100-32gb": "V100-32GB",
    "a6000": "RTXA6000",
    **{name: name.upper() for name in _SAME.split()},
}
"""Our accelerators by their names in SkyPilot's catalogue (catalogs/v8/common)."""
_DSTACK = {
    "h100-80gb": "H100:80GB",
    "a100-80gb": "A100:80GB",
    "a100-40gb": "A100:40GB",
    "v100-32gb": "V100:32GB",
    **{name: name.upper() for name in f"{_SAME} a6000 b300 gb200".split()},
}
"""The same by the names that dstack knows (gpuhunt), with the memory where two differ."""

_END = "END_OF_RECIPE"
_INSTALL = f"pip install {NAME}=={toolkit.__version__}"


class CloudTarget(Target):
    """What both tasks have in common; they are never read."""

    form = ""
    who = ()
    rendered = True
    title: ClassVar[str]
    accelerators: ClassVar[Mapping[str, str]]
    first_machine: ClassVar[str]
    """Its address, as the shell of a task finds it."""

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        name = re.sub(r"[^a-z0-9]+", "-", f"dmt-{recipe.name.lower()}")[:41].strip("-")
        command = LiteralScalarString(_command(recipe, self.first_machine))
        nodes, gpus = recipe.cluster.nodes, self._gpus(recipe.cluster)
        variables = {"RUN_DIR": f"runs/{recipe.name}"}
        text = StringIO()
        YAML().dump(self.task(name, nodes, gpus, variables, command), text)
        if redact(text.getvalue()) != text.getvalue():
            raise PlanError(
                f"{self.title}'s task would hold a secret of this environment",
                fix="take it out of the recipe: pass it as a variable when you start the task",
            )
        return text.getvalue(), tuple(_notes(recipe.cluster))

    def _gpus(self, cluster: ClusterSection) -> str:
        if cluster.groups:
            raise PlanError(
                f"cluster.groups: a task of {self.title} asks for one kind of machines",
                fix="plan for one of the groups, e.g. `--set cluster.groups=[]` and its nodes",
            )
        if cluster.gpu == "cpu":
            return ""
        if (name := self.accelerators.get(accelerator(cluster.gpu).name)) is None:
            raise PlanError(
                f"cluster.gpu: {self.title} knows no {cluster.gpu} by a name of its own",
                fix=f"--set cluster.gpu={' or '.join(self.accelerators)}",
            )
        return f"{name}:{cluster.gpus_per_node}"

    def task(
        self, name: str, nodes: int, gpus: str, variables: dict[str, str], command: str
    ) -> dict[str, Any]:
        """The task as plain data. `gpus`: a machine's, `NAME:COUNT`; empty for CPUs."""
        raise NotImplementedError


class SkyPilotTarget(CloudTarget):
    """The file of `sky launch` and `sky jobs launch`."""

    kind = "SkyPilot task"
    title = "SkyPilot"
    accelerators = _SKYPILOT
    first_machine = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'

    def task(
        self, name: str, nodes: int, gpus: str, variables: dict[str, str], command: str
    ) -> dict[str, Any]:
        """See `CloudTarget`."""
        return {
            "name": name,
            "num_nodes": nodes,
            "resources": {"accelerators": gpus} if gpus else {"cpus": "4+"},
            "workdir": ".",
            "envs": variables,
            "setup": _INSTALL,
            "run": command,
        }


class DstackTarget(CloudTarget):
    """The file of `dstack apply -f`."""

    kind = "dstack task"
    title = "dstack"
    accelerators = _DSTACK
    first_machine = "$DSTACK_MASTER_NODE_IP"

    def task(
        self, name: str, nodes: int, gpus: str, variables: dict[str, str], command: str
    ) -> dict[str, Any]:
        """See `CloudTarget`."""
        return {
            "type": "task",
            "name": name,
            "nodes": nodes,
            "files": ["."],
            "env": variables,
            "commands": [_INSTALL, command],
            "resources": {"gpu": gpus or 0, "shm_size": "16GB"},
        }


SKYPILOT = SkyPilotTarget()
DSTACK = DstackTarget()


def _command(recipe: Recipe, first_machine: str) -> str:
    """What every machine runs; paths below this folder are relative, as they are there."""
    here = f"{Path.cwd()}/"
    stated = dump_recipe(recipe).replace(here, "") if here != "//" else dump_recipe(recipe)
    launcher = "--launcher local"
    if recipe.cluster.nodes > 1:
        launcher = f'--launcher torchrun --set launch.rendezvous="{first_machine}:{PORT}"'
    return (
        f"cat > recipe.yaml <<'{_END}'\n{stated.rstrip()}\n{_END}\n"
        f'dmt launch recipe.yaml --run-dir "$RUN_DIR" {launcher}\n'
    )


def _notes(cluster: ClusterSection) -> Sequence[str]:
    notes = ["RUN_DIR: name a folder on storage that outlives the machines"]
    if cluster.nodes > 1:
        notes[0] += ", and that all of them share"
    if Path(source().strip("'")).exists():
        notes.append(
            f"DMT runs from a checkout here: where no index has {NAME}, put its wheel in this "
            "folder, and name it in the task's `pip install`"
        )
    return notes
