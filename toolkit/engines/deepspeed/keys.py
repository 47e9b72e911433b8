"""Keys that DeepSpeed's config accepts: in known_keys.json, so that `check` needs no DeepSpeed.

DeepSpeed drops unknown keys silently at the top level and in some blocks. A test compares the
file with the installed DeepSpeed's own classes, and rewrites it if DMT_UPDATE_GOLDEN is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("known_keys.json")
_TABLES = {
    name: frozenset(keys) for name, keys in json.loads(FILE.read_text(encoding="utf-8")).items()
}

GONE = _TABLES.pop("removed")
"""Keys of its top level and of `zero_optimization` that it refuses by name."""
REMOVED = "DeepSpeed has removed it, and refuses it"
KNOWN_KEYS: Mapping[str, frozenset[str]] = _TABLES
"""Keys of each checked block; "" is the top level. `optimizer.params` holds those of AdamW.
Old spellings that DeepSpeed still translates (`cpu_offload`, …) are deliberately omitted."""
