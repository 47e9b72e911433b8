"""PyTorch's agent without its traceback: `python -m toolkit.launchers.quiet_agent ARGUMENTS`.

The agent prints its own traceback whenever a rank exits with a nonzero code, even if that rank
saved and stopped or reported a user error, and if machines cannot reach each other. Here only
the workers' messages are shown, and the first failed rank's exit code is returned.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_UNAVAILABLE,
    EXIT_USER_ERROR,
)
from toolkit.launchers.outcome import RankExit
from toolkit.run.directory import RunDirectory
from toolkit.run.recorded import read_events
from toolkit.text.terminal import survive_lost_output, tell

ENDS = "DMT_AGENT_ENDS"
"""Variable with the folder where workers write the exit codes that their agent must not see."""
ELASTIC = "DMT_ELASTIC_RUN"
"""Variable with the run directory of a run whose number of machines may change."""


def main(arguments: Sequence[str]) -> int:
    """Run it; return 0 or the failed rank's exit code (128 + n for signal n)."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    survive_lost_output()
    ends = tempfile.TemporaryDirectory(prefix="dmt-ends-")
    os.environ[ENDS] = ends.name
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]  # both have no hints
        return max((int(file.name) for file in Path(ends.name).iterdir()), default=EXIT_DONE)
    except SignalException:
        return EXIT_RESUMABLE  # it waited for other machines: nothing was trained
    except (OSError, RendezvousError, DistError) as error:
        if (ended := _ended_elsewhere()) is not None:
            return ended
        tell(f"error: the machines did not meet: {type(error).__name__}: {error}")
        return EXIT_FAILED
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        exits = [RankExit(rank, failure.exitcode) for rank, failure in error.failures.items()]
        killed = [one for one in exits if one.code < 0]
        # The others fail because they lost the one that was killed.
        failed = killed[0] if killed else RankExit(rank, first.exitcode)
        if failed.code < 0:
            tell(f"error: {failed.describe()}")
            return 128 - failed.code
        return failed.code
    finally:
        ends.cleanup()


def _ended_elsewhere() -> int | None:
    """How an elastic run ended whose other machines have left: 0 or 75; None if it failed, or
    still runs without this machine."""
    if ELASTIC not in os.environ:
        return None
    events = read_events(RunDirectory(Path(os.environ[ELASTIC])).events)
    last = [event for event in events if event["kind"] in ("start", "end")][-1:]
    code = last[0].get("exit_code") if last else None
    return code if code in (EXIT_DONE, EXIT_RESUMABLE) else None


def told_the_agent(code: int) -> int:
    """The exit code of a worker: 0 if the agent must not restart it.

    An agent treats every other code as a failure, including a graceful stop (75) and user
    errors (2, 3). The true code is written for `main`.
    """
    folder = os.environ.get(ENDS)
    if folder is None or code not in (EXIT_RESUMABLE, EXIT_USER_ERROR, EXIT_UNAVAILABLE):
        return code
    (Path(folder) / str(code)).touch()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
