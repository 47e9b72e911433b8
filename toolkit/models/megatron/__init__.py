"""The `megatron` model implementation: megatron-core's GPTModel without Transformer Engine."""
