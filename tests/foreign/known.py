"""Lists of names that are written down."""

import json
import os
from pathlib import Path

import pytest

from tests.needs import is_of_ci


def expect(
    package: str, table: str, installed: set[str], listed: frozenset[str], file: Path
) -> None:
    """Compare a table of the file, or write it."""
    if not is_of_ci(package):
        pytest.skip(f"the table is of CI's {package}")
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        tables = json.loads(file.read_text()) | {table: sorted(installed)}
        file.write_text(json.dumps(tables, indent=1) + "\n")
    else:
        assert installed == listed
