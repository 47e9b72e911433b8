"""Messages between a rank and the holder: a JSON header, then raw little-endian arrays.

    length of the header   4 bytes
    header                 JSON object
    arrays                 as many bytes as both sides know from the rectangles agreed on

Nothing is unpickled. Sizes follow from the rectangles that a connection has agreed on when it
was made, so no message can ask for memory.
"""

import json
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from toolkit.models.families.tensors import Block

Floats = npt.NDArray[np.float32]
Compression = Literal["none", "int8"]

BLOCK = 1024
"""Elements with one scale."""
_LENGTH = struct.Struct("<I")
_LARGEST_HEADER = 1 << 26
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""Seconds, seconds and number: the other machine is lost after a minute and a half."""


class Connection:
    """One side of a TCP connection. Raises OSError if it is lost, ValueError for nonsense."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
        self._stream = stream
        self.sent = self.received = 0
        """Bytes so far."""

    def send(self, header: dict[str, Any], arrays: Iterable[npt.NDArray[Any]] = ()) -> None:
        """Send a message."""
        text = json.dumps(header).encode()
        self._send(_LENGTH.pack(len(text)) + text)
        for array in arrays:
            self._send(np.ascontiguousarray(array).data.cast("B"))

    def receive(self) -> dict[str, Any]:
        """The next header; what follows it is read by `arrays`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(self._read(length))
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        return header

    def arrays(
        self, blocks: Sequence[Block], compression: Compression = "none"
    ) -> list[Floats]:
        """The values of rectangles, in their stored form: fp32 [rows, columns] or [rows]."""
        return [self._values(block, compression) for block in blocks]

    def _values(self, block: Block, compression: Compression) -> Floats:
        shape = shape_of(block)
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
        self._read_into(values.data.cast("B"))
        return values

    def _send(self, data: bytes | memoryview) -> None:
        self._stream.sendall(data)
        self.sent += len(data)

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, view: memoryview) -> None:
        while view:
            count = self._stream.recv_into(view)
            if not count:
                raise ConnectionError("the other side has ended")
            self.received += count
            view = view[count:]

    def close(self) -> None:
        """Close it, also under a thread that waits for a message."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def packed(values: Floats, compression: Compression) -> list[npt.NDArray[Any]]:
    """A rectangle as it is sent: itself, or in 8 bits, the scales (largest magnitude of every
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


def as_json(blocks: Iterable[Block]) -> list[Any]:
    """Rectangles in a header: [tensor, rows, columns or null, steps] each."""
    return [[block.tensor, block.rows, block.columns, block.steps] for block in blocks]


def from_json(stated: Any, shapes: Mapping[str, Sequence[int]]) -> list[Block]:
    """The rectangles of a header. Raises ValueError for one that is not inside its tensor."""
    found = []
    for tensor, rows, columns, steps in stated:
        block = Block(
            str(tensor),
            tuple(rows),
            None if columns is None else tuple(columns),
            False,
            tuple(steps),
        )
        axes = axes_of(block)
        shape = shapes[block.tensor]
        if len(axes) != len(shape) or not all(
            0 <= axis.start < axis.stop <= size and axis.step > 0
            for axis, size in zip(axes, shape, strict=True)
        ):
            raise ValueError(f"{block} is not inside of {list(shape)}")
        found.append(block)
    return found


def axes_of(block: Block) -> list[range]:
    """The numbers of the rows, and of the columns of a matrix."""
    columns = [] if block.columns is None else [block.column_numbers]
    return [block.row_numbers, *columns]


def shape_of(block: Block) -> tuple[int, ...]:
    """[rows, columns] or [rows]."""
    return tuple(map(len, axes_of(block)))


def inside(block: Block) -> tuple[slice, ...]:
    """The place of a rectangle in its whole tensor."""
    return tuple(slice(axis.start, axis.stop, axis.step) for axis in axes_of(block))
