"""Stand-ins for workers, and whether they live."""

from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in.py")


def alive(pid: int) -> bool:
    """Does the process exist and is it no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False
