"""NV-Embed-v2 with stock transformers: a bidirectional Mistral and a latent-attention block.

The parameter names are those of the checkpoint, so that transformers loads it shard by shard,
quantises it, and names missing tensors. Lee et al., "NV-Embed: Improved Techniques for Training
LLMs as Generalist Embedding Models" (arXiv 2405.17428), section 3.1 and figure 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class LatentConfig(MistralConfig):  # type: ignore[misc]
    """The config of a Mistral, with the sizes of the latent-attention block."""

    model_type = "nvembed"

    num_latents: int = 512
    num_cross_heads: int = 8
    cross_head_dim: int = 4096


def read_config(config: dict[str, Any]) -> LatentConfig:
    """Create the config from the content of NV-Embed's config.json.

    Raises:
        KeyError: If one of its two nested configs, or a size in them, is missing.
        ValueError: If its latent block is not as wide as its backbone.
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
        raise ValueError(f"the backbone has {width} dimensions, but the latent block has {widths}")
    # The original masks padding only: it has no causal direction and no sliding window. This must
    # be set on the config: if set on the attention layers, SDPA would still be causal for padded
    # batches.
    backbone.update(is_causal=False, sliding_window=None, use_cache=False)
    return LatentConfig(
        **backbone,
        num_latents=latent["num_latents_value"],
        num_cross_heads=latent["num_cross_heads"],
        cross_head_dim=latent["cross_dim_head"],
    )


class _PreNorm(nn.Module):
    """A module with a layer norm for its input and, for attention, one for its context."""

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
    """The block that transforms the backbone's token vectors before they are averaged.

    Tokens are the queries; trained latents are the keys and values. The latents are frozen, so the
    projections around them can be multiplied out once: see ``fold``.
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
        attention = _PreNorm(width, nn.ModuleDict(projections), context=True)
        outer = _PreNorm(width, nn.ModuleDict({"net": feed}), context=False)
        self.cross_attend_blocks = nn.ModuleList([attention, outer])
        self.scores: nn.Linear | None = None
        self.values: nn.Linear | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform token vectors, (rows, tokens, width); the shape stays the same."""
        blocks: Any = self.cross_attend_blocks
        hidden = self._attend(blocks[0], blocks[0].norm(hidden)) + hidden
        transformed: Tensor = blocks[1].fn["net"](blocks[1].norm(hidden)) + hidden
        return transformed

    def _attend(self, block: Any, queries: Tensor) -> Tensor:
        """Compute the attention of tokens to the latents, folded or not."""
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

        All queries are compared with the same keys. So ``to_q`` and the keys become one matrix per
        head, and so do the values and ``to_out``. At NV-Embed-v2's size, 537 M parameters become
        34 M. The products are computed in float32, one head at a time.
        """
        block: Any = self.cross_attend_blocks[0]
        like, norm = block.fn["to_q"].weight, block.norm_context
        context = nn.functional.layer_norm(
            self.latents.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float()
        )
        # to_kv is multiplied in two halves, because at full size it takes 1 GiB in float32.
        keys, values = (context @ half.float().T for half in block.fn["to_kv"].weight.chunk(2))
        scale = self.head_dim**-0.5
        scores, outputs = [], []
        for head in range(self.heads):
            part = slice(head * self.head_dim, (head + 1) * self.head_dim)
            scores.append(scale * keys[:, part] @ block.fn["to_q"].weight[part].float())
            outputs.append(values[:, part] @ block.fn["to_out"].weight[:, part].float().T)
        self.scores = _make_linear(torch.cat(scores), like)
        self.values = _make_linear(torch.cat(outputs).T, like)
        del block.fn, block.norm_context, self.latents


def _make_linear(weight: Tensor, like: Tensor) -> nn.Linear:
    """Create a projection without bias, in the type and on the device of ``like``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(like).contiguous(), requires_grad=False)
    return linear


class NVEmbedModel(PreTrainedModel):  # type: ignore[misc]
    """NV-Embed-v2: a bidirectional Mistral, followed by latent attention.

    The output is token vectors, and the embedding is their masked mean. The original excludes the
    tokens of the instruction from the mean, and only these.
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
        """Compute token vectors.

        Args:
            input_ids: (rows, tokens).
            attention_mask: (rows, tokens).
            pooled: Positions among all tokens of all rows whose vectors are needed, (n,). All other
                vectors are zero, which is possible because the latent block treats each token
                independently. None means all tokens.
            **kwargs: More arguments of the backbone.

        Returns:
            The token vectors, (rows, tokens, width), as ``last_hidden_state``.
        """
        backbone = self.embedding_model(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )
        hidden = backbone.last_hidden_state
        if pooled is None:
            return BaseModelOutput(self.latent_attention_model(hidden))
        # With a mask instead of positions, the CPU would wait for the GPU to count its True values.
        pooled = pooled.to(hidden.device)
        tokens = hidden.flatten(0, 1)
        transformed = self.latent_attention_model(tokens.index_select(0, pooled)[None])[0]
        vectors = torch.zeros_like(tokens).index_copy(0, pooled, transformed.type_as(tokens))
        return BaseModelOutput(vectors.view_as(hidden))

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Choose the backbone's attention; that of the latent block does not change."""
        self.embedding_model.set_attn_implementation(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        embeddings: nn.Module = self.embedding_model.embed_tokens
        return embeddings
