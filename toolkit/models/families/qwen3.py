"""Qwen3: as qwen2, with norms over query and key heads and a head size of its own."""

from toolkit.models.families.base import Family
from toolkit.models.families.llama import unsupported
from toolkit.models.families.qwen2 import model

QWEN3 = Family("qwen3", model, unsupported)
