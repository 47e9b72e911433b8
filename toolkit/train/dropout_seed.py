"""The random stream of dropout: a function of seed, step and `Layout.token_rank`."""

from hashlib import blake2b

import torch


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed the stream of one rank in one step: a resumed run draws what it would have drawn.

    As `torch.manual_seed`, which formats a stack trace each time CUDA is not in use.
    """
    digest = blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
