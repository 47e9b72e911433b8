"""Names that other tools' files accept: in known_keys.json, so that nothing heavy is imported.

Accelerate refuses an unknown name at the top level and ignores one in a section silently. A
test compares the file with the installed tools, and rewrites it if DMT_UPDATE_GOLDEN is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path


def read_tables(file: Path) -> dict[str, frozenset[str]]:
    """Lists of names by the name of the list."""
    tables = json.loads(file.read_text(encoding="utf-8"))
    return {table: frozenset(names) for table, names in tables.items()}


FILE = Path(__file__).with_suffix(".json")
_TABLES = read_tables(FILE)

ACCELERATE = _TABLES["accelerate"]
"""Fields of its ClusterConfig, and two older spellings that it still translates."""
SECTIONS: Mapping[str, frozenset[str]] = {
    table.removeprefix("accelerate "): names
    for table, names in _TABLES.items()
    if table.startswith("accelerate ")
}
"""Arguments of `accelerate launch` that each section of its file sets."""
