"""The driver of `launcher: ray`: `python -m toolkit.extras.launchers.ray_driver JSON`.

Every Ray Train worker is a machine of the run and starts `dmt launch` there. These agents meet,
start the ranks, and start them again when one fails, as on machines without Ray. Ray starts all
agents again when a machine is lost, and, with `launch.elastic`, when one joins.
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

from toolkit.errors import EXIT_FAILED, EXIT_UNAVAILABLE
from toolkit.extras.launchers.ray import INSTALL
from toolkit.extras.launchers.ray_job import agent_log, untold_end
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import NODE_ADDRESS, free_port, settings_here
from toolkit.launchers.process import die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.events import EventLog
from toolkit.run.recorded import read_events
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell


def main(given: Mapping[str, Any]) -> int:
    """Run the job of `argv`, `env` and `run_dir`; returns the first agent's exit code, or one
    of errors.py, about which it tells."""
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
    machines: Any = cluster.nodes
    if elastic is not None:
        machines = (elastic.min_nodes, elastic.max_nodes)
    device = "CPU" if cluster.gpu == "cpu" else "GPU"
    fewest = cluster.nodes if elastic is None else elastic.min_nodes
    if not _connected(recipe, device, fewest):
        return EXIT_UNAVAILABLE
    # Type checkers see the classes of Ray Train 1.
    agent: Any = _agent
    trainer: Any = TorchTrainer(
        agent,
        train_loop_config={
            **given,
            "several": recipe.launch.most_nodes(cluster.nodes) > 1,
            "offset": events_offset(run.path),
            "folder": str(Path.cwd()),
            "env": {**settings_here(), **given["env"]},
        },
        torch_config=_no_process_group(),
        scaling_config=ScalingConfig(
            num_workers=machines,
            use_gpu=device == "GPU",
            resources_per_worker={device: cluster.gpus_per_node},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=run.path.name,
            storage_path=str(run.path / "launch" / "ray"),
            failure_config=FailureConfig(max_failures=recipe.launch.max_restarts),
            callbacks=[_failures(run)],
        ),
    )
    try:
        code = trainer.fit().return_value
    except TrainingFailedError as error:
        tell(f"error: Ray gave up: {_cause(error)}")
        return EXIT_FAILED
    finally:
        ray.shutdown()
    if code is None:
        tell("error: Ray lost how the first agent ended")
    return EXIT_FAILED if code is None else int(code)


def _no_process_group() -> Any:
    """The configuration of workers that join no process group: the ranks do."""
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class NoProcessGroup(TorchConfig):
        @property
        def backend_cls(self) -> type[Backend]:
            return Backend

    return NoProcessGroup()


def _failures(run: RunDirectory) -> Any:
    """The callback that records lost agents, whose ranks cannot."""
    from ray.train import UserCallback

    class Failures(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Any]) -> None:
            del run_context
            reason = _of_first(worker_exceptions)
            EventLog(run.events).write("failure", exit_code=EXIT_FAILED, reason=reason)

    return Failures()


def _connected(recipe: Recipe, device: str, fewest: int) -> bool:
    """Join or start Ray; report why it has no place for the `fewest` machines."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(
            address=address or "local",
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        tell(f"error: no Ray at RAY_ADDRESS={address}: {_first_line(error)}")
        tell("  fix: `ray start --head` there, or unset it")
        return False
    each = recipe.cluster.gpus_per_node
    there = [
        (int(node["Resources"].get(device, 0)), node["NodeManagerAddress"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    if sum(devices // each for devices, _ in there) >= fewest:
        return True
    found = ", ".join(f"{devices} at {node}" for devices, node in there)
    lacking = f"{fewest} machine(s) must have {each} {device}(s) each, Ray has {found}"
    if address is None:
        tell(f"error: {lacking}\n  fix: cluster.gpus_per_node as there are, or a Ray cluster")
        return False
    tell(f"waiting: {lacking}")
    return True


def _agent(config: dict[str, Any]) -> int:
    """One Ray Train worker: run `dmt launch` on this machine; returns its exit code."""
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    run = RunDirectory(Path(config["run_dir"]))
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = f"[{address}]" if ":" in address else address
    kinds = [event["kind"] for event in read_events(run.events, config["offset"])]
    before = max(kinds.count("start"), kinds.count("failure"))  # some die before their start
    # The first agent's, for all: a shared disk may show them different events.
    meeting, before = broadcast_from_rank_zero((f"{host}:{free_port()}", before))
    set_by_ray = ["--set", f"launch.rendezvous={meeting}"] if config["several"] else []
    # Ray's own threads are those of one worker, not of a machine's ranks.
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [*config["argv"], *set_by_ray],
        env={**inherited, **config["env"], MEETING: str(before), NODE_ADDRESS: address},
        cwd=config["folder"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    printed: Any = process.stdout
    run.logs.mkdir(parents=True, exist_ok=True)
    with process:
        copy_to_log(printed, agent_log(run, get_context().get_world_rank()))
    if how := untold_end(process.returncode):
        raise RuntimeError(f"dmt launch ended: {how}")  # Ray starts all agents again
    return process.returncode


def _cause(error: Any) -> str:
    """What Ray says about a failure, e.g. a machine that is gone."""
    if workers := getattr(error, "worker_failures", None):
        return _of_first(workers)
    return _first_line(getattr(error, "controller_failure", error))


def _of_first(failures: Mapping[int, BaseException]) -> str:
    number = min(failures)
    return f"machine {number}: {_first_line(failures[number])}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
