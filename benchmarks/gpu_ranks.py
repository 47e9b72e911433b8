"""Several ranks on one GPU, over NCCL: the standard layouts' losses, and a rank that is killed.

    python benchmarks/gpu_ranks.py RESULTS.jsonl losses [--ranks 2] [--only LAYOUT …]
    python benchmarks/gpu_ranks.py RESULTS.jsonl killed [--only ENGINE …]

NCCL refuses two ranks on one GPU of one host ("Duplicate GPU detected"). With NCCL_HOSTID each
rank is a host of its own: they talk through sockets, and the GPU's time slices let both run.
That is slow, but these are NCCL's own communicators, streams, time limits and aborts. The ranks
find their places in Slurm's variables, because then each takes the only GPU.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from toolkit.doctor import calibrate, selftest
from toolkit.doctor.selftest import DENSE, LIMIT_S, machine_suites
from toolkit.launchers.base import LaunchSpec, free_port
from toolkit.launchers.process import die_with_parent
from toolkit.rehearse import rehearsal
from toolkit.rehearse.rehearsal import Options
from toolkit.run import jsonl

LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 60
"""For the first step, and for a rank whose peer was killed."""
local = rehearsal.launch_spec


def places(ranks: int) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What srun would set for each of `ranks` on one machine; a host of its own for NCCL."""
    common = {
        "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN",
    }  # fmt: skip
    each = [
        {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r), "NCCL_HOSTID": f"rank-{r}"}
        for r in range(ranks)
    ]
    return common, each


def on_one_gpu(
    run_dir: Path, processes: int, worker: Sequence[str], gpu: str = "cpu"
) -> LaunchSpec:
    """The rehearsal's processes, as Slurm would start them."""
    spec = local(run_dir, processes, worker, gpu)
    if gpu == "cpu" or processes == 1:
        return spec
    common, each = places(processes)
    env = {key: value for key, value in spec.env.items() if key not in LAUNCHER}
    return replace(spec, env={**env, **common}, rank_env=tuple(each))


def write(results: Path, **row: Any) -> None:
    jsonl.append(results, row)
    print({key: value for key, value in row.items() if key != "tail"}, flush=True)


def losses(results: Path, ranks: int, names: Sequence[str]) -> int:
    """The self-test with so many ranks, in all layouts or these; 1 if one fails."""
    rehearsal.launch_spec = on_one_gpu
    machine = replace(calibrate.this_machine(), processes=ranks)
    suites = [replace(one, patterns=names or one.patterns) for one in machine_suites(ranks)]
    options = Options(processes=ranks, gpu=machine.gpu, limit_s=LIMIT_S)
    folder, failed = Path(mkdtemp()), False
    for check in (c for suite in suites for c in selftest.losses(suite, folder, options)):
        failed = failed or check.verdict == "failed"
        write(results, ranks=ranks, **asdict(check) | {"tail": check.tail[-1500:]})
    return int(failed)


def killed(results: Path, engine: str) -> int:
    """Kill a rank in the middle of training: what the other one does, and how soon. 1 if it did
    not train before, or did not end."""
    folder = Path(mkdtemp())
    run = folder / engine
    command = [
        sys.executable, "-m", "toolkit.train", str(DENSE),
        f"--run-dir={run}", f"--set=cluster.gpu={calibrate.this_machine().gpu}",
        "--set=cluster.gpus_per_node=2", f"--set=parallel.engine={engine}",
        "--set=training.steps=100000", "--set=launch.hang_timeout_s=20",
        "--set=logging.trackers=[]", "--set=checkpoint.export=false",
    ]  # fmt: skip
    common, each = places(2)
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            env = {**os.environ, **common, **each[rank]}
            ranks.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_parent(signal.SIGKILL),
                )
            )
    metrics, limit = run / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < limit and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.2)
    trained = metrics.exists() and metrics.stat().st_size > 0
    time.sleep(2)
    began = time.monotonic()
    ranks[1].send_signal(signal.SIGKILL)
    code: int | str
    try:
        code = ranks[0].wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        code = f"still there after {PATIENCE_S} s"
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
    taken = round(time.monotonic() - began, 1)
    tail = logs[0].read_text(errors="replace")[-2500:]
    write(
        results,
        step="killed",
        name=engine,
        trained=trained,
        code=code,
        seconds=taken,
        tail=tail,
    )
    return int(not trained or isinstance(code, str))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("what", choices=["losses", "killed"])
    parser.add_argument(
        "--only", nargs="*", default=(), help="layouts, or engines; otherwise all"
    )
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    if asked.what == "losses":
        return losses(asked.results, asked.ranks, asked.only)
    engines = asked.only or ("fsdp", "deepspeed", "megatron")
    return max(killed(asked.results, engine) for engine in engines)


if __name__ == "__main__":
    sys.exit(main())
