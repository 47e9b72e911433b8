"""The driver of `launcher: ray`: `python -m toolkit.extras.launchers.ray_job RECIPE RUN_DIR`.

Every Ray Train worker runs one rank in a separate process, so that signals, exit codes and
termination work as under any launcher. A failed rank fails its worker, and Ray restarts all of
them; a user's mistake does not.
"""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_UNAVAILABLE
from toolkit.extras.launchers.ray import RaySection
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import DMT, RENDEZVOUS_VARIABLES, free_port, settings_here
from toolkit.launchers.outcome import failure_code
from toolkit.launchers.process import die_with_parent
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import copy_to_log, redact
from toolkit.text.terminal import tell

_POLL_S = 1.0


class _SharedDevices(Backend):
    """Every worker sees all GPUs that its machine's workers have, as under torchrun."""

    share_cuda_visible_devices = True


class _OwnProcessGroup(TorchConfig):
    """Leaves joining the process group to the ranks."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedDevices


class Mailbox:
    """The mailbox of driver and workers; a separate actor."""

    def __init__(self) -> None:
        self._stopping = False
        self._begun = 0
        self._codes: list[int] = []
        self._said: list[str] = []

    def stop(self) -> None:
        """Request that every rank saves and exits."""
        self._stopping = True

    def begin(self) -> int:
        """Forget the exit codes of the attempts before; returns their number."""
        self._codes.clear()
        self._begun += 1
        return self._begun - 1

    def say(self, lines: list[str]) -> bool:
        """Post a rank's output for the driver; returns whether ranks have to stop."""
        self._said += lines
        return self._stopping

    def said(self) -> list[str]:
        """Take the ranks' output."""
        lines, self._said = self._said, []
        return lines

    def ended(self, code: int) -> None:
        """Record a rank's exit code."""
        self._codes.append(code)

    def code(self) -> int:
        """The exit code of the run."""
        return max(self._codes, default=EXIT_FAILED)


def rank(config: dict[str, Any]) -> None:
    """One Ray Train worker: run one rank, wait for it; raise RuntimeError when it failed."""
    context = ray.train.get_context()
    mailbox = config["mailbox"]
    meeting: Any = None
    if context.get_world_rank() == 0:
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        meeting = {
            "MASTER_ADDR": here,
            "MASTER_PORT": free_port(),
            MEETING: ray.get(mailbox.begin.remote()),
        }
    recipe = Path(config["recipe_file"])
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(recipe, config["recipe"])
    places = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        **broadcast_from_rank_zero(meeting),
    }
    inherited = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS_VARIABLES}
    env = {**inherited, **config["env"], **{k: str(v) for k, v in places.items()}}
    code = _run(config, env, mailbox)
    ray.get(mailbox.ended.remote(code))
    if failure_code(code) == EXIT_FAILED and code not in (EXIT_DONE, EXIT_RESUMABLE):
        raise RuntimeError(f"rank {context.get_world_rank()} ended with code {code}")


def _run(config: dict[str, Any], env: dict[str, str], mailbox: Any) -> int:
    """Run this rank's process; pass on what rank 0 prints, and a request to stop, once."""
    run = RunDirectory(Path(config["run_dir"]))
    run.logs.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", *DMT, "train", config["recipe_file"]),
            *("--run-dir", config["run_dir"]),
        ],
        env=env,
        cwd=config["folder"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    assert process.stdout is not None
    printed: queue.SimpleQueue[str] = queue.SimpleQueue()
    number = int(env["RANK"])
    if number == 0:
        copier = threading.Thread(target=_collect, args=(process.stdout, printed))
    else:
        copier = threading.Thread(
            target=copy_to_log, args=(process.stdout, run.rank_log(number))
        )
    copier.start()
    asked = False
    while copier.is_alive() or not printed.empty():
        lines = [printed.get() for _ in range(printed.qsize())]
        if ray.get(mailbox.say.remote(lines)) and not asked:
            asked = True
            process.send_signal(signal.SIGTERM)
        copier.join(_POLL_S)
    return process.wait()


def _collect(lines: Iterable[str], printed: "queue.SimpleQueue[str]") -> None:
    for line in lines:
        printed.put(line)


def main(recipe_file: Path, run_dir: Path) -> int:
    """Run the job; return its exit code."""
    recipe = load_recipe(recipe_file)
    cluster, elastic = recipe.cluster, recipe.launch.elastic
    ranks: Any = cluster.world_size
    if elastic is not None:
        each = cluster.gpus_per_node
        ranks = elastic.min_nodes * each, elastic.max_nodes * each
    # Type checkers see the one of Ray Train 1, without a range of workers.
    scaling: Any = ScalingConfig(num_workers=ranks, use_gpu=cluster.gpu != "cpu")
    if not _connected(recipe.launch.own(RaySection).address, scaling):
        return EXIT_UNAVAILABLE
    # On this machine: by itself, Ray would place it on any, which may be lost.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    mailbox: Any = ray.remote(num_cpus=0)(Mailbox).options(scheduling_strategy=here).remote()
    over = threading.Event()
    stop = RunDirectory(run_dir).stop
    courier = threading.Thread(target=_carry, args=(stop, mailbox, over), daemon=True)
    courier.start()
    trainer = TorchTrainer(
        rank,
        train_loop_config={
            "mailbox": mailbox,
            "recipe": recipe_file.read_text(encoding="utf-8"),
            "recipe_file": str(recipe_file),
            "run_dir": str(run_dir),
            "folder": str(Path.cwd()),
            "env": settings_here(),
        },
        torch_config=_OwnProcessGroup(),
        scaling_config=scaling,
        run_config=RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir / "launch" / "ray"),
            failure_config=FailureConfig(max_failures=recipe.launch.max_restarts),
        ),
    )
    try:
        trainer.fit()
        code: int = ray.get(mailbox.code.remote())
    except ray.train.TrainingFailedError as error:
        code = EXIT_FAILED
        tell(f"error: Ray gave up: {_first_line(error)}")
    over.set()
    courier.join()  # A call after the end would start a new Ray.
    ray.shutdown()
    return code


def _connected(address: str | None, scaling: Any) -> bool:
    """Join or start Ray; report why it cannot run the ranks."""
    # Only rank 0's output is shown, of all that Ray's processes print.
    try:
        ray.init(
            address=address or "local",
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        tell(f"error: no Ray at launch.ray.address {address}: {_first_line(error)}")
        tell("  fix: `ray start --head` there, or launch.ray.address: null")
        return False
    what = "GPU" if scaling.use_gpu else "CPU"
    there = int(ray.cluster_resources().get(what, 0))  # type: ignore[no-untyped-call]
    if there < scaling.min_workers:
        lacking = f"{scaling.min_workers} ranks need a {what} each, Ray has {there}"
        if address is None:
            tell(
                f"error: {lacking}\n  fix: cluster.gpus_per_node as there are, or a Ray cluster"
            )
            return False
        tell(f"waiting: {lacking}")
    return True


def _carry(stop: Path, mailbox: Any, over: threading.Event) -> None:
    """Passes output and stop requests between launcher and ranks."""
    asked = last = False
    while not last:
        last = over.wait(_POLL_S)
        for line in ray.get(mailbox.said.remote()):
            print(redact(line), end="", file=sys.stderr, flush=True)
        if not asked and stop.exists():
            asked = True
            ray.get(mailbox.stop.remote())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
