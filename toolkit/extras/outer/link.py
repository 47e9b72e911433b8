"""A rank's connection to the holder."""

import socket
import time
from contextlib import closing, suppress
from typing import Any

from toolkit.errors import PlanError, RunFailed
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.wire import (
    Connection,
    Floats,
    address,
    as_json,
    packed,
)
from toolkit.models.families.tensors import Block

PATIENCE_S = 300.0
"""How long a replica tries to reach the holder, which may start later."""
_RETRY_S = 0.5


class HolderLink:
    """Requests of one rank. Raises RunFailed where the holder is gone or refuses."""

    def __init__(self, holder: str, run: str, replica: int, settings: OuterSection) -> None:
        """Raises PlanError if `holder` is not HOST:PORT."""
        self._name, self._settings = holder, settings
        self._hello = {"run": run, "replica": replica}
        try:
            self._address = address(holder)
        except ValueError as error:
            raise PlanError(f"parallel.outer.holder: {error}", fix="HOST:PORT") from error
        self._connection: Connection | None = None
        self._sends: list[Block] = []
        self._takes: list[Block] = []

    def join(self, world: int, step: int, shapes: dict[str, list[int]]) -> dict[str, Any]:
        """Enter the replica, as its rank 0; see `Rounds.join`."""
        end = time.monotonic() + PATIENCE_S
        while True:
            stated = {**self._hello, "do": "join", "world": world, "step": step}
            stated |= {"settings": self._settings.shared, "shapes": shapes}
            self._connect(end)
            answer = self._request(stated, refused=time.monotonic() > end)
            if "error" not in answer:
                return answer
            self.close()
            time.sleep(_RETRY_S)

    def agree(self, sends: list[Block], takes: list[Block]) -> None:
        """State this rank's rectangles, once the replica has entered."""
        self._sends, self._takes = sends, takes
        self._connect(time.monotonic() + PATIENCE_S)
        stated = {"do": "agree", "sends": as_json(sends), "takes": as_json(takes)}
        self._request({**self._hello, **stated})

    def give(self, values: list[Floats]) -> None:
        """The holder's first weights."""
        with self._explained():
            self._open.send({"do": "give"}, values)

    def take(self) -> list[Floats]:
        """The holder's weights."""
        self._request({"do": "take"})
        with self._explained():
            return self._open.arrays(self._takes)

    def note(self, step: int, tokens: float) -> None:
        """Let the holder remember how many tokens were trained since the round began."""
        with self._explained():
            self._open.send({"do": "note", "step": step, "tokens": tokens})

    def hand_in(self, step: int, tokens: float, change: list[Floats]) -> list[Floats] | None:
        """Hand in a round and wait; the new weights, or None if the holder stops."""
        with self._explained():
            arrays = (array for one in change for array in packed(one, self._settings.compress))
            self._open.send({"do": "hand_in", "step": step, "tokens": tokens}, arrays)
        if not self._request(None)["done"]:
            return None
        with self._explained():
            return self._open.arrays(self._takes)

    def stop(self, step: int) -> None:
        """Ask to be sent away from the exchange that `hand_in` waits for."""
        _tell(self._name, {**self._hello, "do": "stop", "step": step})

    def close(self) -> None:
        """Leave."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _open(self) -> Connection:
        assert self._connection is not None, "joined"
        return self._connection

    def _connect(self, end: float) -> None:
        while self._connection is None:
            with suppress(OSError):
                stream = socket.create_connection(self._address, timeout=10.0)
                stream.settimeout(None)
                self._connection = Connection(stream)
                return
            if time.monotonic() > end:
                raise RunFailed(
                    f"the holder of parallel.outer at {self._name} does not answer",
                    fix="start replica 0 there: `dmt launch` starts its holder",
                )
            time.sleep(_RETRY_S)

    def _request(
        self, header: dict[str, Any] | None, *, refused: bool = True
    ) -> dict[str, Any]:
        """The holder's answer. An error that may pass is returned, unless it counts as one."""
        with self._explained():
            if header is not None:
                self._open.send(header)
            answer = self._open.receive()
        if "error" in answer and (refused or not answer["again"]):
            raise RunFailed(
                f"the holder of parallel.outer refuses this replica: {answer['error']}",
                retry=bool(answer["again"]),
            )
        return answer

    def _explained(self) -> "_Explained":
        return _Explained(self._name)


def leave_out(holder: str, run: str, replica: int) -> None:
    """Tell the holder not to wait for a replica. Raises RunFailed where it is gone."""
    _tell(holder, {"run": run, "replica": replica, "do": "gone"})


def _tell(holder: str, message: dict[str, Any]) -> None:
    """A message on a connection of its own, without an answer."""
    with _Explained(holder), closing(socket.create_connection(address(holder))) as stream:
        Connection(stream).send(message)


class _Explained:
    """Turns a lost connection into the error of a lost holder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError | ValueError):
            raise RunFailed(
                f"the holder of parallel.outer at {self._name} is gone: {error}",
                fix="start the same command again; it continues from the last checkpoint that "
                "all replicas and the holder have",
            ) from error
