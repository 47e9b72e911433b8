"""`dmt watch`: the page of a run in the browser, live."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.console import Console
from toolkit.errors import DataError
from toolkit.extras.page.dashboard import show_live
from toolkit.extras.page.serve import LivePage, PageServer
from toolkit.report.record import find_runs
from toolkit.text.terminal import tell

LOWEST_PRIORITY = 19
_OWN_HOST = "127.0.0.1"


def watch(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN…]", help="Run directories; default: the last in runs/."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than this machine's own "
                          "let everyone read who reaches it.")
    ] = _OWN_HOST,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 0,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it here instead, until q or Ctrl-C.")
    ] = False,
) -> None:  # fmt: skip
    """Serve the page of `dmt report --html`, with new steps as they come, until Ctrl-C.

    Example: `dmt watch runs/tiny-llama-bytes --port 8265`
    """
    if terminal and (port or host != _OWN_HOST):
        raise DataError("--terminal: has no --host and --port", fix="leave them out")
    live = LivePage(run_dirs or find_runs(Path("runs"))[:1])
    if terminal:
        show_live(live, Console())
        return
    try:
        server = PageServer(live, host, port)
    except OSError as error:
        raise DataError(
            f"cannot listen on {host}, port {port} ({error.strerror})",
            fix="another --port, or --port 0 for any free one",
        ) from error
    tell(f"watch {server.url} (Ctrl-C ends it)")
    own = host == "localhost"
    with suppress(ValueError):
        own = ipaddress.ip_address(host).is_loopback
    if not own:
        tell(f"warning: everyone who can reach {host or 'this machine'} can read these runs")
    os.nice(LOWEST_PRIORITY)  # ranks on the same machine come first
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
