"""A checkpoint's architecture and tokenizer, created from its settings with stock classes only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    MistralConfig,
    dynamic_module_utils,
)
from transformers.utils import logging

from llmcond.encoders.checkpoints.checkpoint import Checkpoint, read_settings
from llmcond.encoders.engine.nv_embed import LatentConfig, NVEmbedModel, read_config
from llmcond.encoders.settings import encoder_types
from llmcond.encoders.spec import Attention
from llmcond.errors import UserError, first_line

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
#: Passed to all loading functions. Without it, transformers asks on the terminal whether to run a
#: checkpoint's code, and the answer "y" runs it.
_NO_REMOTE_CODE = {"trust_remote_code": False}


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers within a block, because llmcond reports problems in its own messages.

    transformers does not ask whether it may run code either, as it otherwise does for parts whose
    config it has downloaded.
    """
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    patience = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@silence_transformers()
def load_config(checkpoint: Checkpoint, attention: Attention | None = None) -> Any:
    """Load a checkpoint's config, and set the direction of its attention.

    Args:
        checkpoint: The checkpoint, whose small files are downloaded.
        attention: Direction of the attention; None leaves that of the config.

    Raises:
        UserError: If transformers does not include the architecture.
    """
    values = read_settings(checkpoint.folder / "config.json", {})
    if values.get("model_type") == "nvembed":
        try:
            return _use_builtin_attention(read_config(values))
        except Exception as error:
            raise UserError(
                f"config.json of {checkpoint.name} differs from that of NV-Embed, and llmcond "
                f"never runs the code that it names. {type(error).__name__}: {first_line(error)}"
            ) from error
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), **_NO_REMOTE_CODE)
    except Exception as error:  # a damaged config makes libraries raise any kind of error
        raise UserError(
            f"{checkpoint.name} has an architecture that transformers does not include, or "
            "settings that transformers cannot read. It may need code from its own repository, "
            f"which llmcond never runs. {first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.name} is an encoder-decoder ({config.model_type}), which is not "
            "supported; use an encoder or a decoder."
        )
    if config.model_type not in encoder_types():
        config.use_cache = False
        # Gemma's use_bidirectional_attention has narrower windows than is_causal would give it.
        if attention is not None and not getattr(config, "use_bidirectional_attention", False):
            # This is set on the config. On the layers, it would affect unpadded batches only.
            config.is_causal = attention == "causal"
    return _use_builtin_attention(config)


def _use_builtin_attention(config: Any) -> Any:
    """Reset a config's attention implementation to eager or to transformers' default; return it.

    Other values name kernels on the hub, whose code would be loaded and run, or libraries that may
    not be installed.
    """
    eager = config._attn_implementation == "eager"
    config._attn_implementation = "eager" if eager else None
    return config


@silence_transformers()
def build_on_meta(config: Any) -> Any:
    """Build the network without allocating memory for its weights.

    Raises:
        UserError: If transformers has no encoder of this architecture, or not with these settings.
    """
    network = network_class(config)
    try:
        with torch.device("meta"):
            return network(config)
    except Exception as error:
        raise UserError(
            f"config.json describes a {config.model_type} that cannot be built: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def network_class(config: Any) -> Any:
    """Return the class of an architecture's encoder.

    Raises:
        UserError: If transformers has none.
    """
    if isinstance(config, LatentConfig):
        return NVEmbedModel
    model_class = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        raise UserError(
            f"transformers has no text encoder of the architecture {config.model_type!r}."
        )
    return model_class[0] if isinstance(model_class, tuple) else model_class


def token_embeddings(network: Any) -> torch.Tensor:
    """Return the table of a network's token embeddings, (ids, width).

    Raises:
        UserError: If the network does not read tokens.
    """
    try:
        table: torch.Tensor = network.get_input_embeddings().weight
    except (AttributeError, NotImplementedError) as error:
        raise UserError(
            f"the architecture {network.config.model_type!r} has no table of token embeddings, so "
            "it is not a supported text encoder."
        ) from error
    return table


@silence_transformers()
def load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the checkpoint's tokenizer, for the architecture of ``config``.

    Raises:
        UserError: If the checkpoint has no tokenizer that transformers supports.
    """
    folder = checkpoint.folder
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would create a tokenizer without a vocabulary, and all texts would look the
        # same.
        raise UserError(
            f"{checkpoint.name} has no tokenizer ({', '.join(_VOCABULARIES)}). Save it next to "
            "the weights: tokenizer.save_pretrained(FOLDER)"
        )
    if isinstance(config, LatentConfig):
        # For a config that it does not know, transformers builds the tokenizer with the defaults of
        # the tokenizer's class, which differ from tokenizer.json.
        config = MistralConfig()
    try:
        # Because the config is passed, transformers does not look for one that needs code.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, **_NO_REMOTE_CODE)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {checkpoint.name} cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    # InputTokenizer truncates texts, not the tokenizer, whose file may state any length.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer
