"""The batches of a rehearsal: the same for every layout, with masks as uneven as possible."""

import torch
from torch import Tensor

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.layout import Layout
from toolkit.recipe.schema import TrainingSection

_STEPS_PER_SEED = 1_000_003


def global_batch(
    training: TrainingSection, vocabulary: int, step: int
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of global batch `step`, int64 [rows of the global batch, sequence].

    A function of (seed, step) alone. The first row keeps every label, the last two none,
    and the share falls between them: every rank and every micro batch has another number
    of tokens, and one micro batch of two has none.
    """
    rows = training.global_batch_size * training.rows_per_sample
    length = training.sequence_length
    generator = torch.Generator().manual_seed(training.seed * _STEPS_PER_SEED + step)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    keep = torch.cat([torch.linspace(1, 0, rows - 1), torch.zeros(1)])[:, None]
    labels[torch.rand(labels.shape, generator=generator) >= keep] = IGNORE_INDEX
    return tokens[:, :-1], labels


def micro_batches(
    inputs: Tensor, labels: Tensor, layout: Layout, data_rank: int, rows_per_sample: int = 1
) -> list[MicroBatch]:
    """The share of one data-parallel rank of a global batch, in micro batches."""
    share = len(inputs) // layout.dp
    first, size = data_rank * share, layout.micro_batch * rows_per_sample
    return [
        MicroBatch(inputs[row : row + size], labels[row : row + size])
        for row in range(first, first + share, size)
    ]
