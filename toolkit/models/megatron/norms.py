"""Norms of the Megatron model: torch's, at positions and widths that megatron-core lacks."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class Norm:
    """Builds an RMSNorm or torch's LayerNorm, marked for sequence parallel.

    With sequence parallel every tensor-parallel rank normalises different positions, so the
    gradient of the (replicated) weight is a sum over ranks, as the attribute marks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> nn.Module:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        if config.layernorm_zero_centered_gamma:
            kind = ZeroCenteredNorm
        norm = kind(hidden_size, eps=eps, device=local_device(), dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ZeroCenteredNorm(nn.RMSNorm):
    """RMSNorm times 1 + weight, computed in fp32, as in gemma."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → the same."""
        normed = functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


def local_device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class FullWidthNorm(nn.Module):
    """RMSNorm of queries or keys over all heads together. A rank holds some of them.

    The mean of the squares is over the heads of all tensor-parallel ranks, forward and
    backward. Each rank holds the whole weight and multiplies with its heads' part, so the
    gradient is a sum over ranks, as for a norm over each head.
    """

    def __init__(
        self, heads: int, hidden_size: int, config: TransformerConfig, eps: float
    ) -> None:
        super().__init__()
        self.eps = eps
        self.ranks = config.tensor_model_parallel_size
        rank = parallel_state.get_tensor_model_parallel_rank()
        self.first = rank * heads // self.ranks * hidden_size
        """Offset of this rank's first head in the weight. Ranks may share a key head."""
        size = heads * hidden_size
        self.weight = nn.Parameter(
            torch.empty(size, device=local_device(), dtype=config.params_dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[sequence, batch, heads of this rank, head size] → the same."""
        full = x.float()
        square = full.square().mean((-2, -1), keepdim=True)
        if self.ranks > 1:
            # Every rank has the same number of heads; key heads that are held twice count
            # twice.
            square = copy_to_tensor_model_parallel_region(square)
            square = reduce_from_tensor_model_parallel_region(square) / self.ranks
        weight = self.weight[self.first : self.first + x.shape[-2] * x.shape[-1]]
        normed = full * torch.rsqrt(square + self.eps)
        return (normed * weight.view(x.shape[-2:])).to(x.dtype)


class NormThenAdd(nn.Module):
    """residual + norm(what attention or MLP returned), where megatron-core only adds."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The add function in the form that megatron-core's layer expects."""
        return changed_then_added(self.norm, training, fused)


def changed_then_added(
    change: Callable[[Tensor], Tensor], training: bool, fused: bool
) -> Callable[..., Tensor]:
    """megatron-core's function residual + branch, with a change of the branch first."""
    add = get_bias_dropout_add(training, fused)

    def add_changed(
        output: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        branch, bias = output
        branch = branch if bias is None else branch + bias
        total: Tensor = add((change(branch), None), residual, probability)
        return total

    return add_changed
