"""A hub on this machine, which answers what `huggingface_hub` asks when a model is uploaded."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.data.hub import Handler, entry, serving

TOKEN = "hf_canaryOfTheToken"
NAMESPACE = "me"
_COMMIT = "c" * 40


class ModelHub:
    """Repositories by name; `TOKEN` may write those of `NAMESPACE`."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        """The files of each, by path; of one that was uploaded to xet, its SHA-256."""
        self.private: set[str] = set()
        self.commits: list[str] = []
        """Their messages."""
        self.objects: dict[str, bytes] = {}
        """Uploaded by LFS, by SHA-256."""
        self.xet: list[tuple[str, int]] = []
        """Path and bytes of what was uploaded to xet's content-addressed store."""


class _Handler(Handler):
    hub: ModelHub

    def do_POST(self) -> None:  # noqa: N802 - the base class's name
        body = self.body()
        path = urlsplit(self.path).path
        if path.startswith(("/v2/", "/v1/xorb-grants/")):  # newer: clients fall back
            self.missing("")
        elif path.startswith("/v1/"):
            self.hub.xet.append((path, len(body)))
            self.json({"was_inserted": True, "result": 1})
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Invalid username or password.")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            self.json({"files": [_upload_mode(file) for file in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.json(
                {"transfer": "basic", "objects": [*map(self._lfs, json.loads(body)["objects"])]}
            )
        else:
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or NAMESPACE}/{asked['name']}"
        if not name.startswith(f"{NAMESPACE}/"):
            self.refuse(403, "You don't have the rights to create a model here.")
        elif name in self.hub.repositories:
            self.refuse(
                409, "You already created this model repo", url=f"{self.hub.url}/{name}"
            )
        else:
            self.hub.repositories[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(name)
            self.json({"url": f"{self.hub.url}/{name}"})

    def _lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.hub.url}/lfs/{asked['oid']}", "header": {}}
        return {**asked, "actions": {"upload": upload}}

    def _commit(self, name: str, body: bytes) -> None:
        files = self.hub.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects.get(
                        value["oid"], value["oid"].encode()
                    )
                case "deletedFile":
                    del files[value["path"]]
        url = f"{self.hub.url}/{name}/commit/{_COMMIT}"
        self.json({"success": True, "commitOid": _COMMIT, "commitUrl": url})

    def do_PUT(self) -> None:  # noqa: N802 - the base class's name
        content = self.body()
        assert hashlib.sha256(content).hexdigest() == self.path.removeprefix("/lfs/")
        self.hub.objects[self.path.removeprefix("/lfs/")] = content
        self.send(200, b"", {})

    def do_GET(self) -> None:  # noqa: N802 - the base class's name
        path = urlsplit(self.path).path
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        files = self.hub.repositories.get(name)
        token = self.headers.get("Authorization")
        known = token == f"Bearer {TOKEN}"
        if files is None or not (known or (token is None and name not in self.hub.private)):
            self.refuse(401, "Invalid username or password.")
        elif "/xet-write-token/" in path:
            expires = str(int(time.time()) + 3600)
            headers = {"X-Xet-Cas-Url": self.hub.url, "X-Xet-Access-Token": "xet",
                       "X-Xet-Token-Expiration": expires}  # fmt: skip
            body = {"casUrl": self.hub.url, "accessToken": "xet", "exp": int(expires)}
            self.send(200, json.dumps(body).encode(), headers)
        elif "/tree/" in path:
            self.json([entry(*file) for file in sorted(files.items())])
        elif "/resolve/" in path:
            self._file(files.get(path.rpartition("/")[2]))
        else:
            private = name in self.hub.private
            self.json({"id": name, "private": private, "sha": _COMMIT, "siblings": []})

    def _file(self, content: bytes | None) -> None:
        if content is None:
            self.missing("EntryNotFound")
        else:
            headers = {
                "X-Repo-Commit": _COMMIT,
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            }
            self.send(200, content, headers)

    def refuse(self, status: int, message: str, **fields: str) -> None:
        body = json.dumps({"error": message, **fields}).encode()
        self.send(status, body, {"Content-Type": "application/json"})


def _upload_mode(file: dict[str, Any]) -> dict[str, Any]:
    """Weights are large files, as `.gitattributes` of the hub says."""
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def running() -> Iterator[ModelHub]:
    """A hub without repositories."""
    hub = ModelHub()
    with serving(hub, _Handler):
        yield hub
