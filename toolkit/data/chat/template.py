"""Renders a conversation by a chat template, and finds the trained characters. They come from
the template's `{% generation %}` blocks if it has them.

Otherwise a turn of the assistant is what follows the rendering of the previous messages with a
generation prompt: exactly what a model generates at inference. Token ids play no role in this,
so a padding token that equals the end-of-turn token does no harm.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from toolkit.data.chat.conversations import (
    Conversation,
    Example,
    MalformedRow,
    PlainText,
    n_shared,
)
from toolkit.data.rows import MarkedTokens
from toolkit.data.tokenizers import encoder, encoding, tokens_before_text
from toolkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span: TypeAlias = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOOL_USE = "tool_use"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of one key of a message: transformers gives a template all of them."""
_ANSWER = "four"
_EXCHANGE = ({"role": "user", "content": "two"}, {"role": "assistant", "content": _ANSWER})
"""An exchange that shows how a template ends a turn."""
_TODAY = date(2024, 7, 26)
"""The date for templates that insert today's date, so that the same data always gives the same
tokens. Llama's own default for programs without a clock."""


class RewrittenHistory(Exception):
    """The template renders an earlier turn differently once other turns follow."""


@dataclass(frozen=True)
class MarkedText:
    text: str
    spans: tuple[Span, ...]
    """[start, end) of the trained characters, ascending."""


class ChatTemplate:
    """A template with the tokenizer of its special tokens."""

    def __init__(
        self, text: str | Mapping[str, str] | None, tokenizer: "PreTrainedTokenizerFast"
    ) -> None:
        """Named templates are `default` and, for conversations with tools, `tool_use`, as in
        transformers. Without a template (None), only plain text can be marked."""
        named = {} if text is None else {"default": text} if isinstance(text, str) else text
        self._texts = {name: _dated(one) for name, one in named.items()}
        self._marked = {name for name, one in named.items() if _GENERATION.search(one)}
        self.has_tool_use = _TOOL_USE in named
        self._variables = dict(tokenizer.special_tokens_map)
        self._eos = str(tokenizer.eos_token)
        self._backend = encoder(tokenizer, parse_special=True)
        self._before_plain = "".join(
            str(self._backend.id_to_token(token)) for token in tokens_before_text(self._backend)
        )
        added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        known = {*added, *tokenizer.all_special_tokens}
        tokens = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        self.special = re.compile(tokens)
        """Every special token of the tokenizer. There is one at least, its EOS token."""
        self._next_special = re.compile(rf"\s*(?:{tokens})")
        self._blank = re.compile(rf"(?:\s|{tokens})*")

    def mark(self, example: Example, loss_on: str) -> MarkedText:
        """Text of an example and its trained characters. `loss_on` as in `ChatSource`.

        Raises MalformedRow if the template refuses the conversation or omits a part of it,
        RewrittenHistory if trained turns look different in the history, and DataError if the
        template cannot be used for training.
        """
        if isinstance(example, PlainText):
            before = self._before_plain
            prompt = example.prompt.removeprefix(before)
            text = before + prompt + example.completion
            start = 0 if loss_on == "all" else len(before + prompt)
            return self._closed(text, [(start, len(text))])
        if (name := self._name(example)) not in self._texts:
            raise DataError(
                "the tokenizer has no chat template",
                fix="name one in `data.chat_template`: a file, or the shipped `chatml`; or use "
                "the tokenizer of an instruct model",
            )
        text, generated = self._render(example)
        _check_complete(example, text)
        if loss_on in ("all", "completion"):
            whole = loss_on == "all"
            start = 0 if whole else self._completion_start(example, text)
            muted = [self._turn(example, text, turn) for turn in example.muted_turns]
            left = _without((start, len(text)), muted)
            spans = [(first, end) for first, end in left if text[first:end].strip()]
        elif name in self._marked:
            spans = self._generated(example, text, generated, loss_on)
        else:
            turns = example.trained_turns(loss_on)
            spans = [self._turn(example, text, turn) for turn in turns]
        return self._closed(text, spans)

    def encode(self, marked: Sequence[MarkedText]) -> list[MarkedTokens]:
        """Tokens of the texts, all at once. The template has written the special tokens at the
        beginning of a text: the tokenizer adds none."""
        with encoding():
            encodings = self._backend.encode_batch(
                [one.text for one in marked], add_special_tokens=False
            )
        return [
            _tokens(encoding, one.spans)
            for encoding, one in zip(encodings, marked, strict=True)
        ]

    def reads(self, key: str) -> bool:
        """Whether a template names this key of a message."""
        names = _THOUGHTS if key in _THOUGHTS else (key,)
        words = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        return any(map(words.search, self._texts.values()))

    def turn_ends(self) -> list[int]:
        """Ids of the special tokens that end trained turns, ascending: after the answers of an
        exchange, and of two, where a turn may end with the token that opens the next one."""
        found = set[str]()
        for messages in (_EXCHANGE, _EXCHANGE * 2):
            try:
                marked = self.mark(Conversation(messages), "assistant")
            except (MalformedRow, RewrittenHistory, DataError):
                continue  # the data has other conversations, or the run ends with this error
            for start, end in marked.spans:
                said = marked.text.find(_ANSWER, start, end)
                if ended := self.special.search(marked.text, said + len(_ANSWER), end):
                    found.add(ended[0])
        ids = map(self._backend.token_to_id, found)
        return sorted(token for token in ids if token is not None)

    def _render(
        self, conversation: Conversation, until: int | None = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Text of the messages before `until`, and its generation blocks.

        `prompt`: what the template writes before an answer of the assistant is added.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        name = self._name(conversation)
        marked = name in self._marked
        try:
            texts, generated = render_jinja_template(
                [list(conversation.messages[:until])],
                tools=list(conversation.tools) or None,
                chat_template=self._texts[name],
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self._variables | conversation.template_arguments,
            )
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}",
                fix="correct it, or name another one in `data.chat_template`",
            ) from error
        except (DataError, MemoryError):
            raise
        except Exception as error:  # a template may do anything with what it is given
            raise MalformedRow(f"the chat template refuses it: {error}") from error
        return str(texts[0]), [tuple(span) for span in generated[0]] if marked else []

    def _name(self, conversation: Conversation) -> str:
        """Which template renders a conversation."""
        return _TOOL_USE if conversation.tools and self.has_tool_use else "default"

    def _turn(self, conversation: Conversation, text: str, turn: int) -> Span:
        """The characters of assistant turn `turn`, with its end-of-turn token."""
        start = self._answer_start(conversation, text, turn)
        part = text
        if turn + 1 < len(conversation.messages):
            part, _ = self._render(conversation, turn + 1)
        shared = n_shared(part, text)
        ends = [found.end() for found in self.special.finditer(part, start, shared)]
        if ends and self._blank.fullmatch(part, ends[-1]):
            return start, ends[-1]
        if shared < len(part.rstrip()):
            raise RewrittenHistory(f"message {turn}")
        return start, self._end_of_turn(text, start, shared)

    def _answer_start(self, conversation: Conversation, text: str, turn: int) -> int:
        """Where the model begins to write message `turn`."""
        before, _ = self._render(conversation, turn, prompt=True)
        if text.startswith(before):
            return len(before)
        history, _ = self._render(conversation, turn)
        shared = n_shared(history, text)
        if shared < len(history) and not self._blank.fullmatch(history, shared):
            raise RewrittenHistory(f"what is before message {turn}")
        raise DataError(
            f"the chat template prompts the assistant with {before[shared:][-60:]!r}, and "
            f"writes its turns differently: {text[shared:][:60]!r}",
            fix="name a template for training in `data.chat_template`, or mark what the "
            "assistant writes by `{% generation %}` blocks",
        )

    def _completion_start(self, conversation: Conversation, text: str) -> int:
        if conversation.n_prompt is None:
            raise DataError(
                "`loss_on: completion` needs data that separates prompt and completion",
                fix="set `loss_on` to assistant or last_assistant",
            )
        turns = conversation.assistant_turns("completion")
        # The first begins the completion; the others are looked at for what is rewritten.
        (start, _), *_ = [self._turn(conversation, text, turn) for turn in turns]
        return start

    def _generated(
        self, conversation: Conversation, text: str, generated: list[Span], loss_on: str
    ) -> list[Span]:
        """The template's own blocks, each with its end-of-turn token."""
        said = [text[start:end] for start, end in generated]
        *earlier, last = conversation.assistant_turns() or [0]
        n_before = 0
        if loss_on == "last_assistant":
            n_before = len(self._render(conversation, last)[1]) if last else 0
            earlier = []
        for turn in earlier:
            part, spans = self._render(conversation, turn + 1)
            if [part[start:end] for start, end in spans] != said[: len(spans)]:
                raise RewrittenHistory(f"message {turn}")
        muted = {
            block
            for turn in conversation.muted_turns
            for block in range(
                *(len(self._render(conversation, n)[1]) for n in (turn, turn + 1))
            )
        }
        return [
            (start, self._end_of_turn(text, start, end))
            for block, (start, end) in enumerate(generated)
            if start < end and block >= n_before and block not in muted
        ]

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """`end`, or the end of the special token that follows: without an end-of-turn token, a
        turn ends with the token that opens the next one."""
        said = text[start:end].rstrip()
        if any(found.end() == len(said) for found in self.special.finditer(said)):
            return end
        following = self._next_special.match(text, end)
        return following.end() if following else end

    def _closed(self, text: str, spans: list[Span]) -> MarkedText:
        """A trained turn that ends the text without a special token gets the EOS token: the
        model must learn to stop."""
        if spans and not text[spans[-1][1] :].strip():
            kept = text.rstrip()
            if not any(found.end() == len(kept) for found in self.special.finditer(kept)):
                text += self._eos
                spans[-1] = (spans[-1][0], len(text))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MalformedRow("a text holds half of a surrogate pair") from error
        return MarkedText(text, tuple(spans))


def _check_complete(conversation: Conversation, text: str) -> None:
    """Raise MalformedRow if `text`, the rendered conversation, lacks the content of a message,
    or the name of a tool or of its call."""
    needed: list[tuple[str, Any]] = []
    for i, message in enumerate(conversation.messages):
        what = f"message {i} ({message['role']})"
        if message["role"] != "tool":
            needed.append((what, message["content"].rpartition("</think>")[2].strip()))
        for call in message.get("tool_calls", ()):
            needed.append((f"the tool call of message {i}", call["function"]["name"]))
    for tool in conversation.tools:
        needed.append(("the descriptions of tools", tool.get("function", tool).get("name")))
    for what, said in needed:
        if (said or "") not in text:
            raise MalformedRow(f"the chat template leaves out or changes {what}")


def _dated(text: str) -> str:
    """The template, with a macro `strftime_now` that gives `_TODAY` if it inserts a date."""
    if "strftime_now" not in text:
        return text
    codes = [f"%{code}" for code in ("-d", "-m", *"aAbBcdDeFgGhHIjmMnpSuUVwWxXyYzZ", "%")]
    formatted = "".join(f"|replace({code!r}, {_TODAY.strftime(code)!r})" for code in codes)
    macro = "{% macro strftime_now(format) %}{{ format" + formatted + " }}{% endmacro %}"
    return macro + "{{ '' }}" + text  # which keeps a line feed that begins the template


def _without(span: Span, holes: Sequence[Span]) -> list[Span]:
    """The parts of `span` outside `holes`, ascending."""
    left, (start, stop) = list[Span](), span
    for first, end in holes:
        if start < first:
            left.append((start, first))
        start = max(start, end)
    return [*left, (start, stop)] if start < stop else left


def _tokens(encoding: Any, spans: Sequence[Span]) -> MarkedTokens:
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        trained |= (starts < end) & (ends > start)
    return MarkedTokens(np.array(encoding.ids, dtype=np.int64), trained)
