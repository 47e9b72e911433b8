"""What the wheel of DMT resolves to in clean environments, against what was tested.

    python .ci/resolve.py [PYTHON ...] [--out FILE]     # `make resolve`

Builds the wheel and asks pip what it would install, which fetches metadata and no package of
torch's size. Ends with 1 if a dependency of DMT resolves to a minor version that is in none of
the constraints files. Without arguments: python3.11, python3.12 and python3.13 on PATH.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
TESTED = (ROOT / "constraints.txt", *sorted((ROOT / ".ci" / "constraints").glob("*.txt")))
PYTHONS = ("python3.11", "python3.12", "python3.13")


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def tested() -> dict[str, set[str]]:
    """By normalised name, the versions of all constraints files."""
    found = defaultdict(set)
    for file in TESTED:
        for line in file.read_text().splitlines():
            if "==" in line:
                name, version = line.split("==")
                found[normal(name)].add(version)
    return found


def minor(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


def resolved(pip: Path, python: str, wheel: Path) -> tuple[str, dict[str, str], set[str]]:
    """The version of Python, what pip would install, and what DMT itself asks for."""
    command = [pip, "--python", python, "install", "--dry-run", "--ignore-installed", "--quiet"]
    report = wheel.with_suffix(".json")
    command += ["--use-feature=fast-deps", "--report", report, wheel]
    subprocess.run(list(map(str, command)), check=True)
    answer = json.loads(report.read_text())
    packages = [one["metadata"] for one in answer["install"]]
    own = next(one for one in packages if one["name"] == "dmt-train")
    lines = [line for line in own["requires_dist"] if "extra ==" not in line]
    direct = {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}
    versions = {normal(one["name"]): one["version"] for one in packages if one is not own}
    return answer["environment"]["python_full_version"], versions, direct


def table(found: Mapping[str, Mapping[str, str]], direct: set[str]) -> tuple[str, bool]:
    """Markdown, and whether every dependency of DMT is tested."""
    known, good = tested(), True
    rows = [f"| package | {' | '.join(found)} | tested |", f"|{'---|' * (len(found) + 2)}"]
    for name in sorted(direct):
        versions = [every[name] for every in found.values()]
        untested = [v for v in versions if minor(v) not in map(minor, known[name])]
        good &= not untested
        verdict = f"**no: {', '.join(untested)}**" if untested else "yes"
        if not untested and not {*versions} <= known[name]:
            verdict = "another patch release"
        rows.append(f"| {name} | {' | '.join(versions)} | {verdict} |")
    rows.append("")
    for python, every in found.items():
        others = [name for name in every if name not in direct]
        same = sum(every[name] in known[name] for name in others)
        rows.append(f"Python {python}: {same} of {len(others)} further packages as tested.")
    return "\n".join(rows), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=PYTHONS, metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pythons = [shutil.which(name) for name in options.pythons]
    if None in pythons:
        parser.error(f"not on PATH: {options.pythons[pythons.index(None)]}")
    with TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        pip = Path(folder, "venv", "bin", "pip")
        # Older ones download whole wheels for a dry run.
        subprocess.run([pip, "install", "-q", "pip>=23.3"], check=True)
        command = [pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT]
        subprocess.run(list(map(str, command)), check=True)
        (wheel,) = Path(folder).glob("*.whl")
        found, direct = {}, set()
        for python in pythons:
            asked = [python, "-c", "import sys; print(sys.executable)"]  # not a shim of pyenv's
            executable = subprocess.run(
                asked, check=True, text=True, capture_output=True
            ).stdout
            version, found_here, direct = resolved(pip, executable.strip(), wheel)
            found[version] = found_here
    text, good = table(found, direct)
    text = f"Written by `make resolve` on {date.today()}.\n\n{text}\n"
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
