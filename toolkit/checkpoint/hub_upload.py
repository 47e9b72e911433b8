"""Uploads an export to a repository of the Hugging Face hub."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
_EXPORTED = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
)
"""Files of an earlier export in the repository, which may be split otherwise or hold adapters:
removed unless they are uploaded again."""


class HubRepository:
    """A model repository that exists and that this user may write to."""

    def __init__(self, name: str, api: "HfApi") -> None:
        self.name = name
        self._api = api

    @classmethod
    def prepare(cls, name: str, *, private: bool) -> "HubRepository":
        """Create the repository if it does not exist. Raises CheckpointError if it cannot be
        created or seen, or if it is public and should be `private`."""
        from huggingface_hub import HfApi

        api = HfApi(library_name="dmt")
        with _one_error(name, api):
            # None: as the user's or organisation's default is.
            api.create_repo(name, private=private or None, exist_ok=True)
            visible = not api.model_info(name).private
        if private and visible:
            raise CheckpointError(
                f"--private: {name} exists and is public",
                fix="make it private in its settings, or name another repository",
            )
        return cls(name, api)

    def upload(self, folder: Path, message: str, is_generated: Callable[[bytes], bool]) -> str:
        """Upload the files of an export and return the address of the commit.

        Weights of earlier exports are replaced. A card for which `is_generated` is false stays
        as it is. Raises CheckpointError.
        """
        again = f"the export is complete: hf upload {self.name} {shlex.quote(str(folder))}"
        with _one_error(self.name, self._api, again):
            keep = self._api.file_exists(self.name, CARD) and not is_generated(self._card())
            commit = self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                ignore_patterns=[CARD] if keep else None,
                delete_patterns=[*_EXPORTED],
            )
        return str(commit.commit_url)

    def _card(self) -> bytes:
        with TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(self.name, CARD, local_dir=folder)
            return Path(path).read_bytes()


@contextmanager
def _one_error(
    name: str, api: "HfApi", again: str = "start the command again"
) -> Iterator[None]:
    """Raise CheckpointError for whatever the hub's client raises: its own errors, those of its
    HTTP library and of its upload library have no common base. `again`: what repeats it."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}"
        fix = f"check the network and HF_ENDPOINT; then {again}"
        if isinstance(error, HFValidationError):
            reason, fix = str(error), "write NAMESPACE/NAME, e.g. --push-to-hub me/model"
        elif isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            reason = f"{status} {error.server_message or ''}"
            if status in (401, 403, 404):
                fix = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
        message = " ".join(reason.split())
        raise CheckpointError(
            f"--push-to-hub {name}: {api.endpoint}: {message}", fix=fix
        ) from error
