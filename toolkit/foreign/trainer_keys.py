"""Names that transformers' files accept, from known_keys.json (`toolkit/foreign/known_keys.py`
says why it is a file)."""

from pathlib import Path

from toolkit.foreign.known_keys import read_tables

FILE = Path(__file__).with_suffix(".json")
_TABLES = read_tables(FILE)

TRAINING_ARGUMENTS = _TABLES["training_arguments"]
"""Of transformers 5."""
OLD_TRAINING_ARGUMENTS = _TABLES["training_arguments before transformers 5"]
"""Of transformers 4 only; files of then still have them."""
TRAINER_FSDP = _TABLES["training_arguments fsdp_config"]
"""Keys of `fsdp_config`, which may also have `fsdp_` before them."""
