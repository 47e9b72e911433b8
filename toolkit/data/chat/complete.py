"""Whether a chat template writes every part of a conversation.

Searching the text for a part would also find it where another message quotes it. Instead, each
part gets a mark of its own, and all marks must appear in one rendering. For a part whose mark
does not appear, the text is compared with that of the conversation without this part: if they
are equal, the template leaves the part out.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from toolkit.data.chat.conversations import Conversation, MalformedRow

Render: TypeAlias = Callable[[Conversation], str]

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields for what the assistant thinks: a template reads one of them."""
_CALL = "function_call"
"""The field for a tool call in older data of OpenAI's format."""


@dataclass(frozen=True)
class _Part:
    """A string or map in a conversation that a template must write."""

    name: str
    path: tuple[str | int, ...]
    """Where the map that holds it is in `[messages, tools]`."""
    keys: tuple[str, ...]
    """Its keys in that map: alternative names of one part."""
    shown_at: int | None = None
    """The message that must be last to show it: a template may drop it from the history."""


def check_complete(conversation: Conversation, text: str, render: Render) -> None:
    """Raise MalformedRow if `text`, the rendered conversation, lacks a part of it."""
    for i, message in enumerate(conversation.messages):
        said = message["content"].rpartition("</think>")[2].strip()
        if message["role"] != "tool" and said not in text:
            what = f"message {i} ({message['role']})"
            raise MalformedRow(f"the chat template leaves out or changes {what}")
    for part in _unmarked(conversation, text, render):
        shown = conversation if part.shown_at is None else conversation.until(part.shown_at)
        with_it = _rendered(shown, render)
        if with_it and with_it == _rendered(_changed(shown, [part], _emptied), render):
            raise MalformedRow(f"the chat template leaves out {part.name}")


def _unmarked(conversation: Conversation, text: str, render: Render) -> list[_Part]:
    """The parts whose mark does not appear when all are marked."""
    mark, parts = "Qz", [*_parts(conversation)]
    while mark in text:
        mark += "q"
    marks = iter([f"{mark}{number}Z" for number, part in enumerate(parts) for _ in part.keys])
    marked = _changed(conversation, parts, lambda value: _with(value, next(marks)))
    found = _rendered(marked, render)
    return [part for number, part in enumerate(parts) if f"{mark}{number}Z" not in found]


def _parts(conversation: Conversation) -> Iterator[_Part]:
    for i, message in enumerate(conversation.messages):
        where = f"message {i} ({message['role']})"
        if message["content"].strip():
            yield _Part(where, (0, i), ("content",))
        if thoughts := tuple(key for key in _THOUGHTS if _is_text(message.get(key))):
            yield _Part(f"`{thoughts[0]}` of {where}", (0, i), thoughts, i)
        if message.get(_CALL):
            yield _Part(f"`{_CALL}` of {where}: write it as `tool_calls`", (0, i), (_CALL,))
        for j, call in enumerate(message.get("tool_calls", ())):
            called = (0, i, "tool_calls", j, "function")
            yield _Part(f"the tool call of message {i}", called, ("name",))
            if call["function"]["arguments"]:
                said = f"the arguments of the tool call of message {i}"
                yield _Part(said, called, ("arguments",))
    for i, tool in enumerate(conversation.tools):
        if tool.get("function", tool).get("name"):
            inside = ("function",) if "function" in tool else ()
            yield _Part("the descriptions of tools", (1, i, *inside), ("name",))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _changed(
    conversation: Conversation, parts: Iterable[_Part], change: Callable[[Any], Any]
) -> Conversation:
    """A copy of the conversation in which `change` was applied to these parts."""
    copy = deepcopy([list(conversation.messages), list(conversation.tools)])
    for part in parts:
        parent: Any = copy
        for step in part.path:
            parent = parent[step]
        parent.update({key: change(parent[key]) for key in part.keys})
    return replace(conversation, messages=tuple(copy[0]), tools=tuple(copy[1]))


def _with(value: Any, mark: str) -> Any:
    return {**value, mark: mark} if isinstance(value, dict) else f"{value}{mark}"


def _emptied(value: Any) -> Any:
    return {} if isinstance(value, dict) else ""


def _rendered(conversation: Conversation, render: Render) -> str:
    """Its text; empty if the template refuses it, which then depends on what was changed."""
    try:
        return render(conversation)
    except MalformedRow:
        return ""
