"""What transformers' models would compute slowly, or with too much memory, on CUDA alone.

Two of transformers' functions decide by less than they would have to (5.23, torch 2.13). Each
is replaced by one that asks for more, and then asks the original.
"""

import torch
from torch import Tensor
from transformers.integrations import moe, sdpa_attention

_grouped_heads = sdpa_attention.use_gqa_in_sdpa
_grouped_mm = moe._grouped_mm


def choose() -> None:
    """Replace both; the second call changes nothing."""
    sdpa_attention.use_gqa_in_sdpa = takes_grouped_heads
    moe._grouped_mm = autocast_grouped_mm


def takes_grouped_heads(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
    """Whether attention gets fewer heads of keys than of queries, or repeated ones.

    On CUDA only the flash kernel takes fewer, and that computes in 16 bits: in fp32 torch would
    fall back to plain products, which keep all scores [batch, heads, sequence, sequence].
    """
    if key.is_cuda and key.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
        return False
    return bool(_grouped_heads(mask, key, value))


def autocast_grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The products of all experts, under autocast in its precision.

    torch's autocast does not know grouped products (pytorch#174763), and transformers casts
    the input to the weights' type: with fp32 weights they would all be computed in fp32.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, weight = input.to(dtype), weight.to(dtype)
    product: Tensor = _grouped_mm(input, weight, offs)
    return product
