"""What to type to install DMT or what an optional part of it needs: docs/install.md.

`dmt` on PyPI is another project: no message names a distribution of that name.
"""

import json
import shlex
import tomllib
from contextlib import suppress
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


def source() -> str:
    """Where to install DMT from again, as `pip install` takes it.

    A checkout, the wheel or address that pip was given, or a release from the index.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return shlex.quote(str(_CHECKOUT))
    stated = None
    with suppress(metadata.PackageNotFoundError):  # a copy of the folder alone
        stated = metadata.distribution(NAME).read_text("direct_url.json")
    url = json.loads(stated)["url"] if stated else f"{NAME}=={toolkit.__version__}"
    return shlex.quote(url)


def plain(requirement: Requirement) -> str:
    """The requirement as in the project file, the lower bound first, without its marker."""
    bounds = ",".join(sorted(map(str, requirement.specifier), reverse=True))
    extras = f"[{','.join(sorted(requirement.extras))}]" * bool(requirement.extras)
    return f"{requirement.name}{extras}{bounds}"
