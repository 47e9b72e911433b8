"""Small files of the Hugging Face hub, with a limit: its client retries for half a minute."""

import logging
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

LIMIT_S = 5.0
"""For a file of a few KiB; a hub that takes longer counts as unreachable."""


def download(hub: str, name: str, revision: str | None, limit_s: float = LIMIT_S) -> Path:
    """A file of a model, from the hub or its cache.

    Raises what the hub's client raises, or TimeoutError after `limit_s`. A client that is still
    trying then ends with this process.
    """
    from huggingface_hub import hf_hub_download

    answers: Queue[str | Exception] = Queue()

    def ask() -> None:
        try:
            answers.put(hf_hub_download(hub, name, revision=revision))
        except Exception as error:  # noqa: BLE001 - raised below
            answers.put(error)

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    Thread(target=ask, daemon=True, name="hub").start()
    try:
        answer = answers.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return Path(answer)
