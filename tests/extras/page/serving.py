"""Runs that are served, and that grow."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.report.logs import metrics
from toolkit.extras.page.serve import LivePage, PageServer


@contextmanager
def served(run: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(LivePage([run]), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def append(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(step, 2.0)[-1]) + "\n")
