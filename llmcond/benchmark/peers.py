"""Peers of encoders on the same network: a plain transformers loop and sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.nv_embed import NVEmbedModel
from llmcond.encoders.loading.loading import load_config, load_tokenizer
from llmcond.encoders.spec import EncoderInput

Encode = Callable[[Sequence[EncoderInput]], NDArray[np.float32]]
#: The usual batch size.
BATCH = 32


class PlainLoop:
    """A plain loop: batches in the given order, padded to the longest text, and pooled.

    Attributes:
        tokenizer: The checkpoint's tokenizer of transformers.
        network: The network, without an engine's changes.
    """

    def __init__(self, encoder: Encoder, network: Any) -> None:
        resolved = encoder.resolved
        self._encoder, self.network = encoder, network
        self._device, self._length = resolved.device, resolved.identity.max_length
        self._last = resolved.identity.pooling == "last"
        config = load_config(resolved.checkpoint, resolved.identity.attention)
        self.tokenizer = load_tokenizer(resolved.checkpoint, config)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the token ids and the attention mask of a batch, (texts, longest) each."""
        truncation = {"truncation": True, "max_length": self._length}
        encoding = self.tokenizer(list(texts), padding=True, return_tensors="pt", **truncation)
        return {key: encoding[key] for key in ("input_ids", "attention_mask")}

    def pooled(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the vectors, (texts, dim) in float32, of a batch, on the device."""
        ids, mask = (batch[key].to(self._device) for key in ("input_ids", "attention_mask"))
        if isinstance(self.network, NVEmbedModel):
            backbone = self.network.embedding_model(input_ids=ids, attention_mask=mask)
            block = self.network.latent_attention_model
            # One text at a time, since the original computes the latents' keys and values for each
            # text.
            hidden = torch.cat([block(row[None]) for row in backbone.last_hidden_state])
        else:
            hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._last:
            rows = torch.arange(len(ids), device=ids.device)
            vectors = hidden[rows, mask.sum(dim=1) - 1].float()
        else:
            weights = mask.unsqueeze(-1)
            vectors = (hidden * weights).sum(dim=1).float() / weights.sum(dim=1)
        return nn.functional.normalize(vectors, dim=1)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        """Return the vectors, (n, dim), of inputs."""
        texts = [self._encoder.format(item) for item in inputs]
        vectors = []
        for start in range(0, len(texts), BATCH):
            vectors.append(self.pooled(self.tokenize(texts[start : start + BATCH])).cpu())
        return np.asarray(torch.cat(vectors).numpy())

    def computed(self, inputs: Sequence[EncoderInput], *, by_length: bool = False) -> int:
        """Return the number of tokens that the network computes, with padding."""
        texts = [self._encoder.format(item) for item in inputs]
        if by_length:  # the order of sentence-transformers
            texts.sort(key=len, reverse=True)
        batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
        return sum(self.tokenize(batch)["input_ids"].numel() for batch in batches)


class _Module(nn.Module):
    """The plain loop's network as the one module of a SentenceTransformer."""

    def __init__(self, loop: PlainLoop) -> None:
        super().__init__()
        self.loop, self.tokenizer = loop, loop.tokenizer

    def preprocess(self, inputs: Sequence[str], **kwargs: Any) -> dict[str, Tensor]:
        return self.loop.tokenize(inputs)

    tokenize = preprocess  # the name in sentence-transformers before version 6

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features["sentence_embedding"] = self.loop.pooled(features)
        return features


def sentence_transformers(loop: PlainLoop, encoder: Encoder) -> Encode:
    """Return ``SentenceTransformer.encode`` over the plain loop's network.

    Raises:
        ModuleNotFoundError: sentence-transformers is not installed.
    """
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(modules=[_Module(loop)], device=encoder.resolved.device)

    def encode(inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        texts = [encoder.format(item) for item in inputs]
        return np.asarray(peer.encode(texts, batch_size=BATCH, show_progress_bar=False))

    return encode
