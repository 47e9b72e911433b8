"""sft and dpo by TRL's own trainers: what they log of a step is what our objectives compute."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch.utils.data import SequentialSampler

from tests.models.small import filled, section
from toolkit.batch import IGNORE_INDEX, MicroBatch, row_log_probs
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.models import huggingface as hf
from toolkit.objectives.base import Objective, Sft
from toolkit.objectives.preference import REFERENCE, Dpo

# TRL calls transformers by a name that it renames.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
LENGTH, BETA = 16, 0.3
SIZES = [(2, 1, 9), (7, 9, 1), (4, 5, 5), (3, 8, 2), (6, 1, 4)]
"""Tokens of prompts and of answers: chosen, rejected."""


def pairs() -> list[dict[str, list[int]]]:
    """As TRL has them."""
    generator = torch.Generator().manual_seed(11)
    names = "prompt_ids", "chosen_ids", "rejected_ids"
    return [
        {
            name: torch.randint(2, 200, (size,), generator=generator).tolist()
            for name, size in zip(names, sizes, strict=True)
        }
        for sizes in SIZES
    ]


def rows() -> MicroBatch:
    """The same pairs, in padded rows."""
    inputs = torch.zeros(2 * len(SIZES), LENGTH, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for number, pair in enumerate(pairs()):
        for row, name in ((2 * number, "chosen_ids"), (2 * number + 1, "rejected_ids")):
            prompt, tokens = len(pair["prompt_ids"]), pair["prompt_ids"] + pair[name]
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            labels[row, prompt - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt:])
    return MicroBatch(inputs, labels)


class InOrder:
    """A trainer that takes tokens as they are, and samples in their order."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset or self.train_dataset)


def logged(
    kind: type, config: type, model: Any, samples: list[Any], stated: Any, **more: Any
) -> dict[str, float]:
    """What a trainer of TRL logs of a step, by name."""
    arguments = config(
        max_steps=1, logging_steps=1, per_device_train_batch_size=len(samples), report_to=[],
        save_strategy="no", disable_tqdm=True, bf16=False, use_cpu=True,
        remove_unused_columns=False, gradient_checkpointing=False, **stated,
    )  # fmt: skip
    trainer: Any = type("", (InOrder, kind), {})(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(samples),
        processing_class=byte_tokenizer(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.0), None),
        **more,
    )
    trainer.train()
    (step,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    return step


def ours(objective: Objective, model: torch.nn.Module, batch: MicroBatch) -> dict[str, float]:
    """The same by our objective."""
    terms, count = objective.loss(hf.log_probs(model, batch), batch), objective.count(batch)
    gradients = torch.autograd.grad(terms.loss / count, list(model.parameters()))
    found = {"loss": terms.loss, **terms.metrics}
    norm = torch.cat([one.flatten() for one in gradients]).norm().item()
    return {name: (one / count).item() for name, one in found.items()} | {"grad_norm": norm}


def assert_equal(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_dpo(loss: Any, tmp_path: Path) -> None:
    """The reference is another model: with the policy's weights, all rewards would be 0."""
    policy, reference = (filled(section("llama", vocab_size=320), seed) for seed in (1, 2))
    with torch.no_grad():
        values = row_log_probs(hf.log_probs(reference, rows()))
    wanted = ours(Dpo(loss, BETA), policy, replace(rows(), extra={REFERENCE: values}))
    stated = {"output_dir": str(tmp_path), "loss_type": [loss], "beta": BETA}
    trainer = trl.DPOTrainer, trl.DPOConfig, policy, pairs(), stated
    assert_equal(logged(*trainer, ref_model=reference), wanted)


def test_sft(tmp_path: Path) -> None:
    """Of answers to prompts, as TRL's masks make labels of them."""
    model, samples = filled(section("llama", vocab_size=320)), []
    for pair in pairs():
        prompt, answer = pair["prompt_ids"], pair["chosen_ids"]
        labels = [IGNORE_INDEX] * len(prompt) + answer
        samples.append({"input_ids": prompt + answer, "labels": labels})
    chosen = MicroBatch(rows().input_ids[::2], rows().labels[::2])
    wanted = ours(Sft(), model, chosen)
    stated = {"output_dir": str(tmp_path)}
    assert_equal(logged(trl.SFTTrainer, trl.SFTConfig, model, samples, stated), wanted)
