"""What a checkpoint's own small JSON files say of how it makes vectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.encoders.checkpoints.checkpoint import Checkpoint, kind_of, read_settings
from llmcond.encoders.known import known_names
from llmcond.encoders.poolings import POOLINGS
from llmcond.encoders.settings import TOKENIZER_DECIDES
from llmcond.encoders.spec import Attention
from llmcond.errors import UserError, did_you_mean

#: Architectures whose position table starts behind the padding index.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"}
#: Tokenizers without a limit of their own state a number of about 1e30.
_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """The small JSON files of a checkpoint; empty where it has none.

    Attributes:
        config: config.json.
        tokenizer: tokenizer_config.json.
        modules, transformer, sentence_transformers: modules.json, sentence_bert_config.json and
            config_sentence_transformers.json of sentence-transformers.
        pooling_config: the config of its pooling module.
    """

    config: dict[str, Any]
    tokenizer: dict[str, Any]
    modules: list[dict[str, Any]]
    pooling_config: dict[str, Any]
    transformer: dict[str, Any]
    sentence_transformers: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Read them.

        Raises:
            UserError: one cannot be read, or modules.json leads outside of the folder.
        """
        modules = read_settings(folder / "modules.json", [])
        pooling_config = {}
        for module in modules:
            path = Path(str(module.get("path", "")))
            if path.is_absolute() or ".." in path.parts:
                raise UserError(
                    f"modules.json of the checkpoint leads outside of it: {str(path)!r}."
                )
            if kind_of(module) == "Pooling":
                pooling_config = read_settings(folder / path / "config.json", {})
        return cls(
            config=read_settings(folder / "config.json", {}),
            tokenizer=read_settings(folder / "tokenizer_config.json", {}),
            modules=modules,
            pooling_config=pooling_config,
            transformer=read_settings(folder / "sentence_bert_config.json", {}),
            sentence_transformers=read_settings(folder / "config_sentence_transformers.json", {}),
        )

    @property
    def stated(self) -> dict[str, Any]:
        """Return the settings of an encoder that the files state; None or absent: they do not."""
        special_tokens = self.special_tokens
        return {
            "pooling": self.pooling or None,
            "attention": self.attention,
            "normalize": self.normalize,
            "max_length": self.max_length,
            "special_tokens": None if special_tokens == TOKENIZER_DECIDES else special_tokens,
        }

    @property
    def pooling(self) -> str:
        """Return the name of the pooling, from either layout that has been in use; or none."""
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
        """Return whether vectors have unit norm; None where the files do not say."""
        return any(kind_of(m) == "Normalize" for m in self.modules) if self.modules else None

    @property
    def left_out(self) -> list[str]:
        """Return what sentence-transformers would do beside the network, in sentences."""
        own, told = self.sentence_transformers, []
        name, prompts = own.get("default_prompt_name"), own.get("prompts")
        prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
        if prompt:
            told.append(
                f"texts without {prompt!r} in front, which config_sentence_transformers.json puts "
                "there by default (put it into a prompt file)"
            )
        if own.get("truncate_dim"):
            told.append(
                "vectors with all their dimensions, which config_sentence_transformers.json cuts "
                f"to {own['truncate_dim']}"
            )
        return told

    @property
    def positions(self) -> int | None:
        """Return how many positions the model has; None where that is not stated."""
        nested = self.config.get("text_config")
        config = nested if isinstance(nested, dict) else self.config
        positions = config.get("max_position_embeddings")
        if not isinstance(positions, int) or positions <= 0:
            return None
        offset = str(config.get("model_type")) in _OFFSET_POSITIONS
        return positions - 2 if offset else positions

    @property
    def max_length(self) -> int | None:
        """Return the tokens an input may have; None where the files do not say."""
        stated = (self.transformer.get("max_seq_length"), self.tokenizer.get("model_max_length"))
        numbers = (n for n in stated if isinstance(n, int | float) and 8 <= n < _NO_LIMIT)
        return next((int(number) for number in numbers), None)

    @property
    def attention(self) -> Attention | None:
        """Return the direction that the config states itself; None where it does not."""
        if self.config.get("use_bidirectional_attention") is True:
            return "bidirectional"
        causal = self.config.get("is_causal", self.config.get("is_decoder") or None)
        return None if causal is None else "causal" if causal else "bidirectional"

    @property
    def special_tokens(self) -> str:
        """Return the tokens around an input, where the tokenizer's config asks for an end.

        transformers 5 follows tokenizer.json instead, and silently loses that end (mteb #5237).
        """
        if self.tokenizer.get("add_eos_token") is not True:
            return TOKENIZER_DECIDES
        first, last = (_content(self.tokenizer.get(key)) for key in ("bos_token", "eos_token"))
        # The classes of Llama and Gemma add a first token unless they are told not to.
        kind = str(self.tokenizer.get("tokenizer_class"))
        adds_first = self.tokenizer.get("add_bos_token", "Llama" in kind or "Gemma" in kind)
        if last is None or (adds_first and first is None):
            return TOKENIZER_DECIDES
        return f"{first} {{text}} {last}" if adds_first else f"{{text}} {last}"


#: The poolings that are modules of sentence-transformers, by its names for them.
_POOLING_MODES = {pooling.module: name for name, pooling in POOLINGS.items() if pooling.routed}


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


#: What sentence-transformers gives to transformers, and what of it decides no vector here.
_ARGUMENTS = (
    "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args",
    "config_kwargs", "processing_kwargs", "tokenizer_name_or_path",
)  # fmt: skip
_WITHOUT_EFFECT = {
    "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only",
    "low_cpu_mem_usage", "padding_side", "token", "torch_dtype", "trust_remote_code",
    "use_safetensors",
}  # fmt: skip
_LEGAL_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


def read_checked(checkpoint: Checkpoint) -> Settings:
    """Read the settings of a checkpoint, and refuse one that we would not load as it was made.

    Raises:
        UserError: it is no encoder by itself, or not the one that it is taken for; it needs code of
            its own; it has a module of another kind, or in another order; or settings that change
            its vectors.
    """
    settings = Settings.read(checkpoint.folder)
    _check_kind(checkpoint, settings)
    if checkpoint.known is None:
        _check_code(checkpoint, settings)
    _check_modules(checkpoint, settings)
    return settings


def _check_modules(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse what sentence-transformers would do and we would leave out."""
    name, kinds = checkpoint.name, [kind_of(module) for module in settings.modules]
    others = "without it its vectors would be others."
    for kind in kinds:
        if kind not in _LEGAL_MODULES:
            raise UserError(
                f"{name} has a sentence-transformers module {kind!r}, which is not supported; "
                f"{others} Supported: {', '.join(_LEGAL_MODULES)}."
            )
    if kinds and not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise UserError(
            f"{name} has the sentence-transformers modules {', '.join(kinds)} in modules.json. "
            "Supported are Transformer, Pooling, as many Dense as there are, and Normalize or not, "
            "in this order; in another one its vectors would be others."
        )
    if settings.modules and settings.modules[0].get("path") not in (None, "", "."):
        raise UserError(
            f"modules.json of {name} has its Transformer in {settings.modules[0]['path']!r}, and "
            "only one that lies beside modules.json is read. Name that folder itself, with "
            "--pooling and --normalize as the modules say."
        )
    for key in _ARGUMENTS:
        given = settings.transformer.get(key)
        if given and (not isinstance(given, dict) or given.keys() - _WITHOUT_EFFECT):
            raise UserError(
                f"sentence_bert_config.json of {name} has {key} = {given!r}, which is not "
                f"supported; {others}"
            )
    lowers = settings.tokenizer.get("do_lower_case") is True
    if settings.transformer.get("do_lower_case") and not lowers:
        raise UserError(
            f"sentence_bert_config.json of {name} has do_lower_case, which is not supported; "
            f"{others} Save a tokenizer that makes letters small itself, and set do_lower_case "
            "to false."
        )


def stated_beside(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings that sentence-transformers wrote beside an adapter; {} without any.

    Raises:
        UserError: there is a module that would be left out.
    """
    if checkpoint.adapter is None or not (checkpoint.adapter / "modules.json").is_file():
        return {}
    settings = Settings.read(checkpoint.adapter)
    _check_modules(checkpoint, settings)
    if "Dense" in map(kind_of, settings.modules):
        raise UserError(
            f"{checkpoint.name} is an adapter with a dense layer behind its pooling, which is not "
            "supported; without it its vectors would be others. Merge the adapter into its base, "
            "and save all of it."
        )
    length = settings.transformer.get("max_seq_length")
    stated = {"pooling": settings.pooling or None, "normalize": settings.normalize}
    return stated | ({"max_length": length} if isinstance(length, int) else {})


def _check_kind(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse a checkpoint that is no encoder by itself, or not the one that it is taken for."""
    for key, values, file in (
        ("transformers_weights", settings.config, "config.json"),
        ("fast_tokenizer_files", settings.tokenizer, "tokenizer_config.json"),
    ):
        if values.get(key):
            # Which file is read would be another one than the one that is known by its name.
            raise UserError(
                f"{file} of {checkpoint.name} chooses a file by {key} ({values[key]!r}), which is "
                "not supported. Give that file its usual name, model.safetensors or "
                f"tokenizer.json, and take {key} away."
            )
    known, kind = checkpoint.known, settings.config.get("model_type")
    if known is not None and kind != known.architecture["model_type"]:
        raise UserError(
            f"{checkpoint.name} is of the architecture {kind!r}, and {known.name} of "
            f"{known.architecture['model_type']!r}: it is no copy of it."
        )
    if (checkpoint.folder / "adapter_config.json").is_file():
        raise UserError(
            f"{checkpoint.name} holds an adapter, which is not applied to the weights beside "
            "it. Take config.json away, and it is applied to the base that it names; or take away "
            "adapter_config.json."
        )


def _check_code(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse an unknown checkpoint that needs code from its own repository."""
    if _names_code_below(settings.config):
        raise UserError(
            f"{checkpoint.name} asks for code of its own for a part of it (auto_map within a part "
            "of its config.json), which llmcond never runs."
        )
    own, tokenizer = settings.config.get("auto_map"), settings.tokenizer.get("auto_map")
    wanted = dict(own) if isinstance(own, dict) else {}
    if isinstance(tokenizer, dict):
        tokenizer = tokenizer.get("AutoTokenizer")
    if tokenizer:  # old tokenizers wrote a list without the key
        wanted["AutoTokenizer"] = tokenizer
    for key in filter(wanted.get, ("AutoModel", "AutoConfig", "AutoTokenizer")):
        code = wanted[key]
        name = checkpoint.name.rstrip("/").rpartition("/")[2]
        bare = [known.rpartition("/")[2] for known in known_names()]
        if isinstance(code, list):
            code = next(filter(None, code), "")
        raise UserError(
            f"{checkpoint.name} asks for code from its own repository ({key}: {code}), which "
            "llmcond never runs, and it is none of the models that are known without: "
            f"{', '.join(known_names())}. {did_you_mean(name, bare)} If it is a copy of one, say "
            "so with --like NAME."
        )


def _names_code_below(config: Mapping[str, Any]) -> bool:
    """Return whether a nested config names code: transformers builds some parts by their own."""
    waiting = [value for key, value in config.items() if key != "auto_map"]
    for value in waiting:  # which grows
        if isinstance(value, dict):
            if value.get("auto_map"):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False
