"""Compares rendered megatron-core arguments with the megatron-core that is installed."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolkit.errors import BackendUnavailable

SUPPORTED = ">=0.16,<0.20"
"""Versions of megatron-core that DMT is written for, as in pyproject.toml."""


def check_fields(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Check every field of every section of `megatron.json` against the installed classes.

    Imports megatron-core. Raises BackendUnavailable naming the first field that the
    installed version lacks.
    """
    fix = f'pip install "megatron-core{SUPPORTED}"'
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise BackendUnavailable("megatron-core is not installed", fix=fix) from error
    known = installed_fields()
    for section, values in config.items():
        owner, names = known[section]
        for name in values:
            if name not in names:
                raise BackendUnavailable(
                    f"megatron-core {installed} has no {name} in {owner.__name__}; "
                    f"DMT supports megatron-core {SUPPORTED}",
                    fix=fix,
                )


def installed_fields() -> dict[str, tuple[Callable[..., Any], Collection[str]]]:
    """Section of `megatron.json` → the class that it configures and what that accepts."""
    from toolkit.models.megatron import cpu

    cpu.before_import()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from toolkit.models.megatron.model import GPTChunk
    from toolkit.models.megatron.versions import LanguageModel

    dataclasses = {
        "transformer": MLATransformerConfig,  # it has all fields of TransformerConfig
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    known: dict[str, tuple[Callable[..., Any], Collection[str]]] = {
        section: (owner, {field.name for field in fields(owner)})
        for section, owner in dataclasses.items()
    }
    accepted = [inspect.signature(each).parameters for each in (LanguageModel, GPTChunk)]
    return {**known, "gpt": (LanguageModel, {*accepted[0], *accepted[1]})}
