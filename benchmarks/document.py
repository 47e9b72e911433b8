"""Tables of a document that a command writes and a test keeps current."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Tables = Mapping[str, Callable[[], Iterator[str]]]
"""Name, which stands in the document's comments → lines of the table."""


def updated(document: str, tables: Tables) -> str:
    """The document with its tables made again."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = document.partition(begin)
        document = before + begin + "\n".join(table()) + "\n" + end + rest.partition(end)[2]
    return document


def main(description: str, tables: Tables) -> None:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    file = parser.parse_args().write
    if file is None:
        for table in tables.values():
            print("\n".join(table()), end="\n\n")
    else:
        file.write_text(updated(file.read_text(encoding="utf-8"), tables), encoding="utf-8")
