"""What to type to install DMT or what an optional part of it needs: docs/install.md.

`dmt` on PyPI is another project: no message names a distribution of that name.
"""

import tomllib
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import toolkit
from toolkit.errors import BackendUnavailable

NAME = "dmt-train"
"""Name of the distribution. The command is `dmt`, the package `toolkit`."""
_CHECKOUT = Path(toolkit.__file__).parents[1]


def install(extra: str) -> str:
    """The command that installs the packages of an optional part, e.g. `8bit`."""
    file = _CHECKOUT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        wanted = [Requirement(line) for line in project["optional-dependencies"][extra]]
    else:
        every = map(Requirement, metadata.requires(NAME) or ())
        wanted = [
            one
            for one in every
            if one.marker
            and one.marker.evaluate({"extra": extra})
            # `evaluate` is also true of what the part does not decide.
            and not one.marker.evaluate({"extra": ""})
        ]
    return f"pip install {' '.join(repr(plain(one)) for one in wanted)}"


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
