"""What a run ran with: versions only, no environment variables and no host name."""

import platform
import subprocess
from importlib import metadata
from typing import Any

import toolkit
from toolkit.backend import BACKENDS

_PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "accelerate",
    *(package for engine in BACKENDS.names for package in BACKENDS[engine].packages),
    "transformer-engine",
    "flash-attn",
    "wandb",
    "safetensors",
    "numpy",
    "pydantic",
)


def environment_report() -> dict[str, Any]:
    """Return versions of Python, platform and packages, and the working tree's commit.

    Versions come from the packages' metadata: nothing heavy is imported.
    """
    return {
        "dmt": toolkit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return git's answer about the working directory. None outside a repository."""
    try:
        answer = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
