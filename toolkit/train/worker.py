"""The worker: one rank of a run, under any launcher.

`train_run_directory` continues from a run directory that `dmt launch` wrote. `train_recipe` is
for launchers that start the worker themselves: rank 0 plans, writes the run directory and
broadcasts recipe and plan, so that no shared disk is needed. `stages.Stages` does the work.
Here is what surrounds it: the assignment, and what every outcome becomes.
"""

import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import transformers

from toolkit.engines import deterministic
from toolkit.engines.distributed import Ranks, join, leave, rank_here
from toolkit.errors import EXIT_DONE, EXIT_FAILED, BackendUnavailable, DmtError, Stopped
from toolkit.run.announce import show_results
from toolkit.run.assignment import Assignment, assign, read_assignment
from toolkit.run.claim import claim
from toolkit.run.directory import RunDirectory
from toolkit.run.events import PEER_LOST, cause_in
from toolkit.run.rank_log import setup_rank_logging
from toolkit.system.failpoints import failpoint
from toolkit.text.terminal import survive_lost_output, tell
from toolkit.train.all_ranks import AllRanks, PeerFailed
from toolkit.train.gpu_memory import out_of_memory
from toolkit.train.shared import Worker
from toolkit.train.stages import Stages
from toolkit.train.watchdog import FLIGHT_RECORDER, WAITING, Marks

logger = logging.getLogger(__name__)

_PEER_LOST = re.compile(r"gloo/transport|by peer|ncclRemoteError|NCCL communicator was aborted")
"""Text in PyTorch's errors about a collective whose peer died."""

_INTERRUPTED = "ended by the third Ctrl-C; what was being saved is not a checkpoint"

PEER_FAILED_PAUSE_S = 1.0
"""How much later than the rank with the message the others exit."""


def train_run_directory(path: Path) -> int:
    """Train as the run directory states. Return the exit code of this rank."""
    return _guarded(lambda ranks: read_assignment(path, ranks.world))


def train_recipe(recipe: Path, overrides: Sequence[str], run_dir: Path | None) -> int:
    """Plan a recipe for the ranks that a launcher started, and train it."""
    return _guarded(lambda ranks: assign(recipe, overrides, run_dir, sys.argv, ranks.world))


def _guarded(make_assignment: Callable[[Ranks], Assignment]) -> int:
    """Run one rank and turn every outcome into an exit code, a log line and an event."""
    survive_lost_output()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.captureWarnings(True)
    # Until training starts there is nothing to save: Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker: Stages | None = None
    try:
        with Marks(rank_here()) as marks:
            marks.begin(WAITING)
            os.environ.update({**FLIGHT_RECORDER, **os.environ})
            ranks = join()
            together = AllRanks(ranks, marks.begin)
            marks.begin("planning")
            assignment = together.rank_zero(lambda: _on_device(make_assignment(ranks), ranks))
            _on_device(assignment, ranks)  # one message, rank 0's, if no rank has a GPU
            if assignment.recipe.training.deterministic:
                deterministic.switch_on(os.environ, on_gpu=ranks.device.type == "cuda")
            directory = RunDirectory(assignment.run_dir)
            together.rank_zero(lambda: claim(directory))
            setup_rank_logging(directory, ranks.rank)
            worker = Stages(assignment, ranks, together, marks)
            worker.work()
            return _end(worker, EXIT_DONE)
    except PeerFailed as error:
        # Launchers terminate all ranks at the first exit: the rank with the message exits
        # first.
        time.sleep(PEER_FAILED_PAUSE_S)
        return error.code
    except Stopped as error:
        assert worker is not None, "only training is stopped"
        if name := worker.stop.reason:  # of the ranks that received the request
            _record(worker, "signal", signal=name)
        if worker.leads:
            tell(f"dmt: {error}")
        return _end(worker, error.exit_code)
    except KeyboardInterrupt:
        # Python's normal exit would join the thread of the hanging save.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        tell(f"error: {_INTERRUPTED}")
        if worker is not None:
            _record(worker, "end", exit_code=EXIT_FAILED, error=_INTERRUPTED)
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: every failure is reported
        error = _explained(error, worker)
        code, message = _failure(error)
        cause = None
        if worker is not None and message == PEER_LOST:
            cause = cause_in(worker.events.new())
        tell(f"error: {message if cause is None else cause['error']}")
        if worker is not None:
            _fail(worker, error, code, message)
        return code


def _on_device(assignment: Assignment, ranks: Ranks) -> Assignment:
    """The assignment. Raises BackendUnavailable where it is for GPUs and there is none."""
    gpu = assignment.recipe.cluster.gpu
    if gpu != "cpu" and ranks.device.type == "cpu":
        raise BackendUnavailable(
            f"cluster.gpu is {gpu}, but torch finds no GPU on this machine",
            fix="`dmt doctor` shows why; to train on the CPU: --set cluster.gpu=cpu",
        )
    return assignment


def _failure(error: Exception) -> tuple[int, str]:
    """Exit code and message of a failure. The traceback is logged unless it is the user's
    mistake."""
    if isinstance(error, DmtError):
        return error.exit_code, str(error)
    if _PEER_LOST.search(str(error)):
        logger.info("a collective failed", exc_info=error)  # for the log, not the terminal
        return EXIT_FAILED, PEER_LOST
    logger.error("training failed", exc_info=error)
    return EXIT_FAILED, f"{type(error).__name__}: {error}"


def _explained(error: Exception, worker: Worker | None) -> Exception:
    """The failure, or an error that says more: which operator is not deterministic, or where
    memory ran out.

    Another start is worth while only after a step of this one.
    """
    if isinstance(error, DmtError):
        return error
    if mistake := deterministic.as_users_mistake(error):
        return mistake
    doing = worker.marks.doing if worker is not None else "starting"
    stepped = worker is not None and worker.marks.has_stepped
    explained = out_of_memory(error, doing, retry=stepped)
    if explained is not None:
        logger.error("out of memory", exc_info=error)
    return explained or error


def _end(worker: Worker, code: int) -> int:
    """Record a successful end. No rank exits before rank 0's reports are written."""
    worker.marks.begin("finishing the logs")
    failpoint("leaving")
    if worker.leads:
        _record(worker, "end", exit_code=code)
    worker.exit_code = code
    worker.at_end.close()
    dist.barrier(worker.together.group)
    leave()
    worker.marks.close()
    worker.marks.hide()
    if worker.leads:
        show_results(worker.directory, worker.events, done=code == EXIT_DONE)
    return code


def _fail(worker: Worker, error: Exception, code: int, message: str) -> None:
    """Record this rank's failure, without waiting for ranks that may never arrive."""
    retry = {} if getattr(error, "retry", True) else {"retry": False}
    _record(worker, "end", exit_code=code, error=message, **retry)
    worker.exit_code = code
    worker.at_end.__exit__(type(error), error, error.__traceback__)


def _record(worker: Worker, kind: Literal["signal", "end"], **fields: Any) -> None:
    """Write an event of this rank at the current step."""
    worker.events.write(kind, rank=worker.ranks.rank, step=worker.progress.step, **fields)
