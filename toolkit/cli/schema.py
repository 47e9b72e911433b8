"""`dmt schema`: the recipe's JSON Schema, for editors and agents."""

import json
import sys

from toolkit.recipe.json_schema import json_schema
from toolkit.text.terminal import tell


def schema() -> None:
    """Print the JSON Schema of recipes, by which an editor completes and checks them.

    It judges one file; rules that join two settings, and files that a recipe names, are
    left to `dmt check`.

    Example: `dmt schema > recipe.schema.json`
    """
    tell(json.dumps(json_schema(), indent=1, ensure_ascii=False), sys.stdout)
