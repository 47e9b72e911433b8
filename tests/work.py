"""How much a call does, counted: a time would be the machine's."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class TooMuch(Exception):
    """More calls than allowed."""


def calls(do: Callable[[], object], most: int) -> int:
    """Python calls (resumed generators too) that `do` makes; TooMuch beyond `most`."""
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        del frame, argument
        count += event == "call"
        if count > most:
            sys.setprofile(None)
            raise TooMuch(f"more than {most:,} calls")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        do()
    finally:
        sys.setprofile(before)
    return count
