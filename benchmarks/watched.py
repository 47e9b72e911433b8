"""What 50 open pages of `dmt watch` cost the run that they show.

One run trains throughout. In windows of some seconds its server and 50 clients are stopped
(SIGSTOP), in those between they work; a pair is twelve windows, in the order off, on, on, off,
so that a machine whose speed changes slowly does so for both. Counted are the steps of log
lines that lie in a window as a whole. The run logs every 5 of its short steps, about once
a second: most runs do so less often, and cost their server less.

Clients listen as the page does (page.js), one connection each, and do not draw. They are one
process of the lowest priority, since browsers of users run on machines of their own; what it
takes is part of the ratio all the same. The server's processor time is quoted as well, by
second and by log line: at worst the steps are longer by its share of a core.

    python benchmarks/watched.py            # 5 pairs: 5 minutes
    python benchmarks/watched.py --json > benchmarks/results/watched.json
"""

import argparse
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
from pairs import RECIPE, dmt

CLIENTS = 50
OVERRIDES = ("parallel.engine=ddp", "cluster.gpus_per_node=2")
LOGGED_EVERY = 5
MOST_STEPS = 1_000_000
WINDOW_S = 4.5
ORDER = (False, True, True, False) * 3
"""Of a pair's windows: do server and clients work in it?"""


class Audience:
    """`dmt watch` of a run and its clients, which work or are stopped."""

    def __init__(self, run_dir: Path) -> None:
        watch = [sys.executable, "-m", "toolkit.cli.main", "watch", str(run_dir)]
        server = subprocess.Popen(watch, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://\S+/", line)
        if found is None:
            sys.exit(f"dmt watch said {line!r}")
        self._heard = run_dir.parent / "heard.json"
        listen = [sys.executable, __file__, "--listen", found[0], str(self._heard)]
        self.processes = {"server": server, "clients": subprocess.Popen(listen)}
        time.sleep(2.0)  # everyone is connected
        self.work(False)

    def work(self, on: bool) -> None:
        """Let them work, or stop them."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def cpu_s(self) -> dict[str, float]:
        """Processor time of server and clients so far."""
        times = {
            name: psutil.Process(one.pid).cpu_times() for name, one in self.processes.items()
        }
        return {name: one.user + one.system for name, one in times.items()}

    def heard(self) -> dict[str, int]:
        """Events and bytes that the clients got."""
        return dict(json.loads(self._heard.read_text()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def listen(url: str, said: Path) -> None:
    """Listen as CLIENTS pages do until the process is killed; `said` counts what they get."""
    os.nice(19)
    split = urlsplit(url)
    selector = selectors.DefaultSelector()
    for _ in range(CLIENTS):
        client = socket.create_connection((str(split.hostname), int(split.port or 80)))
        client.sendall(f"GET /news HTTP/1.1\r\nHost: {split.netloc}\r\n\r\n".encode())
        selector.register(client, selectors.EVENT_READ)
    heard: Counter[str] = Counter()
    while True:
        for key, _ in selector.select():
            part = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            if not part:
                sys.exit("the server has hung up")
            heard["events"] += part.count(b"\ndata: ")
            heard["bytes"] += len(part)
        said.write_text(json.dumps(heard))
        time.sleep(0.05)  # the others' parts come now


@dataclass
class Half:
    """The windows of a pair in which server and clients work, or those in which they do not."""

    steps: int = 0
    steps_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: Counter[str] = field(default_factory=Counter)

    @property
    def step_s(self) -> float:
        return self.steps_s / self.steps


def lines_of(run_dir: Path) -> list[str]:
    """What the run has logged so far, without a line that is being written."""
    return (run_dir / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()


def window(run_dir: Path, audience: Audience, on: bool, half: Half) -> None:
    """Let one pass, and add what was measured in it."""
    before, cpu_before = len(lines_of(run_dir)), audience.cpu_s()
    started = time.perf_counter()
    audience.work(on)
    while time.perf_counter() - started < WINDOW_S or len(lines_of(run_dir)) < before + 2:
        time.sleep(0.1)  # longer where a machine is so busy that no line is inside
    audience.work(False)
    half.wall_s += time.perf_counter() - started
    half.cpu_s.update({name: s - cpu_before[name] for name, s in audience.cpu_s().items()})
    # Of the first line, some steps lie before the window.
    inside = lines_of(run_dir)[before + 1 :]
    half.steps += LOGGED_EVERY * len(inside)
    half.steps_s += LOGGED_EVERY * sum(json.loads(line)["step_time_s"] for line in inside)


def measure(pairs: int) -> dict[str, Any]:
    """Everything that is printed."""
    offs, ons = [], []
    with (
        tempfile.TemporaryDirectory() as name,
        dmt(Path(name), RECIPE, OVERRIDES, MOST_STEPS, LOGGED_EVERY) as run,
    ):
        run.signal(signal.SIGCONT)
        with Audience(Path(name, "dmt")) as audience:
            for number in range(pairs):
                off, on = Half(), Half()
                for works in ORDER:
                    window(Path(name, "dmt"), audience, works, on if works else off)
                offs.append(off)
                ons.append(on)
                say(number, off, on)
            heard = audience.heard()
    ratios = [off.step_s / on.step_s for off, on in zip(offs, ons, strict=True)]
    wall_s, lines = sum(on.wall_s for on in ons), sum(on.steps for on in ons) / LOGGED_EVERY
    cpu_s = sum((on.cpu_s for on in ons), Counter[str]())
    return {
        "clients": CLIENTS,
        "step_time_without_over_with": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "milliseconds_per_step_without": round(
            1e3 * statistics.median(off.step_s for off in offs), 2
        ),
        "log_lines_per_s": round(lines / wall_s, 2),
        "server_cpu_ms_per_log_line": round(1e3 * cpu_s["server"] / lines, 2),
        "server_share_of_a_core": round(cpu_s["server"] / wall_s, 4),
        "clients_share_of_a_core": round(cpu_s["clients"] / wall_s, 4),
        "clients_got": heard,
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def say(number: int, off: Half, on: Half) -> None:
    """One line for a pair, on standard error."""
    print(
        f"pair {number + 1}: {1e3 * off.step_s:.1f} ms without ({off.steps} steps), "
        f"{1e3 * on.step_s:.1f} ms with ({on.steps}), ratio {off.step_s / on.step_s:.4f}; "
        f"server {on.cpu_s['server'] / on.wall_s:.2%} of a core, "
        f"clients {on.cpu_s['clients'] / on.wall_s:.2%}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--listen"]:
        listen(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="a minute each")
    parser.add_argument("--json", action="store_true", help="nothing else on standard output")
    options = parser.parse_args()
    found = measure(options.pairs)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
