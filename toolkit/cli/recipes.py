"""`dmt recipes`: the shipped recipes, each with its title."""

import re
import sys

from toolkit.recipe.places import shipped_recipes
from toolkit.text.terminal import tell

_TITLE_END = re.compile(r"[:,(]|\.( |$)|$")
"""Of a recipe's first comment."""


def recipes() -> None:
    """List the shipped recipes. Each can be named from anywhere instead of a file.

    Other tasks and clusters: `dmt init SIZE --task TASK --cluster CLUSTER`.

    Example: `dmt plan llama-3.1-8b-pretrain`
    """
    files = shipped_recipes()
    width = max(map(len, files))
    for name, file in files.items():
        with file.open(encoding="utf-8") as text:
            first = text.readline().lstrip("# ").strip()
        tell(f"{name:<{width}}  {_TITLE_END.split(first)[0].rstrip()}", sys.stdout)
