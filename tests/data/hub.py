"""A hub on this machine, which answers what `huggingface_hub` asks of a data set."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "org/texts"
TOKEN = "hf_canaryOfTheToken"
_API = f"/api/datasets/{NAME}"
_FILES = f"/datasets/{NAME}/resolve/"


class Hub:
    """A repository of two revisions at most."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        """Of the branch `main`, by path."""
        self.commits: dict[str, dict[str, bytes]] = {}

    def commit(self) -> str:
        """The commit of the branch."""
        name = hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()
        self.commits[name] = dict(self.files)
        return name

    def at(self, revision: str) -> dict[str, bytes] | None:
        return self.files if revision == "main" else self.commits.get(revision)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to read from it."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def missing(self, code: str) -> None:
        self.send(404, b"", {"X-Error-Code": code})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        files = self.hub.at(self.path.rpartition("/")[2]) or {}
        asked = parse_qs(body).get("paths", []) if "=" in body else json.loads(body)["paths"]
        self.json([entry(path, files[path]) for path in asked if path in files])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(_FILES):
            revision, _, name = path.removeprefix(_FILES).partition("/")
            self._file(revision, name)
        elif path == _API or path.startswith(f"{_API}/revision/"):
            revision = path.removeprefix(_API).removeprefix("/revision/") or "main"
            commit = self.hub.commit() if revision == "main" else revision
            if commit in self.hub.commits:
                self.json({"id": NAME, "sha": commit, "siblings": [], "tags": []})
            else:
                self.missing("RevisionNotFound")
        elif path.startswith(f"{_API}/tree/"):
            self._tree(path.removeprefix(f"{_API}/tree/"))
        else:
            self.missing("RepoNotFound")

    def _tree(self, place: str) -> None:
        revision, _, folder = place.partition("/")
        files = self.hub.at(revision) or {}
        recursive = "recursive=true" in self.path.lower()
        found: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            parents = [str(one) for one in PurePosixPath(path).parents][:-1]
            if folder and folder not in parents:
                continue
            for one in (path, *parents):
                inside = one != folder and (not folder or one.startswith(f"{folder}/"))
                depth = one.count("/") - (folder.count("/") + 1 if folder else 0)
                if inside and (recursive or depth == 0):
                    kind = {"type": "directory", "path": one, "oid": "0", "size": 0}
                    found[one] = entry(path, content) if one == path else kind
        if found:
            self.json([found[one] for one in sorted(found)])
        else:
            self.missing("EntryNotFound")

    def _file(self, revision: str, name: str) -> None:
        content = (self.hub.at(revision) or {}).get(name)
        if content is None:
            self.missing("EntryNotFound")
            return
        commit = self.hub.commit() if revision == "main" else revision
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        asked, status = self.headers.get("Range"), 200
        if asked is not None:
            start, stop = asked.removeprefix("bytes=").split("-")
            last = min(int(stop), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            content, status = content[int(start) : last + 1], 206
        self.send(status, content, headers)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub with an empty repository."""
    hub = Hub()
    answering = type("Answering", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
