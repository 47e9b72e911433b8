"""What a machine does while it waits for others: it reads what its ranks will read first.

    python -m toolkit.launchers.waiting RECIPE

When the machine replaces a lost one, libraries and the model's files are in its memory: the
kernel's copies of files.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.system.interpreter import python

_USUAL_S = 5.0
"""After which a machine is a spare, and no longer one that waits for the others' agents."""
_AT_ONCE = 1 << 24


@contextmanager
def reading_ahead(recipe: Path) -> Iterator[None]:
    """Read in a process of its own, until the block ends."""
    reader = subprocess.Popen(
        [*python(), "-m", "toolkit.launchers.waiting", str(recipe)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # what it cannot read, the ranks will name
    )
    try:
        yield
    finally:
        reader.kill()
        reader.wait()


def read(recipe_file: Path) -> None:
    """Read what a rank of a recipe with `launch.spares` reads before its first step."""
    from toolkit.intake.load import load_recipe

    recipe = load_recipe(recipe_file)
    if not recipe.launch.spares:
        return
    from toolkit.backend import BACKENDS
    from toolkit.models.huggingface import snapshot_folder
    from toolkit.plan.planner import plan_recipe
    from toolkit.registry import load

    load("toolkit.train.worker:train_recipe")  # by name: it is above this room
    load(BACKENDS[plan_recipe(recipe, explained=False).engine].engine)
    model = recipe.model
    if model.init == "pretrained" and model.hub is not None:
        for file in sorted(snapshot_folder(model.hub, model.revision).glob("*.safetensors")):
            with file.open("rb") as opened:
                while opened.read(_AT_ONCE):
                    pass


if __name__ == "__main__":
    time.sleep(_USUAL_S)
    read(Path(sys.argv[1]))
