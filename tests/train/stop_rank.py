"""One rank of the stop test: `stop_rank.py SIGNALLED_RANK STEP`; prints its last step."""

import os
import signal
import sys
import time

import torch.distributed as dist

from toolkit.engines.distributed import end_process
from toolkit.train.signals import StopRequest

signalled, in_step = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
step = 0
with StopRequest() as stop:
    while step < 8:
        step += 1
        stop.ask(rank + step)
        time.sleep(0.02 * rank)
        if rank == signalled and step == in_step:
            os.kill(os.getpid(), signal.SIGTERM)
        stopping, total = stop.agreed()
        assert total == 1 + 2 * step, "the sum over both ranks"
        if stopping:
            break
dist.destroy_process_group()
print(step)
end_process(0)
