"""Compilers and programs that a recipe needs."""

from collections.abc import Iterator

from toolkit.doctor.finding import Finding, ask_python, is_installed, lacking
from toolkit.doctor.needs import Needs
from toolkit.engines.deepspeed.ops import (
    ON_GPU,
    compiled_at_start,
    missing_tools,
    put_ninja_on_path,
    torch_accelerator,
)
from toolkit.errors import BackendUnavailable
from toolkit.system import interpreter
from toolkit.system.compilers import missing_for_torch_compile

_NOT_COMPILED = "DeepSpeed cannot compile its operators, and the run ends before its first step"

_NVCC = """
from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch, installed_cuda_version
assert_no_cuda_mismatch()
print("CUDA {}.{}".format(*installed_cuda_version()))
"""


def check(needs: Needs) -> Iterator[Finding]:
    put_ninja_on_path()  # as every run does
    ops = _to_compile(needs)
    lacked = missing_tools(tuple(ops)) if ops else ()
    for one in (tool for tool in lacked if tool.name != "nvcc"):
        needing = ops.get("async_io") if one.name == "libaio" else next(iter(ops.values()))
        yield lacking(
            one.name, one.what, cost=_NOT_COMPILED, fix=one.fix, needed_by=needing,
        )  # fmt: skip
    for one in missing_for_torch_compile(on_gpu=bool(needs.gpu)) if needs.compiles else ():
        yield lacking(
            f"{one.name} for compiled kernels", one.what, fix=one.fix,
            cost="the first compiled layer fails", needed_by=needs.compiles,
        )  # fmt: skip
    on_gpu = [setting for op, setting in ops.items() if op in ON_GPU]
    if needs.gpu and on_gpu:
        yield from _nvcc(on_gpu[0])
    for name, (setting, install) in needs.programs.items():
        if path := interpreter.program(name):
            yield Finding(name, "ok", path)
        else:
            yield lacking(
                name, "not on PATH", cost="the launcher cannot start", fix=install,
                needed_by=setting,
            )  # fmt: skip


def _to_compile(needs: Needs) -> dict[str, str]:
    """Operators that the recipe needs and that DeepSpeed's package did not bring compiled."""
    try:
        return {op: needs.ops[op] for op in compiled_at_start(tuple(needs.ops))}
    except BackendUnavailable:  # DeepSpeed itself is missing; pip will bring its sources
        return dict(needs.ops)


def _nvcc(needed_by: str) -> Iterator[Finding]:
    """Check CUDA's compiler. DeepSpeed refuses another version than torch is built for."""
    try:
        built_for = torch_accelerator()
    except BackendUnavailable:
        return
    if not built_for.startswith("cu") or not is_installed("deepspeed"):
        return
    answer = ask_python(_NVCC)
    if answer.done:
        yield Finding("nvcc", "ok", answer.out.splitlines()[-1])
        return
    why = answer.out.partition(": ")[2] or answer.out
    yield lacking(
        "nvcc", why, cost=_NOT_COMPILED, needed_by=needed_by,
        fix=f"install the toolkit of CUDA {built_for[2:-1]}.{built_for[-1]}, and set CUDA_HOME "
        "to it",
    )  # fmt: skip
