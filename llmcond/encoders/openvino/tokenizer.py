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
_NAMES = {"Bert": _BERT, "MPNet": _MPNET, "XLMRoberta": _XLM_R, "Roberta": _ROBERTA}
_CLASSES = {f"{n}Tokenizer{end}": kind for n, kind in _NAMES.items() for end in ("", "Fast")}
_CLASSES |= dict.fromkeys(("PreTrainedTokenizerFast", "TokenizersBackend"), _AS_IT_IS)
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
    if kind in (None, _AS_IT_IS):
        return kind is not None
    model = file.get("model")
    model_type = model.get("type") if isinstance(model, dict) else None
    pipeline = [file.get("normalizer"), file.get("pre_tokenizer"), model_type]
    return bool(_plain(pipeline) == _pipeline(kind, config, file))


def _pipeline(kind: str, config: Mapping[str, Any], file: Mapping[str, Any]) -> list[Any]:
    """Return the normalizer, the pre-tokenizer and the model's kind that transformers makes."""
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
    prefix = config.get("add_prefix_space", False)  # as RoBERTa's
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    return [None, level, "BPE"]


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
        self, texts: Sequence[str], pair: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the token ids of a list of texts, or of one text or one pair of texts.

        The ``options`` are those of transformers: ``add_special_tokens``, by default True, and
        ``return_offsets_mapping``; others change nothing here.
        """
        special = options.get("add_special_tokens", True)
        if isinstance(texts, str):
            one = self._tokenizer.encode(texts, pair, add_special_tokens=special)
            return {"input_ids": one.ids, "token_type_ids": one.type_ids}
        if not options.get("return_offsets_mapping"):  # then it is faster
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            return {"input_ids": [one.ids for one in encoded]}
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        offsets = [one.offsets for one in encoded]
        return {"input_ids": [one.ids for one in encoded], "offset_mapping": offsets}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return tokens as the vocabulary has them."""
        return [self._tokenizer.id_to_token(one) for one in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token; that of the unknown one where the vocabulary lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found
