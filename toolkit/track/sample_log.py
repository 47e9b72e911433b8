"""`samples/rank-N.jsonl`: which samples a rank trained on, one line per step.

Ranks that work on the same data (tensor, context and pipeline parallel) write the same lines.
Read together, each (step, data rank) counted once, they are the order in which data was
consumed.
"""

from collections.abc import Sequence

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory


class SampleLog:
    """Appends to the log of one rank."""

    def __init__(self, run: RunDirectory, rank: int, data_rank: int) -> None:
        run.samples.mkdir(exist_ok=True)
        self.path = run.samples / f"rank-{rank}.jsonl"
        self.data_rank = data_rank

    def write(self, step: int, samples: Sequence[int]) -> None:
        """Append the indices, in the training data, of what this step trained on."""
        jsonl.append(self.path, {"step": step, "data_rank": self.data_rank, "samples": samples})
