"""Generates text with the model in a Hugging Face folder, through transformers."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
)

from toolkit.errors import DataError
from toolkit.evaluate.samples import SamplesSection
from toolkit.text.terminal import tell

Message = dict[str, str]
"""A turn: `role` and `content`."""


def load(folder: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer; of a PEFT folder, with its base. Raises DataError."""
    placed = {"device_map": "auto"} if device == "cuda" else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False, **placed
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be loaded by transformers: {error}") from error
    return model.eval(), tokenizer


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], *, chat: bool
) -> torch.Tensor:
    """The tokens of a text, or of a conversation up to the assistant's turn: [1, length]."""
    if not chat:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]  # type: ignore[no-any-return]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return found["input_ids"]  # type: ignore[no-any-return]


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: torch.Tensor,
    max_tokens: int,
    **more: Any,
) -> str:
    """The greedy completion of one prompt, without its special tokens."""
    tokens = tokens.to(model.device)
    out = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_tokens,
        **more,
    )
    text = tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: torch.Tensor,
    max_tokens: int,
) -> Iterator[str]:
    """The pieces of a completion, while it is generated."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    work = (model, tokenizer, tokens, max_tokens)
    thread = Thread(target=complete, args=work, kwargs={"streamer": streamer}, daemon=True)
    thread.start()
    yield from streamer
    thread.join()


def prepare(folder: Path, settings: SamplesSection) -> None:
    """Raise DataError where the prompts cannot be completed."""
    if settings.chat:
        require_template_in(folder, "evaluation.samples.chat")


def require_template_in(folder: Path, setting: str) -> None:
    """Raise DataError for a model whose tokenizer has no chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    require_template(tokenizer, folder, setting)


def require_template(tokenizer: PreTrainedTokenizerBase, folder: Path, setting: str) -> None:
    """Raise DataError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{setting}: the tokenizer in {folder} has no chat template",
            fix="state one in data.chat_template, or turn it off",
        )


def evaluate(folder: Path, settings: SamplesSection, device: str) -> list[dict[str, str]]:
    """Each prompt with its completion. One prompt at a time: nothing is padded."""
    prepare(folder, settings)
    model, tokenizer = load(folder, device)
    found = []
    for number, prompt in enumerate(settings.prompts, 1):
        tell(f"prompt {number} of {len(settings.prompts)}")  # silence would look like a hang
        tokens = tokens_of(tokenizer, prompt, chat=settings.chat)
        text = complete(model, tokenizer, tokens, settings.max_tokens)
        found.append({"prompt": prompt, "completion": text})
    return found
