"""Names that other tools' files accept: in known_keys.json, so that nothing heavy is imported.

Accelerate refuses an unknown name at the top level and ignores one in a section silently. A
test compares the file with the installed tools, and rewrites it if DMT_UPDATE_GOLDEN is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")

_TABLES: Mapping[str, frozenset[str]] = {
    table: frozenset(names)
    for table, names in json.loads(FILE.read_text(encoding="utf-8")).items()
}

ACCELERATE = _TABLES["accelerate"]
"""Fields of its ClusterConfig, and two older spellings that it still translates."""
SECTIONS: Mapping[str, frozenset[str]] = {
    table.removeprefix("accelerate "): names
    for table, names in _TABLES.items()
    if table.startswith("accelerate ")
}
"""Arguments of `accelerate launch` that each section of its file sets."""
TRAINING_ARGUMENTS = _TABLES["training_arguments"]
"""Of transformers 5."""
OLD_TRAINING_ARGUMENTS = _TABLES["training_arguments before transformers 5"]
"""Of transformers 4 only; files of then still have them."""
TRAINER_FSDP = _TABLES["training_arguments fsdp_config"]
"""Keys of `fsdp_config`, which may also have `fsdp_` before them."""
