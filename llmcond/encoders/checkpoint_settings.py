"""The settings of an encoder in the small JSON files of its checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.output import log
from llmcond.encoders.checkpoint import (
    TRANSFORMER_SETTINGS,
    Checkpoint,
    module_class,
    read_settings,
)
from llmcond.encoders.settings import MODELS, TOKENIZER_DECIDES, KnownModel, suggest_model
from llmcond.encoders.spec import ARCHITECTURES, MAX_LAYERS, POOLINGS, Attention

#: Architectures whose position table starts after the padding index.
_OFFSET_POSITIONS = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
#: Tokenizers without a limit state a ``model_max_length`` of about 1e30.
_NO_LIMIT = 1_000_000


class CheckpointSettings:
    """The contents of a checkpoint's small JSON files; those of missing files are empty.

    Attributes:
        config: config.json.
        tokenizer: tokenizer_config.json.
        modules: modules.json of sentence-transformers.
        pooling_config: config.json of the pooling module.
        transformer: sentence_bert_config.json, or the same file under a former name.
        transformer_file: name of that file.
        sentence_transformers: config_sentence_transformers.json.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files of a folder.

        Raises:
            UserError: a file cannot be read, or modules.json names a path outside of the folder.
        """
        self.modules: list[dict[str, Any]] = read_settings(folder / "modules.json", [])
        self.pooling_config: dict[str, Any] = {}
        for module in self.modules:
            path = Path(str(module.get("path", "")))
            if path.is_absolute() or ".." in path.parts:
                raise UserError(
                    f"modules.json of the checkpoint names {str(path)!r}, a path outside of its "
                    "folder."
                )
            if module_class(module) == "Pooling":
                self.pooling_config = read_settings(folder / path / "config.json", {})
        names = (name for name in TRANSFORMER_SETTINGS if (folder / name).exists())
        self.transformer_file = next(names, TRANSFORMER_SETTINGS[0])
        self.config, self.tokenizer, self.transformer, self.sentence_transformers = (
            read_settings(folder / name, {})
            for name in (
                "config.json",
                "tokenizer_config.json",
                self.transformer_file,
                "config_sentence_transformers.json",
            )
        )

    @property
    def encoder_settings(self) -> dict[str, Any]:
        """The encoder settings that the files state; None or missing where they do not."""
        special_tokens = self.special_tokens
        return {
            "pooling": self.pooling or None,
            "attention": self.attention,
            "normalize": self.normalize,
            "max_length": self.max_length,
            "special_tokens": None if special_tokens == TOKENIZER_DECIDES else special_tokens,
            "instruction_format": self.instruction_format or None,
        }

    @property
    def prompts(self) -> dict[str, str]:
        """The prompts of config_sentence_transformers.json by their names, without empty ones."""
        prompts = self.sentence_transformers.get("prompts")
        pairs = prompts.items() if isinstance(prompts, dict) else ()
        return {name: text for name, text in pairs if isinstance(text, str) and text.strip()}

    @property
    def instruction_format(self) -> str:
        """The format of instructions that the prompts have in common; empty if it is not certain.

        ``task: clustering | query: `` has the format ``task: {instruction} | query: {text}``. If
        prompts have several formats, it is the one with more instructions than any other.
        """
        matches = (_INSTRUCTED.fullmatch(text) for text in set(self.prompts.values()))
        formats = Counter(
            f"{match[1]}{{instruction}}{match[2]}{{text}}" for match in matches if match
        )
        (first, count), (_, other) = [*formats.most_common(2), ("", 0), ("", 0)][:2]
        return first if count > other else ""

    def recognize(self) -> list[KnownModel]:
        """Return the known encoders that these files may be a copy or a fine-tuned version of.

        Their architecture, sizes (except for the vocabulary, to which tokens may be added), pooling
        and format of instructions are the same. Settings that the files state remain.
        """
        if not self.instruction_format:
            return []
        stated = {name: value for name, value in self.encoder_settings.items() if value is not None}
        return [
            replace(known, settings={**known.settings, **stated})
            for known in MODELS
            if known.settings.get("instruction_format") == self.instruction_format
            and stated.get("pooling") in known.poolings
            and self._may_attend(known)
            and _includes(self.config, known.architecture)
        ]

    def _may_attend(self, known: KnownModel) -> bool:
        """Return whether the direction of attention may be that of a known encoder.

        A decoder of transformers is causal, unless its files state the contrary.
        """
        has_code = known.computed_as or "auto_map" in self.config
        is_decoder = known.architecture["model_type"] not in ARCHITECTURES
        direction = self.attention or ("causal" if is_decoder and not has_code else None)
        return direction in (None, known.settings["attention"])

    @property
    def pooling(self) -> str:
        """The name of the pooling, from the old or the new layout of its config; may be empty.

        Several poolings are joined by a plus sign.
        """
        modes = self.pooling_config.get("pooling_mode")
        if modes is None:
            on = (key for key, value in self.pooling_config.items() if value is True)
            modes = [key for key in on if key.startswith("pooling_mode_")]
        names = modes if isinstance(modes, list) else [modes] if isinstance(modes, str) else []
        return "+".join(
            _POOLING_MODES.get(str(name).removeprefix("pooling_mode_"), str(name)) for name in names
        )

    @property
    def normalize(self) -> bool | None:
        """Whether vectors have unit norm; None if the files do not say."""
        return any(module_class(m) == "Normalize" for m in self.modules) if self.modules else None

    @property
    def ignored_steps(self) -> list[str]:
        """Steps of sentence-transformers that are not applied, as phrases for the user."""
        config, notes = self.sentence_transformers, []
        name, prompts = config.get("default_prompt_name"), config.get("prompts")
        prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
        if prompt:
            notes.append(
                f"texts without the prefix {prompt!r}, which config_sentence_transformers.json "
                "adds by default (add it to a prompt file)"
            )
        if config.get("truncate_dim"):
            notes.append(
                "vectors with all their dimensions, which config_sentence_transformers.json "
                f"truncates to {config['truncate_dim']}"
            )
        return notes

    @property
    def positions(self) -> int | None:
        """The number of positions that the model has; None if the config does not say."""
        nested = self.config.get("text_config")
        config = nested if isinstance(nested, dict) else self.config
        positions = config.get("max_position_embeddings")
        if positions is None and "relative_attention_num_buckets" not in config:  # T5 has no table
            positions = config.get("n_positions")
        if not isinstance(positions, int) or positions <= 0:
            return None
        kind, pad_id = str(config.get("model_type")), config.get("pad_token_id", 1)
        if kind not in _OFFSET_POSITIONS:
            return positions
        is_fixed = kind == "mpnet" or not isinstance(pad_id, int)
        return positions - (1 if is_fixed else pad_id) - 1

    @property
    def max_length(self) -> int | None:
        """The maximum length of an input in tokens; None if the files do not say."""
        stated = (self.transformer.get("max_seq_length"), self.tokenizer.get("model_max_length"))
        numbers = (n for n in stated if isinstance(n, int | float) and 8 <= n < _NO_LIMIT)
        return next((int(number) for number in numbers), None)

    @property
    def attention(self) -> Attention | None:
        """The direction of attention that the config states; None if it does not."""
        if self.config.get("use_bidirectional_attention") is True:
            return "bidirectional"
        causal = self.config.get("is_causal", self.config.get("is_decoder") or None)
        return None if causal is None else "causal" if causal else "bidirectional"

    @property
    def special_tokens(self) -> str:
        """The special tokens around an input, if the tokenizer's config requests an end token.

        transformers 5 follows tokenizer.json instead and silently drops that token (mteb #5237).
        """
        if self.tokenizer.get("add_eos_token") is not True:
            return TOKENIZER_DECIDES
        first, last = (_token_text(self.tokenizer.get(key)) for key in ("bos_token", "eos_token"))
        # The tokenizer classes of Llama and Gemma add a first token by default.
        kind = str(self.tokenizer.get("tokenizer_class"))
        adds_first = self.tokenizer.get("add_bos_token", "Llama" in kind or "Gemma" in kind)
        if last is None or (adds_first and first is None):
            return TOKENIZER_DECIDES
        return f"{first} {{text}} {last}" if adds_first else f"{{text}} {last}"


def _includes(config: Any, architecture: Mapping[str, Any]) -> bool:
    """Return whether a config has all entries of an architecture, except for the vocabulary."""
    return isinstance(config, dict) and all(
        _includes(config.get(key), value) if isinstance(value, dict) else config.get(key) == value
        for key, value in architecture.items()
        if key != "vocab_size"
    )


#: A prompt with an instruction between two labels: what precedes and follows the instruction. The
#: first label must say that an instruction follows, as ``title: none | text: `` has none.
_INSTRUCTED = re.compile(r"((?i:instruct|instruction|task): ?)\S[^\n|]*?( ?[\n|] ?\w[\w ]*: ?)")
#: Our names of poolings, keyed by their names in the pooling module of sentence-transformers.
_POOLING_MODES = {
    pooling.module: name for name, pooling in POOLINGS.items() if pooling.supports_routers
}


def _token_text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


#: Settings whose values sentence-transformers passes to transformers, and the arguments among
#: them that do not affect vectors of texts in llmcond.
_TRANSFORMERS_ARGUMENTS = (
    "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args",
    "config_kwargs", "processing_kwargs", "tokenizer_name_or_path",
)  # fmt: skip
_HARMLESS_ARGUMENTS = {
    "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only",
    "low_cpu_mem_usage", "padding_side", "token", "torch_dtype", "trust_remote_code",
    "use_safetensors", "image", "video", "audio",
}  # fmt: skip
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


def read_supported_settings(checkpoint: Checkpoint) -> tuple[Checkpoint, CheckpointSettings]:
    """Read a checkpoint's settings, and check that llmcond can compute its vectors as intended.

    Returns:
        The checkpoint, with the known encoder that it is recognized as, and its settings.

    Raises:
        UserError: the checkpoint is an adapter, is not a copy of the requested model, needs code
            from its repository, has unsupported modules or an unsupported order of them, or has
            unsupported settings that would change its vectors.
    """
    settings = CheckpointSettings(checkpoint.folder)
    check_numbers(settings.config, checkpoint.name)
    same = [] if checkpoint.known else settings.recognize()
    if same:
        _log_recognized(checkpoint.name, *((known.repo, known.licence) for known in same))
    if len(same) == 1:
        checkpoint = replace(checkpoint, known=same[0])
    _check_kind(checkpoint, settings)
    if checkpoint.known is None:
        _check_code(checkpoint, settings)
    _check_modules(checkpoint, settings)
    return checkpoint, settings


@cache  # A command resolves the same encoder several times.
def _log_recognized(name: str, *same: tuple[str, str]) -> None:
    repos = " and of ".join(repo for repo, _ in same)
    (repo, licence), *others = same
    advice = (
        "so it may be a copy of any of them. Name it with --like"
        if others
        else f"so it is used with the settings of {repo} (licence: {licence})"
    )
    log.info(f"{name} has the architecture and the prompts of {repos}, {advice}")


#: The largest counts in a config by the last word of their keys. Modules (or labels) are created
#: one by one for them.
_MAX_COUNTS = {"layer": MAX_LAYERS, "layers": MAX_LAYERS, "experts": 10_000, "labels": 100_000}
#: Keys of sizes and counts of a network, which are whole numbers of at least 1.
_COUNTS = re.compile(
    r"(num_|n_)?(hidden_|attention_|key_value_)?(layers?|heads?|kv_heads)|n_embd|d_model|d_ff|dim|"
    r"(hidden|intermediate|embedding|vocab)_size|hidden_dim|head_dim|"
    r"(max_position_embeddings|n_positions|sliding_window|local_attention)"
)
#: Keys of the numbers that keep divisions from dividing by zero.
_EPSILONS = re.compile(r".*_(eps|epsilon)")


def check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Check the numbers of a config.json, before anything is built from them.

    Raises:
        UserError: a number is NaN, a size is not a whole number of at least 1, or modules would
            take hours, or all memory, to create.
    """
    pending = [config]
    for values in pending:  # nested configs are appended during the loop
        pending += [value for value in values.values() if isinstance(value, dict)]
        for key, value in values.items():
            expected = _expected_number(key, value)
            if expected:
                raise UserError(
                    f"config.json of {name} has {key} = {shortened_repr(value)}; expected "
                    f"{expected}. The file may be damaged: copy it again."
                )


def _expected_number(key: str, value: Any) -> str:
    """Return what is expected instead of a value of a config; empty if the value is valid."""
    most = _MAX_COUNTS.get(key.rpartition("_")[2])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if most is not None and is_number and value > most:
        return f"at most {most:,}"
    if is_number and math.isnan(value):
        return "a number"
    # Some architectures have a list of sizes, one for each layer.
    is_absent = value is None or isinstance(value, list | dict)
    if _COUNTS.fullmatch(key) and not is_absent and not (type(value) is int and value >= 1):
        return "a whole number of at least 1"
    if _EPSILONS.fullmatch(key) and not is_absent and not (is_number and 0 <= value < 1):
        return "a number from 0 to 1"
    return ""


def _check_modules(checkpoint: Checkpoint, settings: CheckpointSettings) -> None:
    """Raise a ``UserError`` for steps of sentence-transformers that are not supported."""
    name, kinds = checkpoint.name, [module_class(module) for module in settings.modules]
    consequence = "without it, the vectors would be different."
    for kind in kinds:
        if kind not in _SUPPORTED_MODULES:
            raise UserError(
                f"{name} has a sentence-transformers module {kind!r}, which is not supported; "
                f"{consequence} Supported: {', '.join(_SUPPORTED_MODULES)}."
            )
    if kinds and not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise UserError(
            f"modules.json of {name} has the sentence-transformers modules {', '.join(kinds)}. "
            "Supported are Transformer, Pooling, any number of Dense and optionally Normalize, in "
            "this order; in another order, the vectors would be different."
        )
    if settings.modules and settings.modules[0].get("path") not in (None, "", "."):
        raise UserError(
            f"modules.json of {name} has its Transformer in {settings.modules[0]['path']!r}, but "
            "it must be in the folder of modules.json. Name the folder of the Transformer instead, "
            "with --pooling and --normalize as in the modules."
        )
    for key in _TRANSFORMERS_ARGUMENTS:
        value = settings.transformer.get(key)
        if value and (not isinstance(value, dict) or value.keys() - _HARMLESS_ARGUMENTS):
            raise UserError(
                f"{settings.transformer_file} of {name} has {key} = {value!r}, which is not "
                f"supported; {consequence}"
            )
    tokenizer_lowercases = settings.tokenizer.get("do_lower_case") is True
    if settings.transformer.get("do_lower_case") and not tokenizer_lowercases:
        raise UserError(
            f"{settings.transformer_file} of {name} has do_lower_case, which is not supported; "
            f"{consequence} Save a tokenizer that converts texts to lower case itself, and set "
            "do_lower_case to false."
        )


def read_adapter_settings(checkpoint: Checkpoint) -> CheckpointSettings | None:
    """Return the settings that sentence-transformers wrote next to an adapter; None without any.

    Raises:
        UserError: a module is not supported.
    """
    if checkpoint.adapter is None or not (checkpoint.adapter / "modules.json").is_file():
        return None
    settings = CheckpointSettings(checkpoint.adapter)
    _check_modules(checkpoint, settings)
    if "Dense" in map(module_class, settings.modules):
        raise UserError(
            f"{checkpoint.name} is an adapter with a dense layer after its pooling, which is not "
            "supported; without it, the vectors would be different. Merge the adapter into its "
            "base, and save the whole model."
        )
    return settings


def _check_kind(checkpoint: Checkpoint, settings: CheckpointSettings) -> None:
    """Raise a ``UserError`` for redirected files, another architecture, or an unapplied adapter."""
    for key, values, file in (
        ("transformers_weights", settings.config, "config.json"),
        ("fast_tokenizer_files", settings.tokenizer, "tokenizer_config.json"),
    ):
        if values.get(key):
            # transformers would read a file that is neither listed nor identified.
            raise UserError(
                f"{file} of {checkpoint.name} names a file in {key} ({values[key]!r}), which is "
                "not supported. Rename that file to model.safetensors or tokenizer.json, and "
                f"remove {key}."
            )
    known, kind = checkpoint.known, settings.config.get("model_type")
    if known is not None and kind != known.architecture["model_type"]:
        raise UserError(
            f"{checkpoint.name} has the architecture {kind!r}, but {known.name} has "
            f"{known.architecture['model_type']!r}, so it is not a copy of {known.name}."
        )
    if (checkpoint.folder / "adapter_config.json").is_file():
        raise UserError(
            f"{checkpoint.name} contains both a model and an adapter. Remove config.json to apply "
            "the adapter to the base that it names, or remove adapter_config.json to use the model "
            "without the adapter."
        )


def _check_code(checkpoint: Checkpoint, settings: CheckpointSettings) -> None:
    """Raise a ``UserError`` for an unknown checkpoint that needs code from its repository."""
    if _has_nested_code(settings.config):
        raise UserError(
            f"{checkpoint.name} needs code from its repository for one of its parts (auto_map in a "
            "nested part of its config.json), which llmcond never runs. Use another model."
        )
    auto_map, tokenizer = settings.config.get("auto_map"), settings.tokenizer.get("auto_map")
    code_references = dict(auto_map) if isinstance(auto_map, dict) else {}
    if isinstance(tokenizer, dict):
        tokenizer = tokenizer.get("AutoTokenizer")
    if tokenizer:  # old tokenizers have a list instead of a mapping
        code_references["AutoTokenizer"] = tokenizer
    for key in filter(code_references.get, ("AutoModel", "AutoConfig", "AutoTokenizer")):
        reference = code_references[key]
        if isinstance(reference, list):
            reference = next(filter(None, reference), "")
        raise UserError(
            f"{checkpoint.name} needs code from its repository ({key}: {reference}), which llmcond "
            f"never runs. {suggest_model(checkpoint.name)} If it is a copy of one of these, "
            "name that with --like NAME; otherwise, start a server with it, and name its address "
            "(http://HOST:PORT/v1) and --server-model NAME."
        )


def _has_nested_code(config: Mapping[str, Any]) -> bool:
    """Return whether a nested config names code, which transformers uses for some parts."""
    pending = [value for key, value in config.items() if key != "auto_map"]
    for value in pending:  # the list grows during the loop
        if isinstance(value, dict):
            if value.get("auto_map"):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False
