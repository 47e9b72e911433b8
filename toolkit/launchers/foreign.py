"""Running another tool's launcher under DMT's guard."""

import signal
import subprocess
import sys
import time

from toolkit.launchers.base import LaunchSpec, Outcome, tell
from toolkit.launchers.outcome import events_offset, outcome_from_events
from toolkit.launchers.process import POLL_S, StopSignals


def run_guarded(spec: LaunchSpec, signals: StopSignals) -> Outcome:
    """Run `spec` under `toolkit.launchers.guard`; see Launcher."""
    offset = events_offset(spec.run_dir)
    guard = subprocess.Popen(
        [sys.executable, "-m", "toolkit.launchers.guard", str(spec.grace_s), *spec.argv],
        env=spec.process_env(0),
        stdin=subprocess.PIPE,
        # Ctrl-C at the terminal is for this process, which passes it on once.
        start_new_session=True,
    )
    code = _wait(guard, signals)
    return outcome_from_events(spec.run_dir, offset, code, signals.stop_requested)


def _wait(guard: "subprocess.Popen[bytes]", signals: StopSignals) -> int:
    stopped = killed = False
    while guard.poll() is None:
        if signals.stop_requested and not stopped:
            stopped = True
            tell("stopping: saving first; press Ctrl-C twice more to kill")
            guard.send_signal(signal.SIGTERM)
        if signals.kill_requested and not killed:
            killed = True
            guard.send_signal(signal.SIGUSR2)
        time.sleep(POLL_S)
    return guard.returncode
