"""What every rank of the stop test does: steps, until all agree to stop."""

import os
import signal
import time

from toolkit.engines.distributed import join, leave
from toolkit.train.step_reduction import StepReduction, StopRequest


def last_step(signalled: int, in_step: int) -> int:
    """The step after which this rank stops, of 8; `signalled` gets SIGTERM in `in_step`."""
    rank = join().rank
    step = 0
    with StopRequest() as stop:
        reduction = StepReduction(stop)
        while step < 8:
            step += 1
            reduction.begin(rank + step)
            time.sleep(0.02 * rank)
            if rank == signalled and step == in_step:
                os.kill(os.getpid(), signal.SIGTERM)
            stopping, (total,) = reduction.finish()
            assert total == 1 + 2 * step, "the sum over both ranks"
            if stopping:
                break
    leave()
    return step
