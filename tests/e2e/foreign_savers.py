"""The savers of test_import_formats.py, which import their libraries in the ranks alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class MegatronCase(NamedTuple):
    """A layout of megatron-core, and the form in which its optimizer is saved."""

    layout: Mapping[str, int]
    sharding: str
    """Of the distributed optimizer; empty: the other one."""
    tied: bool = True

    @property
    def overrides(self) -> list[str]:
        """Those of the recipe that continues."""
        return [f"model.config.tie_word_embeddings={str(self.tied).lower()}"]


def megatron(project: Path, cases: Mapping[str, MegatronCase], out: Path) -> Any:
    from tests.e2e.megatron_saver import save_all

    return save_all(project, cases, out)


def fsdp(project: Path, overrides: Sequence[str], out: Path) -> Any:
    from tests.e2e.torch_savers import save_fsdp

    return save_fsdp(project, overrides, out)


def trainer(project: Path, overrides: Sequence[str], out: Path) -> Any:
    from tests.e2e.torch_savers import save_trainer

    return save_trainer(project, overrides, out)
