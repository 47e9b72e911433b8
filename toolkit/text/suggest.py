"""Suggestions for misspelt words."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 80
"""Characters compared of a word. The time grows with their square."""


def closest(word: object, words: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `words`. Empty when none is, or `word` is no text."""
    if not isinstance(word, str):
        return ""
    return next(iter(get_close_matches(word[:_LONGEST], list(words), 1, cutoff)), "")


def did_you_mean(
    word: object, words: Iterable[str], otherwise: str = "", cutoff: float = 0.6
) -> str:
    """The fix for a misspelt word. `otherwise` when nothing similar is known."""
    close = closest(word, words, cutoff)
    return f"did you mean `{close}`?" if close else otherwise
