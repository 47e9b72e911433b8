"""Runs code that may crash, hang or print: in separate processes, with a time limit."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

IMPORT_LIMIT_S = 120.0
"""A first import from a network file system takes a minute."""


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    done: bool
    out: str
    """Standard output where it was done; otherwise why not, in a line."""


def is_installed(module: str) -> bool:
    """Whether `import MODULE` would find it; of a dotted name, the parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent is missing, or is what cannot be imported
        return False


def ask(command: Sequence[str], limit_s: float = 10.0) -> Answer:
    """Run a command and wait for it, `limit_s` seconds at most."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except OSError as error:
        return Answer(False, str(error))
    except subprocess.TimeoutExpired:
        return Answer(False, f"did not answer within {limit_s:g} s")
    if done.returncode == 0:
        return Answer(True, done.stdout)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1][:300] if lines else "no output"
    if done.returncode < 0:
        reason = f"killed by signal {-done.returncode}"
    return Answer(False, reason)


def ask_python(code: str) -> Answer:
    """Run `code` in this Python; see `ask`."""
    return ask([sys.executable, "-W", "ignore", "-c", code], IMPORT_LIMIT_S)
