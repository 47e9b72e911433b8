"""Lists of names that are written down."""

import json
import os
from pathlib import Path


def expect(table: str, installed: set[str], listed: frozenset[str], file: Path) -> None:
    """Compare a table of the file, or write it."""
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        tables = json.loads(file.read_text()) | {table: sorted(installed)}
        file.write_text(json.dumps(tables, indent=1) + "\n")
    else:
        assert installed == listed
