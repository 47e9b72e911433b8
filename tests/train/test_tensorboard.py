"""TensorBoard files hold the numbers; a missing package is named with its fix."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toolkit.errors import BackendUnavailable
from toolkit.track.metrics import Metrics
from toolkit.track.tensorboard import TensorBoardLog

LINE = Metrics(1, 5.5, 1.25, 3e-4, 1024, 2048.0, 0.5, 0.0, None, 8, 1024, False, None)


def test_numbers_are_read_back(tmp_path):
    log = TensorBoardLog(tmp_path)
    log.write(LINE)
    log.write_validation(1, {"loss": 2.5})
    log.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert read.Scalars("train/loss")[0].value == 5.5
    assert read.Scalars("train/loss")[0].step == 1
    assert read.Scalars("train/consumed_tokens")[0].value == 1024
    assert read.Scalars("validation/loss")[0].value == 2.5
    assert "train/mfu" not in read.Tags()["scalars"]


def test_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BackendUnavailable, match=r"dmt\[tensorboard\]") as error:
        TensorBoardLog(tmp_path)
    assert error.value.exit_code == 3
