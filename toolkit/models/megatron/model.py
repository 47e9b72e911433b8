"""Builds megatron-core's language model on this rank, and computes log-probabilities."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import Tensor
from torch.nn import functional

from toolkit.batch import MicroBatch
from toolkit.layout import Layout, LossKernel, loss_chunks
from toolkit.models import compiled
from toolkit.models.context import Context
from toolkit.models.families import MegatronModel
from toolkit.models.log_probs import in_chunks
from toolkit.models.megatron import cpu, versions
from toolkit.models.megatron.attention import CausalAttention, document_masks
from toolkit.models.megatron.config import expert_tensor
from toolkit.models.megatron.layers import chunk_spec
from toolkit.models.megatron.norms import local_device
from toolkit.models.megatron.rotary import Rotary, choose_rotation


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _unchanged(weight: Tensor) -> Tensor:
    return weight


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}


class GPTChunk(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline chunk, with embedding and head where they belong.

    megatron-core's model holds the parts. How they are called stands here.
    """

    described: MegatronModel
    loss_kernel: LossKernel
    context: Context | None
    """The ranks that compute the other positions of the same rows. None: there are none."""

    def __init__(
        self,
        *arguments: Any,
        rope_parameters: Mapping[str, Any] | None = None,
        windowed_rope_parameters: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`rope_parameters`: transformers' map of that name. `windowed_rope_parameters`: that
        of layers with a window, if it differs. The others are the arguments of megatron-core's
        model."""
        super().__init__(*arguments, **options)
        self._full, self._windowed = (
            Rotary(one, self.config, self.max_sequence_length) if one else None
            for one in (rope_parameters, windowed_rope_parameters)
        )
        for layer in self.decoder.layers:
            if self._full is not None and self._full.attention_factor != 1:
                versions.scale_rotation(layer.self_attention, self._full.attention_factor)
            if self._windowed is not None:
                choose_rotation(layer.self_attention, self._windowed.attention_factor)

    def _rotation(
        self, positions: Tensor | None, places: Tensor, longest: Tensor | None
    ) -> Tensor | None:
        """What the layers rotate by: fp32 angles [sequence, batch, 1, size] of the positions;
        if there are none, of `places`. If layers with a window rotate differently, two of them:
        [2, sequence, batch, 1, size].

        `longest`: of the documents of whole rows, if `positions` are a part."""
        if self._full is None:
            return None
        positions = places[:1] if positions is None else positions
        angles = self._full.angles(positions, longest)
        if self._windowed is None:
            return angles
        return torch.stack([angles, self._windowed.angles(positions, longest)])

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        segments: Tensor | None,
        ends: Tensor | None = None,
        labels: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """`position_ids` None: 0, 1, 2, … in every row. `segments` and `ends` as in
        `MicroBatch`. With `ends`, attention is computed in each document alone. `real`: bool
        [batch, sequence], which tokens are not padding. None: the routers are not observed.

        All are whole rows. With context parallel the layers compute this rank's positions, and
        attention those of all, so that every context rank has the loss of whole rows.

        Returns the cross entropy [batch, sequence] on the last stage (without labels, logits
        [batch, sequence, this rank's vocabulary]), hidden states on others.
        """
        longest = None
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        masks = self._masks(places if segments is None else position_ids, segments, ends)
        if self.context is not None:
            own = self.context.own
            position_ids = places if position_ids is None else position_ids
            longest = position_ids.max() + 1
            input_ids, position_ids = own(input_ids), own(position_ids)
            labels, real = (None if x is None else own(x) for x in (labels, real))
        rotation = self._rotation(position_ids, places, longest)
        position_ids = places if position_ids is None else position_ids
        embedded = None  # later stages have been sent their input
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if (scale := self.described.embedding_scale) != 1:  # rounded as in transformers
                embedded = embedded * embedded.new_tensor(scale)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=masks,
            rotary_pos_emb=rotation,
            padding_mask=self._padding(real),
        )
        if not self.post_process:
            return hidden
        losses = self._losses(hidden, labels)
        return losses if self.context is None else self.context.whole(losses)

    def _masks(
        self, positions: Tensor | None, segments: Tensor | None, ends: Tensor | None
    ) -> Tensor | None:
        """The attention mask of `CausalAttention.forward`, for whole rows with these positions
        in their documents. It is an argument of every layer: one that is recomputed needs that
        of its own micro batch."""
        assert positions is not None, "given with segments"
        if ends is None and self.context is not None:
            rows, length = positions.shape
            ends = torch.arange(rows + 1, dtype=torch.int32, device=positions.device) * length
        if ends is None and segments is not None:
            return document_masks(segments, self.config)
        return ends

    def _padding(self, real: Tensor | None) -> Tensor | None:
        """megatron-core's padding mask: with sequence parallel, of this rank's positions."""
        if real is None:
            return None
        if self.config.sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            real = real.chunk(ranks, dim=1)[rank]
        return ~real

    def _losses(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """[sequence, batch, hidden] → what `forward` returns on the last stage.

        With sequence parallel a rank has a contiguous range of its group's positions. Then a
        chunk of the loss is a part of every rank's range.
        """
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        share = self.output_layer.output_size_per_partition
        chunks = loss_chunks(self.loss_kernel, labels.numel(), share)
        if chunks == 1:
            return self.compute_language_model_loss(labels, self._logits(hidden))
        positions = len(hidden)
        runs = labels.view(len(labels), -1, positions)  # [batch, ranks of the group, positions]

        def compute(places: Tensor) -> Tensor:
            wanted = runs[:, :, places]
            logits = self._logits(hidden[places])
            losses = self.compute_language_model_loss(wanted.flatten(1), logits)
            return torch.reshape(losses, wanted.shape).flatten(0, 1)

        losses = in_chunks(compute, positions, chunks, hidden.device)
        return losses.reshape(labels.shape)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[…, batch, hidden] → [sequence, batch, this rank's vocabulary]."""
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else None
        logits: Tensor = self.output_layer(hidden, weight=weight)[0]
        if self.described.logits_divisor != 1:
            logits = logits / self.described.logits_divisor
        if (cap := self.described.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy [batch, sequence] over the real vocabulary.

        Padding tokens, which fill the vocabulary up to a multiple of the tensor-parallel
        degree, get no probability: the loss is that of the model without padding.
        """
        share = logits.shape[-1]
        real = (
            self.described.gpt["vocab_size"]
            - parallel_state.get_tensor_model_parallel_rank() * share
        )
        if real < share:
            padding = torch.arange(share, device=logits.device) >= real
            logits = logits.masked_fill(padding, float("-inf"))
        loss: Tensor = super().compute_language_model_loss(labels, logits)
        return loss


def join_groups(layout: Layout, seed: int) -> None:
    """Create megatron-core's process groups for a layout. Collective over all ranks."""
    cpu.redirect()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=expert_tensor(layout),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)


def seed_dropout() -> None:
    """Seed the random streams of the next step from torch's seed.

    Tensor-parallel ranks, which hold different heads and with sequence parallel different
    positions, have different streams, and so do pipeline stages.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31 + 100 * stage)


def leave_groups() -> None:
    """Destroy what `join_groups` created: the threads of a forgotten group continue.

    The last group first, on every rank: in NCCL, a group's destruction waits for its ranks.
    """
    groups = list(dict.fromkeys(parallel_state._global_process_group_list or ()))
    parallel_state.destroy_model_parallel()
    for group in reversed(groups):
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(group)


def build_chunks(
    model: MegatronModel,
    transformer: Mapping[str, Any],
    gpt: Mapping[str, Any],
    layout: Layout,
) -> list[GPTChunk]:
    """This rank's pipeline chunks (one without virtual stages), uninitialised. Collective.

    `transformer` and `gpt` are the rendered arguments (`toolkit.models.megatron.config`) for
    `layout`. Call `join_groups` first.
    """
    config = transformer_config(transformer)
    context = None
    if layout.cp > 1:
        context = Context(parallel_state.get_context_parallel_group(), layout.exchange)
    if config.bias_activation_fusion:
        compiled.prepare()
    stages = config.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = GPTChunk(
            config=config,
            transformer_layer_spec=chunk_spec(model, config, vp_stage),
            pre_process=first,
            post_process=last,
            vp_stage=vp_stage,
            **gpt,
        )
        chunk.to(local_device())  # megatron-core leaves routers on torch's default device
        chunk.described, chunk.loss_kernel = model, layout.loss
        chunk.context = context
        for part in chunk.modules():
            if isinstance(part, CausalAttention):
                part.context = context
        if first and model.padding_token is not None:
            _freeze_embedding_of(model.padding_token, chunk.embedding.word_embeddings)
        chunks.append(chunk)
    return chunks


def _freeze_embedding_of(token: int, embedding: VocabParallelEmbedding) -> None:
    """Zero the gradient of the input embedding of `token`, like torch's `padding_idx`.

    The output is [batch, sequence, hidden], or with sequence parallel this rank's part of
    [sequence, batch, hidden].
    """

    def stop_gradient(_: object, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        tokens = inputs[0]
        if embedding.reduce_scatter_embeddings:
            rank = parallel_state.get_tensor_model_parallel_rank()
            length = output.shape[0]
            # Contiguous: pipeline stages send what follows from it, and it must be, too.
            tokens = tokens.T[rank * length : (rank + 1) * length].contiguous()
        return torch.where((tokens == token)[..., None], output.detach(), output)

    embedding.register_forward_hook(stop_gradient)


def transformer_config(arguments: Mapping[str, Any]) -> TransformerConfig:
    """megatron-core's own config object from rendered arguments.

    Nothing is drawn: weights are filled by their Hugging Face names. (If initialisation were
    disabled, split parameters would not be marked, and gradient norms would be wrong.)
    """
    objects = {**arguments, **versions.without_cuda_graphs()}
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        objects[name] = _unchanged
    objects["activation_func"] = ACTIVATIONS[objects["activation_func"]]
    for name in ("params_dtype", "pipeline_dtype"):
        objects[name] = getattr(torch, objects[name])
    if "window_size" in objects:
        objects["window_size"] = tuple(objects["window_size"])
    kind = MLATransformerConfig if objects.get("multi_latent_attention") else TransformerConfig
    # megatron-core refuses biases of experts that tensor parallelism splits, because each rank
    # would add that of the second layer. Ours (`ExpertDown`) is added once.
    biased = objects["add_bias_linear"]
    config = kind(**objects | {"add_bias_linear": False})
    config.add_bias_linear = biased
    return config


def log_probs(losses: Tensor, batch: MicroBatch) -> Tensor:
    """A last chunk's output as log p(label), 0 where the label is `IGNORE_INDEX`: fp32
    [micro_batch, sequence]."""
    return -(losses.float() * batch.trained)
