"""All checks of a machine, one after the other."""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.doctor import accelerators, network, packages, storage, toolchain
from toolkit.doctor.finding import Finding
from toolkit.doctor.needs import Needs


def examine(needs: Needs) -> Iterator[Finding]:
    """Every finding, group by group. Takes seconds, most of them for imports."""
    groups = {
        "packages": packages.check(needs),
        "accelerators": accelerators.check(needs),
        "programs": toolchain.check(needs),
        "network": network.check(needs),
        "storage": storage.check(needs),
    }
    for group, findings in groups.items():
        yield from (replace(finding, group=group) for finding in findings)
    if needs.note:
        yield Finding(
            "plan", "warning", needs.note, group="recipe",
            cost="what only the plan would need was not checked", fix="dmt plan RECIPE",
        )  # fmt: skip
