"""Dropout draws other numbers on each data-parallel rank and in each step; the same again."""

import itertools

import torch

from toolkit.train.dropout_seed import seed_dropout


def drawn(*place: int) -> float:
    seed_dropout(*place)
    return torch.rand(()).item()


def test_a_stream_for_each_seed_step_and_rank() -> None:
    places = [*itertools.product((1, 2), (0, 1), (0, 1))]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(1, 0, 1) == drawn(1, 0, 1)
