"""A worker without torch for the launcher tests: `stand_in.py RUN_DIR BEHAVIOUR`.

It leaves `pid-RANK` and `env-RANK` in RUN_DIR, and writes events as a worker does.
Behaviours: `done`; `sleep` (until SIGTERM, then 75); `stubborn` (ignores SIGTERM);
`early` (still importing: no handlers, no events); `fail=RANK:CODE` (that rank fails
a moment after all have started, the others sleep; with ` stubborn` behind it, they ignore
SIGTERM; with ` telling`, it says why, as a worker does; with ` losing`, that it lost another).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from toolkit.run.events import PEER_LOST

run_dir, behaviour = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
asked = 0


def event(kind: str, **fields: object) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "rank": rank, **fields}) + "\n")


def leave(code: int, **error: str) -> None:
    (run_dir / f"asked-{rank}").write_text(str(asked))
    event("end", exit_code=code, **error)
    sys.exit(code)


def on_signal(number: int, frame: FrameType | None) -> None:
    del number, frame
    global asked
    asked += 1


def all_are_here() -> bool:
    """An `end` before another rank's `start` would be one of an earlier start."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    return all((run_dir / f"pid-{one}").exists() for one in ranks)


if behaviour != "early":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    event("start")
(run_dir / f"env-{rank}").write_text(json.dumps(dict(os.environ)))
(run_dir / f"argv-{rank}").write_text(json.dumps(sys.argv))
(run_dir / f"pid-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} is here, {os.environ.get('CANARY_TOKEN', '')}", flush=True)
if behaviour == "done":
    leave(0)
began = time.monotonic()
while time.monotonic() - began < 3600:
    time.sleep(0.02)
    if behaviour.startswith("fail="):
        failing, code = behaviour.split()[0].removeprefix("fail=").split(":")
        if rank == int(failing) and all_are_here() and time.monotonic() - began > 0.3:
            print("the reason it failed", flush=True)
            if "telling" in behaviour:
                print("error: told by itself", file=sys.stderr, flush=True)
                leave(int(code), error="told by itself")
            if "losing" in behaviour:
                leave(int(code), error=PEER_LOST)
            leave(int(code))
    if asked and "stubborn" not in behaviour:
        time.sleep(0.3)  # Saving.
        leave(75)
