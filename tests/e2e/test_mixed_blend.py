"""Documents and conversations in one list, against a plain loop of transformers."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.e2e.conftest import WORDS, Project
from tests.e2e.product import curve
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import ModelSection

LENGTH, STEPS, SEED = 160, 3, 7
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip
QUESTIONS = [*pairwise(WORDS[:9])]
"""Eight, each with an answer: two conversations fit a row."""
TEXTS = [" ".join(WORDS[number:] * 6) for number in range(5)]
END = 256
Passage = tuple[list[int], list[bool]]
"""Tokens that attend to each other, and which of them are trained."""


def conversations() -> Iterator[Passage]:
    for question, answer in QUESTIONS:
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n".encode()
        said = [*f"{answer}<|im_end|>\n".encode(), END]
        yield [*asked, *said], [False] * len(asked) + [True] * len(said)


def documents() -> Iterator[Passage]:
    """The part of each document in each row of the texts."""
    stream = [token for text in TEXTS for token in (*text.encode(), END)]
    ends = [place + 1 for place, token in enumerate(stream) if token == END]
    whole = range(0, len(stream) - 1, LENGTH)[: (len(stream) - 1) // LENGTH]
    assert len(whole) == 8
    for start in whole:
        stop = start + LENGTH
        cuts = [start, *(end for end in ends if start < end < stop), stop]
        for first, behind in pairwise(cuts):
            tokens = stream[first : behind + 1]
            yield tokens, [True, *(token != END for token in tokens[:-1])]


def plain_loop(passages: list[Passage]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step on all passages, each in a pass of its own."""
    section = ModelSection.model_validate({"config": CONFIG})
    config = hf.build_config(section)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(section, config, SEED))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for tokens, trained in passages:
            inputs = torch.tensor(tokens)
            logits = model(inputs[None, :-1], use_cache=False).logits[0]
            losses = cross_entropy(logits, inputs[1:], reduction="none")
            total = total + (losses * torch.tensor(trained[1:])).sum()
        loss = total / sum(sum(trained[1:]) for _, trained in passages)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def write(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    rows = [
        {"messages": [
            {"role": "user", "content": question}, {"role": "assistant", "content": answer},
        ]}
        for question, answer in QUESTIONS
    ]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_losses_equal_a_plain_loop(own_project: Project) -> None:
    """Every step sees all samples of both sources, so their order does not matter."""
    write(own_project.folder)
    n_chats = len(QUESTIONS) // 2
    changes = {
        "data.train": [
            {"kind": "text", "files": ["[0-9].txt"], "weight": 8},
            {"kind": "chat", "path": "chats.jsonl", "weight": n_chats},
        ],
        "data.chat_template": "chatml",
        "data.packing": "greedy",
        "data.isolate_documents": True,
        "data.validation_fraction": 0,
        "model.config": CONFIG,
        "training.objective": "sft",
        "training.steps": STEPS,
        "training.sequence_length": LENGTH,
        "training.global_batch_size": 8 + n_chats,
        "training.micro_batch_size": 2,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.export": "false",
    }
    own_project.launch("mixed", changes)
    expected = plain_loop([*documents(), *conversations()])
    for found, plain in zip(
        curve(own_project.folder / "mixed").values(), expected, strict=True
    ):
        assert found == pytest.approx(plain, rel=1e-5)
