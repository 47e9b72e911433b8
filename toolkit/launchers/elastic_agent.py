"""torchrun's agent for several machines, also for those that are lost, return or are added.

    python -m toolkit.launchers.elastic_agent ARGUMENTS

torch's agent restarts its ranks if one fails, and if a machine waits to join. In addition:

- Ranks that wait for a lost machine are killed as soon as that machine's agent is silent;
  `launch.hang_timeout_s` is only for ranks that hang by themselves.
- Before a machine joins, all ranks save the same step and leave. They have `launch.grace_s` to
  do that (torch 2.13: 30 s, whatever `--shutdown-timeout` says), and their exit code 75 is not
  taken for the end of the run by an agent that sees it before it sees the new machine.
- Restarts count as those of `supervisor`: a newer checkpoint resets their number.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.launcher import api

from toolkit.errors import EXIT_RESUMABLE
from toolkit.launchers.process import POLL_S
from toolkit.launchers.quiet_agent import ELASTIC, ENDS, main
from toolkit.launchers.supervisor import newest_step
from toolkit.launchers.waiting import reading_ahead
from toolkit.run.assignment import MEETING
from toolkit.run.directory import RunDirectory

LAST_CALL_S = 3
"""How long a meeting after the first waits for machines that should come: their agents do so
within about a second of each other."""
_KILLED_S = 5
_RESIZING = "dmt/resizing"
"""Key in the store of a meeting: its ranks are stopped because a machine waits."""
_LEFT = "dmt/left"
"""Key in the store of a meeting: how many machines left it to meet again."""


def wait_only_for_those_here(handler: Any, most: int) -> None:
    """Let the next meeting, of `most` machines in all, be complete as soon as all have come
    that are left or wait; if one of them does not come, after LAST_CALL_S.

    This machine counts, also where the others have given it up. What they agree on without it
    would make it a spare: it waits for a meeting after that when the limit is lifted again.
    """
    handler.num_nodes_waiting()  # reads the store
    now, settings = handler._state_holder.state, handler.settings
    those = {handler._this_node, *now.participants, *now.wait_list, *now.redundancy_list}

    def limit(nodes: int) -> None:
        object.__setattr__(settings, "max_nodes", nodes)  # frozen, but read each time

    limit(max(settings.min_nodes, min(len(those), most)))
    lifting = threading.Timer(2 * LAST_CALL_S, limit, (most,))
    lifting.daemon = True
    lifting.start()


class ElasticAgent(LocalElasticAgent):
    """An agent of one machine."""

    _store: Any
    _pcontext: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._run = RunDirectory(Path(os.environ[ELASTIC]))
        self._newest = newest_step(self._run)
        handler: Any = self._worker_group.spec.rdzv_handler
        self._most = handler.settings.max_nodes
        self._met: set[Any] = set()
        """The machines of the last meeting."""
        self._failed = False
        """Whether a rank of this machine has failed since."""

    def run(self, role: str = "default") -> RunResult:
        """See ElasticAgent of torch. Raises RendezvousClosedError for a spare at the end of the
        run, of which torch's has no result."""
        result: RunResult | None = super().run(role)
        if result is None:
            raise RendezvousClosedError
        return result

    @property
    def _meeting(self) -> Any:
        """The meeting as the store has it; at most a second old."""
        handler: Any = self._worker_group.spec.rdzv_handler
        handler.num_nodes_waiting()
        return handler._state_holder.state

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        if self._store is not None:
            self._store.add(_LEFT, 1)
            wait_only_for_those_here(handler, self._most)
        if self._meeting.round or self._meeting.complete:
            last_call = timedelta(seconds=LAST_CALL_S)
            handler.settings.timeout._set_timeouts(last_call=last_call)
        with reading_ahead(self._run.handed_over):
            super()._rendezvous(worker_group)
        self._met, self._failed = set(handler._state_holder.state.participants), False
        for end in Path(os.environ[ENDS]).iterdir():
            end.unlink()  # of the ranks before
        os.environ[MEETING] = str(handler._state_holder.state.round)

    def _lost_a_machine(self) -> bool:
        """Whether one of the meeting is gone, other than to meet again with a new one."""
        missing = len(self._met - self._meeting.participants.keys())
        return missing > (self._store.add(_LEFT, 0) if missing and self._resizing() else 0)

    def _resizing(self) -> bool:
        return bool(self._store.check([_RESIZING]))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            if not self._lost_a_machine():
                return result
        elif result.state == WorkerState.SUCCEEDED:
            if not (self._stopped() and self._resizing()):
                return result
        elif not self._resizing():
            self._failed = True
            self._count()
            return result
        self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    def _stopped(self) -> bool:
        """Whether ranks have saved and left after a signal."""
        return (Path(os.environ[ENDS]) / str(EXIT_RESUMABLE)).exists()

    def _count(self) -> None:
        """Reset the number of restarts if a newer checkpoint is there."""
        step = newest_step(self._run)
        if step > self._newest:
            self._newest = step
            self._remaining_restarts = self._worker_group.spec.max_restarts

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        del worker_group
        if not (self._failed or self._lost_a_machine()):
            self._store.set(_RESIZING, "")
            self._save_and_leave()
        self._shutdown(signal.SIGKILL, _KILLED_S)

    def _save_and_leave(self) -> None:
        """Signal the ranks, and wait until they are gone, their time is over, or a machine that
        they need is lost."""
        deadline = time.monotonic() + self._shutdown_timeout
        processes = [one.proc for one in self._pcontext.subprocess_handlers.values()]
        for process in processes:
            process.terminate()
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or self._lost_a_machine():
                return
            time.sleep(POLL_S)


if __name__ == "__main__":
    api.LocalElasticAgent = ElasticAgent  # type: ignore[attr-defined]  # no option names one
    sys.exit(main(sys.argv[1:]))
