"""The values of adapters, and of a model that has them, as `WeightSource`s."""

from functools import lru_cache
from hashlib import blake2b
from math import prod, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from toolkit.models import huggingface as hf
from toolkit.models.adapters.lora import Lora, lora_of
from toolkit.models.families.tensors import Block
from toolkit.models.weights import WeightSource
from toolkit.recipe.schema import Recipe


class LoraWeights:
    """Initial values by seed and name, with the distribution that PEFT draws them from.

    A is uniform within ±1/√in (torch's default for a linear layer), B is 0: training begins
    with the base model.
    """

    def __init__(self, lora: Lora, seed: int) -> None:
        self.lora = lora
        self.seed = seed
        self.shapes = lora.shapes
        self._drawn = lru_cache(maxsize=4)(self._whole)
        """A rank reads the parts of its experts one after the other."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `WeightSource.read`: fp32."""
        return self._drawn(name).view(-1)[start:stop]

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`: fp32."""
        assert block.columns is not None, "a matrix"
        rows, columns = (slice(*one) for one in (block.rows, block.columns))
        return self._drawn(block.tensor)[rows, columns][:: block.steps[0], :: block.steps[1]]

    def _whole(self, name: str) -> Tensor:
        """All of a tensor: it is too small for drawing only a range to matter."""
        shape = self.shapes[name]
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        digest = blake2b(f"{self.seed}\0{name}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        values = 2 * random.random(prod(shape), dtype=np.float32) - 1
        return torch.from_numpy(values * np.float32(1 / sqrt(shape[1]))).view(shape)


class AdaptedWeights:
    """The weights of a base model and of its adapters as one source."""

    def __init__(self, base: WeightSource, adapters: WeightSource) -> None:
        self.base = base
        self.adapters = adapters
        self.shapes = {**base.shapes, **adapters.shapes}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `WeightSource.read`."""
        return self._source(name).read(name, start, stop)

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`."""
        return self._source(block.tensor).read_block(block)

    def _source(self, name: str) -> WeightSource:
        return self.adapters if name in self.adapters.shapes else self.base


def first_weights(recipe: Recipe, config: PretrainedConfig) -> WeightSource:
    """The initial weights of a new run, including adapters."""
    seed = recipe.training.seed
    base = hf.weight_source(recipe.model, config, seed)
    lora = lora_of(recipe.adapter, config.to_dict())
    return base if lora is None else AdaptedWeights(base, LoraWeights(lora, seed))


SAMPLED = 1024
"""Elements of a parameter that `fingerprint` reads."""


def fingerprint(weights: WeightSource) -> str:
    """A hash that identifies a base model: of the names and shapes of its parameters, and of at
    most SAMPLED consecutive elements of each, at an offset determined by its name.

    Reading all of a large model would take minutes at every start. Different weights differ
    nearly everywhere. A change outside the samples is not detected.
    """
    digest = blake2b(digest_size=16)
    for name, shape in sorted(weights.shapes.items()):
        numel = prod(shape)
        start = crc32(name.encode()) % max(1, numel - SAMPLED)
        values = weights.read(name, start, min(start + SAMPLED, numel))
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(values.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
