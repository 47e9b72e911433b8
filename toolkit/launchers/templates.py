"""`launch/slurm/` and `launch/kubernetes/`: example jobs, written by the launchers.

python -m toolkit.launchers.templates            write them
python -m toolkit.launchers.templates --check    exit 1 when one is not current
"""

import sys
from pathlib import Path

from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS, Launcher
from toolkit.launchers.base import starter
from toolkit.launchers.job import job_of
from toolkit.run.assignment import decide
from toolkit.text.generated import write_or_check

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/llama/llama-3.1-8b-pretrain.yaml"


def examples() -> dict[Path, str]:
    """The examples of all launchers that have one, by file."""
    return dict(map(example, (each for each in LAUNCHERS.values() if each.example)))


def example(launcher: Launcher) -> tuple[Path, str]:
    """The file, and the job of an 8B model, its paths relative to a checkout of the
    repository."""
    recipe = load_recipe(ROOT / RECIPE, launcher.example)
    job = job_of(decide(recipe, ROOT / "runs" / "llama-3.1-8b"))
    *_, (path, text) = starter(launcher.name).spec(job).files.items()
    here = {sys.executable: "python3", str(job.recipe_file): RECIPE, f"{ROOT}/": ""}
    for old, new in here.items():
        text = text.replace(old, new)
    head, _, rest = text.partition("\n")
    note = "# Written by `python -m toolkit.launchers.templates`; for your own recipe:\n"
    command = f"# dmt render RECIPE --to {launcher.name}\n"
    noted = f"{head}\n{note}{command}{rest}" if head.startswith("#!") else note + command + text
    return ROOT / "launch" / launcher.name / f"llama-3.1-8b{path.suffix}", noted


def main() -> int:
    """Write or check the files."""
    about = __doc__.partition("\n")[0]
    return write_or_check(about, "toolkit.launchers.templates", examples())


if __name__ == "__main__":
    sys.exit(main())
