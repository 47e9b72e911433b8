"""Building an engine on this rank, and what surrounds its steps."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.engines.base import Engine
from toolkit.engines.probes import check_context, check_isolation, refusing
from toolkit.engines.setup import EngineSetup
from toolkit.layout import AttentionKernel
from toolkit.registry import load


def build_engine(name: str, setup: EngineSetup, *, probe: bool = True) -> Engine:
    """Build the engine `name` on this rank, and `probe` what it computes. Collective.

    Raises PlanError if the data isolates documents and the engine's model does not, or if the
    model does not compute the same with its rows spread over context-parallel ranks.
    """
    if setup.plan.model == "megatron":
        from toolkit.models.megatron import cpu

        cpu.before_import()
    spreads = setup.layout.cp > 1 and setup.plan.model == "hf"
    with refusing(setup) if spreads else nullcontext():
        engine: Engine = load(BACKENDS[name].engine)(setup)
        if spreads and probe:
            check_context(engine, setup)
    _try_first(setup.plan.attention_kernel, engine)
    if setting := setup.layout.compiles:
        from toolkit.models.compiled import explain_failures

        _around_steps(explain_failures(setting), engine)
    if setup.recipe.data.isolates and probe:
        check_isolation(engine, setup)
    return engine


def _try_first(kernel: AttentionKernel, engine: Engine) -> None:
    """Let torch's attention try this kernel before the others. A recomputed layer, too."""
    if kernel not in ("cudnn", "flash"):
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    rest = (*names.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    order = list(dict.fromkeys((names[kernel], *rest)))
    _around_steps(sdpa_kernel(order, set_priority=True), engine)


def _around_steps(
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], engine: Engine
) -> None:
    """Wrap all methods of an engine that compute."""
    for name in ("train_step", "evaluate", "sequence_log_probs"):
        setattr(engine, name, wrapper(getattr(engine, name)))
