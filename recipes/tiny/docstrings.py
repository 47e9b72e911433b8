"""Chats about the standard library: what a function does, answered by its docstring.

    python recipes/tiny/docstrings.py

Writes docstrings.jsonl (conversations) and docstrings-preferences.jsonl (the right answer and
that of another function) next to this file; both are in the repository, so that all machines
train on the same rows. The answers are docstrings of CPython (PSF license).
"""

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

MODULES = (  # noqa: SIM905
    "base64 bisect calendar cmath collections colorsys contextlib copy csv datetime difflib "
    "fnmatch fractions functools glob heapq html inspect ipaddress itertools json keyword "
    "linecache locale math operator os.path pathlib pprint random re reprlib shlex shutil "
    "statistics string struct tempfile textwrap tokenize urllib.parse uuid zlib"
).split()
LONGEST = 70
"""Characters of an answer: with the question, a row of 256 bytes."""


def answers() -> Iterator[tuple[str, str]]:
    """Name of each public function, and the first sentence of its docstring."""
    for module in MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not inspect.isroutine(value):
                continue
            summary = (inspect.getdoc(value) or "").partition("\n")[0]
            if summary.endswith(".") and summary.isascii() and 15 <= len(summary) <= LONGEST:
                yield f"{module}.{name}", summary


def main() -> None:
    folder = Path(__file__).parent
    found = list({answer: name for name, answer in answers()}.items())
    with (
        (folder / "docstrings.jsonl").open("w") as chats,
        (folder / "docstrings-preferences.jsonl").open("w") as preferences,
    ):
        for (answer, name), (other, _) in zip(found, [*found[7:], *found[:7]], strict=True):
            question = {"role": "user", "content": f"What does {name} do?"}
            chosen, rejected = ({"role": "assistant", "content": x} for x in (answer, other))
            chats.write(json.dumps({"messages": [question, chosen]}) + "\n")
            pair = {"prompt": [question], "chosen": [chosen], "rejected": [rejected]}
            preferences.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main()
