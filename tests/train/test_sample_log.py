"""The sample log after a kill: what is done again is there once."""

from pathlib import Path

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.track.sample_log import SampleLog


def test_later_steps_of_every_rank_go(tmp_path: Path) -> None:
    """Also of ranks that the resumed run has no more: their shares are dealt anew."""
    run = RunDirectory(tmp_path)
    for rank in range(4):
        log = SampleLog(run, rank, data_rank=rank // 2)
        for step in range(1, 6):
            log.write(step, [10 * step + rank // 2])
    jsonl.drop_later_steps_of_ranks(run.samples, 3)
    for rank in range(4):
        lines = jsonl.read(run.samples / f"rank-{rank}.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1] == {"step": 3, "data_rank": rank // 2, "samples": [30 + rank // 2]}


def test_without_a_log_there_is_nothing_to_drop(tmp_path: Path) -> None:
    jsonl.drop_later_steps_of_ranks(RunDirectory(tmp_path).samples, 3)
    assert list(tmp_path.iterdir()) == []
