"""Verbs and options of `dmt` whose code may be in `toolkit/extras`, which an installation may
leave out."""

from typing import Any

from toolkit.errors import BackendUnavailable
from toolkit.registry import load
from toolkit.system.install import source

OPTIONS = {
    "checkpoint import": "toolkit.extras.imports.command:import_checkpoint",
    "checkpoint export --to megatron": "toolkit.extras.imports.megatron:write_megatron",
    "report --html": "toolkit.extras.page:write_page",
}
"""By verb and option: what carries it out."""


def option(name: str) -> Any:
    """What carries out an option, e.g. `report --html`. Raises BackendUnavailable."""
    return carried_out(name, OPTIONS[name])


def carried_out(name: str, place: str) -> Any:
    """What `module:attribute` names, for a verb or option. Raises BackendUnavailable where its
    part of `toolkit/extras` is missing."""
    try:
        return load(place)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("toolkit.extras"):
            raise
        raise BackendUnavailable(
            f"dmt {name}: this installation of DMT has no toolkit/extras",
            fix=f"install all of it: pip install {source()}",
        ) from error
