"""Makes autograd work on fake CUDA tensors, whether torch is built with CUDA or without.

Without a device guard for CUDA, autograd aborts the process; that of a CUDA build needs a GPU.
`load` compiles one, once per torch and machine, and loads it before torch is imported, because
torch looks up the other hooks of CUDA once.
"""

import ctypes
import hashlib
import importlib.util
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from toolkit.errors import BackendUnavailable
from toolkit.system.compilers import private_folder

_SOURCE = Path(__file__).with_name("guard.cpp")


def load() -> None:
    """Load the guard, then torch, which must not be imported yet.

    Raises BackendUnavailable without torch or a C++ compiler.
    """
    assert "torch" not in sys.modules, "torch has already asked for a guard"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BackendUnavailable("torch is not installed", fix="pip install torch")
    torch = Path(spec.origin).parent
    version = runpy.run_path(str(torch / "version.py"))
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(str(_built(torch, version["__version__"])))
    import_module("torch")
    guard.dmt_take_over()


def _built(torch: Path, version: str) -> Path:
    key = f"{torch} {version}".encode() + _SOURCE.read_bytes()
    library = private_folder("fake-gpu") / f"{hashlib.sha256(key).hexdigest()[:16]}.so"
    if library.exists():
        return library
    unfinished = library.with_suffix(f".{os.getpid()}")
    include = torch / "include"
    command = [
        *(os.environ.get("CXX", "c++"), "-O0", "-shared", "-fPIC", "-std=c++20"),
        *(f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"),
        *(str(_SOURCE), "-o", str(unfinished)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BackendUnavailable(
            f"what stands for a GPU cannot be compiled: {said.strip()[:500]}",
            fix="apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), or "
            "set CXX",
        ) from error
    unfinished.replace(library)
    return library
