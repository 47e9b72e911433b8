"""DeepSpeed's compiled parts: what a run needs, whether it can be built, and building it.

DeepSpeed compiles an op at its first use, on every rank, silently, through
`torch.utils.cpp_extension`. That has three traps: a missing compiler shows as a traceback in
the middle of start-up; a build takes minutes in silence; and a build that was killed
leaves a `lock` file behind, for which later runs wait indefinitely. So ops are checked and
built before the run starts, by one process at a time, in a folder that only DMT uses. Nothing
here imports torch or DeepSpeed: `python -m toolkit.engines.deepspeed.ops OP` builds in a
separate process.
"""

import fcntl
import importlib
import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from toolkit.errors import BackendUnavailable
from toolkit.system.compilers import (
    CPP,
    Missing,
    compiler,
    missing_compiler,
    missing_headers,
    private_folder,
)
from toolkit.system.interpreter import python

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
    "quantizer": "QuantizerBuilder",
}
"""DeepSpeed's builder class of each op that a rendered config can need."""

LOADING_S = 60.0
"""A rank that loads a built op holds torch's lock for less than that."""

ON_GPU = ("fused_adam", "async_io", "quantizer")
"""Ops that are built against CUDA. CPU ops never are."""

_POLL_S = 0.2
_TURN, _BUILT = "dmt-building", "dmt-built"
"""Files in an op's folder: locked while a process builds it, and there once it is built."""

_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_destroy(c); }\n"


def required_ops(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The ops that DeepSpeed will load for a rendered config, in the order to build them."""
    zero = config.get("zero_optimization", {})
    optimizer_device, parameter_device = (
        (zero.get(block) or {}).get("device", "none")  # an offload block may be null
        for block in ("offload_optimizer", "offload_param")
    )
    optimizer = config.get("optimizer")  # none: it is not DeepSpeed's
    ops: list[str] = []
    if optimizer is not None and not optimizer.get("params", {}).get("torch_adam", False):
        ops.append("fused_adam" if optimizer_device == "none" else "cpu_adam")
    if "nvme" in (optimizer_device, parameter_device):
        ops += ["pin_memory", "async_io"]
    if any(name.startswith("zero_quantized") and on for name, on in zero.items()):
        ops.append("quantizer")
    return tuple(ops)


def preflight(ops: Sequence[str]) -> None:
    """Make sure that `ops` can be built and loaded here, before anything starts.

    Raises BackendUnavailable naming everything that is missing, each with its fix. Ops that are
    built already are checked too: loading one runs ninja again.
    """
    ops = compiled_at_start(ops) if ops else ()
    if missing := [*missing_tools(ops)] if ops else []:
        raise BackendUnavailable(
            f"DeepSpeed must compile {', '.join(ops)} for this run, but "
            + "; ".join(item.what for item in missing),
            fix="; ".join(item.fix for item in missing),
        )


def put_ninja_on_path() -> None:
    """Let this process and its children use the `ninja` installed next to this Python.

    A `dmt` started by its full path, without the environment activated, would find none, or the
    system's, and another version of ninja rebuilds what the first one built.
    """
    scripts = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", os.defpath)
    own = shutil.which("ninja", path=scripts)
    if own is not None and shutil.which("ninja", path=path) != own:
        os.environ["PATH"] = f"{scripts}{os.pathsep}{path}"


def build(ops: Sequence[str], report: Callable[[str], None]) -> None:
    """Build those of `ops` that are not built yet, calling `report` for each.

    Waits for another process that builds the same op. Raises BackendUnavailable when a build
    fails, whose log is kept and named, or where the folder cannot be written to.
    """
    for op in compiled_at_start(ops) if ops else ():
        try:
            if is_built(op) and not (build_folder(op) / "lock").exists():
                continue
            with _turn(op, report) as turn:
                if not is_built(op):
                    report(f"building DeepSpeed op {op} (takes minutes, once per machine)…")
                    _build(op, turn)
        except OSError as error:
            raise BackendUnavailable(
                f"DeepSpeed op {op} cannot be built in {build_folder(op)}: {error.strerror}",
                fix="set TORCH_EXTENSIONS_DIR to a folder that you can write to",
            ) from error


def use_own_folder() -> Path:
    """Let torch build and find ops of this environment in a folder of their own: torch compiles
    again at the first use what was compiled for another one.

    For this process and its children. Returns the folder. Raises as `private_folder` does.
    """
    built_for = f"torch {version('torch')}, deepspeed {version('deepspeed')}, {sys.prefix}"
    name = f"dmt-{sha256(built_for.encode()).hexdigest()[:16]}"
    stated = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(stated) if stated else private_folder("operators", name)
    folder = folder if folder.name == name else folder / name
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    return folder


def build_folder(op: str) -> Path:
    """Where torch builds `op`."""
    return use_own_folder() / op


def is_built(op: str) -> bool:
    """Whether a build of `op` was completed."""
    return (build_folder(op) / _BUILT).exists()


@contextmanager
def _turn(op: str, report: Callable[[str], None]) -> Iterator[IO[bytes]]:
    """Context in which no other process builds `op`, with the file that this one has locked.

    A build inherits the file, and with it the lock, if its launcher is killed.
    """
    folder = build_folder(op)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _TURN).open("wb") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(
                f"waiting for another process that builds DeepSpeed op {op} "
                f"(`fuser {shlex.quote(turn.name)}` names it)…"
            )
            fcntl.flock(turn, fcntl.LOCK_EX)
        _remove_torchs_lock(op)
        yield turn


def _remove_torchs_lock(op: str) -> None:
    """Remove the lock that a killed build left. A rank that loads a built op has it for a
    moment."""
    lock = build_folder(op) / "lock"
    with suppress(FileNotFoundError):
        while is_built(op) and time.time() - lock.stat().st_mtime < LOADING_S:
            time.sleep(_POLL_S)
        lock.unlink()


def for_cuda() -> bool:
    """Whether the installed torch was built for CUDA."""
    version = runpy.run_path(str(_package_folder("torch") / "version.py"))
    return bool(version.get("cuda"))


def _package_folder(package: str) -> Path:
    """Folder of an installed package, found without importing it."""
    found = None
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise BackendUnavailable(f"{package} is not installed", fix=f"pip install {package}")
    return Path(found.origin).parent


def compiled_at_start(ops: Sequence[str]) -> list[str]:
    """The `ops` that this DeepSpeed was not installed with (`DS_BUILD_OPS=1`)."""
    record = _package_folder("deepspeed") / "git_version_info_installed.py"
    installed = runpy.run_path(str(record))["installed_ops"] if record.is_file() else {}
    return [op for op in ops if not installed.get(op)]


def missing_tools(ops: Sequence[str]) -> Iterator[Missing]:
    """Missing compiler, ninja and headers."""
    yield from missing_compiler(CPP, "CXX", ("c++",))
    if shutil.which("ninja") is None:
        yield Missing("ninja", "the build tool ninja is not on PATH", "pip install ninja")
    yield from missing_headers()
    found = compiler("CXX", ("c++",))
    if "async_io" in ops and found and not _libaio_links(found):
        yield Missing(
            "libaio",
            "libaio, which NVMe offload reads and writes through, cannot be compiled against",
            "apt-get install libaio-dev (Debian, Ubuntu), dnf install libaio-devel "
            "(Fedora, RHEL)",
        )

    on_gpu = [op for op in ops if op in ON_GPU]
    if on_gpu and for_cuda() and cuda_compiler() is None:
        yield Missing(
            "nvcc",
            f"there is no nvcc, and {', '.join(on_gpu)} needs CUDA's toolkit",
            "install CUDA's toolkit and set CUDA_HOME to it",
        )


def cuda_compiler() -> str | None:
    """CUDA's compiler, found as `torch.utils.cpp_extension` finds it. None if missing."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") if home is None else None
    return found or shutil.which(Path(home or "/usr/local/cuda") / "bin" / "nvcc")


def _libaio_links(compiler: Sequence[str]) -> bool:
    """Whether a program against libaio compiles. CFLAGS and LDFLAGS count, as in DeepSpeed."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    command = [*compiler, "-x", "c++", "-", *flags[0], *flags[1], "-laio", "-o", os.devnull]
    result = subprocess.run(
        command, input=_AIO_PROGRAM, text=True, capture_output=True, check=False
    )
    return result.returncode == 0


def _build(op: str, turn: IO[bytes]) -> None:
    """Compile one op in a separate process. Its log is removed only on success.

    The build of a launcher that is stopped goes on, and the next run finds it. Ctrl-C ends
    both.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"dmt-build-{op}-", suffix=".log")
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.run(
            [*python(), "-m", "toolkit.engines.deepspeed.ops", op],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(turn.fileno(),),
            check=False,
        )
    log = Path(name)
    if process.returncode == 0:
        log.unlink()
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if "error" in line.lower()]
    first = f": {errors[0][:300]}" if errors else ""
    raise BackendUnavailable(
        f"building DeepSpeed op {op} failed (exit code {process.returncode}){first}",
        fix=f"the build's log has the reason: {log}",
    )


def _build_here(op: str) -> None:
    """Compile and load `op` in this process, for the accelerator that a run here uses."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    accelerator.create_op_builder(BUILDERS[op]).load(verbose=True)
    (build_folder(op) / _BUILT).touch()


if __name__ == "__main__":
    _build_here(sys.argv[1])
