"""Without the folder of the extras, the rest of the package works."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import pytest

from tests.processes import ROOT

RUN = """
import sys
# That of an editable installation finds in the checkout what the copy lacks.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in str(finder)]
import toolkit
assert toolkit.__path__[0].startswith(sys.argv[1]), toolkit.__path__
from toolkit.cli.main import main
import toolkit.engines.deepspeed.backend, toolkit.rehearse.layouts
import toolkit.foreign.accelerate_file
for name in ("llama-3.1-8b-pretrain", "mixtral-8x7b-pretrain", "llama-bytes"):
    for verb in (["check"], ["plan", "--explain"], ["render"]):
        assert main([verb[0], name, *verb[1:]]) in (None, 0), (verb, name)
from importlib.util import find_spec
assert find_spec("toolkit.extras") is None
assert main(["check", "llama-adamw-8bit"]) == 2
"""


@pytest.mark.slow
def test_the_core_works_without_extras(tmp_path: Path) -> None:
    for folder in ("toolkit", "recipes", "ds_configs"):
        copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=ignore_patterns("__pycache__"),
        )
    rmtree(tmp_path / "toolkit" / "extras")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
