"""`ray`: Ray Train's `TorchTrainer` around `toolkit.train`; Ray restarts what failed.

Every Ray Train worker runs one rank in a process of its own, so that signals, exit codes and
time limits work as under any launcher. A failed rank fails its worker, and Ray restarts all of
them; a user's mistake does not. The run directory is on a disk that all machines share: there,
a file asks the ranks to stop, and rank 0 leaves its output for the terminal.
"""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_UNAVAILABLE,
    BackendUnavailable,
)
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import (
    DMT,
    RENDEZVOUS_VARIABLES,
    Job,
    LaunchSpec,
    Outcome,
    free_port,
    settings_here,
    spec_of,
)
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import STOPPING, Deadline, StopSignals, die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset, grace_over
from toolkit.run.recorded import read_events
from toolkit.system.atomic import write_atomically
from toolkit.system.handlers import STOP_SIGNALS
from toolkit.system.interpreter import python
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell

_POLL_S = 1.0
_ENDS = (EXIT_DONE, EXIT_RESUMABLE, *USER_CODES)
"""Exit codes of ranks that Ray does not start again."""


class RayStarter:
    """A Ray Train job, driven by this process."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command of each rank; see Starter."""
        if importlib.util.find_spec("ray") is None:
            raise BackendUnavailable(
                "launch.launcher is ray, which is not installed", fix="pip install 'ray[train]'"
            )
        rank = ("-u", *DMT, "train", str(job.recipe_file), "--run-dir", str(job.run_dir))
        return spec_of(job, (*python(), *rank), files={job.recipe_file: job.recipe})

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the job and wait; see Starter."""
        run, offset = RunDirectory(spec.run_dir), events_offset(spec.run_dir)
        run.logs.mkdir(parents=True, exist_ok=True)
        run.stop.unlink(missing_ok=True)
        output, deadline, asked = _Output(_rank_0(run)), Deadline(), False
        outcomes: list[Outcome] = []
        # In a thread, Ray leaves the handlers of signals as they are.
        job = threading.Thread(
            target=lambda: outcomes.append(_train(spec, offset)), daemon=True
        )
        job.start()
        while job.is_alive() and not (signals.kill_requested or deadline.passed):
            job.join(_POLL_S)
            for number in STOP_SIGNALS:  # Ray's core has handlers of its own
                signal.signal(number, signal.getsignal(number))
            output.show()
            if signals.stop_requested and not asked:
                asked = True
                tell(STOPPING)
                run.stop.touch()
                deadline.start(spec.grace_s)
        run.stop.unlink(missing_ok=True)
        if outcomes:
            return outcomes[0]
        message, code = grace_over(spec.grace_s, run.path, offset)
        tell(f"error: {message}")
        return Outcome(code, message)  # Ray ends with this process, its driver


class _Output:
    """What rank 0 printed since the start, from its file to this terminal."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shown = file.stat().st_size if file.exists() else 0

    def show(self) -> None:
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            print(new.decode(errors="replace"), end="", file=sys.stderr, flush=True)


def _rank_0(run: RunDirectory) -> Path:
    return run.logs / "ray-rank-0.log"


def _train(spec: LaunchSpec, offset: int) -> Outcome:
    """Join or start Ray, run the job, and wait for its end."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    run = RunDirectory(spec.run_dir)
    recipe = load_recipe(run.handed_over)
    fewest, most = _ranks(recipe)
    workers: Any = most if fewest == most else (fewest, most)
    # Type checkers see the classes of Ray Train 1.
    trained: Any = _rank
    scaling = ScalingConfig(num_workers=workers, use_gpu=recipe.cluster.gpu != "cpu")
    if not _connected(recipe, fewest):
        return Outcome(EXIT_UNAVAILABLE)
    trainer: Any = TorchTrainer(
        trained,
        train_loop_config={
            "argv": spec.argv,
            "recipe": run.handed_over.read_text(encoding="utf-8"),
            "run_dir": str(spec.run_dir),
            "folder": str(Path.cwd()),
            "env": {**settings_here(), **spec.env},
            "offset": offset,
        },
        torch_config=_no_process_group(),
        scaling_config=scaling,
        run_config=RunConfig(
            name=spec.run_dir.name,
            storage_path=str(spec.run_dir / "launch" / "ray"),
            failure_config=FailureConfig(max_failures=recipe.launch.max_restarts),
        ),
    )
    try:
        return Outcome(trainer.fit().return_value)
    except TrainingFailedError as error:
        tell(f"error: Ray gave up: {_first_line(error)}")
        return Outcome(EXIT_FAILED, _first_line(error))
    finally:
        ray.shutdown()


def _ranks(recipe: Recipe) -> tuple[int, int]:
    """The fewest and the most ranks of a run."""
    cluster, elastic = recipe.cluster, recipe.launch.elastic
    if elastic is None:
        return cluster.world_size, cluster.world_size
    each = cluster.gpus_per_node
    return elastic.min_nodes * each, elastic.max_nodes * each


def _no_process_group() -> Any:
    """The TorchConfig of workers that join none, the ranks do, and that see all GPUs of their
    machine, as under torchrun."""
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class SharedDevices(Backend):
        share_cuda_visible_devices = True

    class NoProcessGroup(TorchConfig):
        @property
        def backend_cls(self) -> type[Backend]:
            return SharedDevices

    return NoProcessGroup()


def _connected(recipe: Recipe, fewest: int) -> bool:
    """Join or start Ray; report why it cannot run the ranks."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = recipe.launch.ray.address
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
    what = "CPU" if recipe.cluster.gpu == "cpu" else "GPU"
    there = int(ray.cluster_resources().get(what, 0))  # type: ignore[no-untyped-call]
    lacking = f"{fewest} ranks need a {what} each, Ray has {there}"
    if there < fewest and address is None:
        tell(f"error: {lacking}\n  fix: cluster.gpus_per_node as there are, or a Ray cluster")
        return False
    if there < fewest:
        tell(f"waiting: {lacking}")
    return True


def _rank(config: dict[str, Any]) -> int:
    """One Ray Train worker: run one rank, wait for it, and return its exit code. Raises
    RuntimeError when it failed."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank, run = context.get_world_rank(), RunDirectory(Path(config["run_dir"]))
    run.logs.mkdir(parents=True, exist_ok=True)
    run.handed_over.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(run.handed_over, config["recipe"])
    meeting: Any = None
    if rank == 0:
        events = read_events(run.events, config["offset"])
        meeting = {
            "MASTER_ADDR": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "MASTER_PORT": free_port(),
            MEETING: sum(event["kind"] == "start" for event in events),
        }
    places = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        **broadcast_from_rank_zero(meeting),
    }
    inherited = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS_VARIABLES}
    process = subprocess.Popen(
        config["argv"],
        env={**inherited, **config["env"], **{k: str(v) for k, v in places.items()}},
        cwd=config["folder"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    printed: Any = process.stdout
    copy_to_log(printed, run.rank_log(rank) if rank else _rank_0(run))
    code = process.wait()
    if code not in _ENDS:
        raise RuntimeError(f"rank {rank} ended with code {code}")
    return code


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
