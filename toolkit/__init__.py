"""DMT, the DeepSpeed/Megatron toolkit: one recipe, any layout, the same loss."""

import logging

__version__ = "0.1.0"

# Before transformers, PEFT or DeepSpeed import them: their complaints are of kernels that they
# cannot load, none of which is used, and of how torchao registers its types with torch.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
