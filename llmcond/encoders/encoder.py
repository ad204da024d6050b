"""A frozen encoder: texts with instructions in, one float32 vector each out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.encoders.architecture import load_config, load_tokenizer
from llmcond.encoders.batching import plan_batches
from llmcond.encoders.direction import check_direction
from llmcond.encoders.loading import load_model
from llmcond.encoders.pooling import pool
from llmcond.encoders.resolve import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import EncoderIdentity, EncoderInput
from llmcond.encoders.tokenizing import InputTokenizer, Tokens
from llmcond.errors import LlmcondError, first_line


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
        config = load_config(resolved.checkpoint, resolved.identity.attention)
        tokenizer = load_tokenizer(resolved.checkpoint, config)
        self._tokenizer = InputTokenizer(tokenizer, resolved.identity, resolved.checkpoint.name)
        self._model = load_model(resolved, config)
        self.dim = self._model.dim
        self._device = self._model.network.get_input_embeddings().weight.device
        self._try_out()

    def _try_out(self) -> None:
        """Run the network once, where it fails at once if it fails at all."""
        identity = self.identity
        try:
            check_direction(self._model.network, identity.attention, self.name, self._device)
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise LlmcondError(
                f"{self.name} cannot be run as {identity.dtype}, quantize {identity.quantize}, on "
                f"{self.resolved.device}: {first_line(error)}. Try another --dtype or --quantize."
            ) from error

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
            UserError: an instruction or a context that the encoder cannot take.
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
            UserError: an instruction or a context that the encoder cannot take.
            LlmcondError: out of memory.
        """
        rows = self._tokenizer(inputs)
        vectors = np.empty((len(inputs), self.dim), dtype=np.float32)
        for batch, pooled in self._forward(rows):
            vectors[batch] = pooled
        n_tokens = np.array([row.n_tokens for row in rows], dtype=np.int32)
        return Encoded(vectors, n_tokens, n_tokens > self.identity.max_length)

    def format(self, item: EncoderInput) -> str:
        """Return the string that the tokenizer is given, with the model's own format around it.

        Raises:
            UserError: the input has an instruction, and the encoder takes none.
        """
        return self._tokenizer.format(item)

    def _forward(self, rows: list[Tokens]) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        lengths = [len(row.ids) for row in rows]
        for batch in plan_batches(lengths, self.resolved.max_tokens_per_batch):
            try:
                yield batch, self._encode_batch([rows[index] for index in batch])
            except torch.OutOfMemoryError as error:
                raise LlmcondError(
                    f"{self.name} ran out of memory on {self.resolved.device} with "
                    f"{self.resolved.max_tokens_per_batch} tokens a batch. Lower "
                    "--max-tokens-per-batch and run the same command again; it resumes."
                ) from error

    @torch.inference_mode()
    def _encode_batch(self, rows: list[Tokens]) -> NDArray[np.float32]:
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self._tokenizer.pad_id, dtype=torch.long)
        attended = torch.zeros((len(rows), width), dtype=torch.long)
        pooled_over = torch.zeros((len(rows), width), dtype=torch.bool)
        types = torch.zeros((len(rows), width), dtype=torch.long)
        for index, row in enumerate(rows):
            # On the right whatever the tokenizer prefers: see PADDING_SIDE.
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            attended[index, : len(row.ids)] = 1
            pooled_over[index, row.first : row.last] = True
            types[index, row.second : len(row.ids)] = 1
        arguments = {"input_ids": ids, "attention_mask": attended}
        if types.any():
            arguments["token_type_ids"] = types
        if self.identity.pooling == "latent":
            arguments["pool_mask"] = pooled_over
        output: Any = self._model.network(
            **{key: value.to(self._device) for key, value in arguments.items()}
        )
        if self.identity.pooling == "pooler":
            pooled = output.pooler_output.float()
        else:
            hidden = output.last_hidden_state
            pooled = pool(hidden, pooled_over.to(hidden.device), self.identity.pooling)
        pooled = self._model.dense(pooled.to(self.resolved.device))
        if self.identity.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        array: NDArray[np.float32] = pooled.cpu().numpy()
        return array


def load_encoder(  # noqa: PLR0913 - each is a choice of the user, by keyword
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    like: str | None = None,
    attention: str | None = None,
    pooling: str | None = None,
    pool_over: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    instruction_format: str | None = None,
    special_tokens: str | None = None,
    max_tokens_per_batch: int | None = None,
    fold_latents: bool = True,
) -> Encoder:
    """Load an encoder by alias (``minilm``), hub name or folder.

    Args:
        model: alias, ``OWNER/NAME`` on the Hugging Face hub, or a checkpoint's folder.
        dtype: ``auto`` (the fastest the device computes natively), ``float32``, ``bfloat16``,
            ``float16``.
        quantize: None, ``8bit`` or ``4bit`` weights (bitsandbytes).
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        revision: branch, tag or commit on the hub.
        like: a known model whose settings a folder or another hub name is to have.
        attention: ``bidirectional`` or ``causal``; None: as the model has it.
        pooling: ``cls``, ``mean``, ``last``, ``pooler`` or ``latent``; None: as the model has it.
        pool_over: ``all`` tokens, or the ``text``'s own only; None: as the model has it.
        normalize: unit L2 norm; None: as the model has it.
        max_length: tokens of an input; None: as the model has it.
        instruction_format: names ``{instruction}`` and ``{text}``; None: as the model has it.
        special_tokens: ``tokenizer``, or the tokens around ``{text}``; None: as the model has it.
        max_tokens_per_batch: token budget of one forward pass, padding included.
        fold_latents: multiply NV-Embed-v2's latent block out at load: the same vectors up to
            rounding, in a fraction of the time and memory.

    Raises:
        UserError: an unknown model, or an option that the model or machine cannot have.
        LlmcondError: the hub cannot be reached, or the weights are broken or too large.
    """
    options = EncoderOptions(
        dtype=dtype,
        device=device,
        quantize=quantize or "none",
        revision=revision,
        like=like,
        attention=attention,
        pooling=pooling,
        pool_over=pool_over,
        normalize=normalize,
        max_length=max_length,
        instruction_format=instruction_format,
        special_tokens=special_tokens,
        max_tokens_per_batch=max_tokens_per_batch,
        fold_latents=fold_latents,
    )
    return Encoder(resolve(os.fspath(model), options))
