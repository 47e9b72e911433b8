"""Which documents are held out for validation."""

import numpy as np

from toolkit.data.hashing import HELD_OUT_DOCUMENTS, derive_key, mix64
from toolkit.data.rows import Int64Array
from toolkit.errors import DataError


def held_out_documents(n_documents: int, fraction: float, seed: int) -> Int64Array:
    """Documents held out for validation, ascending, int64 [held out].

    These are the `fraction` of the documents (at least one, never all) whose number, hashed
    with the seed, is smallest. Takes 16 bytes of memory per document while it runs.

    Raises DataError when there are not enough documents for both sides.
    """
    if n_documents < 2:
        raise DataError(
            f"`validation_fraction: {fraction}` holds out whole documents, but the training "
            f"data has only {n_documents}",
            fix="give `data.validation` a source of its own, split the text into several "
            "documents, or set `validation_fraction: 0`",
        )
    n_held_out = min(max(round(fraction * n_documents), 1), n_documents - 1)
    numbers = np.arange(n_documents, dtype=np.uint64)
    hashes = mix64(numbers ^ derive_key(seed, HELD_OUT_DOCUMENTS))
    return np.sort(np.argpartition(hashes, n_held_out - 1)[:n_held_out])


def held_out_conversations(row_numbers: Int64Array, fraction: float, seed: int) -> Int64Array:
    """The same for conversations, whose rows of the data set are held out whole.

    `row_numbers`: the row of each conversation. Raises DataError as `held_out_documents`.
    """
    rows, row_of = np.unique(row_numbers, return_inverse=True)
    held_out = np.zeros(len(rows), dtype=np.bool_)
    held_out[held_out_documents(len(rows), fraction, seed)] = True
    return np.flatnonzero(held_out[row_of])
