"""Python and packages: versions, and whether they can be imported."""

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import chain

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import toolkit
from toolkit.backend import BACKENDS
from toolkit.doctor.finding import Finding, ask_python, is_installed, lacking
from toolkit.doctor.needs import Needs
from toolkit.system.install import plain, requirements

_OWN = ("torch", "transformers", "accelerate", "datasets", "wandb", "safetensors")
"""Packages of every installation, besides those of the engines."""
_COMPILED = ("transformer-engine", "flash-attn")
"""Packages compiled against a version of torch, which may not be the installed one.
megatron-core and transformers import them if installed."""
_MODULES = {
    "megatron-core": "megatron.core",
    "mlflow-skinny": "mlflow",
    "transformer-engine": "transformer_engine.pytorch",
}
"""Modules that are not named like their package."""


def check(needs: Needs) -> Iterator[Finding]:
    """Python, DMT's own packages, those that the recipe needs, and those that are
    compiled against torch."""
    yield Finding("python", "ok", platform.python_version())
    yield Finding("dmt", "ok", toolkit.__version__)
    engines = chain(*(BACKENDS[engine].packages for engine in BACKENDS.names))
    compiled = (name for name in _COMPILED if _version(name) is not None)
    names = dict.fromkeys((*_OWN, *engines, *needs.packages, *compiled))
    with ThreadPoolExecutor() as threads:
        yield from threads.map(lambda name: _package(name, needs.packages.get(name)), names)


def _package(name: str, needed_by: str | None) -> Finding:
    stated = {one.name: one for one in chain(*requirements().values())}
    requirement = stated.get(name, Requirement(name))
    # flash-attn and Transformer Engine are compiled against the torch that is there.
    option = "--no-build-isolation " * (name in _COMPILED)
    fix, version = f"pip install {option}'{plain(requirement)}'", _version(name)
    unusable = f"recipes with {needed_by} cannot run" if needed_by else "parts of DMT fail"
    if version is None:
        return lacking(name, "not installed", cost=unusable, fix=fix, needed_by=needed_by)
    # The first untested version, as in `<2.14`.
    bounds = [str(one) for one in requirement.specifier if one.operator == "<"]
    if newest := next((one for one in bounds if version not in SpecifierSet(one, True)), ""):
        return Finding(
            name, "warning", f"{version}; newer than the tests ran with ({newest})",
            cost="its losses and errors were not tested", fix=fix, needed_by=needed_by,
        )  # fmt: skip
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{version}; DMT needs {requirement.specifier}"
        return lacking(name, text, cost=unusable, fix=fix, needed_by=needed_by)
    if (failure := _import_failure(name, needed_by)) is not None:
        return lacking(
            name, f"{version}; cannot be imported: {failure}", cost=unusable,
            fix=fix.replace("install ", "install --force-reinstall ", 1), needed_by=needed_by,
        )  # fmt: skip
    return Finding(name, "ok", str(version))


def _import_failure(name: str, needed_by: str | None) -> str | None:
    """Why a package that is needed, or compiled, cannot be imported. None where it can.

    torch is left to `accelerators`, which imports it anyway.
    """
    if name == "torch" or not (needed_by or name in _COMPILED):
        return None
    answer = ask_python(f"import {_module(name)}")
    return None if answer.done else answer.out


def _module(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))


def _version(name: str) -> Version | None:
    """The installed version. None if the module is missing, whatever pip says."""
    if not is_installed(_module(name).partition(".")[0]):
        return None
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
    except InvalidVersion:
        return Version("0")
