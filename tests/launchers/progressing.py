"""A worker without torch for tests of agents: `progressing.py RUN_DIR LAST CODE`.

The last rank commits a step behind the newest one, and is killed; a start behind step LAST ends
with CODE. With LAST 0, it is killed without a checkpoint.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

checkpoints, last, code = Path(sys.argv[1], "checkpoints"), int(sys.argv[2]), int(sys.argv[3])


def newest() -> int:
    return len([*checkpoints.glob("step-*/manifest.json")])


def starts(rank: int) -> int:
    file = Path(sys.argv[1], f"starts-{rank}")
    return len(file.read_text().splitlines()) if file.exists() else 0


rank, world, step = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), newest()
with Path(sys.argv[1], f"starts-{rank}").open("a") as file:
    file.write(f"{os.environ['MASTER_PORT']} {world}\n")
while starts(0) != starts(1):
    time.sleep(0.02)  # until the other has read the newest step, too
if last and step >= last:
    end = {"kind": "end", "exit_code": code} | ({"error": "a mistake"} if code == 2 else {})
    with Path(sys.argv[1], "events.jsonl").open("a") as events:  # as a worker says it
        events.write(f"{json.dumps(end)}\n")
    sys.exit(code)
if rank == world - 1:
    if last:
        folder = checkpoints / f"step-{step + 1:08}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3600)  # for the one that was killed, as in a collective
