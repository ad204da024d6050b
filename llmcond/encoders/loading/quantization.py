"""8 and 4 bit weights through bitsandbytes."""

from __future__ import annotations

import importlib.util
import logging

from transformers import BitsAndBytesConfig

from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.memory import POOLS
from llmcond.encoders.spec import Dtype
from llmcond.errors import UserError, install_command


def quantization(quantize: str, dtype: Dtype) -> BitsAndBytesConfig:
    """Return how weights are quantised: LLM.int8, or NF4 with double quantisation.

    What pools stays in ``dtype``, and so does what 4 bit computes; LLM.int8 multiplies in float16
    inside, whatever ``dtype`` is. Dettmers et al., LLM.int8 (arXiv 2208.07339) and QLoRA (arXiv
    2305.14314, section 3).

    Raises:
        UserError: bitsandbytes or accelerate is not installed.
    """
    require(f"quantize is {quantize!r}", "bitsandbytes", "accelerate")
    # It warns of every product that it casts, and of faster kernels that it would download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(
        load_in_8bit=quantize == "8bit",
        load_in_4bit=quantize == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=TORCH_DTYPES[dtype],
        llm_int8_skip_modules=list(POOLS),
    )


def require(what: str, *names: str, extra: str = "quantize") -> None:
    """Raise a UserError unless libraries are installed, which an ``extra`` of ours brings."""
    absent = [name for name in names if not installed(name)]
    if absent:
        raise UserError(
            f"{what}, which needs {' and '.join(absent)}. Install it: {install_command(extra)}."
        )


def installed(name: str) -> bool:
    """Return whether a library is there, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was disabled in sys.modules
        return False
