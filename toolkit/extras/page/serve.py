"""The page of runs that still train, served to browsers: reads run directories, writes nothing.

    GET /            the page
    GET /news?SEEN   server-sent events: its data, as often as it is another version than SEEN

All clients get what was read and written down once; one that waits costs nothing. There are no
files to ask for. A request must name this server by an address, or by a name that was meant: a
page of somebody else cannot have its own name point here (DNS rebinding).
"""

import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from toolkit.errors import DmtError
from toolkit.extras.page import page, page_data
from toolkit.report.record import Logs, read_record, require_run, state_of
from toolkit.report.summary import Ending
from toolkit.run.directory import RunDirectory
from toolkit.text.units import duration

IDLE_S = 10.0
"""How long a client may take to say what it wants, or to take what it is sent."""
_EVERY_S, _BUSY_EVERY_S = 0.5, 1.2
"""How often runs are looked at; the second where this process takes more than `_SHARE`."""
_SHARE, _READING_SHARE = 0.01, 0.1
"""Of one core: all of this process, with its clients, and reading alone, at most."""
_NOTABLE_S = 5.0
"""From which time between two reads on the page says so."""
_SILENCE_S = 20.0
"""After which a client is sent a comment: one that is gone is noticed."""
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class LivePage:
    """The data of some runs, read again when they have changed, for all clients at once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises DataError for a path that is no run directory."""
        self._runs: list[RunDirectory] = [require_run(path) for path in paths]
        self._logs = Logs()
        self._news = threading.Condition()
        self._seen: object = None
        self._data: dict[str, Any] = {}
        self._error: Exception | None = None
        """Why there are none."""
        self._event = b""
        """What clients are sent: the last data, or why there are none."""
        self._read_at, self._cpu_s, self._reading_s = -math.inf, 0.0, 0.0
        """When the runs were last looked at; processor time of this process until then, and of
        the reading itself."""
        self._begun, self._count = time.time_ns(), 0
        self.listeners = 0

    @property
    def version(self) -> str:
        """Of what clients are sent."""
        return f"{self._begun}-{self._count}" if self._count else ""

    def data(self) -> dict[str, Any]:
        """`page_data` with a `version`. Raises DataError or OSError for a run that is gone."""
        with self._news:
            now, cpu_s, began = time.monotonic(), time.process_time(), time.thread_time()
            busy_s = min(_BUSY_EVERY_S, (cpu_s - self._cpu_s) / _SHARE)
            long_s = self._reading_s / _READING_SHARE
            if now - self._read_at >= max(_EVERY_S, busy_s, long_s):
                self._read(long_s)
                self._read_at, self._cpu_s = now, cpu_s
                self._reading_s = time.thread_time() - began
            if self._error is not None:
                raise self._error
            return self._data

    def _read(self, every_s: float) -> None:
        """Read what has changed, and send it to everyone who listens. `every_s`: how often
        reading is allowed to happen, by the time that it took."""
        try:
            seen = [self._signs(require_run(run.path)) for run in self._runs]
            if seen == self._seen:
                return
            data = page_data([read_record(run.path, self._logs) for run in self._runs])
        except Exception as error:  # noqa: BLE001 - raised for whoever asks, and told
            if self._error is None:
                self._count += 1
                self._tell("event: lost", str(error))
            self._error, self._seen = error, None
            return
        self._count += 1
        if every_s > _NOTABLE_S:
            late = f"these logs are long: they are read every {duration(every_s)}"
            data["runs"][0]["missing"].append(late)
        self._data = data | {"version": self.version}
        self._tell(f"id: {self.version}", self._data)
        self._error, self._seen = None, seen

    def _tell(self, field: str, said: Any) -> None:
        self._event = f"{field}\ndata: {json.dumps(said)}\n\n".encode()
        self._news.notify_all()

    def listen(self, seen: str) -> Generator[bytes]:
        """Events after the version `seen`, for ever; a comment where there is none for long."""
        with self._news:
            self.listeners += 1
        try:
            while True:
                with self._news:
                    if self._news.wait_for(lambda: self.version != seen, _SILENCE_S):  # noqa: B023
                        seen, event = self.version, self._event
                    else:
                        event = b": nothing new\n\n"
                yield event
        finally:
            with self._news:
                self.listeners -= 1

    @staticmethod
    def _signs(run: RunDirectory) -> object:
        """Changes when there is something new to say."""
        found = []
        for path in (run.events, run.metrics):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_size, status.st_mtime_ns))
        return found, state_of(run, Ending("open"))[0]


class PageServer(ThreadingHTTPServer):
    """Serves a LivePage."""

    daemon_threads = True

    def __init__(self, live: LivePage, host: str, port: int) -> None:
        """Raises OSError where it cannot listen."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.live, self._closed = live, threading.Event()
        super().__init__((host, port), _Handler)
        names = "localhost", host, socket.gethostname(), socket.getfqdn()
        self.names = {name.lower() for name in names}

    def serve_forever(self, poll_interval: float = _EVERY_S) -> None:
        """Answer, and look for news in a thread of its own: long runs take long to read."""
        threading.Thread(target=self._look, daemon=True).start()
        super().serve_forever(poll_interval)

    def server_close(self) -> None:
        """Look no longer."""
        self._closed.set()
        super().server_close()

    def _look(self) -> None:
        while not self._closed.wait(_EVERY_S):
            if self.live.listeners:
                with suppress(Exception):  # which clients are told
                    self.live.data()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients hang up whenever they like, and the terminal belongs to the user."""

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def is_meant(self, host: str | None) -> bool:
        """Does a `Host` header name this server?"""
        name, _, port = (host or "").rpartition(":")
        if not port.isdigit():
            name = host or ""
        if name.lower().removesuffix(".") in self.names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    """One request; everything but GET is refused by the base class."""

    timeout = IDLE_S
    protocol_version = "HTTP/1.1"  # a client keeps its connection
    server: PageServer
    server_version = "dmt"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Read a request within IDLE_S, however slowly it comes, and answer it."""
        self._late = threading.Timer(IDLE_S, self._give_up)
        self._late.daemon = True
        self._late.start()
        try:
            super().handle_one_request()
        finally:
            self._late.cancel()

    def parse_request(self) -> bool:
        """Parse the request line and read the headers, the last that is read."""
        try:
            return super().parse_request()
        finally:
            self._late.cancel()

    def _give_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # its body is not read: it is not the next request
        path, _, seen = self.path.partition("?")
        if not self.server.is_meant(self.headers.get("Host")):
            self._answer(
                HTTPStatus.FORBIDDEN, "this is not the name of this server: use its IP address"
            )
        elif path == "/news":
            self._listen(self.headers.get("Last-Event-ID") or seen)
        elif path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "there is only /")
        else:
            try:
                data = self.server.live.data()
            except (DmtError, OSError) as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
                return
            self._answer(HTTPStatus.OK, page(data), "text/html")

    def _listen(self, seen: str) -> None:
        """Send events until the client hangs up."""
        self.close_connection = True
        with suppress(OSError), closing(self.server.live.listen(seen)) as events:
            # nginx would keep events back.
            options = ("Connection", "close"), ("X-Accel-Buffering", "no")
            self._head(HTTPStatus.OK, "text/event-stream", *options)
            for event in events:
                self.wfile.write(event)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        with suppress(ConnectionError):
            self._head(status, kind, ("Content-Length", str(len(body))))
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, *more: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), *_HEADERS, *more):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal belongs to the user."""
