"""The values of adapters, and of a model that has them, as `WeightSource`s."""

from hashlib import blake2b
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor

from toolkit.adapters.lora import Lora
from toolkit.models.families.tensors import Block
from toolkit.models.weights import WeightSource


class LoraWeights:
    """Initial values by seed and name, with the distribution that PEFT draws them from.

    A is uniform within ±1/√in (torch's default for a linear layer) or, with `init: gaussian`,
    normal with the standard deviation 1/rank. B is 0: training begins with the base model.
    """

    def __init__(self, lora: Lora, seed: int) -> None:
        self.lora = lora
        self.seed = seed
        self.shapes = lora.shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `WeightSource.read`: fp32."""
        return self._whole(name).view(-1)[start:stop]

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`: fp32."""
        assert block.columns is not None, "a matrix"
        return self._whole(block.tensor)[slice(*block.rows), slice(*block.columns)]

    def _whole(self, name: str) -> Tensor:
        """All of a tensor: no range of one that is this small is worth drawing by itself."""
        shape = self.shapes[name]
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        digest = blake2b(f"{self.seed}\0{name}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        if self.lora.section.init == "gaussian":
            values = random.standard_normal(prod(shape), dtype=np.float32) / shape[0]
        else:
            values = (2 * random.random(prod(shape), dtype=np.float32) - 1) / sqrt(shape[1])
        return torch.from_numpy(values.astype(np.float32)).view(shape)


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
