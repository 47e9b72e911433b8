"""DeepSpeed's compiled parts: what a run needs, whether it can be built, and building it.

DeepSpeed compiles an op at its first use, on every rank, silently, through
`torch.utils.cpp_extension`. That has three traps: a missing compiler shows as a traceback in
the middle of start-up; a build takes minutes in silence; and a build that was killed
leaves a `lock` file behind, for which later runs wait indefinitely. So ops are checked and
built before the run starts. Nothing here imports torch or DeepSpeed: `python -m
toolkit.engines.deepspeed.ops OP` builds in a separate process.
"""

import glob
import importlib
import importlib.util
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.errors import BackendUnavailable
from toolkit.system.compilers import (
    CPP,
    HEADERS,
    Missing,
    compiler,
    missing_compiler,
    missing_headers,
    user_cache,
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

BUILD_LIMIT_S = 1800.0
"""Time limit of a build: the slowest, async_io, takes minutes."""

OLD_LOCK_S = 600.0
"""Age at which a lock counts as stale if its holder cannot be determined."""

TOOLS = (CPP, "ninja", HEADERS, "libaio")
"""What building an op may need, besides CUDA's compiler."""

ON_GPU = ("fused_adam", "async_io", "quantizer")
"""Ops that are built against CUDA; CPU ops never are."""

_POLL_S = 0.2

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

    Raises BackendUnavailable naming everything that is missing and every lock that a
    killed build left behind, each with its fix. Ops that are built already are checked
    too: loading one runs ninja again.
    """
    ops = compiled_at_start(ops) if ops else ()
    if ops:
        _demand_nothing(ops, [*missing_tools(ops), *stale_locks(ops)])


def _demand_nothing(ops: Sequence[str], missing: Sequence[Missing]) -> None:
    if missing:
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


def build(
    ops: Sequence[str],
    report: Callable[[str], None],
    *,
    limit_s: float = BUILD_LIMIT_S,
) -> None:
    """Build those of `ops` that are not built yet, calling `report` for each.

    Waits for another process that builds the same op. Raises BackendUnavailable when a build
    fails or takes longer than `limit_s` seconds; its log is kept and named.
    """
    for op in compiled_at_start(ops) if ops else ():
        _wait_for_others(op, report, limit_s)
        if not is_built(op):
            report(f"building DeepSpeed op {op} (takes minutes, once per machine)…")
            start = time.monotonic()
            _build(op, limit_s)
            _stamp(op).write_text(_environment(), encoding="utf-8")
            report(f"built DeepSpeed op {op} in {time.monotonic() - start:.0f} s")


def is_built(op: str) -> bool:
    """Whether `op` was last built for the torch and DeepSpeed of this environment:
    environments share the folder, and torch compiles again at the first use what was compiled
    for another one."""
    library, stamp = build_folder(op) / f"{op}.so", _stamp(op)
    return (
        library.is_file()
        and stamp.is_file()
        and stamp.read_text(encoding="utf-8") == _environment()
    )


def _stamp(op: str) -> Path:
    return build_folder(op) / "dmt_built_for"


def _environment() -> str:
    """What a built op depends on."""
    return f"torch {version('torch')}, deepspeed {version('deepspeed')}, {sys.prefix}"


def build_folder(op: str) -> Path:
    """Where torch builds `op`: `torch.utils.cpp_extension` decides it the same way.

    Raises BackendUnavailable where that depends on a torch that is not installed.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return Path(root) / op
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return user_cache() / "torch_extensions" / f"{python}_{torch_accelerator()}" / op


def torch_accelerator() -> str:
    """`cpu`, `cu128`, `rocm63`: what the installed torch was built for."""
    version = runpy.run_path(str(_package_folder("torch") / "version.py"))
    for name, prefix in (("hip", "rocm"), ("cuda", "cu")):
        if version.get(name):
            return prefix + str(version[name]).replace(".", "")
    return "cpu"


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
    if on_gpu and torch_accelerator().startswith("cu") and cuda_compiler() is None:
        yield Missing(
            "nvcc",
            f"there is no nvcc, and {', '.join(on_gpu)} needs CUDA's toolkit",
            "install CUDA's toolkit and set CUDA_HOME to it",
        )


def cuda_compiler() -> str | None:
    """CUDA's compiler, found as `torch.utils.cpp_extension` finds it; None if missing."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") if home is None else None
    return found or shutil.which(Path(home or "/usr/local/cuda") / "bin" / "nvcc")


def _libaio_links(compiler: Sequence[str]) -> bool:
    """Whether a program against libaio compiles; CFLAGS and LDFLAGS count, as in DeepSpeed."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    command = [*compiler, "-x", "c++", "-", *flags[0], *flags[1], "-laio", "-o", os.devnull]
    result = subprocess.run(
        command, input=_AIO_PROGRAM, text=True, capture_output=True, check=False
    )
    return result.returncode == 0


def stale_locks(ops: Sequence[str]) -> Iterator[Missing]:
    """Locks that killed builds of `ops` left behind."""
    for op in ops:
        lock = build_folder(op) / "lock"
        # It may have been released meanwhile.
        if lock.exists() and not _is_held(lock) and lock.exists():
            yield Missing(
                op,
                f"a build of {op} that was killed left its lock {lock}, for which DeepSpeed "
                "would wait indefinitely (no process on this machine holds it, or it is "
                f"another user's, older than {OLD_LOCK_S:.0f} s)",
                f"rm {shlex.quote(str(lock))}",
            )


def _is_held(lock: Path) -> bool:
    """Whether a live build holds the lock: torch keeps the file open while it builds.

    If the lock is another user's, or there is no /proc, its age decides.
    """
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    if status.st_uid != os.getuid() or not Path("/proc/self/fd").is_dir():
        return time.time() - status.st_mtime < OLD_LOCK_S
    return any(os.path.samestat(status, held) for held in _open_files())


def _open_files() -> Iterator[os.stat_result]:
    """Every file that a process has open; other users' processes show none."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - passes over the gone
        with suppress(OSError):
            yield Path(descriptor).stat()


def _wait_for_others(op: str, report: Callable[[str], None], limit_s: float) -> None:
    """Wait while another process builds `op`."""
    lock = build_folder(op) / "lock"
    deadline = time.monotonic() + limit_s
    if lock.exists() and _is_held(lock):
        report(f"waiting for another process that builds DeepSpeed op {op}…")
    while lock.exists():
        _demand_nothing([op], [*stale_locks([op])])
        if time.monotonic() > deadline:
            raise BackendUnavailable(
                f"another process has been building DeepSpeed op {op} for {limit_s:.0f} s "
                f"(lock {lock})",
                fix=f"end that process; if there is none: rm {shlex.quote(str(lock))}",
            )
        time.sleep(_POLL_S)


def _build(op: str, limit_s: float) -> None:
    """Compile one op in a separate process; its log is removed only on success.

    The build of a launcher that is stopped goes on, and the next run finds it; Ctrl-C ends
    both.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"dmt-build-{op}-", suffix=".log")
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(
            [*python(), "-m", "toolkit.engines.deepspeed.ops", op],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.kill()
            process.wait()
            (build_folder(op) / "lock").unlink(missing_ok=True)
            raise _failed(op, f"took longer than {limit_s:.0f} s", Path(name)) from error
    if code != 0:
        raise _failed(op, f"failed (exit code {code})", Path(name))
    Path(name).unlink()


def _failed(op: str, how: str, log: Path) -> BackendUnavailable:
    """The error for a build that did not succeed, with the compiler's first complaint."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if "error" in line.lower()]
    first = f": {errors[0][:300]}" if errors else ""
    return BackendUnavailable(
        f"building DeepSpeed op {op} {how}{first}",
        fix=f"the build's log has the reason: {log}",
    )


def _build_here(op: str) -> None:
    """Compile and load `op` in this process, for the accelerator that a run here uses."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    accelerator.create_op_builder(BUILDERS[op]).load(verbose=True)


if __name__ == "__main__":
    # `timeout` and Slurm signal all processes: torch releases its lock only if it is unwound.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _build_here(sys.argv[1])
