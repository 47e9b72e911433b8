"""What every rank of test_post_training.py does, and what it is compared with: TRL's trainers.

The pairs are token lists, made without any tokenizer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast

from tests.data.building import built
from tests.engines import parity_worker as parity
from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.data.batches import batches_of
from toolkit.data.packing import StreamSamples
from toolkit.engines.distributed import Ranks
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import Recipe

STEPS = 6
SAMPLES = 6
"""Of a global batch."""
REWARDS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected",
)  # fmt: skip
Conversation: TypeAlias = tuple[list[int], list[int]]
"""Tokens, and 1 for each that is trained."""


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class Objective:
    """What is trained."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def pairs(steps: int) -> list[list[Pair]]:
    """Global batches of pairs of very unequal lengths."""
    generator = torch.Generator().manual_seed(11)

    def tokens(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(2, parity.VOCABULARY, (length,), generator=generator).tolist()

    def pair() -> Pair:
        return Pair(tokens(2, 7), tokens(1, 9), tokens(1, 9))

    return [[pair() for _ in range(SAMPLES)] for _ in range(steps)]


def conversations(folder: Path) -> StreamSamples:
    """Rows of one to four short prompts and answers, of bytes, that DMT packs."""
    generator = torch.Generator().manual_seed(13)
    lengths = torch.randint(1, 6, (4 * STEPS * SAMPLES, 2), generator=generator).tolist()
    chats = [{"prompt": "a" * n, "completion": "bcdef"[:m]} for n, m in lengths]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    section = {"train": {"kind": "chat", "path": "chats.jsonl"}, "packing": "greedy"}
    return built(folder, section, parity.LENGTH).sources[0].train


def unpacked(samples: StreamSamples) -> list[list[Conversation]]:
    """The conversations of each global batch; untrained ones make them equally
    many, as TRL wants it."""
    batches = [
        [
            (one.ids.tolist(), one.trained.tolist())
            for index in range(first, first + SAMPLES)
            for one in samples.documents(index)
        ]
        for first in range(0, STEPS * SAMPLES, SAMPLES)
    ]
    most = max(map(len, batches))
    return [batch + [([2, 2], [0, 0])] * (most - len(batch)) for batch in batches]


def row(tokens: Sequence[int], mask: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels [LENGTH] of a token list, padded by 0; labels where the mask is 1."""
    inputs = torch.zeros(parity.LENGTH, dtype=torch.int64)
    labels = torch.full((parity.LENGTH,), IGNORE_INDEX)
    inputs[: len(tokens) - 1] = torch.tensor(tokens[:-1])
    for place, (token, trained) in enumerate(zip(tokens[1:], mask[1:], strict=True)):
        labels[place] = token if trained else IGNORE_INDEX
    return inputs, labels


def rows_of(pair: Pair) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of a pair."""
    before = [0] * len(pair.prompt)
    for answer in (pair.chosen, pair.rejected):
        yield row(pair.prompt + answer, before + [1] * len(answer))


def micro_batch(samples: Sequence[Pair], reference: Sequence[float]) -> MicroBatch:
    inputs, labels = zip(*(one for pair in samples for one in rows_of(pair)), strict=True)
    extra = {"reference_log_probs": torch.tensor(reference)}
    return MicroBatch(torch.stack(inputs), torch.stack(labels), extra=extra)


def initial_model(seed: int = parity.SEED, **family: Any) -> torch.nn.Module:
    """transformers' model with the weights that every engine starts with."""
    return parity.plain_model(parity.Case("ddp", 1, family=family), seed)


@torch.no_grad()
def plain_log_probs(model: torch.nn.Module, tokens: list[int], answer: int) -> float:
    """log p of the last `answer` tokens, of one sequence alone, without padding."""
    inputs = torch.tensor(tokens)[None]
    log_probs = model(inputs, use_cache=False).logits.log_softmax(-1)[0, :-1]
    chosen = log_probs.gather(1, inputs[0, 1:, None])[:, 0]
    return chosen[-answer:].double().sum().item()


def references(model: torch.nn.Module, batch: Sequence[Pair]) -> list[float]:
    """The reference's log p of each row of a batch of pairs."""
    return [
        plain_log_probs(model, pair.prompt + answer, len(answer))
        for pair in batch
        for answer in (pair.chosen, pair.rejected)
    ]


def recipe(case: parity.Case, objective: Objective, world: int) -> Recipe:
    plain = parity.recipe(case, world).model_dump(mode="json")
    plain["training"] |= {
        "global_batch_size": SAMPLES, "objective": objective.name, "steps": STEPS,
    }  # fmt: skip
    plain["data"]["isolate_documents"] = objective.name == "sft"
    if objective.settings:
        plain[objective.name] = objective.settings
    return Recipe.model_validate(plain)


Step: TypeAlias = tuple[MicroBatch, list[MicroBatch]]
"""A global batch, and this rank's micro batches of it."""


def steps_of_conversations(layout: Layout, rank: int) -> Iterator[Step]:
    with TemporaryDirectory() as folder:
        samples, used = conversations(Path(folder)), np.arange(STEPS * SAMPLES)
        whole = batches_of(samples, used, SAMPLES, 0, [SAMPLES])
        share = layout.data_rank(rank), layout.micro_batches
        mine = batches_of(samples, used, SAMPLES, *share)
        yield from ((one, batches) for (one,), batches in zip(whole, mine, strict=True))


def steps_of_pairs(
    found: Sequence[Sequence[float]], layout: Layout, rank: int
) -> Iterator[Step]:
    """`found` is the reference's log p of every row."""
    first, size = layout.data_rank(rank) * SAMPLES // layout.dp, layout.micro_batch
    last = first + SAMPLES // layout.dp
    for batch, reference in zip(pairs(STEPS), found, strict=True):
        yield (
            micro_batch(batch, reference),
            [
                micro_batch(batch[at : at + size], reference[2 * at : 2 * (at + size)])
                for at in range(first, last, size)
            ],
        )


def train(
    case: parity.Case, objective: Objective, ranks: Ranks, found: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Train one case; what is logged of each step, and log p of this rank's first rows."""
    wanted = recipe(case, objective, ranks.world)
    weights = hf.weight_source(wanted.model, hf.build_config(wanted.model), parity.SEED)
    engine, layout = parity.build(wanted, ranks, weights)
    steps = (
        steps_of_conversations(layout, ranks.rank)
        if objective.name == "sft"
        else steps_of_pairs(found, layout, ranks.rank)
    )
    results, before = [], None
    for whole, batches in steps:
        if before is None and objective.name != "sft":
            before = engine.sequence_log_probs(batches).tolist()
        count = float(wanted.objective().count(whole))
        results.append(engine.train_step(batches, count, 1e-3))
    engine.close()
    return {
        **parity.curves(results),
        "before": before,
        **{name: [r.metrics[name] for r in results] for name in results[0].metrics},
    }


def train_all(
    ranks: Ranks,
    cases: Sequence[tuple[parity.Case, Objective]],
    found: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    return [train(case, objective, ranks, found) for case, objective in cases]


def tokenizer() -> PreTrainedTokenizerFast:
    """One that TRL takes its padding token from; nothing is tokenised."""
    vocabulary = {"[PAD]": 0, "[EOS]": 1} | {str(n): n for n in range(2, parity.VOCABULARY)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]"
    )  # fmt: skip


ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": SAMPLES,
    "max_steps": STEPS,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "remove_unused_columns": False,
}


class InOrder:
    """A trainer that takes tokens as they are, and samples in their order."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset or self.train_dataset)


def logged(
    kind: type, model: torch.nn.Module, arguments: Any, samples: list[Any], **more: Any
) -> dict[str, list[float]]:
    """What a trainer of TRL logs, by name."""
    trainer: Any = type("", (InOrder, kind), {})(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(samples),
        processing_class=tokenizer(),
        optimizers=(parity.adamw(model), None),
        **more,
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == STEPS
    return {name: [step[name] for step in steps] for name in steps[0]}


def by_dpo_trainer(
    folder: Path, model: torch.nn.Module, reference: torch.nn.Module, loss: str, beta: float
) -> dict[str, list[float]]:
    """TRL's DPOTrainer over whole global batches, in this process."""
    samples = [
        {"prompt_ids": p.prompt, "chosen_ids": p.chosen, "rejected_ids": p.rejected}
        for batch in pairs(STEPS)
        for p in batch
    ]
    arguments = trl.DPOConfig(output_dir=str(folder), loss_type=[loss], beta=beta, **ARGUMENTS)
    return logged(trl.DPOTrainer, model, arguments, samples, ref_model=reference)


def by_sft_trainer(
    folder: Path, model: torch.nn.Module, batches: list[list[Conversation]]
) -> dict[str, list[float]]:
    """TRL's SFTTrainer with labels as it makes them of masks, in this process."""
    samples = [
        {
            "input_ids": tokens,
            "labels": [t if m else IGNORE_INDEX for t, m in zip(tokens, mask, strict=True)],
        }
        for batch in batches
        for tokens, mask in batch
    ]
    size = {"per_device_train_batch_size": len(batches[0])}
    arguments = trl.SFTConfig(output_dir=str(folder), **ARGUMENTS | size)
    return logged(trl.SFTTrainer, model, arguments, samples)
