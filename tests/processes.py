"""What tests that start processes share: where these run, and how long a test waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HANG_S = 600.0
"""What has not come by then never will. It ends hangs and measures nothing: what takes longest,
a minute or two on a quiet machine, has time on a slow one that does other things too. Below
pytest's own limit, so that what hangs is ended and says what it printed."""


def wait_until(
    condition: Callable[[], object], what: str, said: Callable[[], object] = str
) -> None:
    """Return when `condition` holds; fail with `said()` when `what` has not come by HANG_S."""
    asked = time.monotonic()
    end = asked + HANG_S
    while not condition():
        now = time.monotonic()
        assert now < end, f"{what}: not within {HANG_S:g} s\n{said()}"
        time.sleep(max(0.01, 4 * (now - asked)))  # to ask may cost what is waited for
        asked = time.monotonic()


@contextmanager
def in_thread(action: Callable[[], Any]) -> Iterator[list[Any]]:
    """What it returns, once it has."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()
