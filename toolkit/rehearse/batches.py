"""The batches of a rehearsal: the same for every layout, with masks as uneven as possible."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.data.rows import documents
from toolkit.layout import Layout
from toolkit.recipe.schema import Recipe, TrainingSection

_STEPS_PER_SEED = 1_000_003


def global_batch(
    training: TrainingSection, vocabulary: int, step: int
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of global batch `step`, int64 [rows of the global batch, sequence].

    A function of (seed, step) alone. The first row keeps every label, the last two none, and
    the share decreases in between: every rank and every micro batch has a different number of
    tokens, and one micro batch of two rows has none.
    """
    rows = training.global_batch_size * training.rows_per_sample
    length = training.sequence_length
    generator = torch.Generator().manual_seed(training.seed * _STEPS_PER_SEED + step)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    keep = torch.cat([torch.linspace(1, 0, rows - 1), torch.zeros(1)])[:, None]
    labels[torch.rand(labels.shape, generator=generator) >= keep] = IGNORE_INDEX
    return tokens[:, :-1], labels


def global_batches(recipe: Recipe, vocabulary: int) -> list[MicroBatch]:
    """The global batch of each step of a recipe, its documents isolated if the recipe's are."""
    steps = recipe.training.steps
    assert steps is not None, "a small run's length is stated in steps"
    batches = [
        MicroBatch(*global_batch(recipe.training, vocabulary, step)) for step in range(steps)
    ]
    if not recipe.data.isolates:
        return batches
    return [
        isolated(batch, document_starts(recipe.training, step))
        for step, batch in enumerate(batches)
    ]


def document_starts(training: TrainingSection, step: int) -> list[list[int]]:
    """The start of the documents in each row of global batch `step`, if documents are isolated.

    One to four documents, of any length.
    """
    generator = torch.Generator().manual_seed(training.seed * _STEPS_PER_SEED + step)
    starts = []
    for row in range(training.global_batch_size):
        places = torch.randperm(training.sequence_length - 1, generator=generator) + 1
        starts.append([0, *sorted(places[: row % 4].tolist())])
    return starts


def isolated(batch: MicroBatch, starts: list[list[int]]) -> MicroBatch:
    """The batch with segments and positions of the documents that start there."""
    length = batch.input_ids.shape[1]
    rows = [documents(np.array(row, dtype=np.int64), length) for row in starts]
    segments, positions = map(torch.from_numpy, map(np.stack, zip(*rows, strict=True)))
    return replace(batch, segments=segments, positions=positions)


def micro_batches(
    batch: MicroBatch, layout: Layout, data_rank: int, rows_per_sample: int = 1
) -> list[MicroBatch]:
    """The share of one data-parallel rank of a global batch, in micro batches."""
    sizes = [samples * rows_per_sample for samples in layout.micro_batches]
    rounds, size = len(batch.input_ids) // sum(sizes), sizes[data_rank]
    first = rounds * sum(sizes[:data_rank])
    return [batch.rows(row, row + size) for row in range(first, first + rounds * size, size)]
