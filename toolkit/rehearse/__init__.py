"""The same small model in every possible layout, compared with plain transformers in fp32."""
