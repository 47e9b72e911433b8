"""The driver of `launcher: ray`: `python -m toolkit.extras.launchers.ray_driver JSON`.

Every Ray Train worker runs one rank in a process of its own, so that signals, exit codes and
time limits work as under any launcher. A failed rank fails its worker, and Ray restarts all of
them; a user's mistake does not.
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
from toolkit.extras.launchers.ray_job import rank_0
from toolkit.extras.launchers.ray_record import RayRecord
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import RENDEZVOUS_VARIABLES, free_port, settings_here
from toolkit.launchers.outcome import USER_CODES, RankExit
from toolkit.launchers.process import die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events
from toolkit.system.atomic import write_atomically
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell

_ENDS = (EXIT_DONE, EXIT_RESUMABLE, *USER_CODES)
"""Exit codes of ranks that Ray does not start again."""


def main(given: Mapping[str, Any]) -> int:
    """Run the job of `argv`, `env` and `run_dir`; returns rank 0's exit code, or one of
    errors.py, about which it tells."""
    try:
        return _train(given)
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
    fewest, most = _ranks(recipe)
    workers: Any = most if fewest == most else (fewest, most)
    # Type checkers see the classes of Ray Train 1.
    trained: Any = _rank
    scaling = ScalingConfig(num_workers=workers, use_gpu=recipe.cluster.gpu != "cpu")
    if not _connected(recipe, fewest):
        return EXIT_UNAVAILABLE
    trainer: Any = TorchTrainer(
        trained,
        train_loop_config={
            **given,
            "recipe": run.handed_over.read_text(encoding="utf-8"),
            "folder": str(Path.cwd()),
            "env": {**settings_here(), **given["env"]},
        },
        torch_config=_no_process_group(),
        scaling_config=scaling,
        run_config=RunConfig(
            name=run.path.name,
            storage_path=str(run.path / "launch" / "ray"),
            failure_config=FailureConfig(max_failures=recipe.launch.max_restarts),
        ),
    )
    try:
        code = trainer.fit().return_value
    except TrainingFailedError as error:
        if not RayRecord(run).last()[1]:  # otherwise the launcher names the rank
            tell(f"error: Ray gave up: {_cause(error)}")
        return EXIT_FAILED
    finally:
        ray.shutdown()
    if code is None:
        tell("error: Ray lost how rank 0 ended")
    return EXIT_FAILED if code is None else int(code)


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
    record, meeting = RayRecord(run), None
    if rank == 0:
        meeting = {
            "MASTER_ADDR": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "MASTER_PORT": free_port(),
            MEETING: record.begin(),
        }
    places = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        **broadcast_from_rank_zero(meeting),
    }
    ended = RankExit(rank, _run(config, places))
    record.end(ended)
    if ended.code not in _ENDS and not _final(run, record):
        raise RuntimeError(ended.describe())
    return ended.code


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


def _final(run: RunDirectory, record: RayRecord) -> bool:
    """Whether a rank of this attempt reported a failure that would come again."""
    offset = record.last()[0]
    events = [] if offset is None else read_events(run.events, offset)
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
