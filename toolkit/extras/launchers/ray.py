"""`ray`: actors of Ray, one per machine, in which `dmt launch` runs.

Ray's driver is a child in a session of its own, `python -m toolkit.extras.launchers.ray JSON`:
neither a terminal nor `kill -PGID` reaches it and what it starts, only this launcher. The
agents meet at the driver's store, start the ranks, and start them again when one fails, as on
machines without Ray. An agent that is lost with its machine is started again where Ray has
room, also later. On the disk that all machines share, they leave their output for the terminal.
"""

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    NODE_ADDRESS,
    Job,
    LaunchSpec,
    free_port,
    settings_here,
)
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import (
    FAILED_GRACE_S,
    ORPHAN_GRACE_S,
    StopSignals,
    die_with_parent,
)
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.system.install import install
from toolkit.system.interpreter import python, safe_path
from toolkit.text.redact import copy_to_log
from toolkit.text.terminal import tell

_POLL_S = 1.0
_ANSWER_S = 10.0
"""Time that a Ray cluster has to take a connection."""
_DRIVER = ("-u", "-m", "toolkit.extras.launchers.ray")
_NOT_TRAINING = "dmt: stopped by a signal while no rank trained"


class RayStarter:
    """A job of Ray, whose driver is a child of this process."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the command of each machine. See Starter."""
        if importlib.util.find_spec("ray") is None:
            raise BackendUnavailable(
                "launch.launcher is ray: Ray is not installed", fix=install("ray")
            )
        launch = (*DMT, "launch", str(job.recipe_file), "--run-dir", str(job.run_dir))
        return LaunchSpec(
            (*python(), "-u", *launch, "--launcher", "local"),
            job.run_dir,
            env={"PYTHONSAFEPATH": "1"} if safe_path() else {},
            files={job.recipe_file: job.recipe},
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> int:
        """Start the driver and wait. See Starter. A request to stop reaches every machine's
        agent."""
        run = RunDirectory(spec.run_dir)
        events, shown = EventLog(run.events), _sizes(run)
        code: int | None = None
        with _driver(spec) as driver:
            stopping = False
            while code is None and not signals.kill_requested:
                if signals.stop_requested and not stopping:
                    stopping = True
                    tell("stopping: asking the machines")
                    driver.terminate()
                with suppress(subprocess.TimeoutExpired):
                    code = driver.wait(_POLL_S)
                _show_output(run, shown)
        _show_output(run, shown)
        if code is None:
            code = EXIT_FAILED
            tell("error: the ranks were killed, as requested")
        elif how := _untold_end(code):
            trained = any(event["kind"] == "start" for event in events.new())
            waited = stopping and not trained
            code = EXIT_RESUMABLE if waited else EXIT_FAILED
            tell(_NOT_TRAINING if waited else f"error: Ray's driver ended: {how}")
        return code


@contextmanager
def _driver(spec: LaunchSpec) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the driver. When this is left, no process of its session is left behind."""
    given = {"argv": spec.argv, "env": dict(spec.env), "run_dir": str(spec.run_dir)}
    driver = subprocess.Popen(
        (*python(), *_DRIVER, json.dumps(given)),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    try:
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def _untold_end(code: int) -> str:
    """How a process ended that told nothing itself. Empty if its code is one of errors.py."""
    if code in (EXIT_DONE, EXIT_RESUMABLE, EXIT_FAILED, *USER_CODES):
        return ""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def agent_log(run: RunDirectory, machine: int | str) -> Path:
    """The file with what one machine's agent prints, rank 0 included."""
    return run.logs / f"ray-{machine}.log"


def _sizes(run: RunDirectory) -> dict[Path, int]:
    """Bytes in the log of each machine's agent."""
    return {log: log.stat().st_size for log in run.logs.glob(agent_log(run, "*").name)}


def _show_output(run: RunDirectory, shown: dict[Path, int]) -> None:
    """Print what agents have written behind the bytes `shown`, which this brings up to date."""
    for log in sorted(run.logs.glob(agent_log(run, "*").name)):
        with suppress(OSError), log.open("rb") as file:
            file.seek(shown.get(log, 0))
            print(file.read().decode(errors="replace"), end="", file=sys.stderr, flush=True)
            shown[log] = file.tell()


def main(given: Mapping[str, Any]) -> int:
    """Run the job of `argv`, `env` and `run_dir`. Returns the exit code of the agent that ends
    first, or one of errors.py, about which it tells."""
    try:
        return _train(given)
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
        "offset": EventLog(run.events).begins,
        "folder": str(Path.cwd()),
        "env": {**settings_here(), **given["env"]},
    }
    if machines > 1:
        _store, config["meeting"] = _meeting_point()  # it listens as long as it exists
    options: Any = {
        "num_cpus": 0,
        f"num_{device.lower()}s": cluster.gpus_per_node,
        "scheduling_strategy": "SPREAD",
        "max_concurrency": 2,  # one thread waits for the agent, another may ask it to stop
    }
    actor: Any = ray.remote(**options)(RayMachine)
    try:
        with StopSignals() as signals:
            restarts = recipe.launch.max_restarts
            return _run_agents(
                lambda n: actor.remote(config, n), fewest, machines, restarts, run, signals
            )
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
    signals: StopSignals,
) -> int:
    """Start an agent for each machine, and again what is lost, `max_restarts` times in all.
    Then give up if fewer than `fewest` are left. A request to stop is passed on once. All that
    have a place may save then, whichever ends first."""
    import ray

    agents = {number: start(number) for number in range(machines)}
    running = {agent.run.remote(): number for number, agent in agents.items()}
    asked: dict[Any, int] = {}
    stopped = False
    """Whether one has ended as it was asked to; it may have waited for a place."""
    while True:
        if signals.stop_requested and not asked:
            asked = {agents[number].stop.remote(): number for number in running.values()}
            # Those for which Ray has no room never answer.
            if not ray.wait([*asked], num_returns=1, timeout=ORPHAN_GRACE_S)[0]:
                tell(_NOT_TRAINING)
                return EXIT_RESUMABLE
        ended, others = ray.wait([*running], num_returns=1, timeout=_POLL_S)
        if not ended:
            continue
        number = running.pop(ended[0])
        answered = ray.wait([*asked], num_returns=len(asked), timeout=0)[0] if asked else []
        saving = {asked[one] for one in answered} & {*running.values()}
        try:
            code: int = ray.get(ended[0])
        except ray.exceptions.RayError as error:
            reason = f"machine {number}: {_first_line(getattr(error, 'cause', error))}"
            if len(running) >= fewest or saving or stopped:
                # The others train or save, perhaps since before Ray knew of this.
                EventLog(run.events).write("warning", source="ray", message=reason)
            else:
                EventLog(run.events).write("failure", exit_code=EXIT_FAILED, reason=reason)
            if max_restarts and not asked:
                max_restarts -= 1
                agents[number] = start(number)
                running[agents[number].run.remote()] = number
            elif stopped and not saving:
                return EXIT_RESUMABLE
            elif len(running) < fewest and not saving:
                tell(f"error: Ray gave up: {reason}")
                return EXIT_FAILED
        else:
            if code == EXIT_RESUMABLE and saving:
                stopped = True
                continue
            if others:  # they end, too, or wait for a place
                ray.wait(others, num_returns=len(others), timeout=FAILED_GRACE_S)
            return code


def _connected(recipe: Recipe, device: str, fewest: int) -> bool:
    """Join or start Ray. Report why it has no room for the `fewest` machines."""
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


class RayMachine:
    """The actor of one machine, in which `dmt launch` runs."""

    def __init__(self, config: dict[str, Any], number: int) -> None:
        self._config, self._number = config, number
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run `dmt launch`. Returns its exit code."""
        import ray

        config, run = self._config, RunDirectory(Path(self._config["run_dir"]))
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        kinds = [event["kind"] for event in EventLog(run.events, config["offset"]).new()]
        starts = max(kinds.count("start"), kinds.count("failure"))  # some die before theirs
        meeting = config.get("meeting")
        set_by_ray = ["--set", f"launch.rendezvous={meeting}"] if meeting else []
        # Ray's own threads are those of one actor, not of a machine's ranks.
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        run.logs.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
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
        if self._stopping:
            self.stop()
        with self._process as process:
            printed: Any = process.stdout
            copy_to_log(printed, agent_log(run, self._number))
        if self._stopping and process.returncode == -signal.SIGTERM:
            return EXIT_RESUMABLE  # before it listened, and so before its first ranks
        if how := _untold_end(process.returncode):
            raise RuntimeError(f"dmt launch ended: {how}")  # the driver starts it again
        return process.returncode

    def stop(self) -> None:
        """Ask `dmt launch` to stop."""
        self._stopping = True
        if self._process is not None:
            self._process.terminate()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
