"""Compiled ops: what is missing is named before the start, and a killed build blocks nobody."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.forked import run_ranks
from tests.plan.making import recipe
from tests.processes import HANG_S, wait_until
from toolkit.engines.deepspeed import ops as deepspeed_ops
from toolkit.engines.deepspeed.config import render
from toolkit.engines.deepspeed.ops import (
    build,
    build_folder,
    is_built,
    preflight,
    put_ninja_on_path,
    required_ops,
)
from toolkit.errors import BackendUnavailable
from toolkit.layout import Layout, Placement


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled ops."""
    needs.require(*needs.COMPILER)
    folder = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def holder(extensions: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that builds cpu_adam, and has torch's lock, too."""
    folder = build_folder("cpu_adam")
    assert folder.is_relative_to(extensions)
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'wb')\n"
        "fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "dmt-building")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether torch would have waited for a lock, at each build; none compiles anything."""
    found: list[bool] = []

    def build_nothing(op: str, *_: object) -> None:
        found.append((build_folder(op) / "lock").exists())
        (build_folder(op) / "dmt-built").touch()

    monkeypatch.setattr(deepspeed_ops, "_build", build_nothing)
    return found


@pytest.mark.parametrize(
    ("stage", "optimizer", "parameters", "ops"),
    [
        (0, "none", "none", ()),
        (3, "none", "none", ()),
        (2, "cpu", "none", ("cpu_adam",)),
        (3, "cpu", "cpu", ("cpu_adam",)),
        (3, "none", "cpu", ()),
        (3, "nvme", "none", ("cpu_adam", "pin_memory", "async_io")),
        (3, "none", "nvme", ("pin_memory", "async_io")),
        (3, "nvme", "nvme", ("cpu_adam", "pin_memory", "async_io")),
    ],
)
def test_required_ops(
    stage: int, optimizer: Placement, parameters: Placement, ops: tuple[str, ...]
) -> None:
    layout = Layout(
        zero_stage=stage,  # type: ignore[arg-type]
        offload_optimizer=optimizer,
        offload_parameters=parameters,
    )
    config = render(recipe(parallel__zero={"nvme_path": "/nvme"}), layout)
    assert required_ops(config) == ops


def test_ops_of_own_files() -> None:
    torch_adam = {"optimizer": {"params": {"torch_adam": True}}}
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert required_ops({**torch_adam, **offload}) == ()
    assert required_ops({"optimizer": {"params": {}}}) == ("fused_adam",)
    assert required_ops({}) == ()  # DMT's own optimizer
    assert required_ops({**torch_adam, "zero_optimization": {"offload_param": None}}) == ()


def test_nothing_is_needed_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo runs on a machine without a compiler."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    preflight(())
    build((), print)


def test_every_missing_tool_is_named_with_its_fix(
    extensions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(
        "sysconfig.get_path", lambda name: {"include": "/no/headers"}.get(name, "/no/scripts")
    )
    with pytest.raises(BackendUnavailable) as caught:
        preflight(["cpu_adam"])
    text = str(caught.value)
    assert "there is no C++ compiler;" in text and "apt-get install g++" in text
    assert "ninja is not on PATH" in text and "pip install ninja" in text
    assert "/no/headers/Python.h" in text and "apt-get install python3-dev" in text
    assert caught.value.exit_code == 3
    assert not extensions.exists()


@pytest.mark.usefixtures("extensions")
def test_missing_libaio_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-nostdinc")  # no header is found
    preflight(["cpu_adam"])
    with pytest.raises(BackendUnavailable, match="apt-get install libaio-dev"):
        preflight(["async_io"])


def test_ninja_beside_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, systems = tmp_path / "own", tmp_path / "system"
    for folder in (own, systems):
        folder.mkdir()
        (folder / "ninja").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(own))
    for path in ("/nonexistent", str(systems)):
        monkeypatch.setenv("PATH", path)
        put_ninja_on_path()
        assert os.environ["PATH"] == f"{own}:{path}"
        put_ninja_on_path()
        assert os.environ["PATH"] == f"{own}:{path}"


@pytest.mark.usefixtures("extensions")
def test_the_lock_of_a_killed_build_does_not_count(builds: list[bool]) -> None:
    """torch would wait for it indefinitely. A rank that loads a built op has it, too."""
    lock = build_folder("cpu_adam") / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    build(["cpu_adam"], lambda _: None)
    assert builds == [False]
    lock.touch()
    threading.Timer(0.5, lock.unlink).start()
    build(["cpu_adam"], print)
    lock.touch()
    old = time.time() - deepspeed_ops.LOADING_S - 1
    os.utime(lock, (old, old))
    build(["cpu_adam"], print)
    assert not lock.exists() and len(builds) == 1


def test_a_running_build_is_waited_for(
    holder: "subprocess.Popen[bytes]", builds: list[bool]
) -> None:
    messages: list[str] = []
    waiting = threading.Thread(target=build, args=(["cpu_adam"], messages.append))
    waiting.start()
    wait_until(lambda: messages, "a message")
    assert waiting.is_alive() and not builds
    holder.kill()
    waiting.join(HANG_S)
    assert builds == [False]
    assert "waiting for another process that builds DeepSpeed op cpu_adam" in messages[0]
    assert str(build_folder("cpu_adam")) in messages[0]


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a home that is read-only."""
    file = tmp_path / "file"
    file.touch()
    for variable in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(variable, str(file))
        with pytest.raises(BackendUnavailable, match=f"{file}/.*: Not a directory") as told:
            build(["cpu_adam"], print)
        assert f"set {variable} to a folder" in told.value.fix


def test_the_build_folder_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a"))
    assert build_folder("cpu_adam").parents[1] == tmp_path / "a"
    assert str(build_folder("cpu_adam")) == _get_build_directory("cpu_adam", False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert build_folder("cpu_adam").is_relative_to(tmp_path / "b" / "dmt" / "operators")
    assert str(build_folder("cpu_adam")) == _get_build_directory("cpu_adam", False)


@pytest.mark.usefixtures("extensions")
def test_what_another_environment_built_is_built_again(
    builds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        build(["cpu_adam"], lambda _: None)
        assert is_built("cpu_adam") and len(builds) == 1
    monkeypatch.setattr(deepspeed_ops, "version", lambda _: "2.0")
    assert not is_built("cpu_adam")


@pytest.mark.usefixtures("extensions")
@pytest.mark.slow
def test_a_build_that_fails_says_so_and_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-c\\ *) echo "fatal error: disk full"; exit 1;; esac\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    messages: list[str] = []
    with pytest.raises(
        BackendUnavailable, match="building DeepSpeed op cpu_adam failed"
    ) as error:
        build(["cpu_adam"], messages.append)
    assert messages == ["building DeepSpeed op cpu_adam (takes minutes, once per machine)…"]
    log = Path(error.value.fix.rpartition(" ")[2])
    assert "fatal error: disk full" in error.value.message
    assert "cpu_adam.cpp" in log.read_text()
    log.unlink()


@pytest.mark.slow
@pytest.mark.needs(*needs.COMPILER)
def test_cpu_adam_is_built_once() -> None:
    """In the user's own cache, so that it is compiled once per machine, not per test run."""
    put_ninja_on_path()
    preflight(["cpu_adam"])
    build(["cpu_adam"], print)
    assert is_built("cpu_adam")
    assert (build_folder("cpu_adam") / "cpu_adam.so").stat().st_size > 10_000
    messages: list[str] = []
    build(["cpu_adam"], messages.append)
    assert messages == []


@pytest.mark.usefixtures("extensions")
def test_ops_for_gpus_need_cudas_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed would end in a TypeError; what is for CPUs needs none, whatever torch has."""

    def lacking(op: str) -> bool:
        return any(one.name == "nvcc" for one in deepspeed_ops.missing_tools([op]))

    monkeypatch.setattr(deepspeed_ops, "for_cuda", lambda: True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert [lacking(op) for op in deepspeed_ops.BUILDERS] == [False, True, False, True, True]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    assert not any(lacking(op) for op in deepspeed_ops.BUILDERS)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(deepspeed_ops, "for_cuda", lambda: False)
    assert not any(lacking(op) for op in deepspeed_ops.BUILDERS)


def test_deepspeed_is_imported_without_mlflow() -> None:
    """Which its autotuner would import: more than half of the time."""
    assert importlib.util.find_spec("mlflow") is not None
    assert run_ranks(_has_mlflow, 1) == [False]


def _has_mlflow() -> bool:
    assert "deepspeed" in sys.modules
    return "mlflow" in sys.modules
