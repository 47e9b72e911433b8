"""Python and packages: versions, and whether they can be imported."""

import platform
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import toolkit
from toolkit.backend import BACKENDS
from toolkit.doctor.finding import Finding, ask_python, is_installed
from toolkit.doctor.needs import Needs
from toolkit.launchers import LAUNCHERS
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.run.trackers import TRACKERS
from toolkit.system.install import NAME, plain


@dataclass(frozen=True)
class Package:
    """A package that is checked."""

    name: str
    """Name of the distribution, as `pip install` takes it."""
    module: str
    """The module that is imported, e.g. `megatron.core`."""
    extra: str = ""
    """The extra's name, as in `pip install NAME[EXTRA]`."""


_COMPILED = (
    Package("transformer-engine", "transformer_engine.pytorch"),
    Package("flash-attn", "flash_attn"),
)
"""Packages compiled against a version of torch, which may not be the installed one.
megatron-core and transformers import them if installed."""
_OPTIONAL = (
    Package("torchao", "torchao"),
    Package("torchft", "torchft"),
    Package("peft", "peft"),
    Package("liger-kernel", "liger_kernel"),
    Package("s3fs", "s3fs"),
    Package("gcsfs", "gcsfs"),
)


def _of_every_installation() -> Iterator[Package]:
    """The requirements of DMT itself."""
    yield Package("torch", "torch")
    for engine in BACKENDS.names:
        for name, module in BACKENDS[engine].packages.items():
            yield Package(name, module)
    for name in ("transformers", "accelerate", "datasets", "wandb", "safetensors"):
        yield Package(name, name)


def _of_choices() -> Iterator[Package]:
    """Packages that some recipes need: launchers, optimizers, trackers, kernels, object
    stores."""
    launchers = (launcher.packages for launcher in LAUNCHERS.values())
    kinds = (OPTIMIZERS[name].packages for name in OPTIMIZERS.names)
    for texts in (*launchers, *kinds):
        for text, module in texts.items():
            package = Requirement(text)
            extra = "".join(package.extras)
            yield Package(package.name, f"{module}.{extra}" if extra else module, extra)
    for tracker in TRACKERS.values():
        for name, (module, _) in tracker.packages.items():
            yield Package(name, module)
    yield from _OPTIONAL


def check(needs: Needs) -> Iterator[Finding]:
    """Python, DMT's own packages, those that the recipe needs, and those that are
    compiled against torch."""
    yield Finding("python", "ok", platform.python_version())
    yield Finding("dmt", "ok", toolkit.__version__)
    wanted = {one.name: one for one in _of_choices() if one.name in needs.packages}
    wanted |= {one.name: one for one in _of_every_installation()}
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda one: _package(one, needs), wanted.values())
        yield from found
        compiled = [one for one in _COMPILED if _version(one) is not None]
        yield from threads.map(lambda one: _package(one, needs), compiled)


def _package(package: Package, needs: Needs) -> Finding:
    name, needed_by = package.name, needs.packages.get(package.name)
    requirement = _requirement(package)
    fix, version = _install(requirement), _version(package)
    unusable = f"recipes with {needed_by} cannot run" if needed_by else "parts of DMT fail"
    if version is None:
        return Finding(
            name, "problem", "not installed", cost=unusable, fix=fix, needed_by=needed_by
        )
    # The first untested version, as in `<2.14`.
    bounds = [str(one) for one in requirement.specifier if one.operator == "<"]
    if newest := next((one for one in bounds if version not in SpecifierSet(one, True)), ""):
        return Finding(
            name, "warning", f"{version}; newer than the tests ran with ({newest})",
            cost="its losses and errors were not tested", fix=fix, needed_by=needed_by,
        )  # fmt: skip
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{version}; DMT needs {requirement.specifier}"
        return Finding(name, "problem", text, cost=unusable, fix=fix, needed_by=needed_by)
    if (failure := _import_failure(package, needed_by)) is not None:
        return Finding(
            name, "problem", f"{version}; cannot be imported: {failure}", cost=unusable,
            fix=fix.replace("install ", "install --force-reinstall ", 1), needed_by=needed_by,
        )  # fmt: skip
    return Finding(name, "ok", str(version))


def _import_failure(package: Package, needed_by: str | None) -> str | None:
    """Why a package that is needed, or compiled, cannot be imported. None where it can.

    torch is left to `accelerators`, which imports it anyway.
    """
    if package.name == "torch" or not (needed_by or package in _COMPILED):
        return None
    answer = ask_python(f"import {package.module}")
    return None if answer.done else answer.out


def _requirement(package: Package) -> Requirement:
    """The version that DMT's project file asks for, else any version."""
    extra = f"[{package.extra}]" * bool(package.extra)
    return _stated().get(package.name, Requirement(package.name + extra))


def _install(requirement: Requirement) -> str:
    # flash-attn and Transformer Engine are compiled against the torch that is there.
    compiled = requirement.name in {one.name for one in _COMPILED}
    return f"pip install {'--no-build-isolation ' * compiled}'{plain(requirement)}'"


def _version(package: Package) -> Version | None:
    """The installed version. None if the module is missing, whatever pip says."""
    if not is_installed(package.module.partition(".")[0]):
        return None
    try:
        return Version(metadata.version(package.name))
    except metadata.PackageNotFoundError:
        return None
    except InvalidVersion:
        return Version("0")


@cache
def _stated() -> Mapping[str, Requirement]:
    """The packages that DMT's own project file asks for.

    In a checkout the file is read, otherwise what pip kept of it.
    """
    file = Path(toolkit.__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    else:
        lines = metadata.requires(NAME) or []
    # pip keeps an extra's own with a marker (`; extra == "ray"`), which is none of a fix.
    requirements = [Requirement(line.partition(";")[0]) for line in lines]
    return {one.name: one for one in requirements}
