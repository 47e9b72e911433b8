"""The `--flags` of a program that a shell script starts, as bash would expand them.

Nothing runs. Variables, arrays, quotes, `${NAME:-default}`, `$((1 + 2))` and tests of texts
count. What only the shell knows stays as it is written, with its dollar sign.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from toolkit.errors import Problem, RecipeError

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\n)+|(?<![^\s;(])\#[^\n]*)"""
    r"""|(?P<operator>\n|\[\[|\]\]|&&|\|\||;;|[0-9]*[<>]{1,2}(?:&[0-9-])?|[;|&()])"""
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|\$\([^()]*\)|[^"\\])*"|\\.|\$\(\(.*?\)\)"""
    r"""|\$\([^()]*\)|\$\{[^}]*\}|[^\s'"\\;|&()<>])+)""",
    re.DOTALL,
)
_PART = re.compile(
    r"""'([^']*)'|"((?:\\.|\$\([^()]*\)|[^"\\])*)"|\\(.)|((?:\$\{[^}]*\}|[^'"\\])+)""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$(?P<name>\w+)"
    r"|\$\{(?P<long>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}"
)
_SUM = re.compile(r"(\d+)\s*([-+*/])\s*(\d+)")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_LOOPS = {"for": "done", "while": "done", "until": "done", "case": "esac"}
_PREFIXES = ("export", "declare", "local", "readonly", "do", "{")
_ENDS = ("\n", ";", ";;", "&&", "||", "|", "&")


@dataclass(frozen=True)
class Flag:
    """One option."""

    name: str
    """The option's name as written, with its dashes."""
    values: tuple[str, ...] = ()
    """Empty for a switch."""
    line: int = 0
    """Line where its name first stands, not where a variable is used. 0 if unknown."""


@dataclass(frozen=True)
class _Word:
    text: str
    is_operator: bool = False


@dataclass
class _Shell:
    variables: dict[str, list[str]] = field(default_factory=dict)
    flags: list[Flag] = field(default_factory=list)
    undecided: list[Flag] = field(default_factory=list)


def read_flags(text: str, file: str) -> tuple[list[Flag], list[Flag]]:
    """The options of the program that `text` starts, or is; and those in branches that only the
    shell can decide. Raises RecipeError for a quotation that does not end."""
    shell = _Shell()
    _run(shell, [*_words(text, file)])
    if not shell.flags:  # nothing starts a program: the variables are all there is
        every = (one for values in shell.variables.values() for one in values)
        shell.flags = _flags(part for one in every for part in one.split())
    places: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for name in _FLAG.findall(line):
            places.setdefault(name, number)

    def placed(flags: list[Flag]) -> list[Flag]:
        return [replace(one, line=places.get(one.name, 0)) for one in flags]

    return placed(shell.flags), placed(shell.undecided)


def _words(text: str, file: str) -> Iterator[_Word]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            what, line = "a quotation that does not end", text.count("\n", 0, position) + 1
            raise RecipeError(
                [Problem("arguments", what, "one that does", "close it", file, line)]
            )
        if found.lastgroup != "space":
            yield _Word(found[0], found.lastgroup == "operator")
        position = found.end()


def _commands(words: list[_Word]) -> Iterator[tuple[list[_Word], str]]:
    """Each command, with the operator before it. Arrays and tests stay whole."""
    command: list[_Word] = []
    before, depth = "\n", 0
    for word in [*words, _Word("\n", True)]:
        depth += (
            (word.text in ("(", "[[")) - (word.text in (")", "]]")) if word.is_operator else 0
        )
        if word.is_operator and word.text in _ENDS and depth <= 0:
            yield command, before
            command, before = [], word.text
        elif word.text != "\n":
            command.append(word)


def _all(*states: bool | None) -> bool | None:
    """Whether all hold. None where that is not known."""
    return False if False in states else (None if None in states else True)


def _not(state: bool | None) -> bool | None:
    return None if state is None else not state


def _run(shell: _Shell, words: list[_Word]) -> None:
    """Follow the commands in order. Of an `if`, take the branch whose test holds."""
    status: bool | None = True
    branches: list[tuple[bool | None, bool | None]] = []
    """For each open `if`: whether this branch runs, and whether one before it did."""
    skipped_until = ""
    for command, before in _commands(words):
        while command and not skipped_until:
            key = command[0].text
            if key == "if":
                branches.append((True, False))
            elif key in ("then", "elif", "else", "fi") and branches:
                _, done = branches.pop()
                if key == "then":
                    runs = _all(status, _not(done))
                    branches.append((runs, _not(_all(_not(done), _not(status)))))
                elif key != "fi":
                    branches.append((_not(done), done))
            elif key not in _PREFIXES:
                break
            command = command[1:]
        if skipped_until:
            skipped_until = (
                "" if any(one.text == skipped_until for one in command) else skipped_until
            )
            continue
        if command and command[0].text in _LOOPS:
            skipped_until = _LOOPS[command[0].text]
            continue
        chained = {"&&": status, "||": _not(status)}.get(before, True)
        alive = _all(chained, *(runs for runs, _ in branches))
        if alive and command:
            status = _execute(shell, command)
        elif alive is None:
            shell.undecided += [
                Flag(name) for one in command for name in _FLAG.findall(one.text)
            ]


def _execute(shell: _Shell, command: list[_Word]) -> bool | None:
    """One command: assignments, a test, or a program with its options."""
    while command and (assigned := _ASSIGNMENT.fullmatch(command[0].text)):
        name, more, rest = assigned.groups()
        if not rest and len(command) > 1 and command[1].text == "(" and command[1].is_operator:
            value = [
                one for word in command[2:] for one in _expand(shell, word) if word.text != ")"
            ]
            size = len(command)
            value = shell.variables.get(name, []) + value if more else value
        else:
            text = " ".join(_expand(shell, _Word(rest), splits=False))
            value = ["".join((*shell.variables.get(name, []), text))] if more else [text]
            size = 1
        shell.variables[name] = value
        command = command[size:]
    if command and command[0].text in ("[[", "[", "test"):
        return _test(shell, command[1:])
    fields = [one for word in command for one in _expand(shell, word)]
    for text in fields:
        if " " in text and ".py" in text and "--" in text:  # a command for another shell
            fields = text.split()
    programs = [index for index, one in enumerate(fields) if one.endswith(".py")]
    if "torchrun" in fields or programs or (fields and _FLAG.match(fields[0])):
        start = fields.index("torchrun") if "torchrun" in fields else min(programs, default=0)
        shell.flags += _flags(fields[start:])
    return True


def _test(shell: _Shell, words: list[_Word]) -> bool | None:
    """`a == b`, `-z a` and the like, joined by `||`."""
    sides: list[list[str]] = [[]]
    for word in words:
        if word.text == "||":
            sides.append([])
        elif word.text not in ("]]", "]"):
            sides[-1].append(" ".join(_expand(shell, word)))
    return _not(_all(*(_not(_one_test(side)) for side in sides)))


def _one_test(side: list[str]) -> bool | None:
    if any("$" in one for one in side):
        return None
    if len(side) == 3 and side[1] in ("==", "=", "!="):
        return (side[0] == side[2]) is (side[1] != "!=")
    if len(side) == 2 and side[0] in ("-z", "-n"):
        return bool(side[1]) is (side[0] == "-n")
    return None


def _expand(shell: _Shell, word: _Word, splits: bool = True) -> list[str]:
    """The fields that a word becomes."""
    fields = [""]
    for single, double, escaped, plain in _PART.findall(word.text):
        text, position = (double or plain).replace("\\\n", ""), 0
        fields[-1] += single or escaped.replace("\n", "")
        for found in _VARIABLE.finditer(text):
            fields[-1] += text[position : found.start()]
            position = found.end()
            values = _value(shell, found)
            if splits and plain:
                values = [part for value in values for part in value.split()]
            elif not (splits and found["all"]):
                values = [" ".join(values)]
            fields[-1] += "".join(values[:1])
            fields += values[1:]
        fields[-1] += text[position:]
    quoted = any(mark in word.text for mark in "'\"")
    return fields if quoted or any(fields) else []


def _value(shell: _Shell, found: re.Match[str]) -> list[str]:
    if found["sum"] is not None:
        text = _VARIABLE.sub(lambda one: " ".join(_value(shell, one)), found["sum"])
        names = shell.variables
        text = re.sub(r"[A-Za-z_]\w*", lambda one: " ".join(names.get(one[0], [one[0]])), text)
        numbers = _SUM.fullmatch(text.strip())
        return [_computed(*numbers.groups())] if numbers else [found[0]]
    name = found["name"] or found["long"]
    if name in shell.variables:
        return shell.variables[name]
    if found["default"] is None:
        return [] if found["all"] else [found[0]]
    default = found["default"].strip("\"'")
    return [_VARIABLE.sub(lambda one: " ".join(_value(shell, one)), default)]


def _computed(first: str, sign: str, second: str) -> str:
    one, other = int(first[:30]), int(second[:30])
    results = {"+": one + other, "-": one - other, "*": one * other}
    return str(results[sign] if sign in results else one // max(1, other))


def _flags(fields: Iterable[str]) -> list[Flag]:
    flags: list[Flag] = []
    is_open = False
    for text in fields:
        if _FLAG.match(text):
            name, equals, value = text.partition("=")
            flags.append(Flag(name, (value,) if equals else ()))
            is_open = not equals
        elif text.endswith(".py"):
            is_open = False
        elif is_open:
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, text))
    return flags
