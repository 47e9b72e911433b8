"""`--flag value` out of an argument list or a shell script, each with its line.

Nothing is run: a shell variable counts only where the same text sets it to a plain value.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toolkit.errors import Problem, RecipeError

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|\d+)(?::?[-=]([^}]*))?\})")
_OPERATORS = frozenset(("|", "||", "&&", ";", "&", "(", ")", ">", ">>", "<", "2>&1"))


@dataclass(frozen=True)
class Flag:
    """One option."""

    name: str
    """With its dashes, as written."""
    values: tuple[str, ...]
    """Empty for a switch."""
    line: int


def read_flags(text: str, file: str) -> list[Flag]:
    """All options of `text`, in order; of one stated again, the last counts.

    Raises RecipeError for a quotation that does not end.
    """
    variables: dict[str, str] = {}
    flags: list[Flag] = []
    for word, line in _words(text, file):
        assigned = _ASSIGNMENT.fullmatch(word)
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            own = (_resolve(value, variables),) if equals else ()
            flags.append(Flag(name, own, line))
        elif assigned and not word.startswith("-"):
            variables[assigned[1]] = _resolve(assigned[2], variables)
            flags.append(Flag("", (), line))  # whatever follows is no value of the last flag
        elif word in _OPERATORS:
            flags.append(Flag("", (), line))
        elif flags and flags[-1].name:
            last = flags[-1]
            values = (*last.values, _resolve(word, variables))
            flags[-1] = Flag(last.name, values, last.line)
    return [flag for flag in flags if flag.name]


def _words(text: str, file: str) -> Iterator[tuple[str, int]]:
    """Words as a shell splits them, each with the line on which it begins."""
    pending, first = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        pending += line.removesuffix("\\") + " "
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="();|&<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that continues in the next line
            pending = pending[:-1] + "\n"
            continue
        for word in words:
            yield from ((part, first) for part in _parts(word))
        pending = ""
    if pending:
        found = Problem("arguments", "a quotation that does not end", "one that does", "", file)
        raise RecipeError([found])


def _parts(word: str) -> list[str]:
    """The words that one in quotes becomes where the shell expands it without quotes: of an
    array's element `"--split '99,1,0'"`, or of `ARGS="--lr 1 --bf16"`."""
    name = "".join(re.findall(r"^[A-Za-z_]\w*\+?=(?=\s*--)", word))
    inside = word.removeprefix(name).replace("\\\n", " ")
    if not inside.lstrip().startswith("--") or not re.search(r"\s", inside.strip()):
        return [word]
    return [*filter(None, [name]), *shlex.split(inside)]


def _resolve(value: str, variables: Mapping[str, str]) -> str:
    """The value with the variables that the text itself sets, or their defaults in it."""

    def meaning(found: re.Match[str]) -> str:
        default = found[0] if found[3] is None else found[3].strip("\"'")
        return variables.get(found[1] or found[2], default)

    return _VARIABLE.sub(meaning, value)
