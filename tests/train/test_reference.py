"""The reference's log-probabilities: computed once, kept, found again, attached to rows."""

from pathlib import Path

import numpy as np
import pytest

from tests.forked import run_ranks
from tests.train.reference_ranks import SAMPLES, compute, compute_unusable, expected
from toolkit.layout import Layout

ALL = list(range(SAMPLES))
LAYOUT = Layout(dp=2, micro_batch=1, gradient_accumulation=2)


def test_a_killed_computation_continues_where_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "reference" / "key.npy"
    first = run_ranks(compute, 2, path, LAYOUT, ALL, 2)[0]
    assert first["missing"] == SAMPLES and first["done"] == 8, "two global batches of four"
    assert np.isfinite(first["file"]).all(axis=1).tolist() == [n < 8 for n in ALL]
    assert not list(path.parent.glob("*.tmp"))

    second = run_ranks(compute, 2, path, LAYOUT, ALL)[0]
    assert (second["missing"], second["done"], second["calls"]) == (14, 14, 4)
    assert np.array(second["file"]) == pytest.approx(np.array(expected()), rel=1e-6)

    third = run_ranks(compute, 2, path, LAYOUT, ALL)[0]
    assert (third["missing"], third["calls"]) == (0, 0), "found in the cache"
    assert third["file"] == second["file"]


def test_only_samples_that_are_used_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "key.npy"
    found = run_ranks(compute, 1, path, Layout(micro_batch=4), [0, 5, 21])[0]
    assert found["done"] == 3
    there = np.isfinite(found["file"]).all(axis=1)
    assert np.flatnonzero(there).tolist() == [0, 5, 21]
    # A longer run computes what it needs besides.
    more = run_ranks(compute, 1, path, Layout(micro_batch=4), ALL)[0]
    assert more["missing"] == SAMPLES - 3


def test_ranks_that_share_a_model_compute_together(tmp_path: Path) -> None:
    """And every rank reads all of it, in training and in validation batches."""
    layout = Layout(tp=2, micro_batch=2, gradient_accumulation=2)
    found = run_ranks(compute, 2, tmp_path / "key.npy", layout, ALL)[0]
    values = expected()
    assert np.array(found["file"]) == pytest.approx(np.array(values), rel=1e-6)
    assert found["training"]
    for sample, reference in found["training"]:
        assert reference == pytest.approx(values[sample], rel=1e-6)
    for sample, reference in found["validation"]:
        assert reference == pytest.approx(values[sample] if sample >= 0 else [0, 0], rel=1e-6)


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "key.npy"
    path.write_bytes(b"\x93NUMPY nothing else")
    found = run_ranks(compute, 1, path, Layout(micro_batch=4), ALL)[0]
    assert found["missing"] == SAMPLES
    assert np.isfinite(found["file"]).all()


def test_a_reference_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """Every batch that holds such a pair would be skipped."""
    message, unknown = run_ranks(compute_unusable, 1, tmp_path / "key.npy")[0]
    assert f"of {SAMPLES} samples is not finite" in message
    assert all(unknown)
