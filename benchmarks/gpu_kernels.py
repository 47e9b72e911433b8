"""Rates of the kernels that the planner's table assumes, on this machine's GPU.

    python benchmarks/gpu_kernels.py RESULT.json

Shapes are those of a Llama 3.1 8B layer with 8,192 tokens. Each figure is the median of ten
calls, timed by CUDA events; "both" is a forward and a backward pass.

On a machine without a GPU, what a processor can compute runs once, in small shapes, to try the
program: the exit code is 1 if something fails, and the result has names without figures.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.nn.attention import SDPBackend, sdpa_kernel

from toolkit.batch import IGNORE_INDEX
from toolkit.models import documents
from toolkit.models.documents import Scores
from toolkit.models.log_probs import in_chunks, label_log_probs

MEASURED = torch.cuda.is_available()
GPU = torch.device("cuda" if MEASURED else "cpu")
TOKENS, HIDDEN, INNER, VOCABULARY = (
    (8192, 4096, 14336, 128256) if MEASURED else (128, 64, 96, 256)
)
LENGTHS = (2048, 8192, 32768) if MEASURED else (64,)
WEIGHTS = 250_000_000 if MEASURED else 1000
"""Half of those that AdamW updates."""
DOCUMENTS = 16
"""In a row of isolated documents."""
found: dict[str, dict[str, Any]] = {}


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """Median time of a call on the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    taken = []
    for _ in range(times):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        taken.append(before.elapsed_time(after))
    return statistics.median(taken)


def note(
    name: str,
    call: Callable[[], Any],
    flops: float = 0.0,
    nbytes: float = 0.0,
    times: int = 10,
    gpu_only: bool = False,
) -> None:
    """Measure a call and print it; its error if it has no kernel here. `gpu_only`: a processor
    has no such kernel."""
    if not MEASURED:
        if not gpu_only:
            call()
        found[name] = {}
        return
    torch.cuda.reset_peak_memory_stats()
    try:
        ms = milliseconds(call, times)
    except Exception as error:  # noqa: BLE001 - the next one is measured all the same
        found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    else:
        found[name] = {"ms": round(ms, 4)}
        if flops:
            found[name]["tflops"] = round(flops / ms / 1e9, 1)
        if nbytes:
            found[name]["gb_per_s"] = round(nbytes / ms / 1e6, 1)
        found[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(name, found[name], flush=True)


def random(*shape: int, grad: bool = False) -> Tensor:
    """A bf16 tensor on the GPU."""
    return torch.randn(*shape, device=GPU, dtype=torch.bfloat16, requires_grad=grad)


def both(call: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Its forward and backward pass."""
    seeds: list[Tensor] = []

    def passes() -> Any:
        result = call(*inputs)
        if not seeds:
            seeds.append(torch.ones_like(result))
        return torch.autograd.grad(result, inputs, seeds[0])

    return passes


def products() -> None:
    """Matrix products of the layer and of the head, in bf16 and fp8."""
    for name, k, n in (
        ("qkv", HIDDEN, HIDDEN * 3 // 2), ("proj", HIDDEN, HIDDEN), ("up", HIDDEN, INNER),
        ("down", INNER, HIDDEN), ("head", HIDDEN, VOCABULARY),
        ("1b up", HIDDEN // 2, HIDDEN * 2),
    ):  # fmt: skip
        a, b = random(TOKENS, k), random(n, k)
        flops = 2 * TOKENS * k * n
        note(f"matmul {name} {TOKENS}x{k}x{n}", lambda a=a, b=b: F.linear(a, b), flops)
    a = random(TOKENS, HIDDEN).to(torch.float8_e4m3fn)
    b = random(INNER, HIDDEN).to(torch.float8_e4m3fn).t()
    rows, columns = torch.ones(TOKENS, 1, device=GPU), torch.ones(1, INNER, device=GPU)
    whole = torch.ones((), device=GPU)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    flops = 2 * TOKENS * HIDDEN * INNER
    for name, *scales in (("rowwise", rows, columns), ("tensorwise", whole, whole)):

        def product(scales: list[Tensor] = scales) -> Tensor:
            return torch._scaled_mm(a, b, *scales, **options)

        note(f"fp8 {name} up", product, flops, gpu_only=True)


def grouped_product() -> None:
    """Experts of Qwen3 30B-A3B: 128 of 2,048 × 768, twice, eight for each token."""
    wide, narrow = (2048, 1536) if MEASURED else (32, 16)
    rows, experts = random(TOKENS * 8, wide), random(128, wide, narrow)
    ends = (torch.arange(1, 129, device=GPU) * (TOKENS * 8 // 128)).to(torch.int32)
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
    note(
        "grouped_mm of 128 experts",
        lambda: grouped(rows, experts, offs=ends),
        2 * TOKENS * 8 * wide * narrow,
    )


def attention() -> None:
    """32 heads of 128 in 8 groups; causal, then with isolated documents."""
    for length in LENGTHS:
        q, k, v = (random(1, heads, length, 128, grad=True) for heads in (32, 8, 8))
        flops = 4 * 32 * length**2 * 128 / 2
        for name, kernel in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):

            def causal(q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend = kernel) -> Tensor:
                with sdpa_kernel(kernel):
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    )

            once, absent = partial(causal, q, k, v), kernel is SDPBackend.CUDNN_ATTENTION
            note(f"attention {name} {length} forward", once, flops, gpu_only=absent)
            passes = both(causal, q, k, v)
            note(f"attention {name} {length} both", passes, 3.5 * flops, gpu_only=absent)
        if length <= 8192:
            isolated(length, q, k, v)


def isolated(length: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Documents in one row: a dense mask in two kernels, and the kernel for lengths."""
    of_each = length // DOCUMENTS
    at = torch.arange(length, device=GPU)
    document = at // of_each
    hidden = (document[:, None] != document) | (at[:, None] < at)
    mask = torch.zeros(1, 1, length, length, device=GPU, dtype=torch.bfloat16)
    mask.masked_fill_(hidden, -math.inf)
    groups = [x.detach().repeat_interleave(4, 1).requires_grad_() for x in (k, v)]
    for name, kernel in (
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):

        def masked(q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        passes = both(masked, q, *groups)
        note(f"attention mask {name} {length} both", passes, gpu_only=True)
    rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    ends = torch.arange(0, length + 1, of_each, device=GPU, dtype=torch.int32)
    by_lengths = both(lambda q, k, v: documents.attend(q, k, v, ends, ends, Scores()), *rows)
    note(f"attention varlen {length} both", by_lengths)


def elementwise() -> None:
    """Norm and SwiGLU: eager, torch's own, compiled, Liger's. Bytes as if nothing is read
    twice."""
    x, w = random(TOKENS, HIDDEN, grad=True), random(HIDDEN, grad=True)
    gate, up = random(TOKENS, INNER, grad=True), random(TOKENS, INNER, grad=True)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    kinds: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = [
        ("eager", norm, swiglu),
        ("torch", lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5), swiglu),
        ("compiled", torch.compile(norm), torch.compile(swiglu)),
    ]
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        print("no Liger:", error)
    else:
        kinds.append(
            (
                "liger",
                lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),
                lambda a, b: LigerSiLUMulFunction.apply(a * 1, b * 1),
            )
        )
    for name, of_norm, of_swiglu in kinds:
        absent, wide = name == "liger", TOKENS * INNER * 2
        note(f"norm {name} both", both(of_norm, x, w), 0, TOKENS * HIDDEN * 10, gpu_only=absent)
        note(f"swiglu {name} both", both(of_swiglu, gate, up), 0, wide * 8, gpu_only=absent)


def losses() -> None:
    """The head and the cross entropy: whole, in chunks, Liger's fused one."""
    hidden, head = random(1, TOKENS, HIDDEN, grad=True), random(VOCABULARY, HIDDEN, grad=True)
    labels = torch.randint(VOCABULARY, (1, TOKENS), device=GPU)
    flops = 6 * TOKENS * HIDDEN * VOCABULARY

    def part(positions: Tensor) -> Tensor:
        return label_log_probs(F.linear(hidden[:, positions], head), labels[:, positions])

    for chunks in (1, 8, 16):

        def loss(chunks: int = chunks) -> None:
            if chunks == 1:
                values = part(torch.arange(TOKENS, device=GPU))
            else:
                values = in_chunks(part, TOKENS, chunks, GPU)
            torch.autograd.grad(values.sum(), (hidden, head))

        note(f"loss in {chunks} chunks both", loss, flops, times=5)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Fused,
        )
    except ImportError:
        return

    def liger() -> None:
        options = (None, None, IGNORE_INDEX, 0.0, 0.0, "sum")
        out = Fused.apply(hidden[0], head, labels[0], *options)
        torch.autograd.grad(out[0] if isinstance(out, tuple) else out, (hidden, head))

    note("loss liger both", liger, flops, times=5, gpu_only=True)


def update() -> None:
    """AdamW, the norm of the gradients, and a copy on the device."""
    weights = [torch.zeros(WEIGHTS, device=GPU, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    for name in ("fused", "foreach"):
        adam = torch.optim.AdamW(weights, **{name: True})
        note(f"AdamW {name}, 5e8 weights", adam.step, nbytes=WEIGHTS * 56, times=5)
        del adam
    grads = [weight.grad for weight in weights if weight.grad is not None]
    note(
        "norm of 5e8 gradients", lambda: torch._foreach_norm(grads), nbytes=WEIGHTS * 8, times=5
    )
    note("copy on the device", lambda: grads[0].copy_(grads[1]), nbytes=WEIGHTS * 8, times=5)


def copies() -> None:
    """A checkpoint's copies to the host: pinning, which rounds up, and the bus."""
    if not MEASURED:
        return
    for gib in (1.0, 1.1):
        count = int(gib * 2**28)
        began = time.perf_counter()
        host = torch.empty(count, pin_memory=True)
        seconds = time.perf_counter() - began
        held = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        found[f"pin {gib} GiB"] = {"s": round(seconds, 3), "held_gib": held / 2**30}
        source = torch.zeros(count, device=GPU)

        def pinned(host: Tensor = host, source: Tensor = source) -> None:
            host.copy_(source, non_blocking=True)

        note(f"to pinned {gib} GiB", pinned, nbytes=count * 4, times=5)
        note(
            f"to pageable {gib} GiB",
            lambda source=source: source.cpu(),
            nbytes=count * 4,
            times=3,
        )
        del host, source


def main() -> None:
    failed = False
    for part in (products, grouped_product, attention, elementwise, losses, update, copies):
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
            found[part.__name__] = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(part.__name__, found[part.__name__], flush=True)
            failed = True
        torch.cuda.empty_cache()
    if MEASURED:
        free, total = torch.cuda.mem_get_info()
        outside = (total - free - torch.cuda.memory_reserved()) / 2**30
        found["memory outside torch"] = {"gib": round(outside, 2)}
    found["machine"] = {
        "gpu": torch.cuda.get_device_name() if MEASURED else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
