"""8-bit and 4-bit weights with bitsandbytes."""

from __future__ import annotations

import logging

from transformers import BitsAndBytesConfig

from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.memory import POOLING_MODULES
from llmcond.encoders.spec import Dtype
from llmcond.system import require_quantization


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
