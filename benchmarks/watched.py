"""What 50 open pages of `dmt watch` cost the run that they show.

Pairs of the same run, which take turns (pairs.py): one alone, and one whose directory is served
to 50 clients that ask as the page does. The clients run here, too, though browsers of users run
elsewhere: they have the lowest priority, and the ratio counts what they take all the same.

    python benchmarks/watched.py --pairs 5 --out benchmarks/results/watched.json
"""

import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pairs import RECIPE, Run, dmt, parser

CLIENTS = 50
PAUSE_S = 0.2
"""Between the page's requests (toolkit/report/page/page.js)."""
OVERRIDES = ("parallel.engine=ddp", "cluster.gpus_per_node=2")


class Audience:
    """`dmt watch` of a run and its clients, stopped while it is not the run's turn."""

    def __init__(self, run_dir: Path) -> None:
        watch = [sys.executable, "-m", "toolkit.cli.main", "watch", str(run_dir)]
        self._server = subprocess.Popen(watch, stderr=subprocess.PIPE, text=True)
        assert self._server.stderr is not None
        line = self._server.stderr.readline()
        found = re.search(r"http://\S+/", line)
        if found is None:
            sys.exit(f"dmt watch said {line!r}")
        ask = [sys.executable, __file__, "--ask", found[0]]
        self._clients = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
        time.sleep(2.0)  # everyone has the page
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for process in (self._server, self._clients):
            process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self._clients.terminate()
        said, _ = self._clients.communicate()
        self._server.send_signal(signal.SIGINT)
        self._server.communicate()
        print(f"  {CLIENTS} clients had answers by status: {said.strip()}", flush=True)


def ask(url: str) -> None:
    """Ask as CLIENTS pages do, until SIGTERM."""
    os.nice(19)
    answers: Counter[int] = Counter()

    def page() -> None:
        seen = ""
        while True:
            connection = http.client.HTTPConnection(urlsplit(url).netloc)
            connection.request("GET", f"/data?{seen}")
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            answers[answer.status] += 1
            if answer.status == 200:
                # Not parsed: that is for the browser's machine to do.
                seen = body[-80:].decode().rpartition('"version": "')[2].rstrip('"}')
            time.sleep(PAUSE_S)

    def end(*_: object) -> None:
        print(json.dumps(answers), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for _ in range(CLIENTS):
        threading.Thread(target=page, daemon=True).start()
    while True:
        signal.pause()


def pair(steps: int) -> tuple[Run, Run]:
    """The run alone, and the one that is watched."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, one) for one in ("alone", "watched")]
        for folder in folders:
            folder.mkdir()
        with (
            dmt(folders[0], RECIPE, OVERRIDES, steps) as alone,
            dmt(folders[1], RECIPE, OVERRIDES, steps) as watched,
            Audience(folders[1] / "dmt") as audience,
        ):
            running = [alone, watched]
            while running:
                for run in [*running]:
                    if run is watched:
                        audience.signal(signal.SIGCONT)
                    if run.turn():
                        running.remove(run)
                    audience.signal(signal.SIGSTOP)
            for run in (alone, watched):
                run.end()
    return alone, watched


def main() -> None:
    if sys.argv[1:2] == ["--ask"]:
        ask(sys.argv[2])
    options = parser(__doc__ or "").parse_args()
    ratios, steps_ms = [], []
    for number in range(options.pairs):
        alone, watched = pair(options.steps)
        ratios.append(alone.ran_s / watched.ran_s)
        steps_ms.append(1e3 * alone.ran_s / (options.steps - 1))
        print(
            f"pair {number + 1}: {steps_ms[-1]:.1f} ms alone, ratio {ratios[-1]:.4f}",
            flush=True,
        )
    found = {
        "clients": CLIENTS,
        "step_time_alone_over_watched": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "milliseconds_per_step_alone": round(statistics.median(steps_ms), 2),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
