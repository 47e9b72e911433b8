"""Texts that a shell would run if they became its words."""

from pathlib import Path

import pytest

from toolkit.errors import DmtError
from toolkit.intake.load import load_recipe

HOSTILE = (
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "& touch canary",
    "| touch canary",
    "> canary",
    "< /dev/null > canary",
    "\ntouch canary\n",
    "a'; touch canary; '",
    'a"; touch canary; "',
    "${x:-$(touch canary)}",
    "\\$(touch canary)",
    "{touch,canary}",
    "!touch canary",
    "-x --output=canary",
    "a\n#SBATCH --wrap=touch canary",
    "EOF\ntouch canary\nEOF",
)
RECIPE = Path("recipes/tiny/llama-bytes.yaml")


def refused_at_check(key: str) -> None:
    """Every hostile text is refused as the value of a setting."""
    for text in HOSTILE:
        quoted = '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
        with pytest.raises(DmtError, match=key.replace(".", r"\.")):
            load_recipe(RECIPE, [f"{key}={quoted}"])
