"""Refuses models and tokenizers with custom Python code, with one wording.

transformers runs such code only with `trust_remote_code`, which DMT never sets.
"""

from toolkit.errors import DataError


def asks_to_run_code(error: BaseException) -> bool:
    """Whether transformers refuses because it would have to run code from a repository."""
    return "trust_remote_code" in str(error)


def runs_code(what: str) -> DataError:
    """The error for `what`: "the tokenizer `x/y`"."""
    return DataError(
        f"{what} needs Python code from its own repository, and DMT does not run code that "
        "comes with a model, a tokenizer or a checkpoint",
        fix="use one that transformers itself implements (no `auto_map` in its config)",
    )
