"""A tokenizer read from ``tokenizer.json`` alone, as transformers reads it, without transformers.

transformers 5 does not take all of tokenizer.json for every class: it builds the normalizer and the
pre-tokenizer of some classes anew, from the settings of tokenizer_config.json. Where both agree,
which :func:`can_read` finds out, the file can be read as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcond.encoders.checkpoints.checkpoint import read_settings
from llmcond.errors import UserError, first_line

_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
#: Families of classes in transformers; see :func:`_pipeline`.
_BERT, _MPNET, _XLM_R, _ROBERTA, _AS_IT_IS = "bert", "mpnet", "xlm-roberta", "roberta", "as it is"
_CLASSES = {
    "BertTokenizer": _BERT,
    "BertTokenizerFast": _BERT,
    "MPNetTokenizer": _MPNET,
    "MPNetTokenizerFast": _MPNET,
    "XLMRobertaTokenizer": _XLM_R,
    "XLMRobertaTokenizerFast": _XLM_R,
    "RobertaTokenizer": _ROBERTA,
    "RobertaTokenizerFast": _ROBERTA,
    "PreTrainedTokenizerFast": _AS_IT_IS,
    "TokenizersBackend": _AS_IT_IS,
}
_SPECIAL = ("unk_token", "sep_token", "pad_token", "eos_token")
#: The special tokens that the classes of a family have where no file names them.
_ENDS = {"sep_token": "</s>", "pad_token": "<pad>", "eos_token": "</s>"}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    _BERT: {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
    _MPNET: {"unk_token": "[UNK]", **_ENDS},
    _XLM_R: {"unk_token": "<unk>", **_ENDS},
    _ROBERTA: {"unk_token": "<unk>", **_ENDS},
    _AS_IT_IS: {},
}


def can_read(folder: Path) -> bool:
    """Return whether a checkpoint's tokenizer.json can be read as it is.

    Raises:
        UserError: one of its files cannot be read.
    """
    if not (folder / _FILE).is_file():
        return False
    file, config = read_settings(folder / _FILE, {}), read_settings(folder / _CONFIG, {})
    kind = _CLASSES.get(str(config.get("tokenizer_class")))
    expected = kind and _pipeline(kind, config, file)
    return kind == _AS_IT_IS or (kind is not None and _plain(_pipeline_of(file)) == expected)


def _pipeline(kind: str, config: Mapping[str, Any], file: Mapping[str, Any]) -> list[Any] | None:
    """Return the normalizer, the pre-tokenizer and the model's kind that transformers makes.

    None: those of the file.
    """
    if kind in (_BERT, _MPNET):
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        }
        return [normalizer, {"type": "BertPreTokenizer"}, "WordPiece"]
    if kind == _XLM_R:
        prefix = config.get("add_prefix_space", True) is True
        metaspace = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always" if prefix else "never",
        }
        splitters = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
        # The map of characters is read from the file, if it has one.
        return [file.get("normalizer") and {"type": "Precompiled"}, splitters, "Unigram"]
    if kind == _ROBERTA:
        prefix = config.get("add_prefix_space", False)
        level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
        return [None, level, "BPE"]
    return None


def _pipeline_of(file: Mapping[str, Any]) -> list[Any]:
    model = file.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return [file.get("normalizer"), file.get("pre_tokenizer"), kind]


def _plain(value: Any) -> Any:
    """Return a part of tokenizer.json as :func:`_pipeline` writes it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(one) for key, one in value.items()}
    if value.get("type") == "Metaspace":
        if plain.pop("add_prefix_space", False):  # as files had it before prepend_scheme
            plain.setdefault("prepend_scheme", "always")
        if plain.get("split") is True:
            del plain["split"]
        plain.pop("str_rep", None)
    if value.get("type") == "ByteLevel" and plain.get("use_regex") is True:
        del plain["use_regex"]
    plain.pop("precompiled_charsmap", None)
    return plain


class JsonTokenizer:
    """What :class:`~llmcond.encoders.engine.tokenizing.InputTokenizer` asks of a tokenizer.

    Attributes:
        unk_token, unk_token_id, sep_token_id, pad_token_id, eos_token_id: special tokens; None
            where there are none.
        truncation_side: ``left`` or ``right``.
    """

    is_fast = True

    def __init__(self, folder: Path, name: str) -> None:
        """Read a tokenizer that :func:`can_read` allows.

        Raises:
            UserError: tokenizer.json cannot be read.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / _FILE))
        except Exception as error:  # tokenizers raises no other
            raise UserError(
                f"the tokenizer of {name} cannot be loaded: {first_line(error)}"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = read_settings(folder / _CONFIG, {})
        named = {**read_settings(folder / "special_tokens_map.json", {}), **config}
        self.truncation_side = str(config.get("truncation_side", "right"))
        self.unk_token: str | None = None
        self.unk_token_id = self.sep_token_id = self.pad_token_id = self.eos_token_id = None
        defaults = _DEFAULTS[_CLASSES[str(config.get("tokenizer_class"))]]
        for key in _SPECIAL:
            token = named.get(key, defaults.get(key))
            token = token.get("content") if isinstance(token, dict) else token
            if key == "unk_token":
                self.unk_token = token
            setattr(self, f"{key}_id", token and self._tokenizer.token_to_id(token))

    def __call__(
        self,
        texts: Sequence[str],
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the token ids of a list of texts, or of one text or one pair of texts."""
        if isinstance(texts, str):
            one = self._tokenizer.encode(texts, pair, add_special_tokens=add_special_tokens)
            return {"input_ids": one.ids, "token_type_ids": one.type_ids}
        # Without offsets it is faster.
        encode = self._tokenizer.encode_batch
        if not return_offsets_mapping:
            encode = self._tokenizer.encode_batch_fast
        encoded = encode(list(texts), add_special_tokens=add_special_tokens)
        found: dict[str, Any] = {"input_ids": [one.ids for one in encoded]}
        if return_offsets_mapping:
            found["offset_mapping"] = [one.offsets for one in encoded]
        return found

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return tokens as the vocabulary has them."""
        return [self._tokenizer.id_to_token(one) for one in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token; that of the unknown one where the vocabulary lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found
