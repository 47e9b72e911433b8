"""Converts between a Hugging Face folder and a Megatron checkpoint, in both directions.

A piece of one tensor is in memory at a time. The Megatron side is megatron-core's `torch_dist`
format, whose tensors are unsharded: one checkpoint serves every TP, PP and EP. What the
Megatron format cannot store (config, tokenizer, names of tensors) is kept next to it in `hf/`,
so that the reverse conversion restores the folder.
"""
