"""A small, good recipe for the tests of the loader to spoil."""

GOOD = """\
name: good
model:
  init: random
  config:
    model_type: llama
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    vocab_size: 512
    max_position_embeddings: 128
data:
  train:
    kind: text
    files: ["{stdlib}/*.py"]
  validation_fraction: 0.05
  tokenizer: bytes
training:
  steps: 100
  sequence_length: 64
  global_batch_size: 8
  micro_batch_size: 2
  precision: fp32
  seed: 1
optimizer:
  name: adamw
  learning_rate: 3e-4
  betas: [0.9, 0.95]
  weight_decay: 0.1
schedule:
  name: cosine
  warmup_steps: 10
  min_learning_rate: 3e-5
evaluation:
  every_steps: 50
parallel:
  engine: auto
  sequence: auto
  zero:
    stage: auto
cluster:
  nodes: 1
  gpus_per_node: 2
  gpu: cpu
checkpoint:
  every_steps: 50
logging:
  every_steps: 1
launch:
  launcher: local
"""
