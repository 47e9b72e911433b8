"""Configs of families with rules of their own."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 257,
}

MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}

GEMMA = LLAMA | {"model_type": "gemma2"}
