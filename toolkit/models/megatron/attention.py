"""The core attentions of our layers.

torch's fused attention, which is the plan's `sdpa`, and where its kernels lack something or a
recipe wants it, matrix products with a softmax, which is `eager`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from toolkit.models.context import Context
from toolkit.models.documents import Scores, attend, band, products
from toolkit.models.megatron.norms import local_device


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal softmax(q·k)·v by torch's fused kernels, with an optional window."""

    fused = True
    """Whether torch's fused kernels compute. They neither cap scores nor have sinks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cap: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.cap = cap
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] if windowed else None
        """Number of previous positions that a query sees. None for all of them."""
        self.context: Context | None = None
        """The ranks that have the keys and values of other positions."""

    @property
    def scores(self) -> Scores:
        """How this layer changes q·k."""
        return Scores(self.scale, self.window, self.cap)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **_: object,
    ) -> Tensor:
        """[sequence, batch, heads, size] and keys and values of [..., groups, size] →
        [sequence, batch, heads · size]. `attention_mask`: the `MicroBatch.ends` of documents
        that are attended to alone, or `document_masks`. None if a row is one document."""
        if attention_mask is not None and attention_mask.ndim == 1:
            return self._by_ends(query, key, value, attention_mask)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        random = self.dropout if self.training else 0.0
        with self._own_random_stream():
            output = self._attend(q, k, v, self._mask(q, attention_mask), random)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _by_ends(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        assert not (self.dropout and self.training), "refused at check"
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if self.context is None:
            output = attend(q, k, v, ends, ends, self.scores)
        else:
            output = self.context.attend(q, k, v, ends, self.scores)
        return output.transpose(0, 1).flatten(2)

    def _mask(self, query: Tensor, masks: Tensor | None) -> Tensor | None:
        """This layer's mask, of `document_masks` if there are any. None: all the past."""
        if masks is not None:
            return masks[int(self.window is not None)]
        length, window = query.shape[2], self.window
        if self.fused and (window is None or window + 1 >= length):
            return None
        return band(length, window, query.device)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, random: float
    ) -> Tensor:
        """[batch, heads, sequence, size] each → the same. `random`: share of dropped
        weights."""
        if not self.fused:
            return products(q, k, v, mask, self.scores, random)
        if mask is not None or (q.is_cuda and q.dtype == torch.float32):
            # CUDA's fused kernels take grouped heads neither with a mask nor in fp32.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=random,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )

    def _own_random_stream(self) -> AbstractContextManager[None]:
        """Context in which each tensor-parallel rank, which has different heads, draws its own
        dropout. With sequence parallel the whole layer already does."""
        random = self.dropout > 0 and self.training and not self.config.sequence_parallel
        return get_cuda_rng_tracker().fork() if random else nullcontext()


class EagerAttention(CausalAttention):
    """Attention by matrix products and a softmax in fp32. The scores are kept."""

    fused = False


class SinkAttention(EagerAttention):
    """Σ exp(q·k) v / (exp(s) + Σ exp(q·k)): the sink s, learned for each head, takes a share of
    the softmax to which no value belongs (arXiv:2508.10925, section 2.2)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = nn.Parameter(
            torch.empty(heads, device=local_device(), dtype=config.params_dtype)
        )
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    @property
    def scores(self) -> Scores:
        """See `CausalAttention.scores`."""
        return replace(super().scores, sinks=self.softmax_offset)


def document_masks(segments: Tensor, config: TransformerConfig) -> Tensor:
    """The masks of a micro batch whose documents are isolated, in the compute precision: [1 or
    2, batch, 1, sequence, sequence], 0 where a query sees a key, otherwise -inf.

    The first is for layers with full causal attention inside a document, the second for layers
    with a window. All layers share them: a boolean mask, or one created in each layer, would be
    kept for the backward pass once per layer.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    sees = [same & band(length, length, segments.device)]
    if config.window_size is not None:
        sees.append(same & band(length, config.window_size[0], segments.device))
    hidden = ~torch.stack(sees)[:, :, None]
    scores = torch.zeros(hidden.shape, dtype=config.params_dtype, device=segments.device)
    return scores.masked_fill_(hidden, float("-inf"))
