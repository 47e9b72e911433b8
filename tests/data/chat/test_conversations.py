"""Every form in which people publish conversations, and every way to get one wrong."""

import json
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, Features

from toolkit.data.chat.conversations import (
    Conversation,
    MalformedRow,
    PlainText,
    check_columns,
    conversation_of,
    preference_of,
    unread_columns,
)
from toolkit.data.readers import rows_of
from toolkit.errors import DataError
from toolkit.recipe.schema import ChatSource, PreferenceSource

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"function": {"name": "add", "arguments": {"x": 1}}}


def parse(row: object, **settings: Any) -> Any:
    source = ChatSource.model_validate({"kind": "chat", "path": "x", **settings})
    return conversation_of(row, source)


def pair(row: object, **settings: Any) -> Any:
    source = PreferenceSource.model_validate({"kind": "preference", "path": "x", **settings})
    return preference_of(row, source)


@pytest.mark.parametrize(
    ("row", "settings", "messages"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, {}, (SYSTEM, USER, ANSWER)),
        ({"dialog": [USER, ANSWER]}, {"columns": {"messages": "dialog"}}, (USER, ANSWER)),
        (
            {
                "system": "Be kind.",
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ],
            },
            {},
            (SYSTEM, USER, ANSWER),
        ),
        ({"conversations": [USER, ANSWER]}, {"format": "sharegpt"}, (USER, ANSWER)),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, {}, (USER, ANSWER)),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be kind."},
            {},
            (
                SYSTEM,
                {"role": "user", "content": "Add.\n\n1, 2"},
                {"role": "assistant", "content": "3"},
            ),
        ),
        (
            {"q": "Hi", "a": "Hello"},
            {"format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
            (USER, ANSWER),
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, {}, (USER, ANSWER)),
        # LLaMA-Factory's earlier turns are pairs.
        (
            {"instruction": "a", "output": "b", "history": [["Hi", "Hello"]], "system": "x"},
            {},
            (
                {"role": "system", "content": "x"},
                USER,
                ANSWER,
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ),
        ),
        ({"messages": [USER, ANSWER], "system": "Be kind."}, {}, (SYSTEM, USER, ANSWER)),
        (
            {"messages": [SYSTEM, USER, ANSWER], "system": "Be kind."},
            {},
            (SYSTEM, USER, ANSWER),
        ),
        (
            {"prompt": [SYSTEM, USER], "completion": [ANSWER], "history": [USER, ANSWER]},
            {},
            (SYSTEM, USER, ANSWER, USER, ANSWER),
        ),
        # As in Axolotl's and other tools' messages.
        (
            {"messages": [USER, ANSWER | {"train": False}, USER, ANSWER | {"loss": True}]},
            {},
            (USER, ANSWER | {"weight": 0}, USER, ANSWER),
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
            {},
            (USER, ANSWER),
        ),
        # Arrow adds the keys that other rows have.
        (
            {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "name": None}]},
            {},
            (USER, ANSWER),
        ),
    ],
)
def test_forms(row: object, settings: dict[str, Any], messages: tuple[Any, ...]) -> None:
    assert parse(row, **settings).messages == messages


def test_context_of_prompts_and_pairs() -> None:
    context = {"system": "Be kind.", "history": [["a", "b"]]}
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = parse({"instruction": "Hi", "output": "Hello", **context})
    assert found == Conversation((SYSTEM, *earlier, USER, ANSWER), n_prompt=4)
    for prompt in ({"prompt": [USER]}, {"prompt": "Hi"}):
        found, other = pair({"chosen": [ANSWER], "rejected": [ANSWER], **prompt, **context})
        assert found == other == Conversation((SYSTEM, *earlier, USER, ANSWER), n_prompt=4)


@pytest.mark.parametrize(
    "stated", [{"enable_thinking": False, "x": None}, '{"enable_thinking": false}']
)
def test_template_arguments(stated: object) -> None:
    found = parse({"messages": [USER, ANSWER], "chat_template_kwargs": stated})
    assert found.template_arguments == {"enable_thinking": False}


def test_columns_that_nothing_reads() -> None:
    source = ChatSource.model_validate({"kind": "chat", "path": "x"})
    assert unread_columns(source, ["messages", "id", "tools", "system", "input"]) == [
        "id",
        "input",
    ]
    assert unread_columns(source, ["instruction", "output", "input", "text"]) == ["text"]
    pairs = PreferenceSource(kind="preference", path="x", columns={"chosen": "good"})
    assert unread_columns(pairs, ["good", "rejected", "score", "history"]) == ["score"]


def test_prompt_and_completion() -> None:
    assert parse({"prompt": [SYSTEM, USER], "completion": [ANSWER]}).n_prompt == 2
    assert parse({"prompt": "2+2=", "completion": "4"}) == PlainText("2+2=", "4")


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_tools(arguments: object) -> None:
    """Arguments that are a string of JSON would be written by a template as a string."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ANSWER,
    ]
    for stated in (tools, json.dumps(tools)):
        found = parse({"messages": turns, "tools": stated})
        assert found.tools == tuple(tools)
        (called,) = found.messages[1]["tool_calls"]
        assert called == {"id": "c1", "type": "function", "function": CALL["function"]}
        assert found.messages[1]["content"] == ""


def test_sharegpt_calls() -> None:
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Two."},
    ]
    found = parse({"conversations": turns, "tools": ['{"name": null}']})
    assert found.tools == ({},)
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == CALL["function"]


def test_explicit_nulls_of_arguments_and_tools_are_kept() -> None:
    """What the model is to write. Those that Arrow adds to make rows uniform are dropped."""
    arguments = {"city": "Rome", "unit": None, "days": [{"n": None}]}
    schema = {"type": "object", "properties": {"unit": {"default": None}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    call = {"id": None, "function": {"name": "add", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"messages": turns, "tools": tools}
    for stated in (row, row | {"tools": json.dumps(tools)}):
        found = parse(stated)
        assert found.tools == tuple(tools)
        (called,) = found.messages[1]["tool_calls"]
        assert called == {"type": "function", "function": call["function"]}
    table = pa.Table.from_pylist([row, {"messages": [USER | {"name": "x"}], "tools": []}])
    json_table = Dataset.from_list([row], on_mixed_types="use_json").data.table
    for found, kept in ((table, {"city": "Rome", "days": [{}]}), (json_table, arguments)):
        types = Features.from_arrow_schema(found.schema)
        (_, read), *_ = rows_of(found.to_batches(), "x", types=types)
        (called,) = parse(read).messages[1]["tool_calls"]
        assert called["function"]["arguments"] == kept


def messages(*turns: object) -> dict[str, object]:
    return {"messages": list(turns)}


MALFORMED: list[tuple[object, str]] = [
    ("{not json", "it is not a JSON object"),
    ({"messages": None}, "`messages` is missing or null"),
    ({"messages": "Hi"}, "not a list of messages"),
    (messages(), "no messages"),
    (messages("Hi"), "message 0 is not a map"),
    (messages({"content": "Hi"}, ANSWER), "message 0 has no role"),
    (messages({"role": ["a"], "content": "Hi"}, ANSWER), r"message 0 has the role \['a'\]"),
    ({**messages(USER, ANSWER), "tools": [{"function": "f"}]}, "`tools`: tool 0 is not"),
    ({**messages(USER, ANSWER), "tools": ['{"name": 3}']}, "`tools`: the name of tool 0"),
    (messages({"role": "robot", "content": "Hi"}), "the role 'robot'"),
    (messages(USER, {"role": "assistant", "content": None}), "message 1 has no content"),
    (messages(USER, {**ANSWER, "content": " \n"}), "message 1, an assistant turn, is empty"),
    (messages(USER, {**ANSWER, "weight": 0.5}), "message 1 has the weight 0.5, which is not"),
    (messages({"role": "user", "content": [{"type": "image"}]}), "is not text"),
    (messages(USER, ANSWER, SYSTEM, USER, ANSWER), "message 2 is a system turn"),
    (messages(USER, {"role": "tool", "content": "2"}), "no tool was called"),
    (messages({**USER, "tool_calls": [CALL]}), "its role is user"),
    (messages(USER, {**ANSWER, "tool_calls": "add"}), "not a list"),
    (messages(USER, {**ANSWER, "tool_calls": [{"function": {}}]}), "names no function"),
    (
        messages(
            USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}
        ),
        "arguments of a tool call of message 1",
    ),
    ({**messages(USER, ANSWER), "tools": "add"}, "`tools` is not JSON"),
    ({"instruction": 3, "output": "x"}, "content of instruction is not text"),
    ({**messages(USER, ANSWER), "history": [["Hi"]]}, "`history` is not a list of pairs"),
    ({**messages(SYSTEM, USER, ANSWER), "system": "x"}, "`system` is not what its first"),
    ({**messages(USER, ANSWER), "images": ["a.png"]}, "it has `images`, and only text"),
    (messages(USER, {**ANSWER, "train": "no"}), "message 1 has the train 'no', which is not"),
    ({"prompt": "a", "completion": "b", "system": "c"}, "`system` needs lists of messages"),
    ({"prompt": [], "completion": [ANSWER]}, "the prompt has no messages"),
    ({"prompt": [USER], "completion": []}, "the completion has no messages"),
    ({"prompt": [USER], "completion": [USER]}, "does not begin with an assistant turn"),
    ({"prompt": "Hi", "completion": " "}, "the completion is empty"),
    ({"prompt": "Hi", "completion": [ANSWER]}, "`prompt` is not a list"),
    ({"text": "Hi"}, "it has the columns text, and not `messages` or `conversations` or"),
]


@pytest.mark.parametrize(("row", "says"), MALFORMED)
def test_malformed_rows(row: object, says: str) -> None:
    with pytest.raises(MalformedRow, match=says):
        parse(row)


def test_preferences() -> None:
    yes, no = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
    expected = (Conversation((USER, yes), (), 1), Conversation((USER, no), (), 1))
    for row in (
        {"prompt": [USER], "chosen": [yes], "rejected": [no]},
        {"chosen": [USER, yes], "rejected": [USER, no]},
        {"prompt": [USER], "chosen": [USER, yes], "rejected": [USER, no]},
        {"prompt": "Hi", "chosen": [USER, yes], "rejected": [USER, no]},
        {"prompt": "Hi", "chosen": [yes], "rejected": [no]},
    ):
        assert pair(row) == expected
    asked = {"role": "user", "content": [{"type": "text", "text": "Hi "}]}
    found, _ = pair({"prompt": "Hi", "chosen": [asked, yes], "rejected": [asked, no]})
    assert found.messages == ({**USER, "content": "Hi "}, yes)
    # A text that the answers only continue is the user's first turn.
    later = {"role": "user", "content": "Really?"}
    both = {name: [ANSWER, later, end] for name, end in (("chosen", yes), ("rejected", no))}
    found, other = pair({"prompt": "Hi", **both})
    assert found == Conversation((USER, ANSWER, later, yes), (), 3)
    assert other == Conversation((USER, ANSWER, later, no), (), 3)
    plain = pair(
        {"q": "Hi", "a": "y", "b": "n"}, columns={"prompt": "q", "chosen": "a", "rejected": "b"}
    )
    assert plain == (PlainText("Hi", "y"), PlainText("Hi", "n"))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Hi", "chosen": "y"}, "`rejected` is missing"),
        ({"prompt": "Hi", "chosen": "y", "rejected": [ANSWER]}, "not of one form"),
        ({"chosen": "y", "rejected": "n"}, "`prompt` is missing"),
        # LLaMA-Factory's forms
        (
            {"conversations": [], "chosen": {"from": "gpt"}, "rejected": {"from": "gpt"}},
            "`chosen` is not a list of messages, with or without `prompt`, or a text next to",
        ),
        (
            {"instruction": "Hi", "input": "", "chosen": "y", "rejected": "n"},
            "`prompt` is missing or null, and the answers are not a list of messages",
        ),
        ({"chosen": [], "rejected": []}, "has no messages"),
        (
            {"prompt": "Bye", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "x": 1}]},
            "`prompt` is not what both answers begin with",
        ),
    ],
)
def test_malformed_preferences(row: object, says: str) -> None:
    with pytest.raises(MalformedRow, match=says):
        pair(row)


@pytest.mark.parametrize(
    ("settings", "columns", "says"),
    [
        ({}, ["text"], "it has the columns text"),
        ({"format": "alpaca"}, ["instruction"], "has no column `output`"),
        ({"columns": {"messages": "dialog"}, "format": "messages"}, ["messages"], "`dialog`"),
        ({"columns": {"chosen": "x"}}, ["messages"], "`columns` names `chosen`"),
    ],
)
def test_columns(settings: dict[str, Any], columns: list[str], says: str) -> None:
    source = ChatSource.model_validate({"kind": "chat", "path": "x", **settings})
    with pytest.raises(DataError, match=says) as raised:
        check_columns(source, columns)
    assert raised.value.fix


def test_columns_of_preferences() -> None:
    source = PreferenceSource(kind="preference", path="x", columns={"chosen": "good"})
    check_columns(source, ["good", "rejected"])
    with pytest.raises(DataError, match="no column `good`; its columns are chosen, rejected"):
        check_columns(source, ["chosen", "rejected"])
