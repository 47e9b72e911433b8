"""Programs: compilers for DeepSpeed's operators, and the programs of launchers."""

import re
from collections.abc import Iterator

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs
from toolkit.doctor.probe import ask
from toolkit.engines.deepspeed.ops import (
    ON_GPU,
    TOOLS,
    build_folder,
    compiled_at_start,
    cuda_compiler,
    missing_tools,
    put_ninja_on_path,
    stale_locks,
    torch_accelerator,
)
from toolkit.errors import BackendUnavailable
from toolkit.launcher import LAUNCHERS, Program
from toolkit.system import interpreter
from toolkit.system.compilers import missing_for_torch_compile

NUMACTL = Program(
    "numactl",
    "apt-get install numactl (Debian, Ubuntu), dnf install numactl (Fedora, RHEL)",
    "`deepspeed --bind_cores_to_rank`",
)


def launcher_programs() -> Iterator[Program]:
    """What the launchers need, each program once, with what needs it."""
    programs: dict[str, Program] = {}
    for launcher in LAUNCHERS.values():
        for program in launcher.programs:
            use = program.use or f"`launch.launcher: {launcher.name}`"
            programs[program.name] = program._replace(use=use)
    return iter(programs.values())


def check(needs: Needs) -> Iterator[Finding]:
    put_ninja_on_path()  # as every run does
    yield from _tools(needs)
    yield _nvcc(needs)
    yield _program(NUMACTL, needs)
    yield from _locks(needs)


def check_programs(needs: Needs) -> Iterator[Finding]:
    for program in launcher_programs():
        yield _program(program, needs)


def _tools(needs: Needs) -> Iterator[Finding]:
    ops = _to_compile(needs)
    missing = {one.name: one for one in missing_tools(["cpu_adam", "async_io"])}
    for name in TOOLS:
        if (lacked := missing.get(name)) is None:
            yield Finding(name, "ok", "there")
            continue
        needing, text = next(iter(ops.values()), None), lacked.what
        if name == "libaio":
            needing = ops.get("async_io")
        else:
            text += ": DeepSpeed's offload is compiled"
        yield lacking(name, text, lacked.fix, needing, "warning")
    # What torch.compile and Triton lack.
    on_gpu = needs.gpu is not None
    for one in missing_for_torch_compile(on_gpu=on_gpu) if needs.compiles else ():
        name = f"{one.name} for compiled kernels"
        yield lacking(name, one.what, one.fix, needs.compiles, "warning")


def _to_compile(needs: Needs) -> dict[str, str]:
    """Operators that the recipe needs and that did not come compiled with DeepSpeed."""
    try:
        return {op: needs.ops[op] for op in compiled_at_start(tuple(needs.ops))}
    except BackendUnavailable:  # DeepSpeed itself is missing; pip will bring its sources
        return dict(needs.ops)


def _nvcc(needs: Needs) -> Finding:
    """CUDA's compiler, of the version that torch is built for: DeepSpeed refuses others."""
    try:
        built_for = torch_accelerator()
    except BackendUnavailable:
        built_for = "cpu"
    if not built_for.startswith("cu"):
        return Finding("nvcc", "ok", "not needed: this torch is built without CUDA")
    needing = next((why for op, why in _to_compile(needs).items() if op in ON_GPU), None)
    digits = built_for.removeprefix("cu")
    wanted = f"{digits[:-1]}.{digits[-1]}"
    fix = f"install CUDA {wanted}'s toolkit and set CUDA_HOME to it"
    found = _nvcc_version()
    if found is None:
        text = "there is no nvcc; DeepSpeed's operators for GPUs are compiled with it"
    elif found == wanted:
        return Finding("nvcc", "ok", found)
    elif found.partition(".")[0] == wanted.partition(".")[0]:
        text = f"{found}, torch is built for {wanted}: mostly the same"
        return Finding("nvcc", "note", text, None, fix)
    else:
        text = f"{found}, torch is built for {wanted}: nothing can be compiled"
    return lacking("nvcc", text, fix, needing if needs.gpu else None, "warning")


def _nvcc_version() -> str | None:
    program = cuda_compiler()
    answer = ask([program, "--version"]) if program else None
    if answer is None or not answer.done:
        return None
    release = re.search(r"release (\d+\.\d+)", answer.out)
    return release[1] if release else None


def _locks(needs: Needs) -> Iterator[Finding]:
    """Locks of killed builds, for which DeepSpeed would wait indefinitely."""
    try:
        root = build_folder("any").parent
    except BackendUnavailable:  # without torch there is nothing to build with
        return
    ops = sorted(lock.parent.name for lock in root.glob("*/lock"))
    for lock in stale_locks(ops):
        needed_by = needs.ops.get(lock.name)
        yield Finding(f"lock of {lock.name}", "problem", lock.what, needed_by, lock.fix)


def _program(program: Program, needs: Needs) -> Finding:
    if path := interpreter.program(program.name):
        return Finding(program.name, "ok", path)
    return lacking(
        program.name,
        f"not on PATH; {program.use} needs it",
        program.install,
        needs.programs.get(program.name),
    )
