"""Making sure that a loaded encoder attends the way it was trained to."""

from __future__ import annotations

from typing import Any

import torch

from llmcond.encoders.spec import Attention
from llmcond.errors import LlmcondError

_LENGTH = 8
#: Of the norm of a token's vector. Unseen tokens change nothing, to the last bit; seen ones change
#: it by 1.0 in MiniLM, and by 0.0036 at least in six tiny BERTs with random weights.
_CHANGED = 1e-3


def check_direction(network: Any, attention: Attention, name: str, device: Any) -> None:
    """Stop if the first token of a text sees, or does not see, the tokens behind it.

    transformers decides the direction by version, config and padding; a decoder that runs causally
    by mistake gives vectors that look like any others and are noise. So it is seen on two texts
    that share their first token only: in a batch without padding and in one with padding, which
    take different ways through the attention.

    Raises:
        LlmcondError: the encoder attends the other way.
    """
    for padding in (0, 3):
        sees = _sees(network, device, padding)
        found: Attention = "bidirectional" if sees else "causal"
        if sees is not None and found != attention:
            batch = "a padded" if padding else "an unpadded"
            raise LlmcondError(
                f"{name} should attend in a {attention} way, but does so in a {found} way in "
                f"{batch} batch: its vectors would be noise. This version of transformers does not "
                "follow its config; install the one in constraints.txt."
            )


@torch.inference_mode()
def _sees(network: Any, device: Any, padding: int) -> bool | None:
    """Return whether a first token sees what follows; None where it is NaN, which is told later."""
    size = int(network.get_input_embeddings().weight.shape[0])
    ids = torch.arange(3 * (_LENGTH + padding)).view(3, -1) % (size // 2) + size // 2
    ids[:, 0] = ids[0, 0]
    mask = torch.ones_like(ids)
    mask[:2, _LENGTH:] = 0
    hidden = network(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    first, second = hidden[:2, 0].float()
    change, norm = (first - second).norm(), first.norm()
    return bool(change > _CHANGED * norm) if change.isfinite() and norm.isfinite() else None
