"""Number types, quantisation, and the memory that an encoder needs and a device has."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from llmcond.encoders.spec import Dtype
from llmcond.system import free_memory, require_quantization

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def copy_to_cpu(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy a tensor to the CPU.

    Returns:
        The copy, and the GPU event after which it is complete. A tensor on the CPU is returned as
        it is, with None.
    """
    if not values.is_cuda:
        return values, None
    fetched = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    fetched.copy_(values, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))
    return fetched, copied


def default_token_budget(device: str) -> int:
    """Return the default number of tokens of one forward pass, including padding.

    On a CPU, small batches keep activations in the cache: 1,536 tokens were measured to be fastest
    for MiniLM. A GPU needs more work at a time to be busy.
    """
    return 16_384 if device.startswith("cuda") else 1_536


#: Modules that pool. They are not quantised, because they are small and decide the vector.
POOLING_MODULES = ("latent_attention_model", "pooler")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of an encoder's weights, and of its work on a batch.

    Attributes:
        n_parameters: Number of parameters.
        n_quantized: Number of parameters that quantisation makes smaller.
        n_quantized_rows: Number of rows of their matrices; 8 bit stores a scale for each row.
        n_folded: Number of parameters that folding NV-Embed-v2's latents removes after loading.
        per_token: Approximate number of values that a forward pass keeps per token.
    """

    n_parameters: int
    n_quantized: int
    n_quantized_rows: int
    n_folded: int
    per_token: int

    def weights(self, dtype: Dtype, quantize: str) -> int:
        """Return the size of the loaded weights in bytes."""
        small, size = self.n_quantized, TORCH_DTYPES[dtype].itemsize
        rest = (self.n_parameters - self.n_folded - small) * size
        if quantize == "8bit":
            return small + 4 * self.n_quantized_rows + rest
        if quantize == "4bit":
            # Blocks of 64 parameters share a scale of one byte, and 256 of these scales share one
            # of four bytes (QLoRA, section 3).
            return small // 2 + small // 64 + small // (64 * 256) * 4 + rest
        return small * size + rest

    def loading(self, dtype: Dtype, quantize: str) -> int:
        """Return the peak memory of loading in bytes, when weights are loaded shard by shard."""
        return self.weights(dtype, quantize) + self.n_folded * TORCH_DTYPES[dtype].itemsize

    def batch(self, dtype: Dtype, tokens: int) -> int:
        """Estimate the memory that a forward pass over ``tokens`` tokens adds, in bytes."""
        return tokens * self.per_token * TORCH_DTYPES[dtype].itemsize


def measure_footprint(model: nn.Module) -> Footprint:
    """Return the size of a model, which may be on the ``meta`` device."""
    linear = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in POOLING_MODULES)
    ]
    n_folded = 0
    block: Any = getattr(model, "latent_attention_model", None)
    if block is not None:
        attention = block.cross_attend_blocks[0]
        removed = [*attention.fn.parameters(), *attention.norm_context.parameters(), block.latents]
        n_added = 2 * int(block.heads) * int(block.latents.numel())
        n_folded = sum(int(parameter.numel()) for parameter in removed) - n_added
    return Footprint(
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_quantized=sum(module.weight.numel() for module in linear),
        n_quantized_rows=sum(module.out_features for module in linear),
        n_folded=n_folded,
        per_token=_values_per_token(model.config),
    )


def tokens_that_fit(config: Any, dtype: Dtype, device: str, concurrency: int) -> int:
    """Estimate how many tokens a batch may have if half of the free memory is to stay free.

    The weights must have been loaded already. ``concurrency`` is the number of batches that are
    computed simultaneously.
    """
    size = _values_per_token(config) * TORCH_DTYPES[dtype].itemsize * concurrency
    return max(1, available_memory(device) // 2 // size)


def _values_per_token(config: Any) -> int:
    """Estimate the number of values that a forward pass keeps per token."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 8 * int(config.hidden_size) + 3 * int(inner)


def available_memory(device: str) -> int:
    """Return the free memory of a device in bytes.

    On a GPU, this includes memory that PyTorch has cached for this process but does not use.
    """
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_memory()


def release_memory(device: str) -> None:
    """Free unused memory, on a GPU including what PyTorch has cached for this process."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def quantization_config(quantize: str, dtype: Dtype) -> BitsAndBytesConfig:
    """Return the quantisation config: LLM.int8, or NF4 with double quantisation.

    Modules that pool stay in ``dtype``, and 4-bit layers compute in ``dtype``. LLM.int8 multiplies
    in float16, whatever ``dtype`` is. See Dettmers et al., LLM.int8 (arXiv 2208.07339) and QLoRA
    (arXiv 2305.14314, section 3).

    Raises:
        UserError: If bitsandbytes or accelerate is not installed.
    """
    require_quantization(quantize)
    # bitsandbytes warns of each product that it casts, and of faster kernels that it could
    # download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(
        load_in_8bit=quantize == "8bit",
        load_in_4bit=quantize == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=TORCH_DTYPES[dtype],
        llm_int8_skip_modules=list(POOLING_MODULES),
    )
