"""A frozen encoder: texts with instructions in, one float32 vector each out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.encoders.batching import plan_batches
from llmcond.encoders.loading import load_model, load_tokenizer
from llmcond.encoders.pooling import pool
from llmcond.encoders.resolve import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import EncoderIdentity, EncoderInput, fill
from llmcond.errors import LlmcondError, UserError


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors and what it took to make them, in the order of the inputs.

    Attributes:
        vectors: (n, dim) float32.
        n_tokens: (n,) tokens each input has, special tokens included, before truncation.
        truncated: (n,) whether an input was longer than the encoder takes.
    """

    vectors: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]


class Encoder:
    """A frozen encoder on one device. Make one with :func:`load_encoder`.

    Attributes:
        resolved: its checkpoint, identity, device and token budget.
        dim: size of its vectors.
    """

    def __init__(self, resolved: ResolvedEncoder) -> None:
        """Load tokenizer and weights.

        Raises:
            UserError: the checkpoint cannot be loaded with stock transformers classes.
            LlmcondError: its weights are broken or do not fit into memory.
        """
        self.resolved = resolved
        self._tokenizer = load_tokenizer(resolved)
        self._model = load_model(resolved)
        self.dim = int(self._model.config.hidden_size)
        pad = self._tokenizer.pad_token_id
        self._pad_id = int(pad if pad is not None else self._tokenizer.eos_token_id or 0)

    @property
    def name(self) -> str:
        """Return the name that messages call it by."""
        return self.resolved.checkpoint.name

    @property
    def identity(self) -> EncoderIdentity:
        """Return everything that decides its vectors."""
        return self.resolved.identity

    def encode(self, inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        """Return one vector an input, (n, dim) in float32, in the order of ``inputs``.

        Texts longer than the encoder takes are truncated, with a warning that counts them.

        Raises:
            UserError: an input has an instruction, and the encoder takes none.
            LlmcondError: out of memory.
        """
        encoded = self.encode_counted(inputs)
        if encoded.truncated.any():
            warnings.warn(
                f"{int(encoded.truncated.sum())} of {len(inputs)} inputs were cut to "
                f"{self.identity.max_length} tokens, the most that {self.name} takes.",
                stacklevel=2,
            )
        return encoded.vectors

    def encode_counted(self, inputs: Sequence[EncoderInput]) -> Encoded:
        """Return vectors with the tokens and the truncation of each input.

        Raises:
            UserError: an input has an instruction, and the encoder takes none.
            LlmcondError: out of memory.
        """
        ids, n_tokens = self._tokenise([self.format(item) for item in inputs])
        vectors = np.empty((len(inputs), self.dim), dtype=np.float32)
        for batch, pooled in self._forward(ids):
            vectors[batch] = pooled
        return Encoded(vectors, n_tokens, n_tokens > self.identity.max_length)

    def format(self, item: EncoderInput) -> str:
        """Return the string that the tokenizer is given, with the model's own format around it.

        Raises:
            UserError: the input has an instruction, and the encoder takes none.
        """
        if not item.instruction:
            return item.text
        if not self.identity.instruction_format:
            raise UserError(
                f"{self.name} takes no instruction, and got {item.instruction!r}. Use a prompt "
                "without one (concat-sent-cond), or give --instruction-format."
            )
        values = {"instruction": item.instruction, "text": item.text}
        return fill(self.identity.instruction_format, values)

    def _tokenise(self, texts: Sequence[str]) -> tuple[list[list[int]], NDArray[np.int32]]:
        if not texts:
            return [], np.zeros(0, dtype=np.int32)
        limit = self.identity.max_length
        ids: list[list[int]] = self._tokenizer(list(texts), truncation=False, verbose=False)[
            "input_ids"
        ]
        n_tokens = np.array([len(row) for row in ids], dtype=np.int32)
        for index in np.flatnonzero(n_tokens > limit).tolist():
            # Truncated by the tokenizer, which keeps its special tokens in place.
            cut = self._tokenizer(texts[index], truncation=True, max_length=limit)
            ids[index] = cut["input_ids"]
        # A tokenizer that adds no special tokens gives nothing for an empty text.
        return [row or [self._pad_id] for row in ids], n_tokens

    def _forward(self, ids: list[list[int]]) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        for batch in plan_batches([len(row) for row in ids], self.resolved.max_tokens_per_batch):
            try:
                yield batch, self._encode_batch([ids[index] for index in batch])
            except torch.OutOfMemoryError as error:
                raise LlmcondError(
                    f"{self.name} ran out of memory on {self.resolved.device} with "
                    f"{self.resolved.max_tokens_per_batch} tokens a batch. Lower "
                    "--max-tokens-per-batch and run the same command again; it resumes."
                ) from error

    @torch.inference_mode()
    def _encode_batch(self, rows: list[list[int]]) -> NDArray[np.float32]:
        width = max(len(row) for row in rows)
        # Padded on the right whatever the tokenizer prefers: positions then start at the first
        # token, and the last token is found by the mask.
        ids = torch.full((len(rows), width), self._pad_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.bool)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = True
        ids, mask = ids.to(self.resolved.device), mask.to(self.resolved.device)
        output: Any = self._model(input_ids=ids, attention_mask=mask.long())
        pooled = pool(output.last_hidden_state, mask, self.identity.pooling)
        if self.identity.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        array: NDArray[np.float32] = pooled.cpu().numpy()
        return array


def load_encoder(
    model: str,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    instruction_format: str | None = None,
    max_tokens_per_batch: int | None = None,
) -> Encoder:
    """Load an encoder by alias (``minilm``), hub name or folder.

    Args:
        model: alias, ``OWNER/NAME`` on the Hugging Face hub, or a checkpoint's folder.
        dtype: ``auto`` (the fastest the device computes natively), ``float32``, ``bfloat16``,
            ``float16``.
        quantize: None, ``8bit`` or ``4bit`` weights (bitsandbytes).
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        revision: branch, tag or commit on the hub.
        pooling: ``cls``, ``mean`` or ``last``; None: as the model has it.
        normalize: unit L2 norm; None: as the model has it.
        max_length: tokens of an input; None: as the model has it.
        instruction_format: names ``{instruction}`` and ``{text}``; None: as the model has it.
        max_tokens_per_batch: token budget of one forward pass, padding included.

    Raises:
        UserError: an unknown model, or an option that the model or machine cannot have.
        LlmcondError: the hub cannot be reached, or the weights are broken or too large.
    """
    options = EncoderOptions(
        dtype=dtype,
        device=device,
        quantize=quantize or "none",
        revision=revision,
        pooling=pooling,
        normalize=normalize,
        max_length=max_length,
        instruction_format=instruction_format,
        max_tokens_per_batch=max_tokens_per_batch,
    )
    return Encoder(resolve(model, options))
