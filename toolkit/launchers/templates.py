"""`launch/slurm/` and `launch/kubernetes/`: example jobs, written by the launchers.

python -m toolkit.launchers.templates            write them
python -m toolkit.launchers.templates --check    exit 1 when one is not current
"""

import sys
from pathlib import Path

from toolkit.generated import write_or_check
from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.job import job_of
from toolkit.run.assignment import decide

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/llama/llama-3.1-8b-pretrain.yaml"
FILES = {
    "slurm": ("launch/slurm/llama-3.1-8b.sbatch", ("launch.slurm.time_limit=24:00:00",)),
    "kubernetes": (
        "launch/kubernetes/llama-3.1-8b.yaml",
        (
            "launch.kubernetes.image=registry.example.com/dmt:latest",
            "launch.kubernetes.volume_claim=training",
        ),
    ),
}
"""By launcher: the file, and what is set for it."""


def text_of(launcher: str) -> str:
    """The job of an 8B model, its paths relative to a checkout of the repository."""
    _, overrides = FILES[launcher]
    assignment = decide(load_recipe(ROOT / RECIPE, overrides), ROOT / "runs" / "llama-3.1-8b")
    job = job_of(assignment)
    *_, text = LAUNCHERS[launcher]().spec(job).files.values()
    here = {sys.executable: "python3", str(job.recipe_file): RECIPE, f"{ROOT}/": ""}
    for old, new in here.items():
        text = text.replace(old, new)
    head, _, rest = text.partition("\n")
    note = "# Written by `python -m toolkit.launchers.templates`; for your own recipe:\n"
    command = f"# dmt render RECIPE --to {launcher}\n"
    return f"{head}\n{note}{command}{rest}" if head.startswith("#!") else note + command + text


def main() -> int:
    """Write or check the files."""
    texts = {ROOT / name: text_of(launcher) for launcher, (name, _) in FILES.items()}
    return write_or_check(__doc__.partition("\n")[0], "toolkit.launchers.templates", texts)


if __name__ == "__main__":
    sys.exit(main())
