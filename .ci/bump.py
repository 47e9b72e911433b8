"""The two halves of `make bump`, between which the quick tests run; see docs/versions.md.

    python .ci/bump.py install   # the newest of each dependency into this environment; a table
    python .ci/bump.py write     # what is installed becomes newest.txt and the bounds

pip resolves; nothing here chooses a version.
"""

import argparse
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "pyproject.toml"
NEWEST = ROOT / ".ci" / "constraints" / "newest.txt"
EXTRAS = ("dev", "docs", "tensorboard", "ray")
"""What `make test` installs."""


def pins(file: Path) -> dict[str, Version]:
    """The versions in a constraints file, by the normalised name."""
    lines = [line for line in file.read_text().splitlines() if "==" in line]
    named = (line.split("==") for line in lines)
    return {
        canonicalize_name(name): Version(version.partition("+")[0]) for name, version in named
    }


def requirements(extras: tuple[str, ...] | None = None) -> list[Requirement]:
    """Of the project file: dependencies and those of `extras`, None: of every one."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    chosen = optional if extras is None else extras
    lines = [*project["dependencies"], *(line for name in chosen for line in optional[name])]
    return [Requirement(line) for line in lines]


def without_upper_bound(requirement: Requirement) -> str:
    extras = f"[{','.join(requirement.extras)}]" * bool(requirement.extras)
    lower = ",".join(str(one) for one in requirement.specifier if one.operator == ">=")
    return f"{requirement.name}{extras}{lower}"


def pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def installed() -> dict[str, Version]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "freeze.txt"
        file.write_text(pip("freeze", "--exclude-editable"))
        return pins(file)


def install() -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "newest.in"
        file.write_text("\n".join(map(without_upper_bound, requirements(EXTRAS))))
        pip("install", "-q", "--upgrade", "--upgrade-strategy", "eager", "-r", str(file))
    pip("install", "-q", "--no-deps", "-e", str(ROOT))


def changes(before: Mapping[str, Version], after: Mapping[str, Version]) -> str:
    """A Markdown table of what differs; a dependency above its bound is named."""
    bounds = {canonicalize_name(one.name): one.specifier for one in requirements()}
    rows = ["| package | tested | newest | bound |", "|---|---|---|---|"]
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            above = new and name in bounds and not bounds[name].contains(new, prereleases=True)
            rows.append(f"| {name} | {old or '–'} | {new or '–'} | {'above' * bool(above)} |")
    return "\n".join(rows)


def write(versions: Mapping[str, Version]) -> None:
    """Raise the bounds to the next minor version, and replace newest.txt."""
    known = pins(NEWEST)
    if older := [name for name, one in versions.items() if name in known and one < known[name]]:
        sys.exit(f"older than in {NEWEST.name}: {', '.join(older)}; use the newest Python")
    text = PROJECT.read_text()
    for one in requirements():
        version = versions.get(canonicalize_name(one.name))
        if version is not None and not one.specifier.contains(version, prereleases=True):
            line = rf'"{re.escape(one.name)}(\[[^"\]]*\])?>=[^"]*"'
            bounded = f'"{without_upper_bound(one)},<{version.major}.{version.minor + 1}"'
            text = re.sub(line, bounded, text)
    PROJECT.write_text(text)
    head = f"# Python {platform.python_version()}; written by `make bump`"
    lines = [f"{name}=={version}" for name, version in sorted(versions.items())]
    NEWEST.write_text("\n".join([head, *lines]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("half", choices=("install", "write"))
    half = parser.parse_args().half
    if half == "install":
        install()
        print(changes(pins(NEWEST), installed()))
    else:
        write(installed())


if __name__ == "__main__":
    main()
