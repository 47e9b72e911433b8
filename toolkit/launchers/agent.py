"""The agent of one machine: torch's elastic agent, whose ranks are those of `local`.

torch's agent lets machines meet, restarts all ranks if one fails, and if a machine waits to
join. In addition:

- Exit codes 0, 2, 3 and 75 end the run. Only a failure is started again. A newer checkpoint
  renews the restarts.
- Ranks that wait for a lost machine are killed as soon as that machine's agent is silent.
  `launch.hang_timeout_s` is only for ranks that hang by themselves.
- Before a machine joins, all ranks save the same step and leave. Their exit code 75 is not
  taken for the end of the run by an agent that sees it before it sees the new machine.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from toolkit.launchers.base import (
    LOOPBACK,
    NODE_ADDRESS,
    LaunchSpec,
    Meeting,
    free_port,
)
from toolkit.launchers.outcome import (
    USER_CODES,
    failure_reason,
    newest_step,
    not_retryable,
)
from toolkit.launchers.process import POLL_S, StopRequested, StopSignals
from toolkit.launchers.ranks import RankWatch
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog, cause_in
from toolkit.text.terminal import tell

JOIN_LIMIT_S = 600
"""How long an agent waits for the other machines, at the start and after a failure."""
RAY_JOIN_LIMIT_S = 30 * 24 * 3600
"""How long an agent waits under Ray. Ray starts the others when it has room, and its driver
gives up by itself."""
FIRST_CALL_S, LAST_CALL_S = 10, 3
"""How long the first meeting of an elastic run waits for more than `min_nodes` machines, and
how long one after that. A machine that comes later is taken in without the loss of a step."""
BEAT_S, BEATS = 2, 3
"""In an elastic run, a machine whose agent has been silent for six seconds is lost (torch: 5 s
and 3). All ranks wait for that. An agent is late only where memory runs out."""
_TALKATIVE = (
    "agent.server.api",
    "rendezvous.dynamic_rendezvous",
    "rendezvous.c10d_rendezvous_backend",
)
"""torch's modules that log a traceback where DMT tells one line."""
_RESIZING = "dmt/resizing"
"""Key in the store of a meeting: its ranks are stopped because a machine waits."""
_LEFT = "dmt/left"
"""Key in the store of a meeting: how many machines left it to meet again."""


def run_agent(spec: LaunchSpec, meeting: Meeting, signals: StopSignals) -> int:
    """Meet the other machines, start this one's ranks, and wait for the end of the run."""
    # In torch 2.13, ranks look for a shared store at the first meeting's rank 0, always.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name in _TALKATIVE:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    run = RunDirectory(spec.run_dir)
    events = EventLog(run.events)
    agent: Agent | None = None
    try:
        handler = _interruptible(lambda: get_rendezvous_handler(_parameters(meeting)), signals)
        agent = Agent(spec, meeting, handler, signals)
        agent.run()
        handler.shutdown()
        return agent.exit_code
    except StopRequested:
        # Before its first ranks, nothing was trained.
        met = agent is not None and agent.met
        return _stopped_before_restart(newest_step(run)) if met else EXIT_RESUMABLE
    except (OSError, RendezvousError, DistError) as error:
        if not meeting.several:
            raise
        return _without_the_others(events.new(), error)


def _without_the_others(events: Sequence[Mapping[str, Any]], error: Exception) -> int:
    """The exit code of a run whose other machines have left or did not come."""
    ends = [one for one in events if one["kind"] in ("start", "end")]
    code = ends[-1].get("exit_code") if ends else None
    if code in (EXIT_DONE, EXIT_RESUMABLE):
        return int(code)
    if cause := cause_in(events):
        tell(f"error: the run has failed: {cause['error']}")
        # A code that is never started again is that of the run, whichever rank ended last.
        codes = [one.get("exit_code") for one in ends]
        return next((int(one) for one in codes if one in USER_CODES), EXIT_FAILED)
    tell(f"error: the machines did not meet: {type(error).__name__}: {error}")
    return EXIT_FAILED


def _parameters(meeting: Meeting) -> RendezvousParameters:
    options: dict[str, Any] = {"join_timeout": JOIN_LIMIT_S, "read_timeout": JOIN_LIMIT_S}
    if meeting.elastic:
        options |= {"last_call_timeout": FIRST_CALL_S}
        options |= {"keep_alive_interval": BEAT_S, "keep_alive_max_attempt": BEATS}
    if not meeting.several:
        options |= {"local_addr": LOOPBACK}  # torch would ask for this machine's full name
    elif NODE_ADDRESS in os.environ:
        # They meet at the store of Ray's driver.
        options |= {"local_addr": os.environ[NODE_ADDRESS], "is_host": False}
        if not meeting.elastic:
            options |= {"join_timeout": RAY_JOIN_LIMIT_S}
    limits = meeting.least, meeting.most
    return RendezvousParameters("c10d", meeting.endpoint, meeting.name, *limits, **options)


def _interruptible(make: Callable[[], Any], signals: StopSignals) -> Any:
    """Return the result of `make`, or raise its error. Raises StopRequested while it waits in
    C++ code."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(make())
        except Exception as error:  # noqa: BLE001 - on its way to the caller
            results.append(error)

    with signals.raising():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


class Agent(SimpleElasticAgent):
    """An agent of one machine."""

    _store: Any

    def __init__(
        self, spec: LaunchSpec, meeting: Meeting, handler: Any, signals: StopSignals
    ) -> None:
        super().__init__(
            WorkerSpec(
                "ranks",
                len(spec.rank_env),
                handler,
                entrypoint=spec.argv[0],
                max_restarts=meeting.max_restarts,
                monitor_interval=1e-3,  # `RankWatch.watch` waits
            )
        )
        self.exit_code = EXIT_FAILED
        """The last one of this machine's ranks."""
        self._spec, self._signals, self._several = spec, signals, meeting.several
        self._directory = RunDirectory(spec.run_dir)
        self._events = EventLog(self._directory.events)
        self._newest = newest_step(self._directory)
        self._watch: RankWatch | None = None
        self.met: set[Any] = set()
        """The machines in the last meeting."""
        self._failed = False
        """Whether a rank of this machine has failed since that meeting."""
        self._restart: dict[str, Any] = {}
        """Fields of the event about the next restart, which a signal may still prevent."""

    def run(self, role: str = "default") -> RunResult:
        """Run torch's agent. Raises RendezvousClosedError for a machine that waited beyond
        `max_nodes` until the run ended. Raises StopRequested if it is asked to stop."""
        result: RunResult | None = super().run(role)
        if result is None:
            raise RendezvousClosedError
        return result

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """An event for torch's log, without this machine's full name. Looking it up waits each
        time if no name server answers."""
        return Event(state, source)

    @property
    def _meeting(self) -> Any:
        """The meeting as the store has it, at most a second old."""
        handler: Any = self._worker_group.spec.rdzv_handler
        handler.num_nodes_waiting()
        return handler._state_holder.state

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        if self._store is not None:
            self._store.add(_LEFT, 1)
        if self._meeting.round or self._meeting.complete:
            last_call = timedelta(seconds=LAST_CALL_S)
            handler.settings.timeout._set_timeouts(last_call=last_call)
        with self._signals.raising():
            super()._rendezvous(worker_group)
        self.met, self._failed = set(handler._state_holder.state.participants), False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's ranks, each with its place."""
        if self._restart and not self._several:  # where there are several, rank 0 writes it
            self._events.write("restart", **self._restart)
        self._restart = {}
        self._watch = RankWatch(self._placed(worker_group), self._signals)
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _placed(self, worker_group: WorkerGroup) -> LaunchSpec:
        """Give each rank its place among those of all machines, at a free port."""
        if not self._several:
            # Rank 0 listens there only after its imports: no port of outgoing connections.
            port = {"MASTER_PORT": str(free_port())}
            return replace(self._spec, env={**self._spec.env, **port})
        earlier = int(os.environ.get(MEETING, 0))  # of agents that Ray started before
        shared = {
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "LOCAL_WORLD_SIZE": str(len(worker_group.workers)),
            "GROUP_RANK": str(worker_group.group_rank),
            MEETING: str(earlier + self._meeting.round),
        }
        places = tuple(
            {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
            }
            for worker in worker_group.workers
        )
        return replace(self._spec, env={**self._spec.env, **shared}, rank_env=places)

    def _lost_a_machine(self) -> bool:
        """Whether a machine is gone from the meeting, other than to meet again with a new one.

        A single machine is never lost, as its own agent is late only after all processes
        paused.
        """
        if not self._several:
            return False
        missing = len(self.met - self._meeting.participants.keys())
        return missing > (self._store.add(_LEFT, 0) if missing and self._resizing() else 0)

    def _resizing(self) -> bool:
        return bool(self._store.check([_RESIZING]))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        watch = self._watch
        assert watch is not None
        if watch.watch():
            if not self._lost_a_machine():
                return RunResult(WorkerState.HEALTHY)
        elif set(watch.codes()) == {EXIT_DONE} or not self._resizing():
            return self._ended(watch, worker_group)
        self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    def _ended(self, watch: RankWatch, worker_group: WorkerGroup) -> RunResult:
        """Tell torch how to go on after the end of this machine's ranks."""
        self.exit_code, how = watch.outcome()
        code = self.exit_code
        if code in (EXIT_DONE, EXIT_RESUMABLE):
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=values)
        self._failed = True
        events = watch.events.new()
        reason, step = failure_reason(events, how), newest_step(self._directory)
        if not self._several:
            self._events.write("failure", exit_code=code, reason=reason)
        most = worker_group.spec.max_restarts
        if step > self._newest:
            self._newest, self._remaining_restarts = step, most
        attempt = most - self._remaining_restarts + 1
        ends = self._signals.stop_requested or code in USER_CODES
        if ends or not most or not_retryable(events):
            self._remaining_restarts = 0
        elif attempt > most:
            tell(
                f"error: {most} restarts in a row without a new checkpoint behind step {step}; "
                f"the last time {reason}"
            )
        else:
            tell(f"restart {attempt} of {most} from step {step}: {reason}")
            fields = {"attempt": attempt, "reason": reason, "from_step": step}
            self._restart = {"time": time.time(), **fields}
        return RunResult(WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a machine joins, let the ranks save. Kill what is left."""
        del worker_group
        watch = self._watch
        if watch is not None and not (self._failed or self._lost_a_machine()):
            self._store.set(_RESIZING, "")
            watch.stop()
            while None in watch.codes() and not self._lost_a_machine():
                time.sleep(POLL_S)
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Leave no rank behind."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _stopped_before_restart(step: int) -> int:
    """Tell that a signal came while no ranks ran. `step`: the newest one that is saved."""
    saved = f"step {step} is saved\n  fix: start the same command again to resume"
    tell(f"dmt: stopped by a signal before a restart; {saved if step else 'nothing was saved'}")
    return EXIT_RESUMABLE if step else EXIT_FAILED
