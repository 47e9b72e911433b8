"""One rank of a rehearsed layout that also records which attention kernels computed it.

python -m toolkit.extras.doctor.selftest.rank RUN_DIR
"""

import json
import re

from torch.profiler import ProfilerActivity, profile

from toolkit.engines.distributed import Ranks
from toolkit.extras.doctor.selftest.check import ATTENTION_FILE
from toolkit.rehearse import worker
from toolkit.run.assignment import Assignment

_PREFIX = "aten::_scaled_dot_product_"


def _watched(assignment: Assignment, ranks: Ranks) -> None:
    """Train, and let rank 0 write the operators that torch's attention dispatched to."""
    if ranks.rank != 0:
        worker.train(assignment, ranks)
        return
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        worker.train(assignment, ranks)
    called = {event.key for event in seen.key_averages() if event.key.startswith(_PREFIX)}
    names = {name.removeprefix(_PREFIX).removesuffix("_backward") for name in called}
    kernels = sorted({re.sub("_attention|attention_", "", name, count=1) for name in names})
    (assignment.run_dir / ATTENTION_FILE).write_text(json.dumps(kernels), encoding="utf-8")


if __name__ == "__main__":
    worker.main(_watched)
