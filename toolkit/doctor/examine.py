"""All checks of a machine, one after the other."""

from collections.abc import Iterator
from pathlib import Path

from toolkit.doctor import accelerators, accounts, network, packages, storage, toolchain
from toolkit.doctor.finding import Finding
from toolkit.doctor.needs import Needs


def examine(needs: Needs, hostfile: Path | None = None) -> Iterator[Finding]:
    """Every finding, group by group; takes seconds, most of them for imports.

    `hostfile`: machines to ask whether they answer, instead of the recipe's. Raises
    PlanError when it cannot be read.
    """
    yield from packages.check(needs)
    yield from accelerators.check(needs)
    yield from toolchain.check(needs)
    yield from network.check(needs, hostfile)
    yield from storage.check(needs)
    yield from accounts.check(needs)
    if needs.note:
        yield Finding("recipe", "plan", "note", needs.note, None, "dmt plan RECIPE")
