"""Inputs of encoders, types of settings, poolings, and architectures that OpenVINO computes."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcond.base import package as plugins
from llmcond.base.errors import UserError, format_count, shortened_repr
from llmcond.base.files import digest_bytes
from llmcond.base.options import check_argument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Attention = Literal["bidirectional", "causal"]
Dtype = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["none", "8bit", "4bit"]
#: The library that computes: PyTorch, or OpenVINO on a CPU.
Runtime = Literal["torch", "openvino"]
#: The order in which a cross-encoder reads two sentences: both orders, whose predictions are
#: averaged, or only the given one.
Orders = Literal["both", "given"]
#: The most layers of a network. Creating millions of them, or listing their tensors, would take
#: minutes and all memory.
MAX_LAYERS = 1_000
#: Weights that an encoder may ignore: heads of other tasks, networks for images and sounds, and
#: buffers of older versions.
IGNORED_WEIGHTS = re.compile(
    r"^(\w+\.)?(lm_head|embed_out|cls|classifier|score|qa_outputs|predictions|"
    r"vocab_(transform|layer_norm|projector)|(discriminator|generator)_predictions(_head)?|"
    r"(vision|audio)_tower|embed_(vision|audio))\.|"
    r"^(mlp|head|decoder)\.|(^|\.)pooler\.|\.(position_ids|inv_freq|masked_bias)$"
)
#: What warnings say about inputs that are longer than ``max_length``, unless windows are read.
TRUNCATION_NOTE = (
    "the ends of sentences were cut, conditions and instructions were not. To use whole "
    "sentences, split long texts"
)
#: A part of an input's texts: the field, the position of its first character, and the position
#: after its last character.
Span = tuple[Literal["instruction", "text", "context"], int, int]


@dataclass(frozen=True, slots=True)
class Router:
    """A second text that weights the tokens of an input: routed pooling.

    The token states h_i of the input are pooled to sum_i w_i h_i, with w the softmax over i of
    cos(h_i - m, q) / (temperature * s). Here q is the vector of the router's text; m is the mean of
    the h_i, or 0; s is the standard deviation of these cosines over i, or 1. An encoder with a
    router inside uses another formula and ignores the settings.

    Attributes:
        text: text of the router, encoded as a plain input.
        temperature: positive; a very large temperature gives the mean of the tokens.
        centre: whether m is the mean of the h_i.
        standardize: whether s is the standard deviation of the cosines.

    Raises:
        UserError: the temperature is not a positive number.
    """

    text: str
    temperature: float
    centre: bool
    standardize: bool

    def __post_init__(self) -> None:
        check_argument("temperature", self.temperature, (Real,), "a number")
        if not self.temperature > 0:
            raise UserError(f"temperature is {self.temperature:g}; it must be above 0.")


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """A text to encode, with an optional instruction, context and router.

    Attributes:
        instruction: the task description only (for CASE, I(s) with the sentence in it); the
            encoder adds its model's format around it. Empty: no instruction.
        text: the text whose tokens are encoded.
        context: a text that is read before ``text``, as the first half of a tokenizer pair, but
            not pooled: only the tokens of ``text`` are pooled, without special tokens. Empty:
            there is no first half, but the same tokens are pooled, so that f(c; ∅) is computed in
            the same way as f(c; s). None: a plain input with the model's default pooling.
        sentence: the parts of these texts that may be cut, or read in windows, if the input is
            longer than the encoder accepts. Empty: nothing may be cut. None: first all of the
            context, then the text.
        router: weights the tokens that are pooled. None: the model's default pooling.

    Examples:
        >>> import llmcond
        >>> encoder = llmcond.load_encoder("minilm", device="cpu")
        >>> item = llmcond.EncoderInput(instruction="", text="A girl plays chess.")
        >>> encoder.encode([item]).shape
        (1, 384)
    """

    instruction: str
    text: str
    context: str | None = None
    sentence: tuple[Span, ...] | None = field(default=None, repr=False, compare=False)
    router: Router | None = None
    _key: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of characters, without the router's, as several inputs share a router."""
        return len(self.instruction) + len(self.text) + len(self.context or "")

    @property
    def texts(self) -> tuple[str, str, str, bool, str]:
        """Sort key: the texts of the input, in the order in which the encoder reads them.

        In this order, inputs that differ only in their routers are adjacent, and the text that
        they share is encoded once.
        """
        router = self.router.text if self.router else ""
        return self.instruction, self.context or "", self.text, self.context is not None, router

    @property
    def key(self) -> bytes:
        """Identifier of the input: a 16-byte digest of its texts and their boundaries."""
        if self._key is None:
            # Cached, because an extraction uses the key several times, and computing it is slower
            # than looking it up.
            texts = self.instruction, self.text, *(() if self.context is None else (self.context,))
            content = texts if self.router is None else (*texts, {"router": asdict(self.router)})
            object.__setattr__(self, "_key", digest_bytes(json.dumps(content).encode(), size=16))
        key: Any = self._key
        return bytes(key)


def truncation_note(count: int, limit: str, *, windows: bool = True) -> str:
    """Return what to say about the inputs that were cut.

    Args:
        count: the number of inputs.
        limit: what they exceed, such as ``256 tokens``.
        windows: whether the encoder could read them in windows.
    """
    are, note = ("is", "") if count == 1 else ("are", " (a text counts once for each condition)")
    advice = ", or use a run that was extracted with --long-texts windows" if windows else ""
    return (
        f"{format_count(count, 'input')}{note} {are} longer than {limit}: {TRUNCATION_NOTE}{advice}"
    )


class InputError(UserError):
    """An input that an encoder does not accept or gives no vector for.

    Attributes:
        item: the input, or the row that begins with its text.
    """

    def __init__(self, item: Any, message: str) -> None:
        super().__init__(message)
        self.item = item


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors and token counts, in the order of the inputs.

    Attributes:
        vectors: (n, dim) float32.
        n_tokens: (n,) tokens of each input before truncation, special tokens included.
        truncated: (n,) whether an input exceeded ``max_length``, so that its sentence was cut.
        n_computed: tokens that went through the network, padding included. Sharing prefixes makes
            this less than the sum of ``n_tokens``.
    """

    vectors: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    n_computed: int = 0

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Encoded:
        """Select inputs by positions or by a boolean mask; ``n_computed`` becomes 0."""
        return Encoded(self.vectors[rows], self.n_tokens[rows], self.truncated[rows])


class NotFiniteError(InputError):
    """A vector contains NaN or infinity.

    Attributes:
        encoded: the vectors of all inputs, if an encoder computed them.
    """

    encoded: Encoded | None = None


def check_finite(
    vectors: NDArray[Any], items: Sequence[Any], source: str = "the encoder", advice: str = ""
) -> None:
    """Check that vectors contain neither NaN nor infinity.

    Args:
        vectors: (n, k) vectors.
        items: what they are the vectors of: n inputs, n texts, or n rows that begin with a text.
        source: what computed the vectors, for the message.
        advice: what to do about it; empty: what helps with an encoder.

    Raises:
        NotFiniteError: a vector is not finite. The error is about the first of them.
    """
    import numpy as np  # options import this module, and must not take long

    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if not len(bad):
        return
    item = items[bad[0]]
    if isinstance(item, EncoderInput):
        text = item.text
    else:
        text = item if isinstance(item, str) else item[0]
    advice = advice or (
        "Compute in another type (llmcond extract --dtype float32). If that does not help, the "
        "checkpoint is damaged: copy it again."
    )
    raise NotFiniteError(
        item,
        f"{source} returned NaN or infinity for {shortened_repr(text)}"
        f"{f' and {len(bad) - 1:,} more' if len(bad) > 1 else ''}. {advice}",
    )


def plan_inputs(inputs: Sequence[EncoderInput], *, by_prefix: bool) -> list[int]:
    """Return the positions of inputs in the order in which they are encoded most efficiently.

    Args:
        inputs: n inputs.
        by_prefix: put inputs with a common prefix next to each other, for encoders that compute a
            prefix once. Otherwise the longest inputs come first, so that batches hold inputs of
            similar length, and running out of memory shows early.
    """
    if by_prefix:
        return sorted(range(len(inputs)), key=lambda i: inputs[i].texts)
    return sorted(range(len(inputs)), key=lambda i: (-inputs[i].size, inputs[i].texts))


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the states of an input's tokens become one vector.

    Attributes:
        states: the states that it needs: of the ``first`` token of the input, of the ``last``
            pooled token, the ``mean`` of the pooled tokens, or ``all`` for a user-defined function.
        module: its name in the pooling module of sentence-transformers; empty if it has none.
        supports_pool_over: whether ``pool_over`` applies, that is, whether users choose which
            tokens are pooled.
        supports_routers: whether token states lie in the same space as the vectors of texts, so
            that routers can weight them.
        part: the part of the network that it needs: the ``pooler``, a dense layer after the first
            token, or the ``latent`` attention after every token; empty if neither.
    """

    states: Literal["first", "last", "mean", "all"]
    module: str = ""
    supports_pool_over: bool = False
    supports_routers: bool = False
    part: Literal["", "pooler", "latent"] = ""

    def tokens(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Return the range of tokens, end excluded, whose states an input's vector needs.

        Args:
            first: position of the first pooled token.
            last: position after the last pooled token.
            length: number of tokens of the input.
        """
        ranges = {"first": (0, 1), "last": (last - 1, last), "mean": (first, last)}
        return ranges.get(self.states, (0, length))


POOLINGS: Mapping[str, Pooling] = {
    "cls": Pooling("first", "cls_token", supports_routers=True),
    "mean": Pooling("mean", "mean_tokens", supports_pool_over=True, supports_routers=True),
    "last": Pooling("last", "lasttoken", supports_pool_over=True, supports_routers=True),
    # Used by SimCSE.
    "pooler": Pooling("first", "cls_token", part="pooler"),
    # Used by NV-Embed-v2.
    "latent": Pooling("mean", part="latent"),
}
#: What an encoder behind a server does with the states of its tokens.
SERVER_POOLING = "server"
ROUTED_POOLINGS = tuple(name for name, pooling in POOLINGS.items() if pooling.supports_routers)


def get_pooling(name: str) -> Pooling:
    """Return the pooling with this name, which may be that of a user-defined function."""
    if name == SERVER_POOLING:
        return Pooling("all")
    return Pooling("all", supports_pool_over=True) if plugins.is_plugin(name) else POOLINGS[name]


def identify_pooling(name: str, source: str) -> str:
    """Return the name of a user-defined pooling with the digest of its file, ``NAME@DIGEST``.

    Args:
        name: ``FILE.py:NAME`` or ``MODULE:NAME``, whose file is loaded; or the recorded form
            ``NAME@DIGEST``, whose function must have been loaded before.
        source: name of the record in messages.

    Raises:
        UserError: it cannot be loaded, is not a function, or has changed since it was recorded.
    """
    import_path, _, recorded_digest = name.partition("@")
    function = (
        plugins.get_registered(import_path, source)
        if recorded_digest
        else plugins.load(import_path)
    )
    try:
        file = Path(inspect.getsourcefile(function) or "")
        current_digest = digest_bytes(file.read_bytes(), size=8).hex()
    except (OSError, TypeError) as error:
        raise UserError(
            f"the pooling {import_path} is not a function that is defined in a Python file."
        ) from error
    if recorded_digest not in ("", current_digest):
        raise UserError(
            f"{source} records the pooling {import_path} with the digest {recorded_digest}, but "
            f"{file} has changed since then ({current_digest}). Restore the file, or use another "
            "--run."
        )
    return f"{plugins.record_name(import_path)}@{current_digest}"


_TELEMETRY = "openvino_telemetry"


@cache
def import_openvino() -> Any:
    """Import the module ``openvino`` without its telemetry.

    openvino depends on the package openvino_telemetry. If it finds that package when it is
    imported, it reports the import to Google Analytics. So the package is hidden during the import,
    and openvino uses a stub instead.
    """
    if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # makes its import fail
        try:
            import openvino
        finally:
            del sys.modules[_TELEMETRY]
    import openvino

    return openvino


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between the networks of a ``model_type`` and BERT.

    An architecture that is ``rotary`` differs from BERT in more: it is a bidirectional Gemma 3, and
    ``tensor_shapes`` and OpenVINO's graph have a part of their own for it.

    Attributes:
        prefix: Prefix of the names of tensors in checkpoints for other tasks.
        attention: Name of a layer's attention.
        output: Name of the projection behind the attention.
        norm: Name of the layer norm behind the attention.
        projections: Names of the query, key and value projections.
        typed: Whether there are token type embeddings, which distinguish the halves of a pair.
        padding: Id of the padding token if positions are counted from this id + 1; the padding
            token itself has the position ``padding``. None means that positions start at 0.
        relative: Whether attention has a bias by the distance of two tokens, the same for all
            layers.
        words: Name of the table of token embeddings.
        rotary: Whether positions rotate queries and keys, as in Gemma 3.
    """

    prefix: str
    attention: str = "attention.self"
    output: str = "attention.output.dense"
    norm: str = "attention.output.LayerNorm"
    projections: tuple[str, str, str] = ("query", "key", "value")
    typed: bool = True
    padding: int | None = None
    relative: bool = False
    words: str = "embeddings.word_embeddings.weight"
    rotary: bool = False


ARCHITECTURES = {
    "bert": Architecture("bert."),
    "roberta": Architecture("roberta.", padding=1),
    "xlm-roberta": Architecture("roberta.", padding=1),
    "mpnet": Architecture(
        "mpnet.",
        attention="attention.attn",
        output="attention.attn.o",
        norm="attention.LayerNorm",
        projections=("q", "k", "v"),
        typed=False,
        padding=1,
        relative=True,
    ),
    "gemma3_text": Architecture("model.", words="embed_tokens.weight", typed=False, rotary=True),
}
#: GELU activations by their names in config.json, with OpenVINO's names of their approximations.
GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATIONS = (*GELU, "relu")


def tensor_shapes(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a network, by its name without the prefix.

    Args:
        config: Config of a checkpoint, of one of ``ARCHITECTURES``.
        pooler: Whether to include the dense layer on the first token.

    Raises:
        KeyError: If a size is missing.
        TypeError: If a size is not a number.
        ValueError: If a size is not a number, the heads do not divide the dimensions, or the layers
            are too many to list.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    n_layers = int(config["num_hidden_layers"])
    if n_layers > MAX_LAYERS:
        raise ValueError(f"{n_layers:,} layers")
    if architecture.rotary:
        return _rotary_shapes(config, width, inner, n_layers, heads)
    if heads < 1 or width % heads:
        raise ValueError(f"{width} dimensions and {heads} heads")
    linear = {
        **dict.fromkeys(
            (f"{architecture.attention}.{name}" for name in architecture.projections),
            (width, width),
        ),
        architecture.output: (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        architecture.words: (int(config["vocab_size"]), width),
        "embeddings.position_embeddings.weight": (int(config["max_position_embeddings"]), width),
    }
    if architecture.typed:
        types = int(config.get("type_vocab_size", 2))
        shapes["embeddings.token_type_embeddings.weight"] = (types, width)
    if architecture.relative:
        buckets = int(config.get("relative_attention_num_buckets", 32))
        shapes["encoder.relative_attention_bias.weight"] = (buckets, heads)
    layers = [f"encoder.layer.{i}" for i in range(n_layers)]
    norms = ["embeddings.LayerNorm"]
    for layer in layers:
        norms += [f"{layer}.{architecture.norm}", f"{layer}.output.LayerNorm"]
        for name, shape in linear.items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
    if pooler:
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    return shapes


def _rotary_shapes(
    config: Mapping[str, Any], width: int, inner: int, n_layers: int, heads: int
) -> dict[str, tuple[int, ...]]:
    """Return what ``tensor_shapes`` does for an architecture that is ``rotary``."""
    head, key_heads = int(config["head_dim"]), int(config["num_key_value_heads"])
    for key in ("query_pre_attn_scalar", "rms_norm_eps", "sliding_window"):
        float(config[key])  # raises an error if the graph would lack it
    if len(config["layer_types"]) != n_layers:
        raise ValueError(f"{n_layers} layers and {len(config['layer_types'])} types of them")
    layer = {
        **{f"self_attn.{name}_proj": (key_heads * head, width) for name in "kv"},
        "self_attn.q_proj": (heads * head, width),
        "self_attn.o_proj": (width, heads * head),
        **{f"self_attn.{name}_norm": (head,) for name in "qk"},
        **{f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")},
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "pre_feedforward_layernorm": (width,),
        "post_feedforward_layernorm": (width,),
    }
    return {
        ARCHITECTURES[config["model_type"]].words: (int(config["vocab_size"]), width),
        "norm.weight": (width,),
        **{f"layers.{i}.{k}.weight": shape for i in range(n_layers) for k, shape in layer.items()},
    }


def linear_layers(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight of each linear layer, by the layer's name."""
    shapes = tensor_shapes(config, pooler=pooler)
    return {
        key.removesuffix(".weight"): shape
        for key, shape in shapes.items()
        if len(shape) == 2 and "embed" not in key and key.endswith("weight") and "bias" not in key
    }


def bytes_needed(config: Mapping[str, Any], *, pooler: bool) -> int:
    """Return the memory in bytes that a network needs while it is compiled.

    It holds the network's tensors in float32, and OpenVINO's copies of them.
    """
    shapes = tensor_shapes(config, pooler=pooler)
    return 2 * 4 * sum(math.prod(shape) for shape in shapes.values())
