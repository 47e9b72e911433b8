"""What to type to install DMT or what an optional part of it needs: docs/install.md.

`dmt` on PyPI is another project: no message names a distribution of that name.
"""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import toolkit
from toolkit.errors import BackendUnavailable

NAME = "dmt-train"
"""Name of the distribution. The command is `dmt`, the package `toolkit`."""
_CHECKOUT = Path(toolkit.__file__).parents[1]


def requirements() -> Mapping[str, Sequence[Requirement]]:
    """DMT's requirements by optional part. The empty name has those of every installation. They
    are read from the project file in a checkout, otherwise from what pip kept of it."""
    file = _CHECKOUT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        texts = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: [*map(Requirement, lines)] for extra, lines in texts.items()}
    about = metadata.metadata(NAME)
    every = [*map(Requirement, about.get_all("Requires-Dist") or ())]
    always = [one for one in every if not one.marker or one.marker.evaluate({"extra": ""})]
    others = [one for one in every if one not in always]
    return {"": always} | {
        extra: [one for one in others if one.marker and one.marker.evaluate({"extra": extra})]
        for extra in about.get_all("Provides-Extra") or ()
    }


def install(extra: str) -> str:
    """The command that installs the packages of an optional part, e.g. `8bit`."""
    return f"pip install {' '.join(repr(plain(one)) for one in requirements()[extra])}"


def optional(module: str, extra: str, what: str, otherwise: str = "") -> Any:
    """Import a module of an optional part. Raises BackendUnavailable if that fails. The message
    begins with `what` needs it. The fix ends with what to do `otherwise`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendUnavailable(
            f"{what} cannot be imported ({error})", fix=f"{install(extra)}{otherwise}"
        ) from error


def plain(requirement: Requirement) -> str:
    """The requirement as in the project file, the lower bound first, without its marker."""
    bounds = ",".join(sorted(map(str, requirement.specifier), reverse=True))
    extras = f"[{','.join(sorted(requirement.extras))}]" * bool(requirement.extras)
    return f"{requirement.name}{extras}{bounds}"
