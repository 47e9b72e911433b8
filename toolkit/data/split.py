"""Which documents are held out for validation."""

import numpy as np
import numpy.typing as npt

from toolkit.data.hashing import HELD_OUT_DOCUMENTS, derive_key, mix64
from toolkit.errors import DataError


def held_out_documents(n_documents: int, fraction: float, seed: int) -> npt.NDArray[np.int64]:
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
