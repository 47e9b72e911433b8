"""Objective `sft`: supervised fine-tuning on the trained tokens of conversations."""

from toolkit.objectives.pretrain import Pretrain


class Sft(Pretrain):
    """The loss of `pretrain`; which tokens are trained is decided by the chat data."""

    data_kinds = ("chat",)
