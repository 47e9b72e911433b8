"""megatron-core on a machine without CUDA, and without Transformer Engine on one with it.

megatron-core allocates on "cuda", reads CUDA's random state and waits for CUDA streams in code
that does not need a GPU. Here those calls are redirected to the CPU: inside megatron-core's
modules the name `torch` is a view of torch whose CUDA calls work on the CPU. torch itself is
not changed except for `Tensor.cuda`. If CUDA is available, nothing is changed.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PACKAGE = "megatron.core"


def redirect() -> None:
    """Redirect megatron-core's CUDA calls to the CPU if there is no CUDA.

    Covers the modules of megatron-core imported so far. Further calls cover later ones.
    """
    _without_transformer_engine()
    _take_norms_at_once()
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and vars(module).get("torch") is torch:
            vars(module)["torch"] = _TORCH
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _replace("tensor_parallel.random", "_get_cuda_rng_state", _get_rng_state)
    _replace("tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state)
    _replace("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _as_numbers)


def before_import() -> None:
    """Set-up before the rest of megatron-core is imported.

    Its warnings about optional packages are suppressed. Without CUDA its fused operators stay
    plain Python, because compiling them takes seconds without a benefit.
    """
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    # Its optimizer looks for gradients of views, which have none.
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)
    # 0.19 announces the successor of GPTModel at every start.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    compiled = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401 - it decorates its fused operators now
    finally:
        torch.compile = compiled


def _without_transformer_engine() -> None:
    """Define a name that the router reads although only Transformer Engine defines it."""
    loaded = sys.modules.get(f"{_PACKAGE}.transformer.moe.moe_utils")
    if loaded is not None and not hasattr(loaded, "te_general_gemm"):
        loaded.te_general_gemm = None  # type: ignore[attr-defined]


def _take_norms_at_once() -> None:
    """Replace megatron-core's own norm of gradients, which is used without Transformer Engine
    and Apex: it waits for the GPU once per parameter."""
    loaded: Any = sys.modules.get(f"{_PACKAGE}.optimizer.clip_grads")
    if hasattr(loaded, "local_multi_tensor_l2_norm"):
        loaded.l2_norm_impl = _l2_norm


def cuda_type_names() -> AbstractContextManager[None]:
    """Context in which CPU tensors return CUDA types from `type()`.

    megatron-core's optimizers sort parameters by the names of CUDA types.
    """
    return nullcontext() if torch.cuda.is_available() else _typed_as_cuda()


@contextmanager
def _typed_as_cuda() -> Iterator[None]:
    plain = Tensor.type

    def typed(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = plain(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    Tensor.type = typed  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Tensor.type = plain  # type: ignore[method-assign]


def _replace(module: str, name: str, value: object) -> None:
    """Set a name in a module, if the module was imported."""
    loaded = sys.modules.get(f"{_PACKAGE}.{module}")
    if loaded is not None:
        setattr(loaded, name, value)


class _View:
    """An object whose named attributes are replaced."""

    def __init__(self, base: object, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _on_cpu(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A tensor constructor that reads device="cuda" as "cpu"."""

    def create_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return create_on_cpu


class _Stream(torch.cpu.Stream):
    """A CUDA stream without pending work."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


_STREAM = _Stream()

_CUDA = _View(
    torch.cuda,
    current_device=lambda: "cpu",
    current_stream=lambda *_: _STREAM,
    default_stream=lambda *_: _STREAM,
    stream=lambda _: nullcontext(),
    Stream=_Stream,
    Event=lambda **_: torch.cpu.Event(),
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    manual_seed=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
    nvtx=SimpleNamespace(
        range_push=lambda *_: None, range_pop=lambda: None, range=lambda *_: nullcontext()
    ),
)

_TORCH = _View(
    torch,
    cuda=_CUDA,
    **{
        name: _on_cpu(getattr(torch, name))
        for name in ("empty", "full", "ones", "tensor", "zeros")
    },
)


def _get_rng_state(*_: object, **__: object) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)


def _l2_norm(
    _: object, __: object, tensor_lists: Sequence[Sequence[Tensor]], *___: object
) -> tuple[Tensor, None]:
    """L2 norm of all tensors of the first list together: float32 [1], by pairwise sums.

    torch's own fp32 norm of a large CPU tensor is wrong in the fourth digit. On CUDA, where it
    is exact, it needs no memory for squares.
    """
    if tensor_lists[0][0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(tensor_lists[0])))
        return norms.double().norm().float().reshape(1), None
    squares = [tensor.square().sum().double() for tensor in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt().float().reshape(1), None


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes as Python numbers, which gloo's all-to-all requires. Other tensors stay."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
