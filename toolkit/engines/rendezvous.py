"""The ranks' rendezvous under an elastic agent that may restart them.

torchrun's agents keep one key-value store over all restarts, and PyTorch looks up the ranks'
addresses in it without the restart number: restarted ranks find addresses of dead ones, and
fail or wait until every restart is used up (torch 2.13). So each start agrees on a new prefix
in the store. It cannot be the restart count, because machines count differently.
"""

import os
import socket
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

_POLL_S = 0.02


def needs_new_store() -> bool:
    """Whether these ranks were started by agents that keep a store over restarts."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def on_loopback(local: bool) -> bool:
    """Whether ranks that are all on this machine, if `local`, meet at the loopback address,
    without an agent that keeps their store."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return local and not agent and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")


def loopback_store(rank: int, world: int, timeout: timedelta) -> Store:
    """A store that listens at the loopback address only; PyTorch's own listens at all of this
    machine's, without any authentication. Raises OSError if the port is taken."""
    address = "127.0.0.1", int(os.environ["MASTER_PORT"])
    if rank > 0:
        return TCPStore(*address, world, timeout=timeout)
    listening = socket.create_server(address, backlog=2048).detach()  # the store closes it
    return TCPStore(*address, world, True, timeout=timeout, master_listen_fd=listening)


def new_store(rank: int, world: int, timeout: timedelta) -> Store:
    """The agents' store under a prefix that only the ranks of this start know. Collective.

    Rank 0 sends the prefix to each rank under the random name that this rank posted: names left
    by earlier starts are answered, too, but not read. Raises TimeoutError.
    """
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    store.set_timeout(timeout)
    me = uuid.uuid4().hex
    if rank == 0:
        _answer(store, me, world, time.monotonic() + timeout.total_seconds())
        return PrefixStore(me, store)
    store.set(f"dmt/here/{rank}", me)
    prefix = store.get(f"dmt/prefix/{me}").decode()
    store.set(f"dmt/joined/{prefix}/{rank}", "")
    return PrefixStore(prefix, store)


def _answer(store: Store, prefix: str, world: int, deadline: float) -> None:
    """Send every rank the prefix, until all have read it."""
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if store.check([f"dmt/here/{rank}"]):
                store.set(f"dmt/prefix/{store.get(f'dmt/here/{rank}').decode()}", prefix)
            if store.check([f"dmt/joined/{prefix}/{rank}"]):
                missing.discard(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come")
        time.sleep(_POLL_S)
