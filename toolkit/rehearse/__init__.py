"""The same small model in every legal layout, compared with plain transformers in fp32."""
