"""Steps of the self-test at once, each in a self-test of its own (`dmt doctor --only STEP`)."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from toolkit.extras.doctor.selftest.check import Check, Workplace
from toolkit.extras.doctor.selftest.plan import CHECKS, Step
from toolkit.launchers.process import die_with_parent
from toolkit.run import jsonl
from toolkit.text.redact import redact


def in_processes(
    steps: Sequence[Step], place: Workplace, jobs: int
) -> Iterator[tuple[Step, list[Check]]]:
    """Run the steps, `jobs` at a time: each with its checks, in the order in which they end."""
    running: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(max(1, jobs)) as threads:
        ends = {threads.submit(_run, step, place, running): step for step in steps}
        try:
            for end in as_completed(ends):
                yield ends[end], end.result()
        except BaseException:  # Ctrl-C, too
            threads.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            raise


def _run(step: Step, place: Workplace, running: list["subprocess.Popen[bytes]"]) -> list[Check]:
    folder = place.folder / "steps" / step.title.replace(" ", "-")
    folder.parent.mkdir(exist_ok=True)
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "toolkit.cli.main", "doctor", "--selftest"]
    command += ["--only", step.title, "--folder", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--processes", str(place.machine.processes)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
    running.append(process)
    process.wait()
    return _checks(step, folder, log, place)


def _checks(step: Step, folder: Path, log: Path, place: Workplace) -> list[Check]:
    """The checks of a step that has ended; a failed one if it has none."""
    root = place.folder.parent
    if not (folder / CHECKS).exists():
        said = redact(log.read_text("utf-8", errors="replace")).strip()
        why, where = said.rpartition("\n")[2], str(log.relative_to(root))
        return [Check(step.title, "", "failed", why, log=where, tail=said[-2000:])]
    inside = folder.relative_to(root)
    found = [Check(**line) for line in jsonl.read(folder / CHECKS)]
    return [replace(one, log=str(inside / one.log)) if one.log else one for one in found]
