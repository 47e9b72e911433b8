"""The page of runs that still train, served to browsers: reads run directories, writes nothing.

    GET /              the page
    GET /data?SEEN     its data, as soon as it is another version; 204 after some seconds

A client that waits costs next to nothing. There are no files to ask for. A request must name
this server by an address, or by a name that was meant: a page of somebody else cannot have its
own name point here (DNS rebinding).
"""

import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from toolkit.errors import DmtError
from toolkit.report.page import page, page_data
from toolkit.report.record import read_record, require_run, state_of
from toolkit.report.summary import Ending
from toolkit.run.directory import RunDirectory

IDLE_S = 10.0
"""How long a client may take to say what it wants."""
_EVERY_S, _BUSY_EVERY_S = 0.5, 1.2
"""How often runs are looked at; the second where this process takes more than `_SHARE`."""
_SHARE, _READING_SHARE = 0.02, 0.1
"""Of one core: all of this process, with its clients, and reading alone, at most."""
_HELD_S = 20.0
"""How long a request for news waits for them."""


class LivePage:
    """The data of some runs, read again when they have changed, for all clients at once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises DataError for a path that is no run directory."""
        self._runs: list[RunDirectory] = [require_run(path) for path in paths]
        self._lock = threading.Lock()
        self._seen: object = None
        self._data: dict[str, Any] = {}
        self.json = b""
        """The last `data`, written once for all clients."""
        self._read_at, self._cpu_s, self._reading_s = -math.inf, 0.0, 0.0
        """When the runs were last looked at; processor time of this process until then, and of
        the reading itself."""
        self._begun, self._version = time.time_ns(), 0

    def data(self) -> dict[str, Any]:
        """`page_data` with a `version`. Raises DataError or OSError for a run that is gone."""
        with self._lock:
            now, cpu_s, began = time.monotonic(), time.process_time(), time.thread_time()
            busy_s = min(_BUSY_EVERY_S, (cpu_s - self._cpu_s) / _SHARE)
            if now - self._read_at < max(_EVERY_S, busy_s, self._reading_s / _READING_SHARE):
                return self._data
            seen = [self._signs(run) for run in self._runs]
            if seen != self._seen:
                records = [read_record(run.path) for run in self._runs]
                self._version += 1
                self._data = {**page_data(records), "version": f"{self._begun}-{self._version}"}
                self._seen, self.json = seen, json.dumps(self._data).encode()
            self._read_at, self._cpu_s, self._reading_s = now, cpu_s, time.thread_time() - began
            return self._data

    @staticmethod
    def _signs(run: RunDirectory) -> object:
        """Changes when there is something new to say."""
        found = []
        for path in (run.events, run.metrics):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_size, status.st_mtime_ns))
        return found, state_of(run, Ending("open"))[0]


class PageServer(ThreadingHTTPServer):
    """Serves a LivePage."""

    daemon_threads = True

    def __init__(self, live: LivePage, host: str, port: int) -> None:
        """Raises OSError where it cannot listen."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.live = live
        self.names = {"localhost", host, socket.gethostname()}

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
        if name in self.names:
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

    def do_GET(self) -> None:
        path, _, seen = self.path.partition("?")
        if not self.server.is_meant(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "this is not the address of this server")
            return
        if path not in ("/", "/data"):
            self._answer(HTTPStatus.NOT_FOUND, "there is only /")
            return
        try:
            data = self._news(seen)
        except (DmtError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        if path == "/":
            self._answer(HTTPStatus.OK, page(data), "text/html")
        elif seen == data["version"]:
            self._answer(HTTPStatus.NO_CONTENT, "")
        else:
            self._answer(HTTPStatus.OK, self.server.live.json, "application/json")

    def _news(self, seen: str) -> dict[str, Any]:
        """What there is, once it is not what was `seen`, or has not changed for a while."""
        deadline = time.monotonic() + _HELD_S
        data = self.server.live.data()
        while data["version"] == seen and time.monotonic() < deadline:
            time.sleep(_EVERY_S)
            data = self.server.live.data()
        return data

    def _answer(self, status: HTTPStatus, text: str | bytes, kind: str = "text/plain") -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal belongs to the user."""
