"""An S3 on this machine that fails as it is told: moto's server behind a few lines of ours."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ERROR = b"<Error><Code>InternalError</Code><Message>We are sorry</Message></Error>"
SECRET = "canary-of-the-secret-key-0123456789"
KEY = "canary-of-the-key-id"


class Store:
    """Where the server is, what it was asked, and how the next downloads fail."""

    def __init__(self) -> None:
        self.url = ""
        self.failures: deque[str] = deque()
        """`error` (500), `slow` (a time-out) or `cut` (half of the bytes): of the next GETs."""
        self.slow_s = 1.0
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of each request."""
        self._app = DomainDispatcherApplication(create_backend_app)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to read from it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, place = environ["REQUEST_METHOD"], environ.get("HTTP_RANGE", "")
        self.asked.append((method, environ["PATH_INFO"], place))
        failure = None
        if method == "GET" and self.failures:
            failure = self.failures.popleft()
        if failure == "slow":
            time.sleep(self.slow_s)
        if failure == "error":
            start_response("500 Internal Server Error", [("Content-Length", str(len(ERROR)))])
            return [ERROR]
        body = b"".join(self._app(environ, start_response))
        return [body[: len(body) // 2] if failure == "cut" else body]


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def running() -> Iterator[Store]:
    """A server with the empty bucket `data`."""
    store = Store()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=_Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    store.url = f"http://127.0.0.1:{server.port}"
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
