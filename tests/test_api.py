"""What `toolkit` exports: by name, by type, without torch, and what the functions return."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.errors import PlanError, RecipeError
from toolkit.launchers.local import LocalStarter

TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
NAMES = [
    "DmtError", "LaunchResult", "Planned", "Recipe", "RehearsalResult", "launch_recipe",
    "load_recipe", "plan_recipe", "rehearse_recipe",
]  # fmt: skip


def test_one_list_of_names() -> None:
    """Of the package, its type stub and the page."""
    stub = ast.parse((ROOT / "toolkit" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    typed = [str(name.asname) for node in imports for name in node.names]
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    _, _, page = page.partition("## Python API")
    assert toolkit.__all__ == sorted(typed) == NAMES
    assert sorted(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == sorted(NAMES)


def test_importing_it_is_quick() -> None:
    """`import toolkit` imports nothing more; neither do all names import torch."""
    code = (
        "import sys, toolkit; before = {*sys.modules}\n"
        "assert not before & {'pydantic', 'toolkit.errors', 'rich', 'numpy'}, before\n"
        "from toolkit import *\n"
        f"assert {NAMES} == sorted(n for n in dir() if not n.startswith('_') and n not in "
        "('sys', 'before', 'toolkit')), dir()\n"
        f"assert {{*{NAMES}}} <= {{*dir(toolkit)}}\n"
        "assert not {*sys.modules} & {'torch', 'transformers', 'deepspeed'}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'train_recipe'"):
        toolkit.train_recipe  # type: ignore[attr-defined]  # noqa: B018


def test_a_plan_is_that_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = "2x8xh100-80gb"
    recipe = toolkit.load_recipe("llama-3.1-8b-pretrain", ["training.seed=7"], cluster)
    planned = toolkit.plan_recipe(recipe, cluster)
    words = ["plan", "llama-3.1-8b-pretrain", "--set", "training.seed=7"]
    assert main([*words, "--cluster", cluster, "--json"]) == 0
    (best, *_) = json.loads(capfd.readouterr().out)["plans"]
    assert best["engine"] == planned.plan.engine and planned.plan.fits
    assert best["layout"]["micro_batch"] == planned.plan.layout.micro_batch
    assert best["reasons"] == [*planned.plan.reasons]
    assert planned.recipe.cluster.world_size == 16 and planned.run.steps > 0
    # The recipe's own cluster, replaced when it is planned, is the same.
    elsewhere = toolkit.plan_recipe(toolkit.load_recipe("llama-3.1-8b-pretrain"), cluster)
    assert elsewhere.plan == planned.plan


def test_mistakes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        toolkit.load_recipe(TINY, ["training.steps=0"])
    assert caught.value.problems[0].key == "training.steps"
    assert toolkit.load_recipe(TINY, "training.seed=7").training.seed == 7  # not its letters
    with pytest.raises(PlanError, match="h10"):
        toolkit.load_recipe(TINY, cluster="16xh10")
    for function in (toolkit.plan_recipe, toolkit.rehearse_recipe, toolkit.launch_recipe):
        with pytest.raises(PlanError, match=r"'llama-bytes' is no Recipe\n.*load_recipe"):
            function("llama-bytes")
    recipe = toolkit.load_recipe(TINY, [f"data.train.files=[{tmp_path}/none.txt]"])
    with pytest.raises(toolkit.DmtError, match=r"none\.txt"):
        toolkit.launch_recipe(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_launch_that_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `subprocess.run` does with `check`; what `dmt launch` returns otherwise."""
    recipe = toolkit.load_recipe(TINY)
    planned = toolkit.launch_recipe(recipe, tmp_path / "run", dry_run=True)
    assert "-m toolkit.train" in planned.command and planned.exit_code == 0
    assert not planned.run_dir.exists()
    for code, error in ((4, "the run failed"), (75, "stopped after saving")):
        monkeypatch.setattr(LocalStarter, "run", lambda *_, code=code: code)
        with pytest.raises(toolkit.DmtError, match=error) as caught:
            toolkit.launch_recipe(recipe, tmp_path / "run")
        assert caught.value.exit_code == code
        assert toolkit.launch_recipe(recipe, tmp_path / "run", check=False).exit_code == code
