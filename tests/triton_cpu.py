"""Triton's kernels without a GPU: computed by its interpreter, or compiled for one and not run.

Each function changes Triton for the rest of the process, which has not imported Liger before.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any


def interpret() -> None:
    """Let Triton's interpreter compute kernels, on tensors of the CPU.

    It lacks what compiled kernels have: floats that are scalars in fp32, and two functions of
    libdevice.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [*sys.modules]:  # its own functions are compiled ones if torch imported it
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if type(argument) is not float:
            return converted(argument)
        scalar = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(scalar, tl.float32)

    interpreter._implicit_cvt = with_floats
    # Once, and not in each call of a kernel or of a function in it: most of the time.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    from liger_kernel.ops import geglu, rms_norm

    rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    geglu.tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0


class _Hopper:
    """A driver without a device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_only() -> dict[str, Any]:
    """Let kernels be compiled for an H100 when they are called, and not run: what they should
    write keeps its values. Returns a map that fills with their code, by name: `ptx`, `cubin`,
    and what comes before."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Hopper())
    launch, made = JITFunction.run, {}

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = launch(self, *arguments, **options | {"warmup": True})
        made[self.__name__] = kernel.asm
        return kernel

    JITFunction.run = run
    return made
