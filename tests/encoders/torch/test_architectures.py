"""Known models on tiny checkpoints, compared with plain transformers one text at a time.

The references do not use llmcond. They compute ids, masks, pooling and NV-Embed-v2's latent block
themselves, with eager attention, whose direction depends on the mask alone.
"""

import copy
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import load_on_cpu
from helpers.vectors import assert_close, cosines
from torch import nn
from torch.nn import functional

from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.torch import engine

# Networks this small finish before a second thread would have started.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*inputs are longer"),
]

INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: two dogs"
TASKS = ["classification", "find {text} in\nthe river", INSTRUCTION]
INSTRUCT = "Instruct: {instruction}\nQuery: {text}"
TEXTS = [
    "",
    "dogs",
    "what sport is played ",
    "  two spaces before, one newline behind\n",
    "A café, a cafe\u0301 and 東京 🐕 {braces}",
    "A man plays the guitar in the park while two dogs run over wet grass near the river.",
]
GTE_QWEN2 = "Alibaba-NLP/gte-Qwen2-7B-instruct"
#: ModernBERT's layers alternate between full attention and windows.
WINDOWS = {
    "local_attention": checkpoints.WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}


def inputs(instruction="", texts=TEXTS):
    return [EncoderInput(instruction, text) for text in texts]


# -- references --------------------------------------------------------------------------------


@torch.no_grad()
def hidden_states(network, ids, kind):
    """Return a text's token vectors by the direction of attention, or with positions from ``kind``.

    With "stock", transformers creates the mask of the single text. With "windows", a token sees
    half of EmbeddingGemma's window on either side. transformers has two masks for it. If
    ``config.is_causal`` is False in addition to the model's ``use_bidirectional_attention``, a
    token sees one more token on either side.
    """
    n, hidden = len(ids), torch.finfo(torch.float32).min
    if isinstance(kind, int):
        types, mask = torch.zeros(2, 1, n, dtype=torch.long)
        options = {"attention_mask": mask + 1, "token_type_ids": types}
        options["position_ids"] = torch.arange(kind, kind + n)[None]
    else:
        everything = torch.zeros(1, 1, n, n)
        far = (torch.arange(n)[:, None] - torch.arange(n)).abs() > checkpoints.WINDOW // 2
        window = torch.where(far, hidden, 0.0)[None, None]
        masks = {"causal": torch.full((1, 1, n, n), hidden).triu(1), "bidirectional": everything}
        masks["windows"] = {"sliding_attention": window, "full_attention": everything}
        options = {} if kind == "stock" else {"attention_mask": masks[kind]}
    return network(input_ids=torch.tensor([ids]), **options).last_hidden_state[0]


def pool(pooling, weights, states):
    """Pool token vectors as the authors of a model do."""
    if pooling == "last":
        return states[-1]
    if pooling == "cls":
        return states[0]
    if pooling == "pooler":
        return torch.tanh(weights["pooler.dense.weight"] @ states[0] + weights["pooler.dense.bias"])
    mean = states.sum(dim=0) / len(states)
    return mean if pooling == "mean" else weights["3_Dense"] @ (weights["2_Dense"] @ mean)


@dataclass(frozen=True)
class Case:
    """How the checkpoint of a model is created, and how its authors use the model."""

    kind: str
    attention: str | int
    pooling: str
    instruction_format: str = ""
    options: dict = field(default_factory=dict)

    def build(self, folder):
        return checkpoints.build_checkpoint(self.kind, folder, **self.options)

    def ids(self, checkpoint, item, max_length=None):
        text = item.text
        if item.instruction:
            # str.format would fail, because the texts may contain braces.
            before, _, between = self.instruction_format.partition("{instruction}")
            text = before + item.instruction + between.replace("{text}", "") + text
        content = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        if max_length is not None:
            content = content[: max_length - len(checkpoint.first_ids) - len(checkpoint.last_ids)]
        return [*checkpoint.first_ids, *content, *checkpoint.last_ids]

    def vectors(self, checkpoint, items, max_length=None):
        rows = (self.ids(checkpoint, item, max_length) for item in items)
        states = (hidden_states(checkpoint.network, row, self.attention) for row in rows)
        pooled = [pool(self.pooling, checkpoint.weights, row_states) for row_states in states]
        return functional.normalize(torch.stack(pooled), dim=1).numpy()


CASES = {
    "Salesforce/SFR-Embedding-Mistral": Case(
        "mistral", "causal", "last", INSTRUCT, {"head": True, "end": False}
    ),
    "intfloat/e5-mistral-7b-instruct": Case("mistral", "causal", "last", INSTRUCT),
    GTE_QWEN2: Case("gte-qwen2", "bidirectional", "last", INSTRUCT),
    "intfloat/multilingual-e5-large-instruct": Case("xlm-r", 2, "mean", INSTRUCT),
    "princeton-nlp/sup-simcse-roberta-large": Case("simcse-roberta", 2, "pooler"),
    "princeton-nlp/sup-simcse-bert-base-uncased": Case("simcse-bert", 0, "pooler"),
    "BAAI/bge-small-en-v1.5": Case("simcse-bert", 0, "cls"),
    "Qwen/Qwen3-Embedding-0.6B": Case(
        "qwen", "causal", "last", "Instruct: {instruction}\nQuery:{text}"
    ),
    "google/embeddinggemma-300m": Case(
        "gemma", "windows", "dense", "task: {instruction} | query: {text}"
    ),
    "BAAI/bge-m3": Case("xlm-r", 2, "cls", "", {"pooling": "cls"}),
    "nvidia/llama-embed-nemotron-8b": Case(
        "bidirectional", "bidirectional", "mean", INSTRUCT, {"family": "Llama"}
    ),
    "nvidia/Nemotron-3-Embed-8B-BF16": Case(
        "bidirectional", "bidirectional", "mean", "", {"family": "Ministral3"}
    ),
    "microsoft/harrier-oss-v1-270m": Case("gemma", "stock", "last", INSTRUCT, {"causal": True}),
    "google/embeddinggemma-2": Case(
        "gemma-2", "stock", "mean", "task: {instruction} | query: {text}"
    ),
    "sentence-transformers/all-mpnet-base-v2": Case("mpnet", "stock", "mean"),
    "ibm-granite/granite-embedding-english-r2": Case(
        "stock", "stock", "cls", "", {"family": "modernbert", "pooling": "cls", **WINDOWS}
    ),
}


# -- known models ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_known_model_matches_transformers(name, cache, tmp_path):
    case = CASES[name]
    checkpoint = case.build(tmp_path / "model")
    commit = checkpoints.write_to_hub_cache(checkpoint.folder, cache, name)
    encoder = load_on_cpu(name, max_tokens_per_batch=1_000)
    # MPNet adds a bias by distance, which attention functions of transformers do not get.
    assert encoder.engine.packs == (case.kind != "mpnet")
    assert encoder.identity.weights == f"hub:{name}@{commit}"
    assert encoder.resolved.assumed == ()
    items = inputs()
    if case.instruction_format:
        items += [item for task in TASKS for item in inputs(task)]
    else:
        with pytest.raises(UserError, match="takes no instruction"):
            encoder.encode(inputs("find"))
    encoded = encoder.encode_with_counts(items)
    assert_close(encoded.vectors, case.vectors(checkpoint, items))
    assert encoded.n_tokens.tolist() == [len(case.ids(checkpoint, item)) for item in items]
    # Cut inputs keep their special tokens.
    items = inputs() + (inputs("classification") if case.instruction_format else [])
    cut = load_on_cpu(name, max_length=24)
    assert_close(cut.encode(items), case.vectors(checkpoint, items, max_length=24))


OTHERS = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "eurobert": {},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2},
    "gte": {},
    "jina_embeddings_v3": {},
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "nomic_bert": {},
}


@pytest.mark.parametrize("family", OTHERS)
def test_architecture_of_unknown_encoder_matches_transformers(family, tmp_path):
    case = Case("stock", "stock", "mean", "", {"family": family, **OTHERS[family]})
    checkpoint = case.build(tmp_path / "model")
    encoder = load_on_cpu(checkpoint.folder)
    # DeBERTa and Gemma 2 change the attention scores, and LFM2 convolves neighbouring tokens.
    assert encoder.engine.packs == (family not in ("deberta-v2", "gemma2", "lfm2"))
    assert_close(encoder.encode(inputs()), case.vectors(checkpoint, inputs()))


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
LONG_ROPE |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 32}
#: Networks that mix tokens with their padding, or rotate them by the longest text of a batch.
MIXING = {
    "convbert": {},
    "fnet": {},
    "phi3": {"num_key_value_heads": 2, "rope_parameters": LONG_ROPE},
}


@pytest.mark.parametrize("family", MIXING)
def test_vectors_do_not_depend_on_longer_texts_of_the_batch(family, tmp_path):
    options = {"family": family, **MIXING[family]}
    encoder = load_on_cpu(checkpoints.build_checkpoint("stock", tmp_path / "m", **options).folder)
    texts = ["dogs run", "a man plays the guitar in the park while two dogs run " * 3, "cats sit"]
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    assert_close(encoder.encode(texts), alone)


def test_pooler_is_that_of_the_architecture_or_rejected(tmp_path):
    options = {"family": "albert", "embedding_size": 16}
    checkpoint = checkpoints.build_checkpoint("stock", tmp_path / "albert", **options)
    encoder = load_on_cpu(checkpoint.folder, pooling="pooler", normalize=False)
    ids = [checkpoint.tokenizer.encode(text).ids for text in ("dogs run", "a man walks")]
    with torch.inference_mode():
        expected = [checkpoint.network(torch.tensor([row])).pooler_output[0] for row in ids]
    assert_close(encoder.encode(["dogs run", "a man walks"]), torch.stack(expected).numpy())
    folder = checkpoints.build_checkpoint("stock", tmp_path / "electra", family="electra").folder
    with pytest.raises(UserError, match=r"the architecture of .* has no pooler"):
        load_on_cpu(folder, pooling="pooler")


# -- NV-Embed-v2 -------------------------------------------------------------------------------


def latent_block(weights, hidden, heads=2):
    """Apply NV-Embed-v2's latent attention, as in its paper and code, one head at a time."""
    cross, forward = (f"latent_attention_model.cross_attend_blocks.{i}." for i in (0, 1))

    def norm(x, name):
        weight, bias = (weights[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    context = norm(weights["latent_attention_model.latents"], cross + "norm_context")
    queries = norm(hidden, cross + "norm") @ weights[cross + "fn.to_q.weight"].T
    keys, values = (context @ weights[cross + "fn.to_kv.weight"].T).chunk(2, dim=-1)
    size = queries.shape[-1] // heads
    parts = (part.split(size, dim=-1) for part in (queries, keys, values))
    attended = [(q @ k.T * size**-0.5).softmax(dim=-1) @ v for q, k, v in zip(*parts, strict=True)]
    hidden = torch.cat(attended, dim=-1) @ weights[cross + "fn.to_out.weight"].T + hidden
    normed = norm(hidden, forward + "norm")
    wide = normed @ weights[forward + "fn.net.0.weight"].T + weights[forward + "fn.net.0.bias"]
    value, gate = wide.chunk(2, dim=-1)
    narrow = (value * functional.gelu(gate)) @ weights[forward + "fn.net.2.weight"].T
    return narrow + weights[forward + "fn.net.2.bias"] + hidden


def nv_vector(checkpoint, item, instruction_format, max_length):
    """Encode one text as the original's ``encode`` does."""
    prefix = instruction_format.partition("{text}")[0].replace("{instruction}", item.instruction)
    prefix = prefix if item.instruction else ""
    ids = checkpoint.tokenizer.encode(prefix + item.text + "</s>").ids
    if len(ids) > max_length:  # the original cuts </s> off; llmcond keeps it, as documented
        ids = [*ids[: max_length - 1], 2]
    hidden = hidden_states(checkpoint.network, ids, "bidirectional")
    n_skipped = len(checkpoint.tokenizer.encode(prefix, add_special_tokens=False).tokens)
    return latent_block(checkpoint.weights, hidden)[n_skipped:].mean(dim=0)


def nv_vectors(checkpoint, items, instruction_format=INSTRUCT, max_length=9_999):
    options = instruction_format, max_length
    vectors = torch.stack([nv_vector(checkpoint, item, *options) for item in items])
    return functional.normalize(vectors, dim=1).numpy()


@pytest.fixture(scope="module")
def nv_checkpoint(tmp_path_factory):
    return checkpoints.build_checkpoint("nv-embed", tmp_path_factory.mktemp("nv") / "model")


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_nv_embed_matches_reference(nv_checkpoint, cache, fold):
    name = "nvidia/NV-Embed-v2"
    checkpoints.write_to_hub_cache(nv_checkpoint.folder, cache, name)
    encoder = load_on_cpu(name, fold_latents=fold)
    items = [item for task in ("", *TASKS) for item in inputs(task)]
    expected = nv_vectors(nv_checkpoint, items)
    assert_close(encoder.encode(items), expected)
    assert_close(np.concatenate([encoder.encode([item]) for item in items]), expected)
    items = [*inputs(), *inputs("classification")]
    cut = load_on_cpu(name, fold_latents=fold, max_length=24, max_tokens_per_batch=33)
    assert_close(cut.encode(items), nv_vectors(nv_checkpoint, items, max_length=24))
    # Without a space at the end, one token of the instruction is pooled, as in the original.
    for instruction_format in ("Instruct: {instruction}\nQuery:{text}", "{instruction}  \n{text}"):
        options = {"instruction_format": instruction_format}
        vectors = load_on_cpu(name, fold_latents=fold, **options).encode(inputs(INSTRUCTION))
        assert_close(vectors, nv_vectors(nv_checkpoint, inputs(INSTRUCTION), **options))
    with pytest.raises(UserError, match="too long without its sentence: 'dogs'"):
        load_on_cpu(name, max_length=8).encode(inputs(INSTRUCTION, ["dogs"]))


def test_nv_embed_matches_recorded_vectors_of_original_code():
    data = os.environ.get("LLMCOND_DATA")
    folder = Path(data).parent / "fixtures" / "nvembed-tiny" if data else None
    if folder is None or not folder.is_dir():
        pytest.skip("LLMCOND_DATA is not set, or its parent has no fixtures/nvembed-tiny")
    encoder = load_on_cpu(folder)
    for case in json.loads((folder / "expected.json").read_text(encoding="utf-8")):
        task = case["instruction"].removeprefix("Instruct: ").removesuffix("\nQuery: ")
        vectors = encoder.encode(inputs(task, case["texts"]))
        np.testing.assert_allclose(vectors, case["embeddings"], rtol=0, atol=2e-5)


# -- direction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_attention_option_sets_direction_of_decoder(tmp_path, attention):
    # The folder is no known model, so the tokenizer's files decide on the special tokens.
    case = Case("mistral", attention, "last")
    checkpoint = case.build(tmp_path / "model")
    vectors = load_on_cpu(checkpoint.folder, attention=attention, pooling="last").encode(inputs())
    assert_close(vectors, case.vectors(checkpoint, inputs()))


@pytest.mark.parametrize(
    ("kind", "options", "to_causal"),
    [
        ("gte-qwen2", {"like": GTE_QWEN2}, True),
        ("nv-embed", {"quantize": "4bit"}, True),
        ("mistral", {"like": "intfloat/e5-mistral-7b-instruct"}, False),
    ],
)
def test_model_with_other_direction_raises(tmp_path, monkeypatch, kind, options, to_causal):
    checkpoint = checkpoints.build_checkpoint(kind, tmp_path / "model")
    original = engine.load_config

    def load_config(checkpoint, attention):
        """Load a config as if transformers ignored the requested direction."""
        config = original(checkpoint, attention)
        config.is_causal = to_causal
        return config

    monkeypatch.setattr(engine, "load_config", load_config)
    actual, trained = ("causal", "bidirectional") if to_causal else ("bidirectional", "causal")
    with pytest.raises(
        LlmcondError, match=f"have {trained} attention, but its attention is {actual}"
    ):
        load_on_cpu(checkpoint.folder, **options)


def test_model_that_reads_images_must_be_known(tmp_path):
    folder = checkpoints.build_checkpoint("gemma-2", tmp_path / "model").folder
    with pytest.raises(UserError, match=r"reads images or sounds as well.*--like"):
        load_on_cpu(folder)


def test_settings_that_break_a_model_are_rejected(nv_checkpoint):
    for options, message in (
        ({"pooling": "mean"}, "only supports latent"),
        ({"attention": "causal"}, "attention is 'causal', but .* was trained with"),
    ):
        with pytest.raises(UserError, match=message):
            load_on_cpu(nv_checkpoint.folder, **options)


# -- dtypes and quantisation -------------------------------------------------------------------


@pytest.mark.usefixtures("native_16_bit")
def test_16_bit_vectors_are_close_to_float32(nv_checkpoint, tmp_path):
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    # The float16 of its config.json is the dtype of the weights on disk, not of the computation.
    gte = load_on_cpu(checkpoint.folder, like=GTE_QWEN2, dtype="auto")
    nv_embed = load_on_cpu(nv_checkpoint.folder, dtype="bfloat16")
    for encoder, expected in (
        (gte, CASES[GTE_QWEN2].vectors(checkpoint, inputs())),
        (nv_embed, nv_vectors(nv_checkpoint, inputs())),
    ):
        dtypes = {weight.dtype for weight in encoder.engine.model.network.parameters()}
        assert dtypes == {torch.bfloat16}
        assert cosines(encoder.encode(inputs()), expected).min() > 0.99


def dequantise(checkpoint, quantize):
    """Return the reference with weights rounded to NF4; 8 bit hardly changes them."""
    if quantize == "8bit":
        return checkpoint
    bits = pytest.importorskip("bitsandbytes").functional
    network = copy.deepcopy(checkpoint.network)
    for part in network.modules():
        if isinstance(part, nn.Linear):
            options = {"quant_type": "nf4", "compress_statistics": True}
            packed = bits.quantize_4bit(part.weight.data, **options)
            part.weight.data = bits.dequantize_4bit(*packed).float()
    return replace(checkpoint, network=network)


@pytest.mark.parametrize(("quantize", "fold"), [("8bit", True), ("4bit", False)])
def test_quantised_nv_embed_keeps_latent_block_in_full_precision(nv_checkpoint, quantize, fold):
    pytest.importorskip("bitsandbytes")
    encoder = load_on_cpu(nv_checkpoint.folder, quantize=quantize, fold_latents=fold)
    network = encoder.engine.model.network
    names = []
    for part in (network.embedding_model, network.latent_attention_model):
        linear = (module for module in part.modules() if isinstance(module, nn.Linear))
        names.append({type(module).__name__ for module in linear})
    assert names == [{"Linear8bitLt" if quantize == "8bit" else "Linear4bit"}, {"Linear"}]
    items = [*inputs(), *inputs(INSTRUCTION)]
    vectors = encoder.encode(items)
    assert cosines(vectors, nv_vectors(dequantise(nv_checkpoint, quantize), items)).min() > 0.99
    assert np.abs(vectors - nv_vectors(nv_checkpoint, items)).max() > 1e-4
    # On a CPU, the first forward pass of 4 bit repacks the weights in place.
    np.testing.assert_array_equal(encoder.encode(items), vectors)
