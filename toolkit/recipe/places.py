"""What a recipe's text names: something on this machine, or a URL."""

import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(text: str) -> bool:
    """A URL, e.g. `s3://bucket/data`: read through fsspec, and never joined to a folder."""
    return _SCHEME.match(text) is not None
