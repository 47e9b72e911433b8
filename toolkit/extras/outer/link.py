"""The connection of a replica, which rank 0 has, to the holder."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from toolkit.errors import RunFailed
from toolkit.extras.outer.optimizer import Shapes, Weights
from toolkit.extras.outer.wire import Compression, Connection, address

PATIENCE_S = 300.0
"""How long a replica tries to reach the holder, which may start later."""
_RETRY_S = 0.5


class HolderLink:
    """Requests of a replica. Raises RunFailed where the holder is gone or refuses."""

    def __init__(self, holder: str, shapes: Shapes, compression: Compression) -> None:
        """To HOST:PORT, with the shapes of the replica's trained weights."""
        self._name, self._shapes, self._compression = holder, shapes, compression
        self._connection: Connection
        self.waits = False
        """Whether a round is handed in, and its answer has not come."""
        self.held: Weights = {}
        """The holder's weights when the replica joined."""

    def join(self, stated: dict[str, Any], first: Weights) -> dict[str, Any]:
        """Enter the replica, which may give the first weights; the answer of `Rounds.join`."""
        self._connection = self._connect()
        with self._explained():
            hello = {**stated, "gives": bool(first), "shapes": self._shapes}
            self._connection.send(hello, first)
            answer = self._answer()
            self.held = self._connection.weights(self._shapes)
            return answer

    def hand_in(self, step: int, tokens: float, change: Weights) -> Weights | None:
        """Hand in a round and wait; the new weights, or None if the holder stops."""
        with self._explained():
            self._connection.send({"step": step, "tokens": tokens}, change, self._compression)
            self.waits = True
            done = self._answer()["done"]
            self.waits = False
            return self._connection.weights(self._shapes) if done else None

    def close(self) -> None:
        """Leave. What was handed in counts; `hand_in`, in another thread, then fails."""
        self._connection.close()

    def _connect(self) -> Connection:
        end = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError):
                return Connection(socket.create_connection(address(self._name), timeout=10.0))
            if time.monotonic() > end:
                raise RunFailed(
                    f"the holder of parallel.outer at {self._name} does not answer",
                    fix="start replica 0 there: `dmt launch` starts its holder",
                )
            time.sleep(_RETRY_S)

    def _answer(self) -> dict[str, Any]:
        answer = self._connection.receive()
        if "error" in answer:
            raise RunFailed(
                f"the holder of parallel.outer refuses this replica: {answer['error']}",
                retry=bool(answer["again"]),
            )
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns a lost connection into the error of a lost holder."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise RunFailed(
                f"the holder of parallel.outer at {self._name} is gone: {error}",
                fix="start the same command again; it continues from the last checkpoint that "
                "all replicas and the holder have",
            ) from error
