"""From a model's name and options to everything that decides its vectors.

Nothing is loaded here but small JSON files: a second extraction of the same thing finds its
features without touching the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmcond.encoders.checkpoint import Checkpoint, find_checkpoint
from llmcond.encoders.models import default_prompt
from llmcond.encoders.spec import (
    DTYPES,
    POOLINGS,
    EncoderIdentity,
    Pooling,
    check_instruction_format,
)
from llmcond.errors import UserError, nearest

Quantize = Literal["none", "8bit", "4bit"]
QUANTIZE: tuple[Quantize, ...] = ("none", "8bit", "4bit")


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """What a user may choose about an encoder. None: as the model has it.

    Attributes:
        dtype: ``auto`` is the fastest type that the device computes natively.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        quantize: ``none``, ``8bit`` or ``4bit`` weights.
        revision: branch, tag or commit on the hub.
        pooling: ``cls``, ``mean`` or ``last``.
        normalize: whether vectors have unit L2 norm.
        max_length: tokens of an input, special tokens included.
        instruction_format: names ``{instruction}`` and ``{text}``.
        max_tokens_per_batch: token budget of one forward pass, padding included.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantize: str = "none"
    revision: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    max_length: int | None = None
    instruction_format: str | None = None
    max_tokens_per_batch: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedEncoder:
    """An encoder that is found but not loaded.

    Attributes:
        checkpoint: its files.
        identity: everything that decides its vectors.
        device: where it will run: ``cpu`` or ``cuda:N``.
        max_tokens_per_batch: token budget of one forward pass.
        assumed: what no file and no option said, in sentences for the user.
    """

    checkpoint: Checkpoint
    identity: EncoderIdentity
    device: str
    max_tokens_per_batch: int
    assumed: tuple[str, ...]

    @property
    def default_prompt(self) -> str:
        """Return the bundled prompt that suits the model."""
        return default_prompt(self.identity.instruction_format)


def resolve(name_or_path: str, options: EncoderOptions) -> ResolvedEncoder:
    """Find a model and settle every setting that decides its vectors.

    Raises:
        UserError: an unknown model, or an option that the model or machine cannot have.
        LlmcondError: the hub cannot be reached.
    """
    from llmcond.encoders.device import choose_device, choose_dtype, default_token_budget

    _check_choice("dtype", options.dtype, ("auto", *DTYPES))
    _check_choice("quantize", options.quantize, QUANTIZE)
    if options.pooling is not None:
        _check_choice("pooling", options.pooling, POOLINGS)
    device = choose_device(options.device)
    budget = options.max_tokens_per_batch
    if budget is not None and budget < 1:
        raise UserError(f"max_tokens_per_batch is {budget}; it must be at least 1.")
    checkpoint = find_checkpoint(name_or_path, options.revision)
    files = _SettingsFiles.read(checkpoint.folder)
    _check_modules(checkpoint, files)
    assumed: list[str] = []
    identity = EncoderIdentity(
        weights=checkpoint.weights,
        dtype=choose_dtype(options.dtype, device),
        quantize=options.quantize,
        pooling=_pooling(checkpoint, files, options, assumed),
        normalize=_normalize(checkpoint, files, options, assumed),
        max_length=_max_length(checkpoint, files, options, assumed),
        instruction_format=_instruction_format(checkpoint, options),
    )
    return ResolvedEncoder(
        checkpoint=checkpoint,
        identity=identity,
        device=device,
        max_tokens_per_batch=budget or default_token_budget(device),
        assumed=tuple(assumed),
    )


def _check_choice(option: str, got: str, legal: tuple[str, ...]) -> None:
    if got not in legal:
        raise UserError(f"{option} is {got!r}. {nearest(got, legal)} Legal: {', '.join(legal)}.")


@dataclass(frozen=True, slots=True)
class _SettingsFiles:
    """The small JSON files of a checkpoint; empty where it has none."""

    config: dict[str, Any]
    tokenizer: dict[str, Any]
    modules: list[dict[str, Any]]
    pooling: dict[str, Any]
    transformer: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _SettingsFiles:
        modules = _read(folder / "modules.json", [])
        pooling_folder = next(
            (m.get("path", "") for m in modules if str(m.get("type", "")).endswith("Pooling")), None
        )
        return cls(
            config=_read(folder / "config.json", {}),
            tokenizer=_read(folder / "tokenizer_config.json", {}),
            modules=modules,
            pooling={}
            if pooling_folder is None
            else _read(folder / pooling_folder / "config.json", {}),
            transformer=_read(folder / "sentence_bert_config.json", {}),
        )


def _read(path: Path, default: Any) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise UserError(f"{path} of the checkpoint cannot be read as JSON: {error}.") from error
    entries = value if isinstance(value, list) else [value]
    if type(value) is not type(default) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} of the checkpoint holds something else than settings.")
    return value


def _check_modules(checkpoint: Checkpoint, files: _SettingsFiles) -> None:
    """Refuse what sentence-transformers would do behind the pooling and we would leave out."""
    for module in files.modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in {"Transformer", "Pooling", "Normalize"}:
            raise UserError(
                f"{checkpoint.name} has a sentence-transformers module {kind!r}, which is not "
                "supported; without it its vectors would be others. Supported: Transformer, "
                "Pooling, Normalize."
            )


def _pooling(
    checkpoint: Checkpoint, files: _SettingsFiles, options: EncoderOptions, assumed: list[str]
) -> Pooling:
    if options.pooling is not None:
        return next(pooling for pooling in POOLINGS if pooling == options.pooling)
    if checkpoint.known and checkpoint.known.pooling:
        return checkpoint.known.pooling
    named = _pooling_of_file(files.pooling)
    if named in POOLINGS:
        return next(pooling for pooling in POOLINGS if pooling == named)
    if named:
        raise UserError(
            f"{checkpoint.name} pools by {named!r}, which is not supported. Choose one with "
            f"--pooling: {', '.join(POOLINGS)}."
        )
    assumed.append("pooling mean: no pooling settings in the checkpoint (--pooling to change it)")
    return "mean"


_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def _pooling_of_file(config: dict[str, Any]) -> str:
    """Read the name of the pooling from either layout that sentence-transformers has written."""
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return "last" if mode == "lasttoken" else mode
    modes = [
        _OLD_POOLING_KEYS.get(key, key)
        for key, on in config.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    return "+".join(modes)


def _normalize(
    checkpoint: Checkpoint, files: _SettingsFiles, options: EncoderOptions, assumed: list[str]
) -> bool:
    if options.normalize is not None:
        return options.normalize
    if checkpoint.known and checkpoint.known.normalize is not None:
        return checkpoint.known.normalize
    if files.modules:
        return any(str(module.get("type", "")).endswith("Normalize") for module in files.modules)
    assumed.append("unit L2 norm: the checkpoint does not say (--no-normalize to change it)")
    return True


#: Architectures whose position table starts behind the padding index.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"}
#: Tokenizers without a limit of their own state a number of about 1e30.
_NO_LIMIT = 1_000_000
_FALLBACK_LENGTH = 512


def _max_length(
    checkpoint: Checkpoint, files: _SettingsFiles, options: EncoderOptions, assumed: list[str]
) -> int:
    positions = files.config.get("max_position_embeddings")
    if isinstance(positions, int) and files.config.get("model_type") in _OFFSET_POSITIONS:
        positions -= 2
    limit = positions if isinstance(positions, int) and positions > 0 else None
    if options.max_length is not None:
        if options.max_length < 8 or (limit is not None and options.max_length > limit):
            most = (
                f" and at most {limit}, the positions that {checkpoint.name} has" if limit else ""
            )
            raise UserError(f"max_length is {options.max_length}; it must be at least 8{most}.")
        return options.max_length
    stated = [
        checkpoint.known.max_length if checkpoint.known else None,
        files.transformer.get("max_seq_length"),
        files.tokenizer.get("model_max_length"),
    ]
    named = next((int(n) for n in stated if isinstance(n, int | float) and 0 < n < _NO_LIMIT), None)
    if named is None:
        named = min(limit or _FALLBACK_LENGTH, _FALLBACK_LENGTH)
        assumed.append(
            f"at most {named} tokens an input: the checkpoint does not say (--max-length)"
        )
    return min(named, limit or named)


def _instruction_format(checkpoint: Checkpoint, options: EncoderOptions) -> str:
    if options.instruction_format is not None:
        return check_instruction_format(options.instruction_format)
    return checkpoint.known.instruction_format if checkpoint.known else ""
