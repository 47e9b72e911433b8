"""Waiting for processes to come and go."""

import time
from collections.abc import Callable
from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in.py")


def alive(pid: int) -> bool:
    """Does the process exist and is it no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.02)
