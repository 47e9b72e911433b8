"""The driver of `launcher: ray`: `python -m toolkit.extras.launchers.ray_driver JSON`.

Every Ray Train worker runs one rank in a process of its own, so that signals, exit codes and
time limits work as under any launcher. A failed rank fails its worker, and Ray restarts all of
them. A user's mistake does not, nor a failure after `launch.max_restarts` restarts in a row
from the same checkpoint.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_UNAVAILABLE
from toolkit.extras.launchers.ray import INSTALL
from toolkit.extras.launchers.ray_job import rank_0
from toolkit.extras.launchers.ray_record import RayRecord, restarts_in_a_row
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import RENDEZVOUS_VARIABLES, free_port, settings_here
from toolkit.launchers.outcome import USER_CODES, RankExit, given_up, newest_step
from toolkit.launchers.process import die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.recorded import read_events
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell

_ENDS = (EXIT_DONE, EXIT_RESUMABLE, *USER_CODES)
"""Exit codes of ranks that are not started again."""


def main(given: Mapping[str, Any]) -> int:
    """Run the job of `argv`, `env` and `run_dir`; returns rank 0's exit code, or one of
    errors.py, about which it tells."""
    try:
        return _train(given)
    except ImportError as error:
        tell(f"error: Ray Train cannot be imported ({error})\n  fix: {INSTALL}")
        return EXIT_UNAVAILABLE
    except Exception as error:  # noqa: BLE001 - Ray's own are of many kinds
        tell(f"error: Ray: {type(error).__name__}: {_first_line(error)}")
        return EXIT_FAILED


def _train(given: Mapping[str, Any]) -> int:
    """Join or start Ray, run the job, and wait for its end."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    run = RunDirectory(Path(given["run_dir"]))
    recipe = load_recipe(run.handed_over)
    cluster, elastic = recipe.cluster, recipe.launch.elastic
    workers: Any = cluster.world_size
    if elastic is not None:
        nodes = elastic.min_nodes, elastic.max_nodes
        workers = tuple(each * cluster.gpus_per_node for each in nodes)
    if not _connected(recipe, workers if elastic is None else workers[0]):
        return EXIT_UNAVAILABLE
    # `begin` counts failures, and knows which restarts made progress: Ray does not.
    failures = FailureConfig(max_failures=-1 if recipe.launch.max_restarts else 0)
    # Type checkers see the classes of Ray Train 1.
    trained: Any = _rank
    trainer: Any = TorchTrainer(
        trained,
        train_loop_config={
            **given,
            "recipe": run.handed_over.read_text(encoding="utf-8"),
            "max_restarts": recipe.launch.max_restarts,
            "folder": str(Path.cwd()),
            "env": {**settings_here(), **given["env"]},
        },
        torch_config=_no_process_group(),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=cluster.gpu != "cpu"),
        run_config=RunConfig(
            name=run.path.name,
            storage_path=str(run.path / "launch" / "ray"),
            failure_config=failures,
        ),
    )
    try:
        code = trainer.fit().return_value
    except TrainingFailedError as error:
        attempts = RayRecord(run).attempts()
        if not attempts or not attempts[-1].failed:  # otherwise the launcher names the rank
            tell(f"error: Ray gave up: {_cause(error)}")
        return EXIT_FAILED
    finally:
        ray.shutdown()
    if code is None:
        tell("error: Ray lost how rank 0 ended")
    return EXIT_FAILED if code is None else int(code)


def _no_process_group() -> Any:
    """The configuration of workers that join no process group, as the ranks do, and that see
    all GPUs of their machine, as under torchrun."""
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
    RuntimeError when it failed and may be started again."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    run = RunDirectory(Path(config["run_dir"]))
    run.logs.mkdir(parents=True, exist_ok=True)
    run.handed_over.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(run.handed_over, config["recipe"])
    meeting = None
    if rank == 0 and (number := begin(run, world, config["max_restarts"])) is not None:
        meeting = {
            "MASTER_ADDR": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "MASTER_PORT": free_port(),
            MEETING: number,
        }
    meeting = broadcast_from_rank_zero(meeting)
    if meeting is None:
        return EXIT_FAILED
    places = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        **meeting,
    }
    ended = RankExit(rank, _run(config, places))
    RayRecord(run).end(ended)
    if ended.code not in _ENDS and not _final(run):
        raise RuntimeError(ended.describe())
    return ended.code


def begin(run: RunDirectory, world: int, max_restarts: int) -> int | None:
    """Note an attempt of `world` ranks in the record; returns how many came before it.

    None after the last restart that `launch.max_restarts` allows. Messages go to the file that
    the launcher shows.
    """
    record, step = RayRecord(run), newest_step(run)
    attempts = record.attempts()
    if attempts and attempts[-1].world == world:
        number, reason = restarts_in_a_row(attempts, step, world) + 1, attempts[-1].reason
        message = f"restart {number} of {max_restarts} from step {step}: {reason}"
        if number > max_restarts:
            message = given_up(max_restarts, step, reason)
        with rank_0(run).open("a", encoding="utf-8") as shown:
            tell(message, shown)
        if number > max_restarts:
            return None
    record.begin(events_offset(run.path), step, world)
    return len(attempts)


def _run(config: Mapping[str, Any], places: Mapping[str, Any]) -> int:
    """Run a rank's process; returns its exit code."""
    run, rank = RunDirectory(Path(config["run_dir"])), places["RANK"]
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
    copy_to_log(printed, run.rank_log(rank) if rank else rank_0(run))
    return process.wait()


def _final(run: RunDirectory) -> bool:
    """Whether a rank of this attempt reported a failure that would come again."""
    last = RayRecord(run).attempts()[-1:]
    events = read_events(run.events, last[0].offset) if last else []
    ends = [event for event in events if event["kind"] == "end"]
    return any(e.get("exit_code") in USER_CODES or e.get("retry") is False for e in ends)


def _cause(error: Any) -> str:
    """What Ray says about a failure that is no rank's, e.g. a machine that is gone."""
    workers = getattr(error, "worker_failures", None) or {}
    lines = [f"rank {rank}: {_first_line(one)}" for rank, one in sorted(workers.items())]
    return lines[0] if lines else _first_line(getattr(error, "controller_failure", error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
