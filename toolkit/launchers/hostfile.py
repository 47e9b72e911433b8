"""A hostfile: the machines of a cluster, one `HOST slots=N` a line."""

from pathlib import Path

from toolkit.errors import PlanError


def read_hostfile(hostfile: Path) -> list[list[str]]:
    """The words of every line, the machine's name first; comments are left out.

    Raises PlanError when it cannot be read, names no machine, or names one that ssh would
    take for an option.
    """
    fix = "a file with a line `HOST slots=N` for each machine"
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"hostfile {hostfile} cannot be read: {error}", fix=fix) from error
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise PlanError(f"hostfile {hostfile} names no machine", fix=fix)
    for host, *_ in found:
        if host.startswith("-"):
            raise PlanError(f"hostfile {hostfile}: {host!r} is no machine's name", fix=fix)
    return found
