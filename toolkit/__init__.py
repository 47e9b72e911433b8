"""DMT, the DeepSpeed/Megatron toolkit: one recipe, any layout, the same loss."""

__version__ = "0.1.0"
