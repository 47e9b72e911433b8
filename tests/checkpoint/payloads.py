"""Malicious content of files."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.errors import DmtError


class Canary:
    """Unpickling it runs a command that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def pickled(canary: Canary) -> bytes:
    return pickle.dumps(canary)


def zipped(canary: Canary) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "x": canary}, buffer)
    return buffer.getvalue()


def nested(depth: int) -> str:
    """JSON that is valid, and nested."""
    return '{"a":' * depth + "1" + "}" * depth


def check_refused(file: Path, load: Callable[[], Any], content: bytes) -> str:
    """A file with this content is one error, whose text this is."""
    file.write_bytes(content)
    with pytest.raises(DmtError) as raised:
        load()
    assert raised.value.exit_code == 2
    return str(raised.value)
