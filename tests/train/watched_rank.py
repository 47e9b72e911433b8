"""A rank with time limits: `watched_rank.py RUN_DIR LIMIT_S BEHAVIOUR@RANK`.

It does ten steps of 0.05 s, meeting the other ranks through files. Behaviours of the named
rank in its fifth step: `hang` (sleeps), `stop` (SIGSTOP), `behind` (hears of more progress than
the others, and hangs before their step begins), `slow` (takes a third of the limit, twice),
`lock` (sleeps in C and keeps the interpreter's lock), `disk` (hangs, and so does what it writes
events to), `broken` (hangs, and finding out where fails). `wait`: all wait for 1.3 times the
limit, and say so. `compile`: its first step takes 1.5 times the limit. `begin`: it hangs before
the first step.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.train import watchdog as module
from toolkit.train.watchdog import WAITING, Marks

run, limit_s = RunDirectory(Path(sys.argv[1])), float(sys.argv[2])
behaviour, _, chosen = sys.argv[3].partition("@")
if behaviour == "begin":
    module.START_LIMIT_S = limit_s
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run.logs.mkdir(parents=True, exist_ok=True)


def meet(step: int | str) -> None:
    """Wait until every rank has come to this step. The loop calls no Python function, so that
    what is reported of a rank that waits is a line of this one."""
    here = run.path / f"at-{step}"
    here.mkdir(exist_ok=True)
    (here / str(rank)).touch()
    while len(os.listdir(here)) < world:  # noqa: PTH208
        time.sleep(0.01)


def misbehave() -> None:
    (run.path / "began").write_text(str(time.time()))
    if behaviour == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # any thread may take the signal that asks for the stacks
    elif behaviour == "slow":
        for _ in range(2):
            time.sleep(limit_s * 0.35)
            marks.begin("slow", step=4)
    elif behaviour == "lock":
        ctypes.PyDLL(None).sleep(60)
    else:
        if behaviour == "disk":
            EventLog.write = lambda *_, **__: time.sleep(60)
        if behaviour == "broken":
            module._innermost = lambda *_: 1 / 0
        time.sleep(60)


meet("start")  # a rank that waits for slow imports of another one would hang, for a marks
with Marks(rank) as marks:
    marks.watch(run, world, limit_s, EventLog(run.events))
    if behaviour == "begin" and rank == int(chosen):
        misbehave()
    meet("begin")
    marks.at_step(0)
    for step in range(10):
        if step == 4 and behaviour == "wait":
            marks.begin(WAITING)
            for _ in range(13):  # ranks wait for rank 0, which says that it gets on
                if rank == 0:
                    marks.begin("exporting")
                time.sleep(0.1 * limit_s)
        if step == 4 and behaviour == "behind":
            for _ in range(9 if rank == int(chosen) else 1):
                marks.begin("waiting for a save")
            if rank == int(chosen):
                misbehave()
        marks.begin(f"step {step + 1}", step=step)
        if step == 0 and behaviour == "compile" and rank == int(chosen):
            time.sleep(1.5 * limit_s)
        if (
            step == 4
            and behaviour not in ("begin", "behind", "wait", "compile")
            and rank == int(chosen)
        ):
            misbehave()
        meet(step)
        time.sleep(0.05)
        marks.begin(f"logging step {step + 1}", step=step + 1)
marks.close()
print("done")
