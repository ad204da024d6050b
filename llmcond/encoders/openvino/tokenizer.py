"""A tokenizer read from ``tokenizer.json`` without transformers, with the same results.

transformers 5 does not use all of tokenizer.json for every tokenizer class. For some classes it
rebuilds the normalizer and the pre-tokenizer from the settings of tokenizer_config.json. If both
files agree, which ``can_read`` checks, tokenizer.json can be used directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcond.encoders.checkpoints.checkpoint import read_settings
from llmcond.errors import UserError, first_line

_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
#: Families of tokenizer classes in transformers; see ``_expected_pipeline``. transformers uses
#: tokenizer.json unchanged for the family ``unchanged``.
_BERT, _MPNET, _XLM_R, _ROBERTA, _UNCHANGED = "bert", "mpnet", "xlm-roberta", "roberta", "unchanged"
_NAMES = {"Bert": _BERT, "MPNet": _MPNET, "XLMRoberta": _XLM_R, "Roberta": _ROBERTA}
#: The family of each class.
_FAMILIES = {f"{n}Tokenizer{end}": family for n, family in _NAMES.items() for end in ("", "Fast")}
_FAMILIES |= dict.fromkeys(("PreTrainedTokenizerFast", "TokenizersBackend"), _UNCHANGED)
_SPECIAL = ("unk_token", "sep_token", "pad_token", "eos_token")
#: The default special tokens of a family, for those that no file names.
_ROBERTA_DEFAULTS = {"sep_token": "</s>", "pad_token": "<pad>", "eos_token": "</s>"}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    _BERT: {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
    _MPNET: {"unk_token": "[UNK]", **_ROBERTA_DEFAULTS},
    _XLM_R: {"unk_token": "<unk>", **_ROBERTA_DEFAULTS},
    _ROBERTA: {"unk_token": "<unk>", **_ROBERTA_DEFAULTS},
    _UNCHANGED: {},
}


def can_read(folder: Path) -> bool:
    """Return whether ``JsonTokenizer`` can read a checkpoint's tokenizer.

    Raises:
        UserError: If one of its files cannot be read.
    """
    if not (folder / _FILE).is_file():
        return False
    file, config = read_settings(folder / _FILE, {}), read_settings(folder / _CONFIG, {})
    family = _FAMILIES.get(str(config.get("tokenizer_class")))
    if family in (None, _UNCHANGED):
        return family is not None
    model = file.get("model")
    model_type = model.get("type") if isinstance(model, dict) else None
    pipeline = [file.get("normalizer"), file.get("pre_tokenizer"), model_type]
    return bool(_simplify(pipeline) == _expected_pipeline(family, config, file))


def _expected_pipeline(
    family: str, config: Mapping[str, Any], file: Mapping[str, Any]
) -> list[Any]:
    """Return the normalizer, the pre-tokenizer and the type of model that transformers creates."""
    if family in (_BERT, _MPNET):
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        }
        return [normalizer, {"type": "BertPreTokenizer"}, "WordPiece"]
    if family == _XLM_R:
        prefix = config.get("add_prefix_space", True) is True
        metaspace = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always" if prefix else "never",
        }
        splitters = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
        # transformers reads the character map from the file, if it has one.
        return [file.get("normalizer") and {"type": "Precompiled"}, splitters, "Unigram"]
    prefix = config.get("add_prefix_space", False)  # the default of RoBERTa
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    return [None, level, "BPE"]


def _simplify(value: Any) -> Any:
    """Bring a part of tokenizer.json to the form of ``_expected_pipeline``, without defaults."""
    if isinstance(value, list):
        return [_simplify(item) for item in value]
    if not isinstance(value, dict):
        return value
    simplified = {key: _simplify(item) for key, item in value.items()}
    if value.get("type") == "Metaspace":
        if simplified.pop("add_prefix_space", False):  # older files, before prepend_scheme
            simplified.setdefault("prepend_scheme", "always")
        if simplified.get("split") is True:
            del simplified["split"]
        simplified.pop("str_rep", None)
    if value.get("type") == "ByteLevel" and simplified.get("use_regex") is True:
        del simplified["use_regex"]
    simplified.pop("precompiled_charsmap", None)
    return simplified


class JsonTokenizer:
    """A tokenizer with the part of transformers' interface that ``InputTokenizer`` uses.

    Attributes:
        unk_token: The unknown token; None if there is none.
        unk_token_id: Its id; None if there is none, like the ids below.
        sep_token_id: Id of the separator.
        pad_token_id: Id of the padding token.
        eos_token_id: Id of the end token.
        truncation_side: ``left`` or ``right``.
    """

    is_fast = True

    def __init__(self, folder: Path, name: str) -> None:
        """Read a tokenizer for which ``can_read`` returns True.

        Args:
            folder: The checkpoint's folder.
            name: The checkpoint's name in error messages.

        Raises:
            UserError: If tokenizer.json cannot be read.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / _FILE))
        except Exception as error:  # the only type that tokenizers raises
            raise UserError(
                f"the tokenizer of {name} cannot be loaded: {first_line(error)}"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = read_settings(folder / _CONFIG, {})
        special_tokens = {**read_settings(folder / "special_tokens_map.json", {}), **config}
        self.truncation_side = str(config.get("truncation_side", "right"))
        self.unk_token: str | None = None
        self.unk_token_id = self.sep_token_id = self.pad_token_id = self.eos_token_id = None
        defaults = _DEFAULTS[_FAMILIES[str(config.get("tokenizer_class"))]]
        for key in _SPECIAL:
            token = special_tokens.get(key, defaults.get(key))
            token = token.get("content") if isinstance(token, dict) else token
            if key == "unk_token":
                self.unk_token = token
            setattr(self, f"{key}_id", token and self._tokenizer.token_to_id(token))

    def __call__(
        self, texts: Sequence[str], pair: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the token ids of a list of texts, or of one text or one pair of texts.

        Supported ``options`` of transformers are ``add_special_tokens``, by default True, and
        ``return_offsets_mapping``, by default False. Others are ignored.
        """
        special = options.get("add_special_tokens", True)
        if isinstance(texts, str):
            encoding = self._tokenizer.encode(texts, pair, add_special_tokens=special)
            return {"input_ids": encoding.ids, "token_type_ids": encoding.type_ids}
        if not options.get("return_offsets_mapping"):  # encode_batch_fast computes no offsets
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            return {"input_ids": [encoding.ids for encoding in encodings]}
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        offsets = [encoding.offsets for encoding in encodings]
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": offsets,
        }

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the tokens of the vocabulary with these ids."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token, or the id of the unknown token if the vocabulary lacks it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if token_id is None else token_id
