"""Rehearsals of recipes in two environments, compared: losses and gradient norms of every step.

    python benchmarks/two_versions.py PYTHON PYTHON [RECIPE …] [--layouts 'megatron*']

Each PYTHON is an interpreter in whose environment DMT's requirements are installed; DMT itself
is this checkout. Prints the largest relative difference of each recipe, the plain transformers
loop included, and ends with 4 where one exceeds 1e-6: rounding of fp32, which other versions of
torch and megatron-core sum in another order.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TINY = ("llama-bytes", "llama-sft", "llama-lora", "llama-dpo", "mixtral-bytes")
RECIPES = [ROOT / "recipes/tiny" / f"{name}.yaml" for name in TINY]
TOLERANCE = 1e-6
PACKAGES = ("megatron-core", "torch", "transformers", "deepspeed")


def installed(python: str) -> str:
    """The packages of an environment."""
    script = "import sys; from importlib.metadata import version as v; "
    script += "print(sys.version.split()[0], *(f'{each} {v(each)}' for each in sys.argv[1:]))"
    command = [python, "-c", script, *PACKAGES]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def rehearsal(python: str, recipe: Path, layouts: str) -> dict[str, Any]:
    """What `dmt rehearse --json` prints in the environment of `python`."""
    command = [python, "-m", "toolkit.cli.main", "rehearse", str(recipe.resolve()), "--json"]
    result = subprocess.run(
        [*command, "--processes", "2", "--layouts", f"recipe,{layouts}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def records(found: dict[str, Any]) -> dict[str, list[float]]:
    """Losses, then gradient norms, of the reference and of every layout that ran."""
    named = {
        "reference": found["reference"],
        **{each["name"]: each for each in found["layouts"]},
    }
    values = {name: [*each["loss"], *each["grad_norm"]] for name, each in named.items()}
    return {name: each for name, each in values.items() if each}


def differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """The largest relative difference of each layout, and its name."""
    ours, theirs = records(first), records(second)
    assert ours.keys() == theirs.keys(), "each environment runs the same layouts"
    for name, values in ours.items():
        pairs = zip(values, theirs[name], strict=True)
        yield max(abs(one - other) / abs(one) for one, other in pairs), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs=2, metavar="PYTHON")
    parser.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE", default=RECIPES)
    parser.add_argument("--layouts", default="megatron*")
    options = parser.parse_args()
    for python in options.pythons:
        print(f"Python {installed(python)}", end="", flush=True)
    worst = 0.0
    for recipe in options.recipes:
        first, second = (rehearsal(each, recipe, options.layouts) for each in options.pythons)
        found = sorted(differences(first, second), reverse=True)
        largest, name = found[0]
        print(f"{recipe.stem}: {largest:.1e} ({name}; {len(found)} layouts)", flush=True)
        worst = max(worst, largest)
    return 0 if worst <= TOLERANCE else 4


if __name__ == "__main__":
    sys.exit(main())
