"""A check that a loaded encoder attends in the direction that it was trained with."""

from __future__ import annotations

from typing import Any

import torch

from llmcond.encoders.spec import Attention
from llmcond.errors import LlmcondError

_LENGTH = 8
#: Smallest change of a token's vector that shows that it attends to other tokens, as a share of its
#: norm. Tokens that it does not attend to change nothing, to the last bit. Others change the vector
#: by 1.0 in MiniLM, and by at least 0.0036 in six tiny BERTs with random weights.
_MIN_CHANGE = 1e-3


def check_direction(network: Any, attention: Attention, name: str, device: Any) -> None:
    """Check that a network's attention is causal or bidirectional, as ``attention`` says.

    In transformers, the direction depends on the version, the config and padding. A decoder that
    runs causally by mistake produces vectors that look normal, but are noise. So this function
    compares the first tokens of two texts that differ in all other tokens. It does so in a batch
    without padding and in one with padding, which take different paths through the attention code.

    Raises:
        LlmcondError: If the encoder attends in the other direction.
    """
    for padding in (0, 3):
        sees = _first_token_sees_others(network, device, padding)
        direction: Attention = "bidirectional" if sees else "causal"
        if sees is not None and direction != attention:
            batch = "a padded" if padding else "an unpadded"
            raise LlmcondError(
                f"{name} should have {attention} attention, but its attention is {direction} in "
                f"{batch} batch, so its vectors would be noise. This version of transformers does "
                "not follow the model's config; install the version in constraints.txt."
            )


@torch.inference_mode()
def _first_token_sees_others(network: Any, device: Any, padding: int) -> bool | None:
    """Return whether a first token attends to later ones; None for NaN, which is reported later."""
    size = int(network.get_input_embeddings().weight.shape[0])
    ids = torch.arange(3 * (_LENGTH + padding)).view(3, -1) % (size // 2) + size // 2
    ids[:, 0] = ids[0, 0]
    mask = torch.ones_like(ids)
    mask[:2, _LENGTH:] = 0
    hidden = network(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    first, second = hidden[:2, 0].float()
    change, norm = (first - second).norm(), first.norm()
    return bool(change > _MIN_CHANGE * norm) if change.isfinite() and norm.isfinite() else None
