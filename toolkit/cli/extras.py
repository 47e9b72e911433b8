"""Options of `dmt` whose code is in `toolkit/extras`, which an installation may leave out."""

from typing import Any

from toolkit.errors import BackendUnavailable
from toolkit.registry import Registry
from toolkit.system.install import source

OPTIONS: Registry[Any] = Registry(
    "dmt.options",
    {
        "checkpoint import": "toolkit.extras.imports.command:import_checkpoint",
        "checkpoint export --to megatron": "toolkit.extras.imports.megatron:write_megatron",
        "report --html": "toolkit.extras.page:write_page",
    },
)
"""By verb and option: what carries it out."""


def option(name: str) -> Any:
    """What carries out an option, e.g. `report --html`. Raises BackendUnavailable."""
    if name not in OPTIONS.names:
        raise not_installed(f"dmt {name}")
    return OPTIONS[name]


def not_installed(what: str) -> BackendUnavailable:
    """The error of a verb or option whose part of `toolkit/extras` is missing."""
    return BackendUnavailable(
        f"{what}: this installation of DMT has no toolkit/extras",
        fix=f"install all of it: pip install {source()}",
    )
