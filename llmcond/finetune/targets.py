"""Which projections of an encoder get an adapter, and adding one to each."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from llmcond.encoders.loading.memory import POOLS
from llmcond.errors import UserError, did_you_mean
from llmcond.finetune.settings import TuneSettings

#: Groups of projections, by what their names begin with.
_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\b")
GROUPS = ("auto", "attention", "mlp")


def projections(network: nn.Module) -> list[str]:
    """Return the names that linear layers have within a transformer block, such as ``mlp.up_proj``.

    What pools is left out: it is no part of a block.
    """
    found: dict[str, None] = {}
    for name, module in network.named_modules():
        # Of a subclass too: so are quantised layers.
        if not isinstance(module, nn.Linear) or any(part in name for part in POOLS):
            continue
        match = re.fullmatch(r".*\.\d+\.(.+)", f".{name}")
        if match:
            found[match[1]] = None
    return list(found)


def choose(network: nn.Module, target: Sequence[str], encoder: str) -> list[str]:
    """Return the projections that a target names: groups of :data:`GROUPS`, names, or their ends.

    Raises:
        UserError: a name that no projection has; the legal ones are listed.
    """
    legal = projections(network)
    if not legal:
        raise UserError(
            f"{encoder} has no linear layers in numbered blocks, so there is nothing to put an "
            "adapter on. Train all of it: --rank full"
        )
    chosen: dict[str, None] = {}
    for name in target:
        # A whole name goes before names that end in it: output.dense, attention.output.dense.
        found = [name] if name in legal else [own for own in legal if _is(own, name)]
        if not found:
            ends = [own.rpartition(".")[2] for own in legal]
            hint = did_you_mean(name, [*legal, *ends, *GROUPS])
            raise UserError(
                f"--target is {name!r}, which {encoder} does not have. {hint} Legal: "
                f"{', '.join((*GROUPS, *legal))}."
            )
        chosen.update(dict.fromkeys(found))
    return [own for own in legal if own in chosen]


def _is(own: str, name: str) -> bool:
    if name in GROUPS:
        attention = _ATTENTION.search(own) is not None
        return name == "auto" or attention == (name == "attention")
    return own.endswith(f".{name}")


def add_adapters(network: nn.Module, settings: TuneSettings, encoder: str) -> Any:
    """Put an adapter on each of the chosen projections, in place, and freeze all else.

    Each begins as the zero map; its first matrix is drawn from PyTorch's own generator. What is
    returned is peft's model around the network.
    """
    # bitsandbytes, which peft imports, warns of faster kernels that it would download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, TaskType, get_peft_model

    names = choose(network, settings.target, encoder)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.adapter_dropout,
        # Not a list of names: peft would take ``output.dense`` for ``attention.output.dense`` too.
        target_modules=rf"(.*\.)?\d+\.({'|'.join(re.escape(name) for name in names)})",
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    with warnings.catch_warnings():
        # Of its own use of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(network, config)
