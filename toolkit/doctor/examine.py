"""All checks of a machine, one after the other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.doctor import accelerators, accounts, network, packages, storage, toolchain
from toolkit.doctor.finding import Finding
from toolkit.doctor.needs import Needs


def examine(needs: Needs, hostfile: Path | None = None) -> Iterator[Finding]:
    """Every finding, group by group; takes seconds, most of them for imports.

    `hostfile`: machines to ask whether they answer, instead of the recipe's. Raises
    PlanError when it cannot be read.
    """
    groups = {
        "packages": packages.check(needs),
        "accelerators": accelerators.check(needs),
        "compilers": toolchain.check(needs),
        "launchers": toolchain.check_programs(needs),
        "network": network.check(needs, hostfile),
        "storage": storage.check(needs),
        "accounts": accounts.check(needs),
    }
    for group, findings in groups.items():
        yield from (replace(finding, group=group) for finding in findings)
    if needs.note:
        yield Finding("plan", "note", needs.note, None, "dmt plan RECIPE", group="recipe")
