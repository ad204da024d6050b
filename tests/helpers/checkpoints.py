"""Tiny checkpoints with random weights in the layouts of the known models.

Each has what a reference implementation needs: the stock network that its weights come from, and
its tokenizer as the ``tokenizers`` library reads it. Only ``load`` uses llmcond.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor

from llmcond.encoders.encoder import Encoder, load_encoder

CORPUS = [
    "A man plays the guitar in the park while two dogs run over wet grass near the river.",
    "The number of people, the color of the dress, what sport is played, the time of the day.",
    "Three children read a book in the kitchen while it rains outside and the sun is gone.",
    "Instruct: Retrieve semantically similar texts to the Condition, given the Sentence: ",
    "Query: task: Given a web search query, retrieve relevant passages | query: classification",
]
HIDDEN, LAYERS, HEADS, POSITIONS = 32, 2, 4, 128
WINDOW = 24


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint with the parts of its reference implementation.

    Attributes:
        folder: folder of the checkpoint.
        network: stock network in float32 with eager attention, whose direction only depends on
            the mask.
        tokenizer: tokenizer as the ``tokenizers`` library reads it.
        weights: weights by name.
        first_ids, last_ids: token ids in front of and behind every input.
    """

    folder: Path
    network: Any
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    first_ids: list[int]
    last_ids: list[int]


def build_checkpoint(kind: str, folder: Path, **options: Any) -> TinyCheckpoint:
    """Create a checkpoint of a kind in ``BUILDERS``."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    return BUILDERS[kind](folder, **options)


def write_to_hub_cache(folder: Path, cache: Path, repo: str) -> str:
    """Write a checkpoint to a cache of the hub, as a download would; return its commit."""
    commit = hashlib.sha1(repo.encode()).hexdigest()
    repo_folder = cache / f"models--{repo.replace('/', '--')}"
    for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
        blob = repo_folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        link = repo_folder / "snapshots" / commit / path.relative_to(folder)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repo_folder / "refs").mkdir()
    (repo_folder / "refs" / "main").write_text(commit)
    return commit


def shard(folder: Path) -> None:
    """Split model.safetensors into two shards with an index."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = names[::2], names[1::2]  # both contain weights of each layer
    shard_of_weight = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in half}, folder / file, {"format": "pt"})
        shard_of_weight.update(dict.fromkeys(half, file))
    index = {"metadata": {}, "weight_map": shard_of_weight}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON object in a file, which is created if it does not exist."""
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**values, **changes})


def write_modules(folder: Path, *kinds: str, pooling: Mapping[str, Any] | str = "mean") -> None:
    """Write modules.json of sentence-transformers, and the config or mode of its pooling.

    ``kinds`` are the classes of the modules after Transformer and Pooling.
    """
    names = ["Transformer", "Pooling", *kinds]
    modules = [
        {"path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    write_json(folder / "modules.json", modules)
    config = {"pooling_mode": pooling} if isinstance(pooling, str) else pooling
    write_json(folder / "1_Pooling" / "config.json", config)


def write_dense(
    folder: Path, weights: Mapping[str, Tensor], activation: str = "linear.Identity"
) -> None:
    """Write a dense layer of sentence-transformers."""
    out_features, in_features = weights["linear.weight"].shape
    values = {
        "in_features": in_features,
        "out_features": out_features,
        "bias": "linear.bias" in weights,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    write_json(folder / "config.json", values)
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})


# -- tokenizers --------------------------------------------------------------------------------

_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _train_bpe(
    specials: list[str], normalizer: Any, splitter: Any, alphabet: list[str]
) -> models.BPE:
    """Train a BPE on the corpus, with ``specials`` first and bytes for unknown characters."""
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = normalizer, splitter
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 150, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    vocabulary = {token: i for i, token in enumerate([*specials, *tokens])}
    return models.BPE(
        vocabulary,
        [tuple(merge) for merge in model["merges"]],
        unk_token="<unk>" if "<unk>" in specials else None,
        fuse_unk="<unk>" in specials,
        byte_fallback="<0x00>" in specials,
    )


def _add_specials(tokenizer: Tokenizer, specials: list[str], single: str, pair: str) -> None:
    """Add special tokens, and templates of them around one text and around a pair."""
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(token, i) for i, token in enumerate(specials) if token in single],
    )


def _mistral_tokenizer() -> Tokenizer:
    """Return a tokenizer like Mistral 7B v0.1's: ▁ begins a word, and only <s> is added."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = pre_tokenizers.Split("▁", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(_train_bpe([*specials, *_BYTES], normalizer, words, []))
    tokenizer.normalizer = normalizer
    _add_specials(tokenizer, specials, "<s> $A", "<s> $A <s> $B")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _qwen_tokenizer() -> Tokenizer:
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    normalizer, alphabet = normalizers.NFC(), sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(_train_bpe([], normalizer, words, alphabet))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def _roberta_tokenizer() -> Tokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(_train_bpe(specials, None, words, alphabet))
    tokenizer.pre_tokenizer = words
    tokenizer.add_special_tokens([*specials, "<mask>"])
    return tokenizer


_BERT_MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_MPNET_MARKS = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]


def _bert_tokenizer(specials: list[str] = _BERT_MARKS) -> Tokenizer:
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = dict.fromkeys(" ".join(CORPUS).lower().replace(".", "").replace(",", "").split())
    pieces = [*letters, *(f"##{letter}" for letter in letters), "##ing", "##er", "##s"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*specials, *pieces, *words]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _xlm_r_tokenizer() -> Tokenizer:
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")]
    )
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = words
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    tokenizer = Tokenizer(
        models.Unigram([*((piece, score) for piece, score in pieces), ("<mask>", 0.0)], 3, False)
    )
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    tokens = [*specials, "<mask>"]
    _add_specials(tokenizer, tokens, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer


def _gemma_tokenizer() -> Tokenizer:
    normalizer = normalizers.Replace(" ", "▁")
    words = pre_tokenizers.Split("▁", "merged_with_next")
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(_train_bpe([*specials, *_BYTES], normalizer, words, []))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    _add_specials(tokenizer, specials, "<bos> $A <eos>", "<bos> $A <eos> <bos> $B <eos>")
    return tokenizer


# -- weights -----------------------------------------------------------------------------------


def _randomise(module: Any) -> None:
    """Randomise every weight, so that no layer is nearly linear and no norm is the identity."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            weight.normal_(1.0 if is_scale else 0.0, 0.15)


def _random_network(kind: Any, config: Any) -> Any:
    config._attn_implementation = "eager"
    network = kind(config).eval().requires_grad_(False)
    _randomise(network)
    return network


def _save(folder: Path, config: Any, weights: dict[str, Tensor], **more: Any) -> None:
    config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.pop("dtype", None)
    # Large checkpoints are published in float16. The requested dtype overrides it.
    write_json(folder / "config.json", {**values, "torch_dtype": "float16", **more})
    if weights:
        save_file(
            {key: value.contiguous() for key, value in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )


def _config_values(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        **more,
    }


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, kind: str, **settings: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"model_max_length": POSITIONS, "tokenizer_class": kind, **settings}
    write_json(folder / "tokenizer_config.json", values)


def _save_decoder(
    folder: Path, family: str, tokenizer: Tokenizer, head: bool, **shape: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Save a decoder, with the names of a model that has a language-model head if ``head``."""
    import transformers

    values = {"max_position_embeddings": 4096, "num_key_value_heads": 2, **shape}
    config = getattr(transformers, f"{family}Config")(**_config_values(tokenizer, **values))
    network = _random_network(getattr(transformers, f"{family}Model"), config)
    weights = written = network.state_dict()
    if head:
        written = {f"model.{key}": value for key, value in weights.items()}
        written["lm_head.weight"] = torch.randn_like(weights["embed_tokens.weight"])
    _save(folder, config, written, architectures=[f"{family}{'ForCausalLM' if head else 'Model'}"])
    return network, weights


def _build_mistral(folder: Path, head: bool = False, end: bool = True) -> TinyCheckpoint:
    """Write a Mistral whose tokenizer.json adds only <s>; its config may add </s>."""
    tokenizer = _mistral_tokenizer()
    network, weights = _save_decoder(folder, "Mistral", tokenizer, head)
    settings = {**_MISTRAL_SETTINGS, "add_eos_token": end, "pad_token": "</s>"}
    _save_tokenizer(folder, tokenizer, "LlamaTokenizer", **settings)
    return TinyCheckpoint(folder, network, tokenizer, weights, [1], [2])


_MISTRAL_SETTINGS = {
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 10**30,
}


def _build_bidirectional(folder: Path, family: str) -> TinyCheckpoint:
    """Write a decoder whose files make it bidirectional: by a setting, or by code of its own."""
    tokenizer = _mistral_tokenizer()
    network, weights = _save_decoder(folder, family, tokenizer, head=False)
    changes: dict[str, Any] = {"is_causal": False}
    if family == "Llama":
        auto_map = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
        changes = {"model_type": "llama_bidirec", "auto_map": auto_map, "pooling": "avg"}
    change_json(folder / "config.json", **changes)
    _save_tokenizer(folder, tokenizer, "PreTrainedTokenizerFast", **_MISTRAL_SETTINGS)
    return TinyCheckpoint(folder, network, tokenizer, weights, [1], [])


def _build_qwen(folder: Path, family: str = "Qwen3") -> TinyCheckpoint:
    tokenizer = _qwen_tokenizer()
    network, weights = _save_decoder(folder, family, tokenizer, head=True, head_dim=HIDDEN // HEADS)
    end = "<|endoftext|>"
    settings = {"add_prefix_space": False, "bos_token": None, "pad_token": end, "unk_token": None}
    # The end token of chat models is not the one whose state is the embedding.
    settings["eos_token"] = "<|im_end|>" if family == "Qwen3" else end
    _save_tokenizer(folder, tokenizer, "Qwen2Tokenizer", **settings)
    return TinyCheckpoint(folder, network, tokenizer, weights, [], [tokenizer.token_to_id(end)])


def _build_gte_qwen2(folder: Path) -> TinyCheckpoint:
    """Write a Qwen2 whose files request remote code."""
    checkpoint = _build_qwen(folder, "Qwen2")
    kinds = {"AutoModel": "Qwen2Model", "AutoModelForCausalLM": "Qwen2ForCausalLM"}
    auto_map = {auto: f"modeling_qwen.{kind}" for auto, kind in kinds.items()}
    change_json(folder / "config.json", auto_map=auto_map)
    names = [f"tokenization_qwen.Qwen2Tokenizer{end}" for end in ("", "Fast")]
    path = folder / "tokenizer_config.json"
    change_json(path, add_eos_token=True, auto_map={"AutoTokenizer": names})
    return checkpoint


def _build_gemma(folder: Path, causal: bool = False) -> TinyCheckpoint:
    """Write an EmbeddingGemma with two dense layers, or a causal Gemma 3 without them.

    The window of the first layer is wide enough for packing, and narrower than some texts.
    """
    from transformers import Gemma3TextConfig, Gemma3TextModel

    tokenizer = _gemma_tokenizer()
    config = Gemma3TextConfig(
        **_config_values(tokenizer, num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8),
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=not causal,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    network = _random_network(Gemma3TextModel, config)
    weights = network.state_dict()
    _save(folder, config, weights, architectures=["Gemma3TextModel"], sliding_window=WINDOW)
    _save_gemma_tokenizer(folder, tokenizer)
    write_modules(folder, *([] if causal else ["Dense", "Dense"]), "Normalize")
    for path, width, out in (("2_Dense", HIDDEN, 48), ("3_Dense", 48, HIDDEN)):
        if not causal:
            weights[path] = torch.randn(out, width) / width**0.5
            write_dense(folder / path, {"linear.weight": weights[path]})
    return TinyCheckpoint(folder, network, tokenizer, weights, [2], [1])


def _build_gemma_2(folder: Path) -> TinyCheckpoint:
    """Write an EmbeddingGemma 2, with weights of its network for images."""
    from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model, EmbeddingGemma2TextConfig

    tokenizer = _gemma_tokenizer()
    text = EmbeddingGemma2TextConfig(
        **_config_values(tokenizer, num_key_value_heads=2, max_position_embeddings=4096),
        head_dim=8,
        global_head_dim=16,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        hidden_size_per_layer_input=16,
        embedding_dim=48,
    )
    config = EmbeddingGemma2Config(text_config=text, vision_config=None, audio_config=None)
    network = _random_network(EmbeddingGemma2Model, config)
    weights = network.state_dict()
    images = {"vision_tower.weight": torch.ones(4), "embed_vision.weight": torch.ones(4)}
    _save(folder, config, {**weights, **images}, architectures=["EmbeddingGemma2Model"])
    _save_gemma_tokenizer(folder, tokenizer)
    write_modules(folder, "Normalize")
    return TinyCheckpoint(folder, network, tokenizer, weights, [2], [1])


def _save_gemma_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    settings = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    settings |= {"add_bos_token": True, "add_eos_token": True}
    _save_tokenizer(folder, tokenizer, "GemmaTokenizer", **settings)


def _roberta_values(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    sizes = {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}
    return _config_values(tokenizer, **sizes, **ids)


def _build_xlm_r(folder: Path, pooling: str = "mean") -> TinyCheckpoint:
    from transformers import XLMRobertaConfig, XLMRobertaModel

    tokenizer = _xlm_r_tokenizer()
    config = XLMRobertaConfig(**_roberta_values(tokenizer))
    network = _random_network(XLMRobertaModel, config)
    weights = network.state_dict()
    _save(folder, config, weights, architectures=["XLMRobertaModel"])
    write_modules(folder, "Normalize", pooling=pooling)
    settings = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    _save_tokenizer(folder, tokenizer, "XLMRobertaTokenizer", **settings)
    return TinyCheckpoint(folder, network, tokenizer, weights, [0], [2])


def _build_simcse_roberta(folder: Path) -> TinyCheckpoint:
    """As published in 2021: pytorch_model.bin, and a vocabulary without tokenizer.json."""
    from transformers import RobertaConfig, RobertaModel

    tokenizer = _roberta_tokenizer()
    config = RobertaConfig(**_roberta_values(tokenizer))
    network = _random_network(RobertaModel, config)
    weights = _save_pickled(folder, network)
    tokenizer.model.save(str(folder))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 512})
    return TinyCheckpoint(folder, network, tokenizer, weights, [0], [2])


def _build_simcse_bert(folder: Path, hidden: int = HIDDEN) -> TinyCheckpoint:
    from transformers import BertConfig, BertModel

    tokenizer = _bert_tokenizer()
    config = BertConfig(**_config_values(tokenizer, hidden_size=hidden), pad_token_id=0)
    network = _random_network(BertModel, config)
    weights = _save_pickled(folder, network)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    (folder / "vocab.txt").write_text("\n".join(token for token, _ in vocabulary) + "\n")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": True, "model_max_length": 512})
    first, last = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    return TinyCheckpoint(folder, network, tokenizer, weights, [first], [last])


def _build_stock(folder: Path, family: str, pooling: str = "mean", **shape: Any) -> TinyCheckpoint:
    """Write a network of any ``model_type`` in transformers, with BERT's tokenizer."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    tokenizer = _bert_tokenizer()
    first, last = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    ids = {"pad_token_id": 0, "bos_token_id": first, "eos_token_id": last}
    config = CONFIG_MAPPING[family](**_config_values(tokenizer, **ids, **shape))
    network = _random_network(MODEL_MAPPING[type(config)], config)
    weights = network.state_dict()
    _save(folder, config, weights, architectures=[type(network).__name__])
    _add_specials(tokenizer, _BERT_MARKS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
    settings = {f"{token[1:-1].lower()}_token": token for token in _BERT_MARKS}
    _save_tokenizer(folder, tokenizer, "PreTrainedTokenizerFast", **settings)
    write_modules(folder, "Normalize", pooling=pooling)
    return TinyCheckpoint(folder, network, tokenizer, weights, [first], [last])


def _build_mpnet(folder: Path) -> TinyCheckpoint:
    from transformers import MPNetConfig, MPNetModel

    tokenizer = _bert_tokenizer(_MPNET_MARKS)
    config = MPNetConfig(**_roberta_values(tokenizer))
    network = _random_network(MPNetModel, config)
    _save(folder, config, network.state_dict(), architectures=["MPNetForMaskedLM"])
    _add_specials(tokenizer, _MPNET_MARKS, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    settings |= {"unk_token": "[UNK]", "pad_token": "<pad>", "mask_token": "<mask>"}
    _save_tokenizer(folder, tokenizer, "MPNetTokenizer", **settings)
    write_modules(folder, "Normalize")
    return TinyCheckpoint(folder, network, tokenizer, network.state_dict(), [0], [2])


def _save_pickled(folder: Path, network: Any) -> dict[str, Tensor]:
    _save(folder, network.config, {}, architectures=[type(network).__name__])
    weights: dict[str, Tensor] = network.state_dict()
    # Versions of that time saved the positions with the weights.
    positions = {"embeddings.position_ids": torch.arange(POSITIONS)[None]}
    torch.save({**weights, **positions}, folder / "pytorch_model.bin")
    return weights


# -- NV-Embed-v2 -------------------------------------------------------------------------------


def _build_nv_embed(folder: Path) -> TinyCheckpoint:
    """Write the layout of NV-Embed-v2: nested configs, its weight names, Mistral's tokenizer."""
    from transformers import MistralConfig, MistralModel

    tokenizer, hidden = _mistral_tokenizer(), 64
    backbone = {
        **_config_values(tokenizer, hidden_size=hidden, max_position_embeddings=4096),
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    network = _random_network(MistralModel, MistralConfig(**backbone, rope_theta=10_000.0))
    cross_heads, cross_head_dim, latents = 2, 48, 8
    inner = cross_heads * cross_head_dim
    first, second = (f"latent_attention_model.cross_attend_blocks.{i}." for i in (0, 1))
    norms = (f"{first}norm", f"{first}norm_context", f"{second}norm")
    shapes = {
        "latent_attention_model.latents": (latents, hidden),
        **{f"{norm}.{kind}": (hidden,) for norm in norms for kind in ("weight", "bias")},
        f"{first}fn.to_q.weight": (inner, hidden),
        f"{first}fn.to_kv.weight": (2 * inner, hidden),
        f"{first}fn.to_out.weight": (hidden, inner),
        f"{second}fn.net.0.weight": (8 * hidden, hidden),
        f"{second}fn.net.0.bias": (8 * hidden,),
        f"{second}fn.net.2.weight": (hidden, 4 * hidden),
        f"{second}fn.net.2.bias": (hidden,),
    }
    weights = {
        **{f"embedding_model.{key}": value for key, value in network.state_dict().items()},
        **{key: torch.randn(shape) * 0.3 for key, shape in shapes.items()},
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_json(
        folder / "config.json",
        {
            "architectures": ["NVEmbedModel"],
            "auto_map": {
                "AutoConfig": "configuration_nvembed.NVEmbedConfig",
                "AutoModel": "modeling_nvembed.NVEmbedModel",
            },
            "hidden_size": hidden,
            "is_mask_instruction": True,
            "latent_attention_config": {
                "cross_dim_head": cross_head_dim,
                "hidden_dim": hidden,
                "latent_dim": hidden,
                "model_type": "latent_attention",
                "num_cross_heads": cross_heads,
                "num_latents_value": latents,
            },
            "model_type": "nvembed",
            "text_config": {
                **backbone,
                "architectures": ["MistralModel"],
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": None,
                "model_type": "bidir_mistral",
                "rope_theta": 10_000.0,
                "sliding_window": 4096,
            },
            "torch_dtype": "float16",
        },
    )
    settings = {**_MISTRAL_SETTINGS, "add_eos_token": False}
    _save_tokenizer(folder, tokenizer, "PreTrainedTokenizerFast", **settings)
    return TinyCheckpoint(folder, network, tokenizer, weights, [1], [2])


BUILDERS = {
    "mistral": _build_mistral,
    "qwen": _build_qwen,
    "gte-qwen2": _build_gte_qwen2,
    "gemma": _build_gemma,
    "gemma-2": _build_gemma_2,
    "bidirectional": _build_bidirectional,
    "stock": _build_stock,
    "mpnet": _build_mpnet,
    "xlm-r": _build_xlm_r,
    "simcse-roberta": _build_simcse_roberta,
    "simcse-bert": _build_simcse_bert,
    "nv-embed": _build_nv_embed,
}


def load_on_cpu(folder: Path, **options: Any) -> Encoder:
    """Load an encoder with PyTorch in float32 on the CPU."""
    settings = {"dtype": "float32", "device": "cpu", "runtime": "torch", **options}
    return load_encoder(str(folder), **settings)
