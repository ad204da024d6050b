"""How much memory an encoder takes, and how much there is, before anything large is read."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.spec import Dtype
from llmcond.system import free_memory

#: Layers that pool. Not quantised: they decide the vector, and are small.
POOLS = ("latent_attention_model", "pooler")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The size of an encoder's weights, and of the work on a batch.

    Attributes:
        n_quantized: of them, those that 8 and 4 bit make small.
        n_quantized_rows: rows of their matrices; 8 bit keeps a scale for each.
        n_folded: those that NV-Embed-v2's folding takes away after loading.
        per_token: numbers that a forward pass keeps for a token, about.
    """

    n_parameters: int
    n_quantized: int
    n_quantized_rows: int
    n_folded: int
    per_token: int

    def weights(self, dtype: Dtype, quantize: str) -> int:
        """Return the bytes that the weights take once they are loaded."""
        small, size = self.n_quantized, TORCH_DTYPES[dtype].itemsize
        rest = (self.n_parameters - self.n_folded - small) * size
        if quantize == "8bit":
            return small + 4 * self.n_quantized_rows + rest
        if quantize == "4bit":
            # Blocks of 64 share a scale of one byte, 256 of those a scale of four (QLoRA, 3).
            return small // 2 + small // 64 + small // (64 * 256) * 4 + rest
        return small * size + rest

    def loading(self, dtype: Dtype, quantize: str) -> int:
        """Return the bytes at the peak of loading, shard by shard."""
        return self.weights(dtype, quantize) + self.n_folded * TORCH_DTYPES[dtype].itemsize

    def batch(self, dtype: Dtype, tokens: int) -> int:
        """Return about how many bytes a forward pass over so many tokens adds."""
        return tokens * self.per_token * TORCH_DTYPES[dtype].itemsize


def footprint(model: nn.Module) -> Footprint:
    """Measure a model, which may be on the ``meta`` device."""
    linear = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in POOLS)
    ]
    n_folded = 0  # what folding saves on balance
    block: Any = getattr(model, "latent_attention_model", None)
    if block is not None:
        attention = block.cross_attend_blocks[0]
        gone = [*attention.fn.parameters(), *attention.norm_context.parameters(), block.latents]
        made = 2 * int(block.heads) * int(block.latents.numel())
        n_folded = sum(int(parameter.numel()) for parameter in gone) - made
    return Footprint(
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_quantized=sum(module.weight.numel() for module in linear),
        n_quantized_rows=sum(module.out_features for module in linear),
        n_folded=n_folded,
        per_token=_per_token(model.config),
    )


def tokens_that_fit(config: Any, dtype: Dtype, device: str, concurrency: int) -> int:
    """Return about how many tokens a batch may have, so that half of the free memory is left.

    Its weights are loaded already, and ``concurrency`` batches are computed at the same time.
    """
    size = _per_token(config) * TORCH_DTYPES[dtype].itemsize * concurrency
    return max(1, available(device) // 2 // size)


def _per_token(config: Any) -> int:
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 8 * int(config.hidden_size) + 3 * int(inner)


def available(device: str) -> int:
    """Return the bytes that are free on a device now.

    Of a GPU also those that PyTorch keeps for this process, of tensors that are no more.
    """
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return free_memory()


def release(device: str) -> None:
    """Free what is no longer used; of a GPU also what PyTorch keeps for this process."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
