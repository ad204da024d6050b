"""A frozen encoder: texts with instructions in, one float32 vector each out."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.engine.engine import OutOfMemoryError, try_engine
from llmcond.encoders.engine.tokenizing import InputTokenizer, check_inputs
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.options import EncoderOptions
from llmcond.encoders.resolve import ResolvedEncoder, resolve
from llmcond.encoders.spec import CUT, EncoderIdentity, EncoderInput, plan_inputs
from llmcond.encoders.threads import Concurrency, WorkerThreads, check_cancelled
from llmcond.errors import LlmcondError, UserError
from llmcond.options import option_of
from llmcond.progress import ExtractionBar

_P = ParamSpec("_P")

#: Inputs that one thread tokenises and encodes at a time.
UNIT = 256


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors and what it took to make them, in the order of the inputs.

    Attributes:
        vectors: (n, dim).
        n_tokens: (n,) tokens each input has, special tokens included, before truncation.
        truncated: (n,) whether an input was longer than the encoder takes, and its sentence cut.
        n_computed: tokens that went through the network, padding included; fewer than there are
            where prefixes are shared.
    """

    vectors: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    n_computed: int


_Unit = Sequence[EncoderInput]
_Map = Callable[[Callable[[_Unit], Encoded], Iterable[_Unit]], Iterable[Encoded]]


class Encoder:
    """A frozen encoder on one device. Make one with :func:`load_encoder`.

    Attributes:
        resolved: its checkpoint, identity, device and token budget.
        dim: size of its vectors.
        concurrency: how many threads it is best run by at a time.
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
        # bitsandbytes keeps what it is at in the layers themselves.
        exclusive = resolved.identity.quantize != "none"
        self.concurrency = Concurrency.of(resolved.device, exclusive=exclusive)
        self._threads = WorkerThreads(self.concurrency)
        # A fast tokenizer is one object in Rust, which refuses a second borrower.
        self._tokenizing = threading.Lock()
        threads, pad_id = self.concurrency.threads, self._tokenizer.pad_id
        self.engine = try_engine(self._model, resolved, pad_id, threads)

    @property
    def name(self) -> str:
        """Return the name that messages call it by."""
        return self.resolved.checkpoint.name

    @property
    def identity(self) -> EncoderIdentity:
        """Return everything that decides its vectors."""
        return self.resolved.identity

    def __reduce__(self) -> tuple[type[Encoder], tuple[ResolvedEncoder]]:
        """Pickle what it was loaded from: another process loads it anew."""
        return type(self), (self.resolved,)

    def encode(
        self, inputs: Sequence[EncoderInput | str], *, show_progress: bool = False
    ) -> NDArray[np.float32]:
        """Return one vector an input, (n, dim) in float32, in the order of ``inputs``.

        A plain string is a text without instruction. In inputs longer than the encoder takes the
        sentence is cut, with a warning that counts them; or it is read in windows, whose vectors
        are averaged (``long_texts``). ``show_progress`` shows a bar on standard error.

        Raises:
            UserError: an instruction or a context that the encoder cannot take.
            LlmcondError: out of memory.
        """
        if isinstance(inputs, str | EncoderInput):
            raise UserError(f"one {type(inputs).__name__} was given; give a list of inputs.")
        items = [EncoderInput("", item) if isinstance(item, str) else item for item in inputs]
        map_units = self._threads.map if self.concurrency.threads > 1 else map
        with ExtractionBar() if show_progress else nullcontext() as bar:
            encoded = self._encode(items, map_units, bar)
        if encoded.truncated.any():
            warnings.warn(
                f"{int(encoded.truncated.sum())} of {len(inputs)} inputs are longer than the "
                f"{self.identity.max_length} tokens that {self.name} takes; {CUT}.",
                stacklevel=2,
            )
        return encoded.vectors

    def encode_counted(self, inputs: Sequence[EncoderInput]) -> Encoded:
        """Return vectors with the tokens and the truncation of each input, on the calling thread.

        A function of its inputs alone: how they are batched depends on nothing else, but where
        memory runs out. Safe to call from several threads.

        Raises:
            UserError: an instruction or a context that the encoder cannot take.
            LlmcondError: out of memory.
        """
        return self._encode(inputs, map)

    def _encode(
        self, inputs: Sequence[EncoderInput], map_units: _Map, bar: ExtractionBar | None = None
    ) -> Encoded:
        check_inputs(inputs)
        if bar is not None:
            bar.start(len(inputs), sum(item.size for item in inputs))
        order = plan_inputs(inputs, by_prefix=self.resolved.shares_prefixes)
        vectors = np.empty((len(inputs), self.dim), dtype=np.float32)
        n_tokens = np.empty(len(inputs), dtype=np.int32)
        computed = 0
        units = [order[start : start + UNIT] for start in range(0, len(order), UNIT)]
        parts = ([inputs[index] for index in unit] for unit in units)
        encode = map_units if len(units) > 1 else map
        for unit, encoded in zip(units, encode(self._encode_unit, parts), strict=True):
            vectors[unit], n_tokens[unit] = encoded.vectors, encoded.n_tokens
            computed += encoded.n_computed
            if bar is not None:
                size = sum(inputs[index].size for index in unit)
                bar.advance(len(unit), size, int(encoded.n_tokens.sum()))
        return Encoded(vectors, n_tokens, self._cut(n_tokens), computed)

    def _cut(self, n_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        cuts = self.identity.long_texts == "cut"
        return (n_tokens > self.identity.max_length) & cuts

    def _encode_unit(self, inputs: Sequence[EncoderInput]) -> Encoded:
        with self._tokenizing:
            windows = self._tokenizer.windows(inputs)
        rows = [row for own in windows for row in own]
        vectors = np.empty((len(rows), self.dim), dtype=np.float32)
        computed = 0
        try:
            for done in self.engine.run(rows, before_batch=check_cancelled):
                vectors[done.inputs] = done.vectors
                computed += done.n_computed
        except OutOfMemoryError as error:
            raise LlmcondError(
                f"{self.name} {error} Lower --max-length, or see what fits: llmcond models --check "
                f"{self.name}"
            ) from error
        if len(rows) > len(inputs):
            vectors = self._averaged(vectors, [len(own) for own in windows])
        n_tokens = np.array([own[0].n_tokens for own in windows], dtype=np.int32)
        return Encoded(vectors, n_tokens, self._cut(n_tokens), computed)

    def _averaged(self, vectors: NDArray[np.float32], counts: Sequence[int]) -> NDArray[np.float32]:
        """Return the mean of each input's windows, which are equally long; unit norm if asked."""
        starts = np.cumsum([0, *counts[:-1]])
        means = np.add.reduceat(vectors, starts) / np.array(counts, np.float32)[:, None]
        if self.identity.normalize:
            means /= np.linalg.norm(means, axis=1, keepdims=True)
        return means.astype(np.float32)

    def format(self, item: EncoderInput) -> str:
        """Return the string that the tokenizer is given, with the model's own format around it.

        Raises:
            UserError: the input has an instruction, and the encoder takes none.
        """
        return self._tokenizer.format(item)


def _loader(
    options: Callable[_P, EncoderOptions],
) -> Callable[Concatenate[str | os.PathLike[str], _P], Encoder]:
    """Return :func:`load_encoder`, whose keyword arguments are the fields of ``EncoderOptions``."""

    def load_encoder(model: str | os.PathLike[str], *args: _P.args, **kwargs: _P.kwargs) -> Encoder:
        return Encoder(resolve(os.fspath(model), options(*args, **kwargs)))

    given = [
        f"    {field.name}: {told.help}"
        for field in fields(EncoderOptions)
        if (told := option_of(field)) is not None
    ]
    load_encoder.__qualname__ = "load_encoder"
    load_encoder.__doc__ = _DOC.format(options="\n".join(given))
    signature = inspect.signature(options)
    model = inspect.Parameter(
        "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | os.PathLike[str]"
    )
    load_encoder.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[model, *signature.parameters.values()], return_annotation=Encoder
    )
    return load_encoder  # type: ignore[return-value]  # model may be named, too


_DOC = """Load an encoder by alias (``minilm``), hub name or folder.

Args:
    model: alias, ``OWNER/NAME`` on the Hugging Face hub, or a checkpoint's folder.
{options}

Raises:
    UserError: an unknown model, or an option that the model or machine cannot have.
    LlmcondError: the hub cannot be reached, or the weights are broken or too large.
"""

load_encoder = _loader(EncoderOptions)
