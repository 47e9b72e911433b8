"""The sdist, the wheel built from it, and what the wheel alone does in an empty folder."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.slow
SOURCES = ("toolkit", "recipes", "ds_configs", "pyproject.toml", "README.md", "LICENSE")
"""What is built from: a copy, since setuptools leaves files behind."""
BUILD = (
    "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('..'))"
)


def build(what: str, folder: Path) -> Path:
    """Run the hook of `pyproject.toml`'s backend in a source folder; the file is next to it."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD, f"build_{what}"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder.parent / ended.stdout.splitlines()[-1]


@dataclass(frozen=True)
class Installed:
    """A wheel in an environment of its own, which sees the packages of this one."""

    sdist: Path
    wheel: Path
    scripts: Path
    empty: Path
    """A working directory outside of the checkout."""

    def run(self, program: str, *words: str) -> str:
        command = [str(self.scripts / program), *words]
        ended = subprocess.run(
            command, cwd=self.empty, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                source / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            shutil.copy(ROOT / name, source)
    sdist = build("sdist", source)
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in 3.11.2
        archive.extractall(folder, **safe)
    wheel = build("wheel", folder / sdist.name.removesuffix(".tar.gz"))
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # As paths: links to the checkout that these folders have are not followed.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    scripts = folder / "venv" / "bin"
    command = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(list(map(str, command)), check=True)
    (folder / "empty").mkdir()
    return Installed(sdist, wheel, scripts, folder / "empty")


def test_everything_is_inside(installed: Installed) -> None:
    """All code and every file that it reads; no tests; one command; our name."""
    inside = set(zipfile.ZipFile(installed.wheel).namelist())
    files = [path for path in (ROOT / "toolkit").rglob("*") if path.is_file()]
    for folder in ("recipes", "ds_configs"):
        files += [
            ROOT / "toolkit" / path.relative_to(ROOT) for path in ROOT.glob(f"{folder}/**/*")
        ]
    expected = {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert {name for name in inside if ".dist-info/" not in name} == expected
    assert installed.wheel.name == "dmt_train-0.1.0-py3-none-any.whl"
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected < names and not any(name.startswith("tests") for name in names)


def test_an_image_is_built_from_the_same_files() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(allowed) == sorted(SOURCES)


IN_AN_EMPTY_FOLDER = """
from toolkit.cli.main import main
assert main(["check", "own.yaml"]) == main(["launch", "llama-bytes", "--dry-run"]) == 0
from toolkit.system.install import *
from toolkit.system.interpreter import TRAIN
print(install("fp8"), TRAIN, sep="\\n")
"""


def test_commands_in_an_empty_folder(installed: Installed) -> None:
    made = ["init", "llama-3.1-8b", "--cluster", "8xh100-80gb", "--out", "own.yaml"]
    installed.run("dmt", *made)
    *said, extra, train = installed.run("python", "-c", IN_AN_EMPTY_FOLDER).splitlines()
    assert "-m toolkit.train" in " ".join(said)
    assert train == "-m toolkit.train", "there is no folder launch/"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra == f"pip install '{project['optional-dependencies']['fp8'][0]}'"


def test_a_run(installed: Installed) -> None:
    """With half the libraries, in one process."""
    words = ["training.steps=2", "schedule.warmup_steps=0", "evaluation.every_steps=null"]
    words += ["parallel.engine=ddp", "cluster.gpus_per_node=1"]
    settings = [word for one in words for word in ("--set", one)]
    installed.run("dmt", "launch", "llama-bytes", "--run-dir", "run", *settings)
    assert (installed.empty / "run/export/model.safetensors").is_file()
