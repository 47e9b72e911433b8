"""Trained tokens of every chat format are those that its documentation lets the model write."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.chat.families import (
    CHATML,
    FAMILIES,
    TEMPLATES,
    Family,
    Message,
    Span,
    conversations,
    make_tokenizer,
)
from toolkit.data.chat.conversations import Conversation, MalformedRow, PlainText
from toolkit.data.chat.template import ChatTemplate, RewrittenHistory
from toolkit.data.rows import MarkedTokens
from toolkit.errors import DataError

MARKED_CHATML = next(one for one in FAMILIES if one.name == "chatml_generation")


def tokens_of(
    template: ChatTemplate, messages: Sequence[Message], loss_on: str
) -> MarkedTokens:
    conversation = Conversation(tuple(map(dict, messages)))
    (tokens,) = template.encode([template.mark(conversation, loss_on)])
    return tokens


def reference(
    tokenizer: PreTrainedTokenizerFast, text: str, spans: Sequence[Span]
) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and which of them hold a character of the spans: one by one."""
    wanted = np.zeros(len(text), dtype=bool)
    for start, end in spans:
        wanted[start:end] = True
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [bool(wanted[s:e].any()) for s, e in encoded["offset_mapping"]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_trained_tokens_are_those_of_the_documented_format(family: Family) -> None:
    tokenizer = family.tokenizer()
    template = ChatTemplate(family.template, tokenizer)
    for messages in conversations(family, 200):
        text, spans = family.expected(messages)
        ids, trained = reference(tokenizer, text, spans)
        found = tokens_of(template, messages, "assistant")
        assert found.ids.tolist() == ids
        assert found.trained.tolist() == trained
        # The end-of-turn token is trained after every answer.
        ended = family.closing.strip() or family.next_role_ends
        if ended in family.special:
            ends = found.ids[found.trained] == tokenizer.convert_tokens_to_ids(ended)
            assert ends.sum() == len(spans) - (not family.closing)
            assert tokenizer.convert_tokens_to_ids(ended) in template.turn_ends()
        last = tokens_of(template, messages, "last_assistant")
        assert last.trained.tolist() == reference(tokenizer, text, spans[-1:])[1]
        assert tokens_of(template, messages, "all").trained.all()


def test_what_follows_the_last_answer_is_not_trained() -> None:
    tokenizer = CHATML.tokenizer()
    template = ChatTemplate(CHATML.template, tokenizer)
    messages = conversations(CHATML, 1)[0]
    text, spans = CHATML.expected(messages)
    asked = [*messages, {"role": "user", "content": "ok"}]
    ids, trained = reference(tokenizer, text + "<|im_start|>user\nok<|im_end|>\n", spans)
    for loss_on, wanted in (("assistant", spans), ("last_assistant", spans[-1:])):
        found = tokens_of(template, asked, loss_on)
        assert found.ids.tolist() == ids
        assert found.trained.sum() == sum(reference(tokenizer, text, wanted)[1])
    assert tokens_of(template, asked, "assistant").trained.tolist() == trained


def test_a_beginning_token_is_there_once() -> None:
    """OpenRLHF#393, unsloth#10312: the template writes BOS, and so does the tokenizer."""
    from tokenizers.processors import TemplateProcessing

    llama = next(one for one in FAMILIES if one.name == "llama3")
    tokenizer = llama.tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos
    template = ChatTemplate(llama.template, tokenizer)
    messages = conversations(llama, 1)[0]
    assert (tokens_of(template, messages, "assistant").ids == bos).sum() == 1
    for prompt in ("What?", "<|begin_of_text|>What?"):
        (plain,) = template.encode([template.mark(PlainText(prompt, " This."), "assistant")])
        assert plain.ids.tolist().count(bos) == 1 and not plain.trained[0]


def test_plain_text_trains_the_completion_and_its_end() -> None:
    tokenizer = CHATML.tokenizer()
    template = ChatTemplate(None, tokenizer)
    marked = template.mark(PlainText("What is two plus two?", " It's four."), "assistant")
    (tokens,) = template.encode([marked])
    assert tokenizer.decode(tokens.ids[tokens.trained]) == " It's four.<|im_end|>"
    assert tokenizer.decode(tokens.ids[~tokens.trained]) == "What is two plus two?"
    with pytest.raises(DataError, match="no chat template"):
        tokens_of(template, conversations(CHATML, 1)[0], "assistant")


@pytest.mark.parametrize("outside", ["<|im_end|>\\n", "\\n<|im_end|>"])
def test_an_end_of_turn_outside_of_the_generation_block_is_trained(outside: str) -> None:
    """trl#5988: the model never stops."""
    text = MARKED_CHATML.template.replace("m.content ~ '<|im_end|>'", "m.content")
    text = text.replace("{{- '\\n' -}}\n{%- else", f"{{{{- '{outside}' -}}}}\n{{%- else")
    assert text != MARKED_CHATML.template
    template = ChatTemplate(text, MARKED_CHATML.tokenizer())
    messages = conversations(MARKED_CHATML, 1)[0]
    tokens = tokens_of(template, messages, "assistant")
    n_answers = sum(message["role"] == "assistant" for message in messages)
    eos = template.encode([template.mark(PlainText("", ""), "all")])[0].ids[0]
    assert (tokens.ids[tokens.trained] == eos).sum() == n_answers


THOUGHT = [
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "reasoning_content": "is two plus", "content": "It's four."},
    {"role": "user", "content": "ok what is two?"},
    {"role": "assistant", "reasoning_content": "def", "content": "It's two."},
]
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text()
QWEN3_SPECIAL = ("<|im_end|>", "<|im_start|>")


def test_a_template_that_drops_thinking_is_detected_and_split() -> None:
    """trl#6361, slime#330, ms-swift#4390: masks slip where history is rewritten."""
    tokenizer = make_tokenizer(QWEN3_SPECIAL)
    template = ChatTemplate(QWEN3, tokenizer)
    conversation = Conversation(tuple(THOUGHT))
    with pytest.raises(RewrittenHistory, match="message 1"):
        template.mark(conversation, "assistant")
    expected = [
        "<think>\nis two plus\n</think>\n\nIt's four.<|im_end|>",
        "<think>\ndef\n</think>\n\nIt's two.<|im_end|>",
    ]
    histories = [
        "<|im_start|>user\ntwo plus two?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\ntwo plus two?<|im_end|>\n"
        "<|im_start|>assistant\nIt's four.<|im_end|>\n"
        "<|im_start|>user\nok what is two?<|im_end|>\n<|im_start|>assistant\n",
    ]
    for turn, history, said in zip((1, 3), histories, expected, strict=True):
        marked = template.mark(conversation.until(turn), "last_assistant")
        assert marked.text == history + said + "\n"
        assert marked.spans == ((len(history), len(history + said)),)


def test_thinking_that_a_completion_loses_is_detected() -> None:
    template = ChatTemplate(QWEN3, make_tokenizer(QWEN3_SPECIAL))
    with pytest.raises(RewrittenHistory, match="message 1"):
        template.mark(Conversation(tuple(THOUGHT), n_prompt=1), "completion")
    # What a prompt loses is not trained.
    marked = template.mark(Conversation(tuple(THOUGHT), n_prompt=3), "completion")
    (said,) = [marked.text[start:end] for start, end in marked.spans]
    assert said == "<think>\ndef\n</think>\n\nIt's two.<|im_end|>\n"


def test_history_rewritten_inside_generation_blocks_is_detected() -> None:
    text = MARKED_CHATML.template.replace(
        "m.content ~ '<|im_end|>'",
        "(m.content if loop.last else m.content.split('</think>')[-1]) ~ '<|im_end|>'",
    )
    template = ChatTemplate(text, MARKED_CHATML.tokenizer())
    messages = [{**THOUGHT[0]}, {"role": "assistant", "content": "<think>x</think>four"}] * 2
    with pytest.raises(RewrittenHistory, match="message 1"):
        tokens_of(template, messages, "assistant")
    assert tokens_of(template, messages, "last_assistant").trained.any()


def test_a_prompt_that_turns_do_not_begin_with_is_refused() -> None:
    """trl#4147, #4201: the boundary is off by a generation prompt."""
    deepseek = next(one for one in FAMILIES if one.name == "deepseek")
    text = (TEMPLATES / "deepseek_r1.jinja").read_text()
    template = ChatTemplate(text, deepseek.tokenizer())
    messages = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It's"}]
    with pytest.raises(DataError, match=r"prompts the assistant with .*<think>"):
        tokens_of(template, messages, "assistant")


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
CALLED = (
    {"role": "user", "content": "two plus two?"},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
        ],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It's four."},
)
SYSTEM = {"role": "system", "content": "Be kind."}


def test_tool_calls_are_trained_and_their_results_are_not() -> None:
    template = ChatTemplate(QWEN3, make_tokenizer(QWEN3_SPECIAL))
    marked = template.mark(Conversation(CALLED, TOOLS), "assistant")
    said = [marked.text[start:end] for start, end in marked.spans]
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call><|im_end|>'
    assert said == [
        f"<think>\n\n</think>\n\nok\n{call}",
        "<think>\n\n</think>\n\nIt's four.<|im_end|>",
    ]


WITHOUT_SYSTEM = CHATML.template.replace(
    "messages -%}", "messages if m.role != 'system' -%}", 1
)


@pytest.mark.parametrize(
    ("text", "messages", "tools", "says"),
    [
        (CHATML.template, CALLED[:2], (), "the tool call of message 1"),
        (CHATML.template, (CALLED[0], CALLED[3]), TOOLS, "the descriptions of tools"),
        (WITHOUT_SYSTEM, (SYSTEM, CALLED[0], CALLED[3]), (), r"message 0 \(system\)"),
    ],
)
def test_what_a_template_does_not_render_is_not_lost_silently(
    text: str, messages: Sequence[Message], tools: Any, says: str
) -> None:
    """slime#1008: tool calls never rendered."""
    template = ChatTemplate(text, make_tokenizer(QWEN3_SPECIAL))
    with pytest.raises(MalformedRow, match=f"the chat template leaves out or changes {says}"):
        template.mark(Conversation(tuple(map(dict, messages)), tools), "last_assistant")


@pytest.mark.parametrize("text", [CHATML.template, MARKED_CHATML.template])
def test_a_message_of_weight_0_is_not_trained(text: str) -> None:
    """As in OpenAI's format; its tokens are the history of the others."""
    template = ChatTemplate(text, CHATML.tokenizer())
    asked = {"role": "user", "content": "ok"}
    turns = [{"role": "assistant", "content": said} for said in ("def", "two", "is")]
    for weights in ((0, 1, 1), (1, 0, 1), (1, 1, 0.0), (False, True, False), (0, 0, 0)):
        messages = [
            one
            for turn, w in zip(turns, weights, strict=True)
            for one in (asked, turn | {"weight": w})
        ]
        conversation = Conversation(tuple(messages), n_prompt=1)
        plain = Conversation(tuple(m for turn in turns for m in (asked, turn)), n_prompt=1)
        assert template.mark(conversation, "all").text == template.mark(plain, "all").text

        def said(loss_on: str, conversation: Conversation = conversation) -> list[str]:
            marked = template.mark(conversation, loss_on)
            return [marked.text[start:end] for start, end in marked.spans]

        wanted = [f"{t['content']}<|im_end|>" for t, w in zip(turns, weights, strict=True) if w]
        assert said("assistant") == wanted
        assert said("last_assistant") == (wanted[-1:] if weights[2] else [])
        for loss_on in ("all", "completion"):
            trained = "".join(said(loss_on))
            for turn, weight in zip(turns, weights, strict=True):
                assert (f"{turn['content']}<|im_end|>" in trained) == bool(weight)
            assert trained.startswith("<|im_start|>user\nok") == (loss_on == "all")


def test_what_a_template_refuses_is_malformed() -> None:
    gemma = next(one for one in FAMILIES if one.name == "gemma")
    template = ChatTemplate(gemma.template, gemma.tokenizer())
    messages = [{"role": "system", "content": "x"}, THOUGHT[0], THOUGHT[1]]
    with pytest.raises(MalformedRow, match="System role not supported"):
        tokens_of(template, messages, "assistant")
    with pytest.raises(DataError, match="syntax error in line 2"):
        tokens_of(ChatTemplate("\n{% for %}", gemma.tokenizer()), messages, "assistant")


@pytest.mark.parametrize("argument", ["'%d %b %Y'", "form"])
def test_todays_date_is_the_same_tomorrow(argument: str) -> None:
    text = "{%- set form = '%d %b %Y' -%}{{- strftime_now(" + argument + ") -}}"
    template = ChatTemplate(text + CHATML.template, CHATML.tokenizer())
    marked = template.mark(Conversation((CALLED[0], CALLED[3])), "assistant")
    assert marked.text.startswith("26 Jul 2024<|im_start|>")
