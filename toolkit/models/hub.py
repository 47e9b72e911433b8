"""The config of a recipe's model: stated, in a folder, or on the Hugging Face hub.

No code of a repository is run: transformers would do it only with `trust_remote_code`.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from toolkit.errors import DataError, PlanError
from toolkit.models.model import is_dropout, published, read
from toolkit.recipe.schema import ModelSection
from toolkit.system.untrusted import read_json

LIMIT_S = 5.0
"""For a file of a few KiB. A hub that takes longer counts as unreachable."""


Answer = TypeVar("Answer")


class ShapeUnknown(PlanError):
    """The model's shape is only on the hub, which is not reachable now."""


def model_config(model: ModelSection, *, download: bool = True) -> dict[str, Any]:
    """The Hugging Face config of a recipe's model: stated, or read from `hub` without its
    dropout.

    Without `download`, a hub id is looked up only in the hub's local cache. Raises PlanError if
    it cannot be read, ShapeUnknown if the network is the reason.
    """
    if model.config is not None:
        return model.config
    path, stated, config = _read_config(model, download)
    if stated.get("quantization_config") is not None:
        raise PlanError(
            f"model.hub: {path}: its weights are quantized, and DMT trains those that are not",
            fix="choose a copy in bf16 or fp32",
        )
    try:
        read(config)
    except PlanError as error:
        told = f"model.hub: {path}: {error.message}"
        fix = f"{error.fix}; or choose another model" if error.fix else "choose another model"
        raise PlanError(told, fix=fix) from error
    return config | dict.fromkeys(filter(is_dropout, config), 0.0)


def ignored_keys(model: ModelSection, *, download: bool = True) -> str | None:
    """A note about keys of the config in `hub` that transformers does not read. None without
    any. Raises what `model_config` raises."""
    if model.config is not None:
        return None
    path, stated, config = _read_config(model, download)
    unread = [key for key in stated if key not in config and stated[key] is not None]
    return f"{path}: transformers does not read {', '.join(unread)}" if unread else None


def _read_config(
    model: ModelSection, download: bool
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The config.json of `hub`, what it states, and what is read of that."""
    assert model.hub is not None, "checked at load"
    path = Path(model.hub) / "config.json"
    if not Path(model.hub).is_dir():
        path = _hub_config(model.hub, model.revision, download)
    try:
        stated = read_json(path)
        if not isinstance(stated, dict):
            raise ValueError("it is no map of settings")
        return path, stated, published(stated)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"model.hub: cannot read {path}: {error}",
            fix="check the folder, or set model.config",
        ) from error


def _hub_config(hub: str, revision: str | None, download: bool) -> Path:
    """The cached or downloaded config.json of a hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    fix = "state the shape in model.config to plan offline, or point at a local folder"
    try:
        if download:
            return download_file(hub, "config.json", revision)
        # hf_hub_download(local_files_only=True) still makes other network requests.
        found = try_to_load_from_cache(hub, "config.json", revision=revision)
        if not isinstance(found, str):
            raise LocalEntryNotFoundError("not cached")
        return Path(found)
    except HFValidationError as error:
        raise PlanError(
            f"model.hub: {hub} is neither a folder nor a hub id", fix=fix
        ) from error
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        missing = "reachable on the hub" if download else "in the hub's local cache"
        raise ShapeUnknown(
            f"model.hub: {hub!r} is neither a local folder nor {missing} "
            f"({type(error).__name__})",
            fix=fix,
        ) from error


def answers(hub: str, revision: str | None) -> bool:
    """Whether the hub answers in time a question about the model or tokenizer `hub`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        url = hf_hub_url(hub, "tokenizer_config.json", revision=revision)
        _in_time(lambda: get_hf_file_metadata(url, timeout=LIMIT_S), LIMIT_S)
    except (HfHubHTTPError, ValueError):
        return True  # an answer, which whoever loads it next reports
    except Exception:  # noqa: BLE001 - of whichever client the hub's library has
        return False
    return True


def dataset_commit(hub: str) -> str | None:
    """The newest commit of a data set. None if the hub has none or does not answer in time."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # of whichever client the hub's library has
        return _in_time(lambda: HfApi().dataset_info(hub, timeout=LIMIT_S).sha, LIMIT_S)
    return None


def download_file(hub: str, name: str, revision: str | None, limit_s: float = LIMIT_S) -> Path:
    """A file of a model, from the hub or its cache. The hub's client alone would retry for half
    a minute.

    Raises what the hub's client raises, or TimeoutError after `limit_s`. A client that is still
    trying then ends with this process.
    """
    from huggingface_hub import hf_hub_download

    return Path(_in_time(lambda: hf_hub_download(hub, name, revision=revision), limit_s))


def _in_time(question: Callable[[], Answer], limit_s: float) -> Answer:
    """The answer of the hub's client. Raises TimeoutError without one after `limit_s`."""
    queue: Queue[Answer | Exception] = Queue()

    def ask() -> None:
        try:
            queue.put(question())
        except Exception as error:  # noqa: BLE001 - raised below
            queue.put(error)

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt
    Thread(target=ask, daemon=True, name="hub").start()
    try:
        answer = queue.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def asks_to_run_code(error: BaseException) -> bool:
    """Whether transformers refuses because it would have to run code from a repository."""
    return "trust_remote_code" in str(error)


def runs_code(what: str) -> DataError:
    """The error for `what`: "the tokenizer `x/y`"."""
    return DataError(
        f"{what} needs Python code from its own repository, and DMT does not run code that "
        "comes with a model, a tokenizer or a checkpoint",
        fix="use one that transformers itself implements (no `auto_map` in its config)",
    )
