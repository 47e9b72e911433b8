"""Messages between a replica and the holder: a line of JSON, then raw little-endian arrays.

    join        what the replica is, of replica 0 the first weights  →  where it continues, and
                the weights
    hand_in     step, tokens and change of a round  →  the new weights

`join` once, `hand_in` again and again: a replica takes part while its connection is open.
Arrays have the shapes that `join` has stated, in the order of their names. No pickles.
"""

import json
import socket
from contextlib import suppress
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from toolkit.extras.outer.optimizer import Floats, Shapes, Weights

Compression = Literal["none", "int8"]

BLOCK = 1024
"""Elements with one scale."""
_LONGEST_LINE = 1 << 26
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 6,
    socket.TCP_USER_TIMEOUT: 90_000,
}
"""Seconds, seconds and number: the other machine is lost after a minute and a half; and
milliseconds, the same for one that is lost while it is sent to, which is not asked then."""


class Connection:
    """One side of a TCP connection. Raises OSError if it is lost, ValueError for nonsense."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
        self._stream, self._file = stream, stream.makefile("rb")
        self.sent = self.received = 0
        """Bytes so far."""

    def send(
        self, header: dict[str, Any], weights: Weights, compression: Compression = "none"
    ) -> None:
        """Send a message."""
        self._send(json.dumps(header).encode() + b"\n")
        for name in sorted(weights):
            for array in packed(weights[name], compression):
                self._send(np.ascontiguousarray(array).data.cast("B"))

    def receive(self) -> dict[str, Any]:
        """The JSON of the next message; its arrays are read by `weights`."""
        line = self._file.readline(_LONGEST_LINE)
        self.received += len(line)
        if not line:
            raise ConnectionError("the other side has ended")
        header = json.loads(line)
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        return header

    def weights(self, shapes: Shapes, compression: Compression = "none") -> Weights:
        """Tensors of these shapes."""
        return {name: self._tensor(shapes[name], compression) for name in sorted(shapes)}

    def _tensor(self, shape: tuple[int, ...], compression: Compression) -> Floats:
        count = prod(shape)
        if compression == "none":
            return self._array(np.dtype("<f4"), count).reshape(shape)
        scales = self._array(np.dtype("<f4"), -(-count // BLOCK))
        whole = np.zeros(len(scales) * BLOCK, np.float32)
        whole[:count] = self._array(np.dtype("i1"), count)
        restored: Floats = whole.reshape(-1, BLOCK) * scales[:, None]
        return restored.reshape(-1)[:count].reshape(shape)

    def _array(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        values = np.empty(count, dtype)
        read = self._file.readinto(values.data.cast("B"))
        self.received += read
        if read < values.nbytes:
            raise ConnectionError("the other side has ended inside of a message")
        return values

    def _send(self, data: bytes | memoryview) -> None:
        self._stream.sendall(data)
        self.sent += len(data)

    def lost(self) -> bool:
        """Whether the other side, which does not send now, has closed it."""
        try:
            return not self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close it, also under a thread that waits for a message."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._stream.close()


def packed(values: Floats, compression: Compression) -> list[npt.NDArray[Any]]:
    """A tensor as it is sent: itself, or in 8 bits, the scales (largest magnitude of every
    BLOCK elements over 127) first."""
    if compression == "none":
        return [values.astype("<f4", copy=False)]
    flat = values.reshape(-1)
    whole = np.zeros(-(-len(flat) // BLOCK) * BLOCK, np.float32)
    whole[: len(flat)] = flat
    blocks = whole.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    rounded = np.rint(blocks / divisors[:, None]).astype(np.int8)
    return [scales.astype("<f4"), rounded.reshape(-1)[: len(flat)]]


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ValueError."""
    host, sign, port = text.rpartition(":")
    if not sign or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text} is not HOST:PORT")
    return host.strip("[]"), int(port)
