"""Converts rows of a data set, in common published formats, to conversations.

Everything is checked here, once: a template would render even a message without content or with
an unknown role.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from toolkit.data.columns import Broken
from toolkit.errors import DataError
from toolkit.recipe.schema import ChatRowsSource, ChatSource, ColumnName, PreferenceSource

Message: TypeAlias = dict[str, Any]

_REQUIRED: dict[str, tuple[ColumnName, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""Columns that a format needs. The order decides which one `auto` tries first."""
_ANSWERS: tuple[ColumnName, ...] = ("chosen", "rejected")
_PAIRS = "a list of messages, with or without `prompt`, or a text next to a `prompt`"
_CONTEXT: tuple[ColumnName, ...] = ("system", "history", "tools", "chat_template_kwargs")
"""Columns that every format may have. Texts without a template may not."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NOT_TRAINED = ("loss", "train")
"""Keys of a message whose false means `weight: 0`."""
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "weight"})
_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_FUNCTION_CALL = "function_call"


class MalformedRow(Exception):
    """A row that is not a conversation. The message states why."""


def check_dropped(source: ChatRowsSource, said: str) -> None:
    """Raise DataError for a malformed row, with what is said of it, unless such are dropped."""
    if source.malformed == "error":
        fix = "correct the row, or set `malformed: drop` to drop and count such rows"
        raise DataError(said, fix=fix)


@dataclass(frozen=True)
class Conversation:
    """Validated messages in order: the input of a chat template."""

    messages: tuple[Message, ...]
    """`role` and `content` (a string) each. Where there are any, also `tool_calls`,
    `reasoning_content`, `weight` (0 or 1) and whatever else the row states."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions (JSON schemas) of the tools that the assistant may call."""
    n_prompt: int | None = None
    """Messages of the prompt, if the data separates prompt and completion."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables for the template (`chat_template_kwargs`)."""

    def assistant_turns(self, loss_on: str = "assistant") -> list[int]:
        """Indices of the assistant's messages that `loss_on` selects, as in `ChatSource`."""
        first = self.n_prompt or 0 if loss_on == "completion" else 0
        roles = [message["role"] for message in self.messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant" and i >= first]
        return turns[-1:] if loss_on == "last_assistant" else turns

    def trained_turns(self, loss_on: str) -> list[int]:
        """The `assistant_turns` without `weight: 0`, which OpenAI's format has."""
        return [turn for turn in self.assistant_turns(loss_on) if self._weight(turn)]

    @property
    def muted_turns(self) -> list[int]:
        """The assistant's messages with `weight: 0`."""
        return [turn for turn in self.assistant_turns() if not self._weight(turn)]

    def _weight(self, turn: int) -> object:
        return self.messages[turn].get("weight", 1)

    def until(self, turn: int) -> "Conversation":
        """The conversation up to and including message `turn`."""
        return replace(self, messages=self.messages[: turn + 1])


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion, without a template."""

    prompt: str
    completion: str


Example: TypeAlias = Conversation | PlainText


@dataclass(frozen=True)
class _Context:
    """What columns beside the messages add to a conversation."""

    system: str
    history: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    template_arguments: dict[str, Any]

    @classmethod
    def of(cls, row: Mapping[str, Any], source: ChatRowsSource) -> Self:
        system, history, tools, arguments = (row.get(source.column(n)) for n in _CONTEXT)
        stated = _stated(_json(arguments, "`chat_template_kwargs`")) if arguments else {}
        system = _text(system or "", "`system`")
        return cls(system, tuple(_history(history or [])), _tools(tools), stated)

    def conversation(self, turns: list[Any], n_completion: int | None = None) -> Conversation:
        """All turns as a conversation, of which the last `n_completion` are the completion."""
        turns = list(turns)
        first = [turns.pop(0)] if turns and _is_system(turns[0]) else []
        if self.system and not first:
            first = [{"role": "system", "content": self.system}]
        messages = _messages([*first, *self.history, *turns])
        if self.system and messages[0]["content"] != self.system:
            raise MalformedRow("`system` is not what its first message says")
        n_prompt = None if n_completion is None else len(messages) - n_completion
        return Conversation(messages, self.tools, n_prompt, self.template_arguments)

    def check_plain(self) -> None:
        """Raise MalformedRow if texts without a template would lose something."""
        stated = (self.system, self.history, self.tools, self.template_arguments)
        if name := next(
            (name for name, one in zip(_CONTEXT, stated, strict=True) if one), None
        ):
            raise MalformedRow(f"`{name}` needs lists of messages: texts have no template")


def examples_of(value: object, source: ChatSource | PreferenceSource) -> tuple[Example, ...]:
    """The conversation of a row, or the two of a preference. Raises MalformedRow."""
    if isinstance(source, PreferenceSource):
        return preference_of(value, source)
    return (conversation_of(value, source),)


def conversation_of(value: object, source: ChatSource) -> Example:
    """Parse one row. Raises MalformedRow unless it is a conversation of the source's format."""
    row = _columns_of(value)
    form = form_of(row, source)
    for name in map(source.column, _REQUIRED[form]):
        if row.get(name) is None:
            raise MalformedRow(f"`{name}` is missing or null")
    context = _Context.of(row, source)
    if form == "prompt_completion":
        prompt, completion = (row[source.column(name)] for name in _REQUIRED[form])
        return _answered(prompt, completion, context)
    if form == "alpaca":
        return context.conversation(_alpaca(row, source), n_completion=1)
    return context.conversation(_list(row[source.column(_REQUIRED[form][0])], "messages"))


def preference_of(value: object, source: PreferenceSource) -> tuple[Example, Example]:
    """Parse one row into the chosen and the rejected example, which share their prompt.

    Without a prompt, or if the answers repeat it, it is the common beginning of both answers.
    Raises MalformedRow.
    """
    row = _columns_of(value)
    prompt: Any = row.get(source.column("prompt"))
    chosen, rejected = (row.get(source.column(name)) for name in _ANSWERS)
    for name in _ANSWERS:
        if row.get(source.column(name)) is None:
            raise MalformedRow(f"`{source.column(name)}` is missing or null")
        if not isinstance(row[source.column(name)], str | list):
            raise MalformedRow(f"`{source.column(name)}` is not {_PAIRS}")
    if type(chosen) is not type(rejected):
        raise MalformedRow("`chosen` and `rejected` are not of one form")
    if isinstance(chosen, list) and isinstance(rejected, list):
        if not isinstance(prompt, list) or prompt == chosen[: max(len(prompt), 1)]:
            shared = n_shared(chosen[:-1], rejected[:-1])
            said, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            prompt = _asked(prompt, said) if isinstance(prompt, str) else said
    elif prompt is None:
        raise MalformedRow(f"`prompt` is missing or null, and the answers are not {_PAIRS}")
    context = _Context.of(row, source)
    return _answered(prompt, chosen, context), _answered(prompt, rejected, context)


def check_columns(
    source: ChatSource | PreferenceSource, columns: Collection[str], *, all_rows: bool = False
) -> None:
    """Raise DataError unless rows with these columns can be read as the recipe states.

    `all_rows`: whether no row has others. Any one row may lack an optional column.
    """
    try:
        form = form_of(columns, source)
    except MalformedRow as error:
        ours = "prompt: …, chosen: …, rejected: …"
        if isinstance(source, ChatSource):
            ours = "messages: …" if len(columns) == 1 else "instruction: …, output: …"
        fix = f"map its columns, e.g. by `columns: {{{ours}}}` (docs/data.md)"
        raise DataError(f"`{source.path}`: {error}", fix=fix) from error
    known = _read(form)
    for stated in source.columns:
        if stated not in known:
            raise DataError(
                f"`columns` names `{stated}`, which data of the form {form} does not have",
                fix=f"map any of {', '.join(known)}, or remove it",
            )
    needed = _REQUIRED.get(form, _ANSWERS)
    for name in (*needed, *source.columns) if all_rows else needed:
        if source.column(name) not in columns:
            raise DataError(
                f"`{source.path}` has no column `{source.column(name)}`; its columns are "
                + (", ".join(columns) or "none"),
                fix=f"name the column that holds it: `columns: {{{name}: …}}`",
            )


def unread_columns(
    source: ChatSource | PreferenceSource, columns: Collection[str]
) -> list[str]:
    """The columns of a row that `conversation_of` and `preference_of` do not read."""
    read = {source.column(name) for name in _read(form_of(columns, source))}
    return [name for name in columns if name not in read]


def template_keys(example: Example) -> Iterator[str]:
    """Keys of the messages that only a template may read."""
    if isinstance(example, Conversation):
        for message in example.messages:
            yield from (key for key in message if key not in _MESSAGE_KEYS)


def _read(form: str) -> tuple[ColumnName, ...]:
    """The columns that are read of rows of a form."""
    if form == "preference":
        return ("prompt", *_ANSWERS, *_CONTEXT)
    if form == "alpaca":
        return ("input", *_REQUIRED[form], *_CONTEXT)
    return (*_REQUIRED[form], *_CONTEXT)


def _columns_of(row: object) -> dict[str, Any]:
    if isinstance(row, Broken):
        raise MalformedRow(row.why)
    if not isinstance(row, dict):
        raise MalformedRow("it is not a JSON object")
    if media := next((name for name in _MEDIA if row.get(name)), None):
        raise MalformedRow(f"it has `{media}`, and only text is trained")
    return row


def form_of(columns: Collection[str], source: ChatSource | PreferenceSource) -> str:
    """The form of a row with these columns."""
    if isinstance(source, PreferenceSource):
        return "preference"
    if source.format != "auto":
        return source.format
    for form, required in _REQUIRED.items():
        if all(source.column(name) in columns for name in required):
            return form
    forms = " or ".join(" and ".join(f"`{n}`" for n in names) for names in _REQUIRED.values())
    raise MalformedRow(f"it has the columns {', '.join(columns) or 'none'}, and not {forms}")


def _alpaca(row: Mapping[str, Any], source: ChatSource) -> list[Message]:
    """Instruction and input, with a blank line between them, are the user's message."""
    stated = {name: row.get(source.column(name)) for name in ("instruction", "input")}
    asked = "\n\n".join(_text(text, name) for name, text in stated.items() if text)
    answer = row[source.column("output")]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _history(turns: object) -> Iterator[Message]:
    """Earlier turns: messages, or pairs of what the user and the assistant said."""
    for turn in _list(turns, "history"):
        if not isinstance(turn, list):
            yield turn
            continue
        if len(turn) != 2:
            raise MalformedRow("`history` is not a list of pairs, or of messages")
        for role, said in zip(("user", "assistant"), turn, strict=True):
            yield {"role": role, "content": said}


def _is_system(turn: object) -> bool:
    return isinstance(turn, dict) and "system" in (turn.get("role"), turn.get("from"))


def _answered(prompt: Any, completion: Any, context: _Context) -> Example:
    if isinstance(prompt, str) and isinstance(completion, str):
        context.check_plain()
        if not completion.strip():
            raise MalformedRow("the completion is empty")
        return PlainText(prompt, completion)
    turns = [*_list(prompt, "prompt"), *_list(completion, "completion")]
    n_prompt = len(turns) - len(completion)
    if not completion or not n_prompt:
        raise MalformedRow(f"the {'completion' if n_prompt else 'prompt'} has no messages")
    conversation = context.conversation(turns, len(completion))
    if conversation.messages[-len(completion)]["role"] != "assistant":
        raise MalformedRow("the completion does not begin with an assistant turn")
    return conversation


def _asked(prompt: str, shared: list[Any]) -> list[Any]:
    """The messages of a prompt that is a text, where both answers begin with `shared`."""
    first = {"role": "user", "content": prompt}
    if not shared:
        return [first]
    messages = _messages(shared)
    if any(m["role"] == "user" and prompt.strip() in m["content"] for m in messages):
        return shared
    if messages[0]["role"] != "assistant":
        raise MalformedRow("`prompt` is not what both answers begin with")
    return [first, *shared]


def n_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of common items at the beginning of both."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i in range(n) if one[i] != other[i])


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedRow(f"`{name}` is not a list of messages")
    return value


def _messages(turns: object) -> tuple[Message, ...]:
    """Checked messages of a list of turns."""
    turns = _list(turns, "messages")
    if not turns:
        raise MalformedRow("it has no messages")
    messages = tuple(_message(turn, f"message {i}") for i, turn in enumerate(turns))
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        again = roles.index("system", 1)
        raise MalformedRow(f"message {again} is a system turn; only message 0 may be one")
    for i, message in enumerate(messages):
        before = messages[i - 1] if i else {}
        if roles[i] == "tool" and not (
            before.get("tool_calls") or before.get("role") == "tool"
        ):
            raise MalformedRow(f"message {i} is a tool's answer, and no tool was called")
        if roles[i] == "assistant" and not (
            message["content"].strip() or message.get("tool_calls")
        ):
            raise MalformedRow(f"message {i}, an assistant turn, is empty")
    return messages


def _message(turn: object, name: str) -> Message:
    if not isinstance(turn, dict):
        raise MalformedRow(f"{name} is not a map of role and content")
    message = _stated(turn)
    if "from" in message:  # ShareGPT's names
        stated = message.pop("from")
        message = {"role": _SHAREGPT_ROLES.get(str(stated), stated), **message}
        message["content"] = message.pop("value", None)
        if stated == _FUNCTION_CALL:
            message = {"role": "assistant", "tool_calls": [message["content"]]}
    role = message.get("role")
    if role is None:
        raise MalformedRow(f"{name} has no role")
    if role not in _ROLES:
        raise MalformedRow(
            f"{name} has the role {role!r}, which is none of {', '.join(_ROLES)}"
        )
    if "tool_calls" in message:
        if role != "assistant":
            raise MalformedRow(f"{name} has tool calls, and its role is {role}")
        message["tool_calls"] = [
            _tool_call(c, name) for c in _list(message["tool_calls"], name)
        ]
    for key in ("weight", *NOT_TRAINED):
        if message.get(key, 1) not in (0, 1):
            raise MalformedRow(f"{name} has the {key} {message[key]!r}, which is not 0 or 1")
    if False in [message.pop(key, True) for key in NOT_TRAINED]:
        message["weight"] = 0
    if message.get("content") is None and not message.get("tool_calls"):
        raise MalformedRow(f"{name} has no content")
    return {**message, "content": _text(message.get("content") or "", name)}


def _text(content: object, name: str) -> str:
    """The content as one string. A list of text parts (OpenAI's format) is joined."""
    if isinstance(content, list) and content:
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    if not isinstance(content, str):
        raise MalformedRow(f"the content of {name} is not text")
    return content


def _tool_call(call: object, name: str) -> dict[str, Any]:
    """A call in OpenAI's form, its arguments as a map: templates write those as JSON."""
    call = _stated(_json(call, name))
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedRow(f"a tool call of {name} names no function")
    arguments = _stated(function).get("arguments", {})
    arguments = _json(arguments, f"the arguments of a tool call of {name}")
    called = {"name": function["name"], "arguments": arguments}
    return {
        "type": "function",
        **({"id": call["id"]} if "id" in call else {}),
        "function": called,
    }


def _tools(tools: object) -> tuple[dict[str, Any], ...]:
    if tools is None or tools == "":
        return ()
    with_text = tools
    if isinstance(tools, str):
        try:
            with_text = json.loads(tools)
        except ValueError as error:
            raise MalformedRow("`tools` is not JSON") from error
    return tuple(_tool(tool, f"tool {i}") for i, tool in enumerate(_list(with_text, "tools")))


def _tool(tool: object, name: str) -> dict[str, Any]:
    """The description of a tool, in OpenAI's form or only the function of it."""
    described = _stated(_json(tool, f"`tools`: {name}"))
    function = described.get("function", described)
    if not isinstance(function, dict):
        raise MalformedRow(f"`tools`: {name} is not described by a map")
    if not isinstance(function.get("name") or "", str):
        raise MalformedRow(f"`tools`: the name of {name} is not text")
    return described


def _json(value: object, name: str) -> dict[str, Any]:
    """A map, given directly or as a JSON string."""
    found: Any = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise MalformedRow(f"{name} is not JSON: {value[:60]!r}") from error
    if not isinstance(found, dict):
        raise MalformedRow(f"{name} is not a JSON object")
    return dict(found)


def _stated(value: dict[str, Any]) -> dict[str, Any]:
    """The map without its null keys. Nulls deeper inside, as in arguments, are kept."""
    return {key: item for key, item in value.items() if item is not None}


def texts_of(example: Example) -> Iterator[str]:
    """Every string that the data, rather than the template, puts into the text."""
    if isinstance(example, PlainText):
        yield from (example.prompt, example.completion)
        return
    pending: list[Any] = [*example.messages, *example.tools, example.template_arguments]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [item for key, item in value.items() if key != "role"]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            yield value
