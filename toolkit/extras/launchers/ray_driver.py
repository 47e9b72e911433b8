"""The driver of `launcher: ray`: `python -m toolkit.extras.launchers.ray_driver JSON`.

A Ray task on every machine of the run starts `dmt launch` there. These agents meet at the
driver's store, start the ranks, and start them again when one fails, as on machines without
Ray. An agent that is lost with its machine is started again where Ray has room, also later.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import EXIT_FAILED, EXIT_UNAVAILABLE
from toolkit.extras.launchers.ray import INSTALL
from toolkit.extras.launchers.ray_job import agent_log, untold_end
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import NODE_ADDRESS, free_port, settings_here
from toolkit.launchers.process import FAILED_GRACE_S, die_with_parent
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.events import EventLog
from toolkit.run.recorded import read_events
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell

_ANSWER_S = 10.0
"""Time that a Ray cluster has to take a connection."""


def main(given: Mapping[str, Any]) -> int:
    """Run the job of `argv`, `env` and `run_dir`; returns the exit code of the agent that ends
    first, or one of errors.py, about which it tells."""
    try:
        return _train(given)
    except ImportError as error:
        tell(f"error: Ray cannot be imported ({error})\n  fix: {INSTALL}")
        return EXIT_UNAVAILABLE
    except Exception as error:  # noqa: BLE001 - Ray's own are of many kinds
        tell(f"error: Ray: {type(error).__name__}: {_first_line(error)}")
        return EXIT_FAILED


def _train(given: Mapping[str, Any]) -> int:
    """Join or start Ray, run an agent on each machine, and wait for the end of the run."""
    import ray

    run = RunDirectory(Path(given["run_dir"]))
    recipe = load_recipe(run.handed_over)
    cluster, elastic = recipe.cluster, recipe.launch.elastic
    device = "CPU" if cluster.gpu == "cpu" else "GPU"
    fewest = cluster.nodes if elastic is None else elastic.min_nodes
    if not _connected(recipe, device, fewest):
        return EXIT_UNAVAILABLE
    machines = recipe.launch.most_nodes(cluster.nodes)
    config = {
        **given,
        "offset": events_offset(run.path),
        "folder": str(Path.cwd()),
        "env": {**settings_here(), **given["env"]},
    }
    if machines > 1:
        _store, config["meeting"] = _meeting_point()  # it listens as long as it exists
    devices: Any = {"num_cpus": 0, f"num_{device.lower()}s": cluster.gpus_per_node}
    task = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **devices)(_agent)
    try:
        restarts = recipe.launch.max_restarts
        return _run_agents(lambda n: task.remote(config, n), fewest, machines, restarts, run)
    finally:
        ray.shutdown()


def _meeting_point() -> tuple[Any, str]:
    """A store on this machine, where agents meet, and its address."""
    import ray
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    port = free_port()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    return store, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _run_agents(
    start: Callable[[int], Any],
    fewest: int,
    machines: int,
    max_restarts: int,
    run: RunDirectory,
) -> int:
    """Start an agent for each machine, and again what is lost, `max_restarts` times in all;
    then give up if fewer than `fewest` are left."""
    import ray

    running = {start(number): number for number in range(machines)}
    while True:
        (ended,), others = ray.wait([*running], num_returns=1)
        number = running.pop(ended)
        try:
            code: int = ray.get(ended)
        except ray.exceptions.RayError as error:
            reason = f"machine {number}: {_first_line(getattr(error, 'cause', error))}"
            if len(running) >= fewest:  # which train, perhaps since before Ray knew of this
                EventLog(run.events).write("warning", source="ray", message=reason)
            else:
                EventLog(run.events).write("failure", exit_code=EXIT_FAILED, reason=reason)
            if max_restarts:
                max_restarts -= 1
                running[start(number)] = number
            elif len(running) < fewest:
                tell(f"error: Ray gave up: {reason}")
                return EXIT_FAILED
        else:
            if others:  # they end, too, or wait for a place
                ray.wait(others, num_returns=len(others), timeout=FAILED_GRACE_S)
            return code


def _connected(recipe: Recipe, device: str, fewest: int) -> bool:
    """Join or start Ray; report why it has no place for the `fewest` machines."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS") or None
    try:
        host, _, port = (address or "").rpartition(":")
        if port.isdigit() and "//" not in host:  # where nothing listens, Ray tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        ray.init(
            address=address or "local",
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except OSError as error:
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


def _agent(config: dict[str, Any], number: int) -> int:
    """The task of one machine: run `dmt launch` there; returns its exit code."""
    import ray

    run = RunDirectory(Path(config["run_dir"]))
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    kinds = [event["kind"] for event in read_events(run.events, config["offset"])]
    starts = max(kinds.count("start"), kinds.count("failure"))  # some die before their start
    meeting = config.get("meeting")
    set_by_ray = ["--set", f"launch.rendezvous={meeting}"] if meeting else []
    # Ray's own threads are those of one task, not of a machine's ranks.
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [*config["argv"], *set_by_ray],
        env={**inherited, **config["env"], MEETING: str(starts), NODE_ADDRESS: address},
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
        copy_to_log(printed, agent_log(run, number))
    if how := untold_end(process.returncode):
        raise RuntimeError(f"dmt launch ended: {how}")  # the driver starts it again
    return process.returncode


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
