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
from toolkit.doctor.finding import Finding, Level, lacking
from toolkit.doctor.needs import Needs
from toolkit.doctor.probe import ask_python, is_installed
from toolkit.launcher import LAUNCHERS
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.system.install import NAME, plain, source
from toolkit.track.trackers import TRACKERS


@dataclass(frozen=True)
class Package:
    """A package that is checked."""

    name: str
    """Of the distribution, as `pip install` takes it."""
    module: str
    compiled: bool = False
    """Against torch, so that it may not fit the one that is there. DMT itself uses none of
    these: one that is not installed is not missing."""
    extra: str = ""
    """Which of its parts is used, as in `pip install NAME[EXTRA]`; also the submodule."""
    use: str = ""
    """Of one that is used when installed, and not among DMT's own requirements: what for."""


_REQUIRED = (
    Package("torch", "torch"),
    *dict.fromkeys(
        Package(package, module)
        for engine in BACKENDS.names
        for package, module in BACKENDS[engine].packages.items()
    ),
    Package("transformers", "transformers"),
    Package("accelerate", "accelerate"),
    Package("datasets", "datasets"),
    Package("wandb", "wandb"),
    Package("safetensors", "safetensors"),
)


def _of_choices() -> Iterator[Package]:
    """What a launcher or an optimizer needs and DMT itself does not."""
    required = {package.name for package in _REQUIRED}
    choices = [
        *((f"launch.launcher: {each.name}", each.packages) for each in LAUNCHERS.values()),
        *((f"optimizer.name: {name}", kind.packages) for name, kind in OPTIMIZERS.items()),
    ]
    for setting, packages in choices:
        for text, module in packages.items():
            package, use = Requirement(text), f"`{setting}` needs it"
            if package.name not in required:
                yield Package(package.name, module, extra="".join(package.extras), use=use)


PACKAGES = (
    *_REQUIRED,
    *(
        Package(package, module, use=f"`logging.{name}` {when + ' ' * bool(when)}needs it")
        for name, tracker in TRACKERS.items()
        for package, (module, when) in tracker.packages.items()
    ),
    *_of_choices(),
    Package("torchao", "torchao", use="`kernels.fp8` needs it"),
    Package("torchft", "torchft", use="`parallel.outer` needs it"),
    Package(
        "liger-kernel",
        "liger_kernel",
        use="`kernels.fused: liger` and `kernels.loss: liger` need it",
    ),
    Package("s3fs", "s3fs", use="data on s3:// needs it"),
    Package("gcsfs", "gcsfs", use="data on gs:// needs it"),
    Package(
        "transformer-engine",
        "transformer_engine",
        compiled=True,
        extra="pytorch",
        use="megatron-core imports it where it is installed",
    ),
    Package(
        "flash-attn",
        "flash_attn",
        compiled=True,
        use="transformers imports it where it is installed",
    ),
)


OLD_KERNEL = (5, 5)
"""Accelerate warns below it: processes may hang (huggingface/accelerate#1929)."""


def check(needs: Needs) -> Iterator[Finding]:
    """Python, the kernel and every package of `PACKAGES`."""
    yield _python(needs)
    yield from _kernel(platform.release())
    yield Finding("dmt", "ok", toolkit.__version__)
    with ThreadPoolExecutor() as threads:
        for findings in threads.map(lambda package: [*_package(package, needs)], PACKAGES):
            yield from findings


def _python(needs: Needs) -> Finding:
    found, allowed = platform.python_version(), _stated()[0]
    if Version(found) in allowed:
        return Finding("python", "ok", found)
    fix = f"python3.12 -m venv .venv && .venv/bin/pip install {source()}"
    return Finding("python", "problem", f"{found}; DMT needs {allowed}", needs.run, fix)


def _kernel(release: str) -> Iterator[Finding]:
    numbers = release.partition("-")[0].split(".")[:2]
    if all(number.isdecimal() for number in numbers) and (*map(int, numbers),) < OLD_KERNEL:
        text = f"Linux {release}: processes may hang (huggingface/accelerate#1929)"
        yield Finding("kernel", "warning", text, None, "use Linux 5.5 or later")


def _package(package: Package, needs: Needs) -> Iterator[Finding]:
    needed_by = needs.packages.get(package.name)
    version = _version(package)
    if version is None and package.compiled:
        return
    if version is None:
        text = f"not installed; {package.use}" if package.use else "not installed"
        fix, level = _install(_requirement(package)), _if_unneeded(package)
        yield lacking(package.name, text, fix, needed_by, level)
        return
    requirement = _requirement(package)
    text = str(version)
    # The first untested version, as in `<2.14`.
    bounds = [str(one) for one in requirement.specifier if one.operator == "<"]
    if newest := next((one for one in bounds if version not in SpecifierSet(one, True)), ""):
        text += f"; newer than the tests ran with ({newest})"
        yield Finding(package.name, "warning", text, needed_by, _install(requirement))
    elif not requirement.specifier.contains(version, prereleases=True):
        text += f"; DMT needs {requirement.specifier}"
        fix = _install(requirement)
        yield lacking(package.name, text, fix, needed_by, _if_unneeded(package))
    elif (failure := _import_failure(package, needed_by)) is not None:
        text += f"; cannot be imported: {failure}"
        fix = _install(requirement).replace("install ", "install --force-reinstall ", 1)
        yield Finding(package.name, "problem", text, needed_by, fix)
    else:
        yield Finding(package.name, "ok", text)


def _import_failure(package: Package, needed_by: str | None) -> str | None:
    """Why a package that is needed, or compiled, cannot be imported; None where it can.

    torch is left to `accelerators`, which imports it anyway.
    """
    if package.name == "torch" or not (needed_by or package.compiled):
        return None
    part = f".{package.extra}" * bool(package.extra)
    answer = ask_python(f"import {package.module}{part}")
    return None if answer.done else answer.out


def _if_unneeded(package: Package) -> Level:
    return "note" if package.use else "problem"


def _requirement(package: Package) -> Requirement:
    """What DMT's project file asks for, else any version."""
    extra = f"[{package.extra}]" * bool(package.extra)
    return _stated()[1].get(package.name, Requirement(package.name + extra))


def _install(requirement: Requirement) -> str:
    # flash-attn and Transformer Engine are compiled against the torch that is there.
    compiled = requirement.name in ("flash-attn", "transformer-engine")
    return f"pip install {'--no-build-isolation ' * compiled}'{plain(requirement)}'"


def _version(package: Package) -> Version | None:
    """The installed version; None where the module is not there, whatever pip says."""
    if not is_installed(package.module):
        return None
    try:
        return Version(metadata.version(package.name))
    except metadata.PackageNotFoundError:
        return None
    except InvalidVersion:
        return Version("0")


@cache
def _stated() -> tuple[SpecifierSet, Mapping[str, Requirement]]:
    """Which Python and which packages DMT's own project file asks for.

    Of a checkout, the file; of an installed package, what pip kept of it.
    """
    file = Path(toolkit.__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        python, lines = project["requires-python"], [*project["dependencies"]]
        lines += chain(*project["optional-dependencies"].values())
    else:
        python = metadata.metadata(NAME)["Requires-Python"]
        lines = metadata.requires(NAME) or []
    # pip keeps an extra's own with a marker (`; extra == "ray"`), which is none of a fix.
    requirements = [Requirement(line.partition(";")[0]) for line in lines]
    return SpecifierSet(python), {one.name: one for one in requirements}
