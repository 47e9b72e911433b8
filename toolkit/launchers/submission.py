"""Jobs that another program takes: a scheduler runs them."""

import subprocess
from shutil import which

from toolkit.errors import EXIT_DONE, EXIT_FAILED, BackendUnavailable
from toolkit.launchers.base import LaunchSpec, Outcome
from toolkit.text.terminal import tell


def submit(launcher: str, spec: LaunchSpec, fix: str) -> Outcome:
    """Submit a job; returns when it is accepted or refused. Raises BackendUnavailable if the
    launcher's program is not on this machine."""
    program = spec.argv[0]
    if which(program) is None:
        raise BackendUnavailable(
            f"launch.launcher is {launcher}, but there is no `{program}` here", fix=fix
        )
    done = subprocess.run(spec.argv, env=spec.process_env(0), check=False)
    if done.returncode:
        reason = f"{program} ended with code {done.returncode}"
        tell(f"error: {reason}; its message is above")
        return Outcome(EXIT_FAILED, reason)
    return Outcome(EXIT_DONE)
