"""Objective `sft`: supervised fine-tuning on the trained tokens of conversations."""

from toolkit.objectives.pretrain import Pretrain


class Sft(Pretrain):
    """The loss of `pretrain`; chat data decides which of its tokens are trained. Of documents
    in the same list, all are."""

    data_kinds = ("chat",)
    blended_kinds = Pretrain.data_kinds
