"""Weights & Biases: checks the login and whether its server answers."""

import netrc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs

ANSWER_S = 3.0
_FIX = "wandb login, or export WANDB_API_KEY; or logging.wandb.mode: offline"


def check(needs: Needs) -> Iterator[Finding]:
    """Reports where the key is, never the key. The network is used for online logging only."""
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    host = url.hostname or "api.wandb.ai"
    try:
        place = _login(host)
    except (OSError, netrc.NetrcParseError) as error:
        text = f"{getattr(error, 'filename', None) or '~/.netrc'} cannot be read: {error}"
        yield lacking("W&B login", text, _FIX, needs.wandb, "warning")
        return
    if place is None:
        text = f"none for {host}; runs log offline without one"
        yield lacking("W&B login", text, _FIX, needs.wandb)
        return
    yield Finding("W&B login", "ok", f"for {host}, in {place}")
    if needs.wandb is None:
        return
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
        yield Finding("W&B server", "ok", f"{host}:{port} answers")
    except OSError as error:
        text = f"{host}:{port} does not answer: {error}"
        fix = "logging.wandb.mode: offline, and `wandb sync RUN/wandb` later"
        yield Finding("W&B server", "problem", text, needs.wandb, fix)


def _login(host: str) -> str | None:
    """Where the key of `host` is: the environment, or the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        if file.is_file() and host in netrc.netrc(str(file)).hosts:
            return str(file)
    return None
