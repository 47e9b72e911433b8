"""Light modules stay light, and imports point downward only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import toolkit

ROOT = Path(toolkit.__file__).parent
HEAVY = {
    "accelerate", "datasets", "deepspeed", "megatron", "numpy", "peft", "torch",
    "transformers", "wandb",
}  # fmt: skip
LIGHT = (
    "toolkit.errors", "toolkit.text.redact", "toolkit.optimizers", "toolkit.recipe",
    "toolkit.plan", "toolkit.extras.optimizers.adamw_8bit", "toolkit.intake",
    "toolkit.objectives", "toolkit.models.adapters.lora", "toolkit.models.spec",
    "toolkit.models.families", "toolkit.models.model", "toolkit.launchers",
    "toolkit.extras.launchers", "toolkit.extras.tune.trial", "toolkit.cli.main",
    "toolkit.cli.check", "toolkit.cli.report", "toolkit.report", "toolkit.foreign",
    "toolkit.accelerate.__init__", "toolkit.accelerate.scripts",
)  # fmt: skip

PROGRAMS = (
    "toolkit.launchers.agent",
    "toolkit.train.__main__",
)
"""Started as processes of their own, imported by nobody."""

LAYERS = (
    ("toolkit.__init__", "toolkit.errors", "toolkit.removed", "toolkit.text", "toolkit.system",
     "toolkit.registry", "toolkit.batch", "toolkit.layout"),
    ("toolkit.objectives",),
    ("toolkit.recipe.section",),
    ("toolkit.optimizers",),
    ("toolkit.recipe", "toolkit.launchers.__init__"),
    ("toolkit.plan.hardware",),
    ("toolkit.models",),
    ("toolkit.plan.plan", "toolkit.plan.request", "toolkit.plan.cost.engine",
     "toolkit.plan.cost.stages", "toolkit.plan.cost.__init__",
     "toolkit.plan.__init__"),
    ("toolkit.backend",),
    ("toolkit.plan",),
    ("toolkit.intake",),
    ("toolkit.data",),
    ("toolkit.checkpoint",),
    ("toolkit.engines",),
    ("toolkit.foreign",),
    ("toolkit.run",),
    ("toolkit.launchers",),
    ("toolkit.train",),
    ("toolkit.accelerate",),
    ("toolkit.rehearse", "toolkit.doctor", "toolkit.starter", "toolkit.report"),
    ("toolkit.cli",),
    ("toolkit.extras",),
)  # fmt: skip
"""The package order, the lowest first. A module may import its own layer and those below."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("toolkit", *path.relative_to(ROOT).with_suffix("").parts))
        found[name] = path
    return found


MODULES = modules()


def layer_of(module: str) -> int:
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return index
    raise AssertionError(f"{module} belongs to no layer: add it to LAYERS")


def imports_of(path: Path) -> Iterator[str]:
    """Modules of toolkit that a file imports anywhere, for types alone, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from `toolkit`, not relative ones"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def named(module: str) -> str:
    """A package is its `__init__` module."""
    return module if module in MODULES else f"{module}.__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    mine = layer_of(module)
    upward = [
        other
        for other in imports_of(MODULES[module])
        if other.split(".")[0] == "toolkit" and layer_of(named(other)) > mine
    ]
    assert not upward


def test_no_circle_of_imports() -> None:
    graph = {
        module: {named(other) for other in imports_of(path) if other.startswith("toolkit")}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names one


def test_light_modules_import_nothing_heavy() -> None:
    light = [
        module.removesuffix(".__init__")
        for module in MODULES
        if any(module == name or module.startswith(f"{name}.") for name in LIGHT)
        and module not in PROGRAMS
    ]
    assert {"toolkit.intake.load", "toolkit.plan.rules.legality", "toolkit.cli.check"} <= set(
        light
    )
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & {{module.partition('.')[0] for module in sys.modules}}\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verbs_are_loaded_only_when_run() -> None:
    code = (
        "import sys\n"
        "from toolkit.cli.main import main\n"
        "main(['--help'])\n"
        "loaded = [m for m in sys.modules if m.startswith('toolkit.')]\n"
        "print(sorted(loaded), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    expected = ["cli", "cli.main", "errors", "removed", "text", "text.redact", "text.terminal"]
    assert ast.literal_eval(done.stderr) == [f"toolkit.{name}" for name in expected]


def test_helpers_live_outside_test_modules() -> None:
    """What two test modules need is in a module of its own: either can be changed alone."""
    tests = Path(__file__).parent
    found = [
        f"{path.relative_to(tests)}: {node.module}"
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests"
        if any(part.startswith("test_") for part in node.module.split("."))
    ]
    assert not found
