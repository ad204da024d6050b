"""From a checkpoint's settings to its architecture and tokenizer, with stock classes only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
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
from llmcond.errors import UserError, brief, first_line

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
#: Said each time: left out, transformers asks on the terminal, and a "y" runs a checkpoint's code.
_NO_REMOTE_CODE = {"trust_remote_code": False}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers for a block: what is wrong is checked, and told in our own words.

    Nor does it ask whether it may run code, as it does for parts whose config it has downloaded.
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


@quiet()
def load_config(checkpoint: Checkpoint, attention: Attention | None = None) -> Any:
    """Load a checkpoint's config, with the direction of its attention set.

    Raises:
        UserError: an architecture that transformers does not have itself, or of an absurd size.
    """
    values = read_settings(checkpoint.folder / "config.json", {})
    _check_counts(values, checkpoint.name)
    if values.get("model_type") == "nvembed":
        try:
            return _with_own_attention(read_config(values))
        except Exception as error:
            raise UserError(
                f"config.json of {checkpoint.name} is not as NV-Embed's, and the code that it asks "
                f"for llmcond never runs. {type(error).__name__}: {first_line(error)}"
            ) from error
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), **_NO_REMOTE_CODE)
    except Exception as error:  # whatever a file of settings can make a library raise
        raise UserError(
            f"{checkpoint.name} has an architecture that transformers does not have itself, or "
            "settings that it cannot read. It may need code from its own repository, which "
            f"llmcond never runs. {first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.name} is an encoder-decoder ({config.model_type}), which is not "
            "supported; use an encoder or a decoder."
        )
    if config.model_type not in encoder_types():
        config.use_cache = False
        # Gemma's own way of being bidirectional has narrower windows than is_causal gives it.
        if attention is not None and not getattr(config, "use_bidirectional_attention", False):
            # On the config: set on the layers, it would hold for unpadded batches only.
            config.is_causal = attention == "causal"
    return _with_own_attention(config)


#: What is made one by one, by the end of its name in a config, and how many there are at most.
_COUNTED = {"layer": 1_000, "layers": 1_000, "experts": 10_000, "labels": 100_000}


def _check_counts(config: Mapping[str, Any], name: str) -> None:
    """Refuse numbers of parts that would take hours, or all memory, to make."""
    waiting = [config]
    for values in waiting:  # which grows
        waiting += [value for value in values.values() if isinstance(value, dict)]
        for key, value in values.items():
            most = _COUNTED.get(key.rpartition("_")[2])
            if most is not None and isinstance(value, int | float) and value > most:
                raise UserError(
                    f"config.json of {name} has {key} = {brief(value)}; no encoder has more than "
                    f"{most:,}. Copy it anew."
                )


def _with_own_attention(config: Any) -> Any:
    """Return a config, in place, whose attention is one of those that are tried out here.

    Other names are of kernels on the hub, whose code would be loaded and run, or of libraries that
    need not be installed.
    """
    eager = config._attn_implementation == "eager"
    config._attn_implementation = "eager" if eager else None
    return config


@quiet()
def build_on_meta(config: Any) -> Any:
    """Build the architecture without memory for its weights.

    Raises:
        UserError: transformers has no encoder of this architecture, or not with these settings.
    """
    network = network_class(config)
    try:
        with torch.device("meta"):
            return network(config)
    except Exception as error:
        raise UserError(
            f"config.json describes no {config.model_type} that can be built: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def network_class(config: Any) -> Any:
    """Return the class of an architecture's encoder.

    Raises:
        UserError: transformers has none.
    """
    if isinstance(config, LatentConfig):
        return NVEmbedModel
    found = MODEL_MAPPING.get(type(config), None)
    if found is None:
        raise UserError(
            f"transformers has no text encoder of the architecture {config.model_type!r}."
        )
    return found[0] if isinstance(found, tuple) else found


def token_embeddings(network: Any) -> torch.Tensor:
    """Return the table of a network's token embeddings, (ids, width).

    Raises:
        UserError: it reads something else than tokens.
    """
    try:
        table: torch.Tensor = network.get_input_embeddings().weight
    except (AttributeError, NotImplementedError) as error:
        raise UserError(
            f"the architecture {network.config.model_type!r} has no table of token embeddings, so "
            "it is no text encoder that is supported."
        ) from error
    return table


@quiet()
def load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the checkpoint's tokenizer.

    Raises:
        UserError: the checkpoint has none that transformers knows.
    """
    folder = checkpoint.folder
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would make one that knows no word, and every text would look alike.
        raise UserError(
            f"{checkpoint.name} has no tokenizer ({', '.join(_VOCABULARIES)}). Save it "
            "beside the weights: tokenizer.save_pretrained(FOLDER)"
        )
    if isinstance(config, LatentConfig):
        # For a config that it does not know, transformers builds the tokenizer by its class's
        # defaults, which are not those of tokenizer.json.
        config = MistralConfig()
    try:
        # With the config at hand, it does not look for one that needs code.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, **_NO_REMOTE_CODE)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {checkpoint.name} cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    # Texts are cut here, not by it; and a file may state anything.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer
