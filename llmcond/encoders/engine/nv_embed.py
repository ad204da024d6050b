"""NV-Embed-v2 on stock transformers: a bidirectional Mistral and its latent-attention block.

The parameter names are those of the checkpoint, so that transformers loads it shard by shard,
quantises it, and names what is missing. Lee et al., "NV-Embed: Improved Techniques for Training
LLMs as Generalist Embedding Models" (arXiv 2405.17428), section 3.1 and figure 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class LatentConfig(MistralConfig):  # type: ignore[misc]
    """A Mistral's config with the sizes of the latent-attention block."""

    model_type = "nvembed"

    num_latents: int = 512
    num_cross_heads: int = 8
    cross_head_dim: int = 4096


def read_config(config: dict[str, Any]) -> LatentConfig:
    """Return the config for the content of NV-Embed's config.json.

    Raises:
        KeyError: one of its two nested configs is absent.
        ValueError: its latent block is not as wide as its backbone.
    """
    latent = config["latent_attention_config"]
    backbone = {
        key: value
        for key, value in config["text_config"].items()
        if key not in {"model_type", "architectures", "torch_dtype", "dtype", "auto_map"}
    }
    width = backbone["hidden_size"]
    widths = {key: latent.get(key, width) for key in ("hidden_dim", "latent_dim")}
    if set(widths.values()) != {width}:
        raise ValueError(f"the backbone's vectors have {width} dimensions, the block's {widths}")
    # The original's mask knows padding only: no causal direction and no sliding window. Set on
    # the attention layers instead of here, SDPA would still be causal for padded batches.
    backbone.update(is_causal=False, sliding_window=None, use_cache=False)
    return LatentConfig(
        **backbone,
        num_latents=latent["num_latents_value"],
        num_cross_heads=latent["num_cross_heads"],
        cross_head_dim=latent["cross_dim_head"],
    )


class _Norm(nn.Module):
    """What the checkpoint calls PreNorm: layer norms before a function of the same width."""

    def __init__(self, width: int, function: nn.Module, context: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        if context:
            self.norm_context = nn.LayerNorm(width)
        self.fn = function


class _GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * nn.functional.gelu(gate)


class LatentAttention(nn.Module):
    """The block that turns the backbone's token vectors into those that are averaged.

    Tokens are the queries, trained latents the keys and values. The latents are frozen, so the
    projections around them can be multiplied out once: see :meth:`fold`.
    """

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.head_dim = config.num_cross_heads, config.cross_head_dim
        self.latents = nn.Parameter(torch.empty(config.num_latents, width))
        inner = self.heads * self.head_dim
        projections = {
            "to_q": nn.Linear(width, inner, bias=False),
            "to_kv": nn.Linear(width, 2 * inner, bias=False),
            "to_out": nn.Linear(inner, width, bias=False),
        }
        feed = nn.Sequential(nn.Linear(width, 8 * width), _GEGLU(), nn.Linear(4 * width, width))
        attention = _Norm(width, nn.ModuleDict(projections), context=True)
        outer = _Norm(width, nn.ModuleDict({"net": feed}), context=False)
        self.cross_attend_blocks = nn.ModuleList([attention, outer])
        self.scores: nn.Linear | None = None
        self.values: nn.Linear | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return token vectors of the same shape, (rows, tokens, width)."""
        blocks: Any = self.cross_attend_blocks
        hidden = self._attend(blocks[0], blocks[0].norm(hidden)) + hidden
        transformed: Tensor = blocks[1].fn["net"](blocks[1].norm(hidden)) + hidden
        return transformed

    def _attend(self, block: Any, queries: Tensor) -> Tensor:
        if self.scores is not None and self.values is not None:
            weights = self.scores(queries).unflatten(-1, (self.heads, -1)).softmax(dim=-1)
            folded: Tensor = self.values(weights.flatten(-2))
            return folded
        rows = queries.shape[0]
        keys, values = block.fn["to_kv"](block.norm_context(self.latents)).chunk(2, dim=-1)
        heads = (-1, self.heads, self.head_dim)
        attended = nn.functional.scaled_dot_product_attention(
            block.fn["to_q"](queries).unflatten(-1, heads[1:]).transpose(1, 2),
            keys.view(heads).transpose(0, 1).expand(rows, -1, -1, -1),
            values.view(heads).transpose(0, 1).expand(rows, -1, -1, -1),
        )
        projected: Tensor = block.fn["to_out"](attended.transpose(1, 2).flatten(-2))
        return projected

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply the frozen latents into the projections around them.

        Queries only ever meet the same keys: ``to_q`` and the keys become one matrix per head, and
        so do the values and ``to_out``. At NV-Embed-v2's size 537 M parameters become 34 M. The
        products are taken in float32, a head at a time.
        """
        block: Any = self.cross_attend_blocks[0]
        like, norm = block.fn["to_q"].weight, block.norm_context
        context = nn.functional.layer_norm(
            self.latents.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float()
        )
        # Half at a time: at full size to_kv alone is 1 GiB in float32.
        keys, values = (context @ half.float().T for half in block.fn["to_kv"].weight.chunk(2))
        scale = self.head_dim**-0.5
        scores, outputs = [], []
        for head in range(self.heads):
            part = slice(head * self.head_dim, (head + 1) * self.head_dim)
            scores.append(scale * keys[:, part] @ block.fn["to_q"].weight[part].float())
            outputs.append(values[:, part] @ block.fn["to_out"].weight[:, part].float().T)
        self.scores = _linear(torch.cat(scores), like)
        self.values = _linear(torch.cat(outputs).T, like)
        del block.fn, block.norm_context, self.latents


def _linear(weight: Tensor, like: Tensor) -> nn.Linear:
    """Return a projection without bias, in the type and on the device of ``like``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(like).contiguous(), requires_grad=False)
    return linear


class NVEmbedModel(PreTrainedModel):  # type: ignore[misc]
    """NV-Embed-v2: a bidirectional Mistral, then latent attention. Token vectors come out.

    Their masked mean is the embedding: the original masks instruction tokens out of it, and pools
    nothing else away.
    """

    config_class = LatentConfig
    base_model_prefix = ""
    _no_split_modules = ("MistralDecoderLayer", "LatentAttention")
    _supports_sdpa = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        self.embedding_model = MistralModel(config)
        self.latent_attention_model = LatentAttention(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooled: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Return token vectors, (rows, tokens, width) as ``last_hidden_state``.

        What goes in is (rows, tokens). ``pooled`` are the positions, (n,) among all tokens of all
        rows, where a vector is wanted; elsewhere it is zero: the latent block treats each token by
        itself.
        """
        backbone = self.embedding_model(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )
        hidden = backbone.last_hidden_state
        if pooled is None:
            return BaseModelOutput(self.latent_attention_model(hidden))
        # Not by a mask: a GPU would be waited for, to count what is True.
        pooled = pooled.to(hidden.device)
        tokens = hidden.flatten(0, 1)
        transformed = self.latent_attention_model(tokens.index_select(0, pooled)[None])[0]
        wanted = torch.zeros_like(tokens).index_copy(0, pooled, transformed.type_as(tokens))
        return BaseModelOutput(wanted.view_as(hidden))

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Choose the backbone's attention; the latent block has one of its own."""
        self.embedding_model.set_attn_implementation(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        embeddings: nn.Module = self.embedding_model.embed_tokens
        return embeddings
