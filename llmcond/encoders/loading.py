"""Loading a checkpoint's weights and tokenizer with stock transformers classes only."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging

from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.errors import LlmcondError, UserError

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
#: Said each time: left out, transformers asks on the terminal, and a "y" runs a checkpoint's code.
_NO_REMOTE_CODE = {"trust_remote_code": False}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers for a block: what is wrong is checked, and told in our own words."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@_quiet()
def load_tokenizer(resolved: ResolvedEncoder) -> Any:
    """Load the checkpoint's tokenizer.

    Raises:
        UserError: the checkpoint has none that transformers knows.
    """
    folder = resolved.checkpoint.folder
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would make one that knows no word, and every text would look alike.
        raise UserError(
            f"{resolved.checkpoint.name} has no tokenizer ({', '.join(_VOCABULARIES)}). Save it "
            "beside the weights: tokenizer.save_pretrained(FOLDER)"
        )
    try:
        return AutoTokenizer.from_pretrained(str(resolved.checkpoint.folder), **_NO_REMOTE_CODE)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the tokenizer of {resolved.checkpoint.name} cannot be loaded: {_first_line(error)}"
        ) from error


@_quiet()
def load_model(resolved: ResolvedEncoder) -> Any:
    """Load the checkpoint's weights in the resolved type, on the resolved device.

    Raises:
        UserError: an architecture that transformers lacks, or quantisation without its library.
        LlmcondError: weights that do not fit the architecture, or no memory for them.
    """
    identity, checkpoint = resolved.identity, resolved.checkpoint
    arguments: dict[str, Any] = {**_NO_REMOTE_CODE, "dtype": _TORCH_DTYPES[identity.dtype]}
    if identity.quantize != "none":
        arguments["quantization_config"] = _quantization(identity.quantize, identity.dtype)
        arguments["device_map"] = resolved.device
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), **_NO_REMOTE_CODE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint.name} has an architecture that transformers does not have itself. It "
            "may need code from its own repository, which llmcond never runs. "
            f"{_first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.name} is an encoder-decoder ({config.model_type}), which is not "
            "supported; use an encoder or a decoder."
        )
    try:
        model, report = AutoModel.from_pretrained(
            str(checkpoint.folder), config=config, output_loading_info=True, **arguments
        )
    except torch.OutOfMemoryError as error:
        raise LlmcondError(
            f"{checkpoint.name} does not fit into the memory of {resolved.device} as "
            f"{identity.dtype}. Try --quantize 8bit or 4bit, or --device cpu."
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: {_first_line(error)}"
        ) from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise LlmcondError(
            f"{checkpoint.name} lacks {len(missing)} weights of its architecture (first: "
            f"{missing[0]}); vectors from random weights would be noise."
        )
    if getattr(model, "pooler", None) is not None:
        # We pool ourselves. Where its weights are missing, quantising leaves it broken.
        model.pooler = None
    if identity.quantize == "none":
        model = model.to(resolved.device)
    return model.eval().requires_grad_(False)


def _quantization(quantize: str, dtype: str) -> BitsAndBytesConfig:
    absent = [name for name in ("bitsandbytes", "accelerate") if not _installed(name)]
    if absent:
        raise UserError(
            f"quantize is {quantize!r}, which needs {' and '.join(absent)}. "
            "Install it: pip install 'llmcond[quantize]'"
        )
    if quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_TORCH_DTYPES[dtype],
    )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was disabled in sys.modules
        return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
