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
    "&& touch canary #",
    "| touch canary",
    "|| touch canary",
    "> canary",
    ">> canary",
    "< /dev/null > canary",
    "\ntouch canary\n",
    "\r\ntouch canary",
    "a'; touch canary; '",
    'a"; touch canary; "',
    "a'$(touch canary)'b",
    'a"$(touch canary)"b',
    "${x:-$(touch canary)}",
    "$((1)) $(touch canary)",
    "\\$(touch canary)",
    "\\\n touch canary",
    "{touch,canary}",
    "!touch canary",
    "-x --output=canary",
    "--wrap=touch canary",
    "\t touch canary",
    "#SBATCH --wrap=touch",
    "a\n#SBATCH --wrap=touch canary",
    "EOF\ntouch canary\nEOF",
    "*; touch canary",
    "~$(touch canary)~",
)
RECIPE = Path("recipes/tiny/llama-bytes.yaml")


def refused_at_check(key: str) -> None:
    """Every hostile text is refused as the value of a setting."""
    for text in HOSTILE:
        quoted = '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
        with pytest.raises(DmtError, match=key.replace(".", r"\.")):
            load_recipe(RECIPE, [f"{key}={quoted}"])
