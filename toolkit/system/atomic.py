"""Files that are replaced as a whole."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: a reader sees the old content or the new, never a part.

    The temporary file has a name of its own on every machine that shares the folder. Raises
    OSError.
    """
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
