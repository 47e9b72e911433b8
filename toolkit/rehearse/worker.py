"""One rank of one rehearsed layout: the run directory's engine, on a rehearsal's batches.

python -m toolkit.rehearse.worker RUN_DIR
"""

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.rehearse.comparison import write_step
from toolkit.rehearse.small_run import small_run
from toolkit.run.assignment import Assignment, read_assignment
from toolkit.text.terminal import tell


def train(assignment: Assignment, ranks: Ranks) -> None:
    """Train one layout; rank 0 records each step in the run directory."""
    for result in small_run(assignment, ranks):
        if ranks.rank == 0:
            write_step(assignment.run_dir, result.loss, result.grad_norm)


def main(train: Callable[[Assignment, Ranks], None] = train) -> None:
    """Run one rank; a failure's last line on standard error says what it was."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        ranks = join()
        train(read_assignment(Path(sys.argv[1]), ranks.world), ranks)
        leave()
    except Exception as error:  # noqa: BLE001 - the last resort: every failure is reported
        traceback.print_exc()
        first, _, more = str(error).strip().partition("\n")
        if more:
            tell(f"{type(error).__name__}: {first}")
        end_process(EXIT_FAILED)
    end_process(EXIT_DONE)


if __name__ == "__main__":
    main()
