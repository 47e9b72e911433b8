"""`python -m toolkit.launchers.quiet_torchrun ARGUMENTS`: torchrun without its traceback.

torchrun ends with a traceback of its own whenever a rank ends with another code than 0,
also when that rank saved and stopped or told the user what to mend, and when machines
cannot reach each other. Here the workers'
messages stand alone, and the first failed rank's exit code is handed on.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import EXIT_FAILED
from toolkit.launchers.base import tell
from toolkit.launchers.outcome import RankExit

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; return 0 or the failed rank's exit code (128 + n for signal n)."""
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]  # both have no hints
    except (OSError, RendezvousError, DistNetworkError) as error:
        tell(f"error: the machines did not meet: {type(error).__name__}: {error}")
        return EXIT_FAILED
    except ChildFailedError as error:
        failed = _root_cause(error)
        if failed.code < 0:
            tell(f"error: {failed.describe()}")
            return 128 - failed.code
        return failed.code
    return 0


def _root_cause(error: "ChildFailedError") -> RankExit:
    """The rank that was killed, if one was: the others fail for want of it."""
    failures = [RankExit(rank, failure.exitcode) for rank, failure in error.failures.items()]
    killed = [failure for failure in failures if failure.code < 0]
    rank, first = error.get_first_failure()
    return killed[0] if killed else RankExit(rank, first.exitcode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
