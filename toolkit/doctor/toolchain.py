"""Compilers and programs that a recipe needs."""

from collections.abc import Iterator

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs
from toolkit.engines.deepspeed.ops import (
    compiled_at_start,
    missing_tools,
    put_ninja_on_path,
)
from toolkit.errors import BackendUnavailable
from toolkit.system import interpreter
from toolkit.system.compilers import missing_for_torch_compile

_NOT_COMPILED = "DeepSpeed cannot compile its operators, and the run ends before its first step"


def check(needs: Needs) -> Iterator[Finding]:
    put_ninja_on_path()  # as every run does
    ops = _to_compile(needs)
    for one in missing_tools(tuple(ops)) if ops else ():
        needing = ops.get("async_io") if one.name == "libaio" else next(iter(ops.values()))
        yield lacking(
            one.name, one.what, cost=_NOT_COMPILED, fix=one.fix, needed_by=needing,
        )  # fmt: skip
    for one in missing_for_torch_compile(on_gpu=bool(needs.gpu)) if needs.compiles else ():
        yield lacking(
            f"{one.name} for compiled kernels", one.what, fix=one.fix,
            cost="the first compiled layer fails", needed_by=needs.compiles,
        )  # fmt: skip
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
