"""Known models on tiny checkpoints, compared with plain transformers one text at a time.

The references do not use llmcond. They compute ids, masks, pooling and NV-Embed-v2's latent block
themselves, with eager attention, whose direction depends on the mask alone.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.vectors import assert_close, cosines
from torch import nn
from torch.nn import functional

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine import engine
from llmcond.errors import LlmcondError, UserError

# Networks this small finish before a second thread would have started.
pytestmark = pytest.mark.usefixtures("one_thread")

INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: two dogs"
OTHER_INSTRUCTIONS = [
    "classification",
    "find {text} in\nthe river",
    "the time of the day is given :",
]
INSTRUCT = "Instruct: {instruction}\nQuery: {text}"
TEXTS = [
    "",
    "dogs",
    "the number of people",
    "what sport is played ",
    "  two spaces before, one newline behind\n",
    "A café, a cafe\u0301 and 東京 🐕 {braces}",
    "A man plays the guitar in the park while two dogs run over wet grass near the river.",
]
#: Texts of increasing length, which decide how much padding the other text of a batch gets.
PADDING_TEXTS = ["the dogs " * n for n in range(1, 16)]


def inputs(texts, instruction=""):
    return [EncoderInput(instruction, text) for text in texts]


def load(name, **options):
    fixed = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    options = {**fixed, "max_tokens_per_batch": 100_000, **options}
    return load_encoder(str(name), **options)


def causal_mask(length):
    """Return an additive mask that hides all later tokens."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def bidirectional_mask(length):
    return torch.zeros(1, 1, length, length)


def window_mask(length):
    """Return EmbeddingGemma's mask: a token sees half of the window of 8 on either side.

    transformers has two masks for it. If ``config.is_causal`` is False in addition to the model's
    ``use_bidirectional_attention``, a token sees one more token on either side.
    """
    positions = torch.arange(length)
    far = (positions[:, None] - positions).abs() > 4
    return torch.where(far, torch.finfo(torch.float32).min, 0.0)[None, None]


@torch.no_grad()
def run_network(checkpoint, ids, mask):
    return checkpoint.network(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[
        0
    ]


# -- references --------------------------------------------------------------------------------


def hidden_with_mask(mask):
    return lambda checkpoint, ids: run_network(checkpoint, ids, mask(len(ids)))


def hidden_with_windows(checkpoint, ids):
    n = len(ids)
    return run_network(
        checkpoint,
        ids,
        {"sliding_attention": window_mask(n), "full_attention": bidirectional_mask(n)},
    )


def hidden_from_position(start):
    """Return a function that computes token vectors with position ids from ``start`` on."""

    @torch.no_grad()
    def hidden(checkpoint, ids):
        output = checkpoint.network(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            token_type_ids=torch.zeros(1, len(ids), dtype=torch.long),
            position_ids=torch.arange(start, start + len(ids))[None],
        )
        return output.last_hidden_state[0]

    return hidden


def pool_last(checkpoint, hidden):
    return hidden[-1]


def pool_mean(checkpoint, hidden):
    return hidden.sum(dim=0) / len(hidden)


def pool_cls(checkpoint, hidden):
    return hidden[0]


def pool_pooler(checkpoint, hidden):
    weights = checkpoint.weights
    return torch.tanh(weights["pooler.dense.weight"] @ hidden[0] + weights["pooler.dense.bias"])


def pool_mean_and_dense(checkpoint, hidden):
    return checkpoint.weights["3_Dense"] @ (
        checkpoint.weights["2_Dense"] @ pool_mean(checkpoint, hidden)
    )


@dataclass(frozen=True)
class Case:
    """How the checkpoint of a model is created, and how its authors use the model."""

    kind: str
    hidden: Callable
    pool: Callable
    instruction_format: str = ""
    options: dict = field(default_factory=dict)


CASES = {
    "Salesforce/SFR-Embedding-Mistral": Case(
        "mistral", hidden_with_mask(causal_mask), pool_last, INSTRUCT, {"head": True, "end": False}
    ),
    "intfloat/e5-mistral-7b-instruct": Case(
        "mistral", hidden_with_mask(causal_mask), pool_last, INSTRUCT
    ),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": Case(
        "gte-qwen2", hidden_with_mask(bidirectional_mask), pool_last, INSTRUCT
    ),
    "intfloat/multilingual-e5-large-instruct": Case(
        "xlm-r", hidden_from_position(2), pool_mean, INSTRUCT
    ),
    "princeton-nlp/sup-simcse-roberta-large": Case(
        "simcse-roberta", hidden_from_position(2), pool_pooler
    ),
    "princeton-nlp/sup-simcse-bert-base-uncased": Case(
        "simcse-bert", hidden_from_position(0), pool_pooler
    ),
    "Qwen/Qwen3-Embedding-0.6B": Case(
        "qwen", hidden_with_mask(causal_mask), pool_last, "Instruct: {instruction}\nQuery:{text}"
    ),
    "google/embeddinggemma-300m": Case(
        "gemma", hidden_with_windows, pool_mean_and_dense, "task: {instruction} | query: {text}"
    ),
    "BAAI/bge-m3": Case("xlm-r", hidden_from_position(2), pool_cls, "", {"pooling": "cls"}),
}


@dataclass(frozen=True)
class KnownModel:
    """A tiny checkpoint that is stored in the hub's cache under the name of a known model."""

    name: str
    case: Case
    checkpoint: checkpoints.TinyCheckpoint
    commit: str

    def ids(self, text, instruction="", max_length=None):
        checkpoint = self.checkpoint
        if instruction:
            # str.format would fail, because the texts may contain braces.
            before, _, between = self.case.instruction_format.partition("{instruction}")
            text = before + instruction + between.replace("{text}", "") + text
        content = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        if max_length is not None:
            content = content[: max_length - len(checkpoint.first_ids) - len(checkpoint.last_ids)]
        return [*checkpoint.first_ids, *content, *checkpoint.last_ids]

    def vector(self, text, instruction="", max_length=None):
        ids = self.ids(text, instruction, max_length)
        pooled = self.case.pool(self.checkpoint, self.case.hidden(self.checkpoint, ids))
        return (pooled / pooled.norm()).numpy()

    def vectors(self, texts, instruction="", max_length=None):
        return np.stack([self.vector(text, instruction, max_length) for text in texts])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A temporary cache of the hub, in offline mode."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        # The library reads these from the environment on import, which has already happened.
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield folder


@pytest.fixture(scope="module", params=CASES)
def known(request, cache, tmp_path_factory):
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    checkpoint = checkpoints.build_checkpoint(case.kind, folder, **case.options)
    commit = checkpoints.write_to_hub_cache(folder, cache, request.param)
    return KnownModel(request.param, case, checkpoint, commit)


@pytest.fixture(scope="module")
def known_encoder(known):
    return load(known.name)


# -- known models ------------------------------------------------------------------------------


def test_known_model_is_loaded_from_hub_cache(known, known_encoder):
    assert known_encoder.identity.weights == f"hub:{known.name}@{known.commit}"
    assert known_encoder.resolved.assumed == ()


def test_known_model_matches_transformers(known, known_encoder):
    assert_close(known_encoder.encode(inputs(TEXTS)), known.vectors(TEXTS))


def test_known_model_counts_tokens_as_its_tokenizer_does(known, known_encoder):
    counts = known_encoder.encode_with_counts(inputs(TEXTS)).n_tokens
    assert counts.tolist() == [len(known.ids(text)) for text in TEXTS]


def test_known_model_matches_transformers_for_single_inputs(known, known_encoder):
    alone = np.concatenate([known_encoder.encode(inputs([text])) for text in TEXTS])
    assert_close(alone, known.vectors(TEXTS))


def test_known_model_vector_does_not_depend_on_padding(known, known_encoder):
    text = "the color of the dress"
    pairs = np.stack([known_encoder.encode(inputs([text, other])) for other in PADDING_TEXTS])
    assert_close(pairs[:, 0], np.stack([known.vector(text)] * len(PADDING_TEXTS)))
    assert_close(pairs[:, 1], known.vectors(PADDING_TEXTS))


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 40, 150])
def test_known_model_vectors_do_not_depend_on_token_budget(known, budget):
    encoder = load(known.name, max_tokens_per_batch=budget)
    assert_close(
        encoder.encode(inputs([*TEXTS, *PADDING_TEXTS])), known.vectors([*TEXTS, *PADDING_TEXTS])
    )


def test_known_model_applies_its_instruction_format(known, known_encoder):
    if not known.case.instruction_format:
        with pytest.raises(UserError, match="takes no instruction"):
            known_encoder.encode(inputs(["dogs"], INSTRUCTION))
        return
    vectors = known_encoder.encode(inputs(TEXTS, INSTRUCTION))
    assert_close(vectors, known.vectors(TEXTS, INSTRUCTION))
    assert np.abs(vectors - known.vectors(TEXTS)).max() > 0.01


def test_known_model_accepts_one_instruction_per_input(known, known_encoder):
    tasks = ["", *OTHER_INSTRUCTIONS] if known.case.instruction_format else [""]
    mixed = [EncoderInput(task, text) for text in TEXTS for task in tasks]
    assert_close(
        known_encoder.encode(mixed),
        np.stack([known.vector(item.text, item.instruction) for item in mixed]),
    )


@pytest.mark.matrix
@pytest.mark.parametrize("max_length", [24, 30])
@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_truncated_inputs_keep_their_special_tokens(known, max_length):
    encoder = load(known.name, max_length=max_length)
    texts = [*TEXTS, *PADDING_TEXTS]
    assert_close(encoder.encode(inputs(texts)), known.vectors(texts, max_length=max_length))
    if known.case.instruction_format:
        items = inputs(texts, "classification")
        assert_close(encoder.encode(items), known.vectors(texts, "classification", max_length))


def test_missing_dense_layers_are_downloaded(tmp_path, monkeypatch):
    """transformers downloads its own files only, not those of sentence-transformers."""
    checkpoint = checkpoints.build_checkpoint("gemma", tmp_path / "model")
    name, cache = "google/embeddinggemma-300m", tmp_path / "hub"
    commit = checkpoints.write_to_hub_cache(checkpoint.folder, cache, name)
    snapshot = cache / "models--google--embeddinggemma-300m" / "snapshots" / commit
    for layer in ("2_Dense", "3_Dense"):
        (snapshot / layer / "model.safetensors").unlink()

    def download(repo, allow_patterns, **options):
        if "*.safetensors" in allow_patterns:
            for layer in ("2_Dense", "3_Dense"):
                file = f"{layer}/model.safetensors"
                shutil.copyfile(checkpoint.folder / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    expected = KnownModel(name, CASES[name], checkpoint, commit).vectors(["", "dogs"])
    assert_close(load(name).encode(inputs(["", "dogs"])), expected)


def test_copy_of_known_model_takes_its_settings_from_like(tmp_path):
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    encoder = load(checkpoint.folder, like=name)
    expected = KnownModel(name, CASES[name], checkpoint, "")
    assert_close(encoder.encode(inputs(TEXTS, INSTRUCTION)), expected.vectors(TEXTS, INSTRUCTION))


def test_sharded_checkpoint_gives_identical_vectors(tmp_path):
    checkpoint = checkpoints.build_checkpoint("mistral", tmp_path / "model", head=True)
    options = {"like": "Salesforce/SFR-Embedding-Mistral"}
    whole = load(checkpoint.folder, **options).encode(inputs(TEXTS))
    checkpoints.shard(checkpoint.folder)
    np.testing.assert_array_equal(load(checkpoint.folder, **options).encode(inputs(TEXTS)), whole)


def test_remote_code_of_gte_qwen2_never_runs(cache, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model", marker=marker)
    name = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    checkpoints.write_to_hub_cache(checkpoint.folder, cache, name)
    # If the code asked for confirmation, the answer "y" would run it.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    from_cache = load(name).encode(inputs(TEXTS))
    from_folder = load(checkpoint.folder, like=name).encode(inputs(TEXTS))
    np.testing.assert_array_equal(from_cache, from_folder)
    with pytest.raises(UserError, match=r"needs code from its repository.*--like NAME"):
        load(checkpoint.folder)
    assert not marker.exists()


# -- special tokens around an input ------------------------------------------------------------


def capture_ids(encoder, items):
    """Encode the inputs and return the ids that the network receives for each."""
    rows = []

    def record_ids(module, args, kwargs):
        if "packed" not in kwargs:
            masks = kwargs["attention_mask"].bool()
            pairs = zip(kwargs["input_ids"], masks, strict=True)
            rows.extend(ids[mask].tolist() for ids, mask in pairs)
            return
        ids, positions = (kwargs[name][0].tolist() for name in ("input_ids", "position_ids"))
        starts = [index for index, position in enumerate(positions) if position == min(positions)]
        rows.extend(ids[start:stop] for start, stop in pairwise([*starts, len(ids)]))

    hook = encoder.engine.model.network.register_forward_pre_hook(record_ids, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "shares_prefixes", False)
        encoder.encode_with_counts(items)
    hook.remove()
    return rows


@pytest.mark.parametrize("max_length", [60, 4096])
@pytest.mark.parametrize("end", [True, False], ids=["with-end", "without-end"])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_e5_mistral_gets_both_special_tokens(tmp_path, tokenizer_class, end, max_length):
    checkpoint = checkpoints.build_checkpoint(
        "mistral", tmp_path / "model", tokenizer_class=tokenizer_class, end=end
    )
    # These files contradict each other, so transformers 5 does not add the end (mteb #5237).
    assert checkpoint.tokenizer.encode("dogs").tokens[0] == "<s>"
    assert checkpoint.tokenizer.encode("dogs").tokens[-1] != "</s>"
    encoder = load(checkpoint.folder, like="intfloat/e5-mistral-7b-instruct", max_length=max_length)
    items = [*inputs([*TEXTS, *PADDING_TEXTS]), *inputs(TEXTS, INSTRUCTION)]
    rows = capture_ids(encoder, items)
    assert len(rows) == len(items)
    assert {row[0] for row in rows} == {1}
    assert {row[-1] for row in rows} == {2}
    assert {row.count(1) + row.count(2) for row in rows} == {2}
    assert max(map(len, rows)) <= max_length


def test_unknown_mistral_gets_end_token_set_in_config(tmp_path):
    checkpoint = checkpoints.build_checkpoint("mistral", tmp_path / "model")
    rows = capture_ids(load(checkpoint.folder, pooling="last"), inputs(TEXTS))
    assert {(row[0], row[-1]) for row in rows} == {(1, 2)}


def test_network_of_known_model_receives_expected_ids(known, known_encoder):
    texts = sorted(TEXTS)
    rows = capture_ids(known_encoder, inputs(texts))
    assert sorted(rows) == sorted(known.ids(text) for text in texts)


# -- NV-Embed-v2 -------------------------------------------------------------------------------


def latent_block(weights, hidden, heads):
    """Apply NV-Embed-v2's latent attention, as in its paper and code, one head at a time."""
    cross, forward = (f"latent_attention_model.cross_attend_blocks.{i}." for i in (0, 1))

    def norm(x, name):
        return functional.layer_norm(
            x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"]
        )

    context = norm(weights["latent_attention_model.latents"], cross + "norm_context")
    queries = norm(hidden, cross + "norm") @ weights[cross + "fn.to_q.weight"].T
    keys, values = (context @ weights[cross + "fn.to_kv.weight"].T).chunk(2, dim=-1)
    size = queries.shape[-1] // heads
    attended = []
    for q, k, v in zip(
        *(part.split(size, dim=-1) for part in (queries, keys, values)), strict=True
    ):
        attended.append((q @ k.T * size**-0.5).softmax(dim=-1) @ v)
    hidden = torch.cat(attended, dim=-1) @ weights[cross + "fn.to_out.weight"].T + hidden
    normed = norm(hidden, forward + "norm")
    wide = normed @ weights[forward + "fn.net.0.weight"].T + weights[forward + "fn.net.0.bias"]
    value, gate = wide.chunk(2, dim=-1)
    narrow = (value * functional.gelu(gate)) @ weights[forward + "fn.net.2.weight"].T
    return narrow + weights[forward + "fn.net.2.bias"] + hidden


def nv_ids(checkpoint, prefix, text, max_length=None):
    ids = checkpoint.tokenizer.encode(prefix + text + "</s>").ids
    # The original cuts </s> off; llmcond keeps it, which the documentation says.
    return ids if max_length is None or len(ids) <= max_length else [*ids[: max_length - 1], 2]


def nv_vector(
    checkpoint, text, instruction="", instruction_format=INSTRUCT, max_length=None, heads=2
):
    """Encode one text as the original's ``encode`` does."""
    prefix = instruction_format.partition("{text}")[0].replace("{instruction}", instruction)
    prefix = prefix if instruction else ""
    ids = nv_ids(checkpoint, prefix, text, max_length)
    hidden = latent_block(
        checkpoint.weights, run_network(checkpoint, ids, bidirectional_mask(len(ids))), heads
    )
    pool_mask = torch.ones(len(ids), 1)
    pool_mask[: len(checkpoint.tokenizer.encode(prefix, add_special_tokens=False).tokens)] = 0
    pooled = (hidden * pool_mask).sum(dim=0) / pool_mask.sum()
    return functional.normalize(pooled, dim=0).numpy()


def nv_vectors(checkpoint, items, **options):
    return np.stack(
        [nv_vector(checkpoint, item.text, item.instruction, **options) for item in items]
    )


@pytest.fixture(scope="module")
def nv_checkpoint(tmp_path_factory):
    return checkpoints.build_checkpoint("nv-embed", tmp_path_factory.mktemp("nv") / "model")


@pytest.fixture(scope="module", params=[True, False], ids=["folded", "unfolded"])
def fold(request):
    return request.param


@pytest.fixture(scope="module")
def nv_encoder(nv_checkpoint, fold):
    return load(nv_checkpoint.folder, fold_latents=fold)


@pytest.mark.matrix
@pytest.mark.parametrize("instruction", ["", INSTRUCTION, *OTHER_INSTRUCTIONS])
def test_nv_embed_matches_reference(nv_checkpoint, nv_encoder, instruction):
    items = inputs([*TEXTS, *PADDING_TEXTS], instruction)
    assert_close(nv_encoder.encode(items), nv_vectors(nv_checkpoint, items))


@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_nv_embed_matches_reference_for_single_inputs(nv_checkpoint, nv_encoder, instruction):
    items = inputs(TEXTS, instruction)
    alone = np.concatenate([nv_encoder.encode([item]) for item in items])
    assert_close(alone, nv_vectors(nv_checkpoint, items))


@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_nv_embed_vector_does_not_depend_on_padding(nv_checkpoint, nv_encoder, instruction):
    text = "the color of the dress"
    pairs = [nv_encoder.encode(inputs([text, other], instruction)) for other in PADDING_TEXTS]
    assert_close(
        np.stack(pairs)[:, 0],
        np.stack([nv_vector(nv_checkpoint, text, instruction)] * len(PADDING_TEXTS)),
    )


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 33, 64, 1_000])
def test_nv_embed_vectors_do_not_depend_on_token_budget(nv_checkpoint, fold, budget):
    encoder = load(nv_checkpoint.folder, fold_latents=fold, max_tokens_per_batch=budget)
    items = [*inputs([*TEXTS, *PADDING_TEXTS]), *inputs(TEXTS, INSTRUCTION)]
    assert_close(encoder.encode(items), nv_vectors(nv_checkpoint, items))


def test_nv_embed_accepts_one_instruction_per_input(nv_checkpoint, nv_encoder):
    items = [
        EncoderInput(task, text)
        for text in TEXTS
        for task in ("", INSTRUCTION, *OTHER_INSTRUCTIONS)
    ]
    together = nv_encoder.encode(items)
    assert_close(together, np.concatenate([nv_encoder.encode([item]) for item in items]))
    assert_close(together, nv_vectors(nv_checkpoint, items))
    assert np.abs(together[0] - together[1]).max() > 0.01


@pytest.mark.parametrize(
    "instruction_format",
    [
        "Instruct: {instruction}\nQuery: {text}",
        # Without a space at the end, one token of the instruction is pooled, as in the original.
        "Instruct: {instruction}\nQuery:{text}",
        "{instruction} {text}",
        "{instruction}{text}",
        "{instruction}  \n{text}",
    ],
)
def test_nv_embed_masks_as_many_tokens_as_original(
    nv_checkpoint, nv_encoder, fold, instruction_format
):
    encoder = load(nv_checkpoint.folder, fold_latents=fold, instruction_format=instruction_format)
    items = inputs(TEXTS, INSTRUCTION)
    assert_close(
        encoder.encode(items),
        nv_vectors(nv_checkpoint, items, instruction_format=instruction_format),
    )


@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_truncated_nv_embed_input_keeps_end_token(nv_checkpoint, fold):
    encoder = load(nv_checkpoint.folder, fold_latents=fold, max_length=24)
    items = [
        *inputs([*TEXTS, *PADDING_TEXTS]),
        *inputs([*TEXTS, *PADDING_TEXTS], OTHER_INSTRUCTIONS[0]),
    ]
    assert max(len(nv_ids(nv_checkpoint, "", item.text)) for item in items) > 24
    assert_close(encoder.encode(items), nv_vectors(nv_checkpoint, items, max_length=24))


def test_nv_embed_rejects_instruction_that_leaves_no_room(nv_checkpoint):
    with pytest.raises(UserError, match="too long without its sentence: 'dogs'"):
        load(nv_checkpoint.folder, max_length=8).encode(inputs(["dogs"], INSTRUCTION))


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_nv_embed_tokenises_according_to_tokenizer_json(tmp_path, tokenizer_class):
    checkpoint = checkpoints.build_checkpoint(
        "nv-embed", tmp_path / "model", tokenizer_class=tokenizer_class
    )
    encoder = load(checkpoint.folder)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    expected = [nv_ids(checkpoint, "", text) for text in TEXTS]
    expected += [nv_ids(checkpoint, f"Instruct: {INSTRUCTION}\nQuery: ", text) for text in TEXTS]
    assert sorted(capture_ids(encoder, items)) == sorted(expected)
    assert_close(encoder.encode(items), nv_vectors(checkpoint, items))


@pytest.mark.parametrize("sizes", [(1, 32, 5), (4, 16, 8), (3, 40, 1)], ids=str)
def test_nv_embed_supports_latent_blocks_of_any_size(tmp_path, fold, sizes):
    heads, size, latents = sizes
    options = {"hidden": 32, "cross_heads": heads, "cross_head_dim": size, "latents": latents}
    checkpoint = checkpoints.build_checkpoint("nv-embed", tmp_path / "model", **options)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    vectors = load(checkpoint.folder, fold_latents=fold).encode(items)
    assert_close(vectors, nv_vectors(checkpoint, items, heads=heads))


def test_nv_embed_is_loaded_by_name(nv_checkpoint, cache):
    commit = checkpoints.write_to_hub_cache(nv_checkpoint.folder, cache, "nvidia/NV-Embed-v2")
    encoder = load("nvidia/NV-Embed-v2")
    assert encoder.identity.weights == f"hub:nvidia/NV-Embed-v2@{commit}"
    items = inputs(TEXTS, INSTRUCTION)
    assert_close(encoder.encode(items), nv_vectors(nv_checkpoint, items))


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_sharded_nv_embed_gives_identical_vectors(nv_checkpoint, tmp_path, quantize):
    folder = shutil.copytree(nv_checkpoint.folder, tmp_path / "model")
    checkpoints.shard(folder)
    items = inputs(TEXTS, INSTRUCTION)
    np.testing.assert_array_equal(
        load(folder, quantize=quantize).encode(items),
        load(nv_checkpoint.folder, quantize=quantize).encode(items),
    )


def test_nv_embed_matches_recorded_vectors_of_original_code(fold):
    data = os.environ.get("LLMCOND_DATA")
    folder = Path(data).parent / "fixtures" / "nvembed-tiny" if data else None
    if folder is None or not folder.is_dir():
        pytest.skip("LLMCOND_DATA is not set, or its parent has no fixtures/nvembed-tiny")
    encoder = load(folder, fold_latents=fold)
    for case in json.loads((folder / "expected.json").read_text(encoding="utf-8")):
        task = case["instruction"].removeprefix("Instruct: ").removesuffix("\nQuery: ")
        vectors = encoder.encode(inputs(case["texts"], task))
        np.testing.assert_allclose(vectors, case["embeddings"], rtol=0, atol=2e-5)


# -- direction ---------------------------------------------------------------------------------

DECODERS = {"mistral": {}, "qwen": {"family": "Qwen2"}}


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return checkpoints.build_checkpoint(request.param, folder, **DECODERS[request.param])


def reference_vectors(checkpoint, mask, texts):
    case = Case("", hidden_with_mask(mask), pool_last)
    # The folders are no known models, so the tokenizer's files decide on the special tokens.
    return KnownModel("", case, checkpoint, "").vectors(texts)


def test_attention_option_sets_direction_of_decoder(decoder):
    options = {"pooling": "last"}
    if not decoder.first_ids:
        options["special_tokens"] = "{text} <|endoftext|>"
    texts = [text for text in TEXTS if text]
    forward = load(decoder.folder, attention="causal", **options).encode(inputs(texts))
    both = load(decoder.folder, attention="bidirectional", **options).encode(inputs(texts))
    assert_close(forward, reference_vectors(decoder, causal_mask, texts))
    assert_close(both, reference_vectors(decoder, bidirectional_mask, texts))
    assert cosines(forward[1:], both[1:]).max() < 0.99


def override_direction(monkeypatch, to_causal):
    """Change ``is_causal`` in loaded configs, as if transformers ignored the requested direction.

    None removes the setting, which older versions of transformers did not read.
    """
    original = engine.load_config

    def load_config(checkpoint, attention):
        config = original(checkpoint, attention)
        if to_causal is None:
            del config.is_causal
        else:
            config.is_causal = to_causal
        return config

    monkeypatch.setattr(engine, "load_config", load_config)


@pytest.mark.parametrize("kind", ["gte-qwen2", "nv-embed"])
def test_bidirectional_model_with_causal_attention_raises(tmp_path, monkeypatch, kind):
    checkpoint = checkpoints.build_checkpoint(kind, tmp_path / "model")
    like = {"gte-qwen2": "Alibaba-NLP/gte-Qwen2-7B-instruct"}.get(kind)
    override_direction(monkeypatch, to_causal=True)
    with pytest.raises(
        LlmcondError, match=r"have bidirectional attention, but its attention is causal"
    ):
        load(checkpoint.folder, like=like)


def test_causal_model_with_bidirectional_attention_raises(tmp_path, monkeypatch):
    checkpoint = checkpoints.build_checkpoint("mistral", tmp_path / "model")
    override_direction(monkeypatch, to_causal=False)
    with pytest.raises(
        LlmcondError, match=r"have causal attention, but its attention is bidirectional"
    ):
        load(checkpoint.folder, like="intfloat/e5-mistral-7b-instruct")


def test_direction_that_changes_with_padding_raises(tmp_path, monkeypatch):
    """Code of checkpoints may set it on the layers, which SDPA ignores for padded batches."""
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    original = engine.load_model

    def load_model(resolved, config):
        model = original(resolved, config)
        for layer in model.network.layers:
            layer.self_attn.is_causal = False
        return model

    override_direction(monkeypatch, to_causal=None)
    monkeypatch.setattr(engine, "load_model", load_model)
    with pytest.raises(LlmcondError, match=r"attention is causal in a padded batch"):
        load(checkpoint.folder, like="Alibaba-NLP/gte-Qwen2-7B-instruct")


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_direction_of_quantised_model_is_checked(tmp_path, monkeypatch, quantize):
    checkpoint = checkpoints.build_checkpoint("nv-embed", tmp_path / "model")
    override_direction(monkeypatch, to_causal=True)
    with pytest.raises(
        LlmcondError, match=r"have bidirectional attention, but its attention is causal"
    ):
        load(checkpoint.folder, quantize=quantize)


@pytest.mark.parametrize(
    ("kind", "like", "attention"),
    [
        ("gte-qwen2", "Alibaba-NLP/gte-Qwen2-7B-instruct", "causal"),
        ("nv-embed", None, "causal"),
        ("gemma", "google/embeddinggemma-300m", "causal"),
        ("simcse-bert", "princeton-nlp/sup-simcse-bert-base-uncased", "causal"),
        ("mistral", "Salesforce/SFR-Embedding-Mistral", "bidirectional"),
        ("qwen", "Qwen/Qwen3-Embedding-0.6B", "bidirectional"),
    ],
)
def test_known_model_rejects_other_direction(tmp_path, kind, like, attention):
    checkpoint = checkpoints.build_checkpoint(kind, tmp_path / "model")
    with pytest.raises(UserError, match=rf"attention is '{attention}', but .* was trained with"):
        load(checkpoint.folder, like=like, attention=attention)


def test_unknown_encoder_rejects_causal_attention(tmp_path):
    checkpoint = checkpoints.build_checkpoint("simcse-bert", tmp_path / "model")
    with pytest.raises(UserError, match=r"is an encoder \(bert\), which is bidirectional"):
        load(checkpoint.folder, attention="causal")


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [True, False])
def test_rotary_decoder_vectors_do_not_depend_on_padding_side(decoder, is_causal):
    """For this reason, every model may be padded on the right, whatever its model card says."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(decoder.folder)
    config.is_causal = is_causal
    options = {"config": config, "dtype": torch.float32}
    network = AutoModel.from_pretrained(decoder.folder, **options).eval()
    rows = [decoder.tokenizer.encode(text).ids for text in TEXTS if text]
    width = max(map(len, rows))
    vectors = {}
    for side in ("left", "right"):
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
        for i, row in enumerate(rows):
            span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, span], mask[i, span] = torch.tensor(row), 1
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors[side] = torch.stack([hidden[i][mask[i].bool()][-1] for i in range(len(rows))])
    assert_close(vectors["left"], vectors["right"])


# -- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("gte-qwen2", "Alibaba-NLP/gte-Qwen2-7B-instruct", r"vectors collapse.*mteb #4935"),
        ("gemma", "google/embeddinggemma-300m", "activations overflow in float16"),
    ],
)
def test_model_that_float16_breaks_rejects_float16(tmp_path, kind, name, reason):
    checkpoint = checkpoints.build_checkpoint(kind, tmp_path / "model")
    with pytest.raises(UserError, match=rf"does not work in float16: .*{reason}"):
        load(checkpoint.folder, like=name, dtype="float16")


@pytest.mark.usefixtures("native_16_bit")
def test_auto_dtype_of_gte_qwen2_is_bfloat16(tmp_path):
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    encoder = load(checkpoint.folder, like=name, dtype="auto")
    # The float16 of its config.json is the dtype of the weights on disk, not of the computation.
    assert {weight.dtype for weight in encoder.engine.model.network.parameters()} == {
        torch.bfloat16
    }
    expected = KnownModel(name, CASES[name], checkpoint, "").vectors(TEXTS)
    assert cosines(encoder.encode(inputs(TEXTS)), expected).min() > 0.99


@pytest.mark.usefixtures("native_16_bit")
def test_nv_embed_in_bfloat16_is_close_to_float32(nv_checkpoint, fold):
    encoder = load(nv_checkpoint.folder, dtype="bfloat16", fold_latents=fold)
    assert {weight.dtype for weight in encoder.engine.model.network.parameters()} == {
        torch.bfloat16
    }
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    assert cosines(encoder.encode(items), nv_vectors(nv_checkpoint, items)).min() > 0.99


# -- quantised ---------------------------------------------------------------------------------

QUANTISED_CLASSES = {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}


def linear_class_names(module):
    return {type(part).__name__ for part in module.modules() if isinstance(part, nn.Linear)}


def dequantise(checkpoint, quantize):
    """Return the reference with weights rounded to NF4; 8 bit hardly changes them."""
    if quantize == "8bit":
        return checkpoint
    bits = pytest.importorskip("bitsandbytes").functional
    network = copy.deepcopy(checkpoint.network)
    for part in network.modules():
        if isinstance(part, nn.Linear):
            packed = bits.quantize_4bit(
                part.weight.data, quant_type="nf4", compress_statistics=True
            )
            part.weight.data = bits.dequantize_4bit(*packed).float()
    return replace(checkpoint, network=network)


@pytest.mark.parametrize("quantize", QUANTISED_CLASSES)
def test_quantised_nv_embed_keeps_latent_block_in_full_precision(nv_checkpoint, fold, quantize):
    pytest.importorskip("bitsandbytes")
    encoder = load(nv_checkpoint.folder, quantize=quantize, fold_latents=fold)
    network = encoder.engine.model.network
    assert linear_class_names(network.embedding_model) == {QUANTISED_CLASSES[quantize]}
    assert linear_class_names(network.latent_attention_model) == {"Linear"}
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    vectors, full = encoder.encode(items), nv_vectors(nv_checkpoint, items)
    assert np.isfinite(vectors).all()
    assert cosines(vectors, full).min() > 0.9
    assert cosines(vectors, nv_vectors(dequantise(nv_checkpoint, quantize), items)).min() > 0.99
    assert np.abs(vectors - full).max() > 1e-4  # the weights were in fact quantised


@pytest.mark.parametrize("quantize", QUANTISED_CLASSES)
def test_quantised_nv_embed_is_deterministic(nv_checkpoint, quantize):
    """On a CPU, the first forward pass of 4 bit repacks the weights in place."""
    pytest.importorskip("bitsandbytes")
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    first = load(nv_checkpoint.folder, quantize=quantize)
    vectors = first.encode(items)
    np.testing.assert_array_equal(first.encode(items), vectors)
    np.testing.assert_array_equal(
        load(nv_checkpoint.folder, quantize=quantize).encode(items), vectors
    )


@pytest.mark.parametrize("quantize", QUANTISED_CLASSES)
@pytest.mark.parametrize("kind", ["bert-base-uncased", "roberta-large"])
def test_quantised_simcse_keeps_pooler_in_full_precision(tmp_path, kind, quantize):
    pytest.importorskip("bitsandbytes")
    name = f"princeton-nlp/sup-simcse-{kind}"
    checkpoint = checkpoints.build_checkpoint(CASES[name].kind, tmp_path / "model", hidden=64)
    encoder = load(checkpoint.folder, like=name, quantize=quantize)
    network = encoder.engine.model.network
    assert linear_class_names(network.encoder) == {QUANTISED_CLASSES[quantize]}
    assert linear_class_names(network.pooler) == {"Linear"}
    expected = KnownModel(name, CASES[name], dequantise(checkpoint, quantize), "")
    vectors = encoder.encode(inputs(TEXTS))
    assert np.isfinite(vectors).all()
    assert cosines(vectors, expected.vectors(TEXTS)).min() > 0.99


@pytest.mark.parametrize("quantize", QUANTISED_CLASSES)
def test_quantised_decoder_loads_from_checkpoint_with_head(tmp_path, quantize):
    """Tensors that are read one by one need the prefix ``model.`` removed as well."""
    pytest.importorskip("bitsandbytes")
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model", hidden=64)
    encoder = load(checkpoint.folder, like=name, quantize=quantize)
    assert linear_class_names(encoder.engine.model.network) == {QUANTISED_CLASSES[quantize]}
    expected = KnownModel(name, CASES[name], dequantise(checkpoint, quantize), "")
    vectors = encoder.encode(inputs(TEXTS, INSTRUCTION))
    assert cosines(vectors, expected.vectors(TEXTS, INSTRUCTION)).min() > 0.99


def test_8bit_is_discouraged_for_model_that_float16_breaks(tmp_path):
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    like = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    assumed = {
        quantize: resolve(
            str(checkpoint.folder), EncoderOptions(like=like, device="cpu", quantize=quantize)
        ).assumed
        for quantize in QUANTISED_CLASSES
    }
    assert assumed["4bit"] == ()
    assert "8 bit multiplies in float16" in assumed["8bit"][0]
    assert "--quantize 4bit" in assumed["8bit"][0]


@pytest.mark.parametrize("quantize", QUANTISED_CLASSES)
def test_quantised_vectors_hardly_depend_on_padding(nv_checkpoint, quantize):
    pytest.importorskip("bitsandbytes")
    encoder = load(nv_checkpoint.folder, quantize=quantize)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    alone = np.concatenate([encoder.encode([item]) for item in items])
    assert cosines(alone, encoder.encode(items)).min() > 0.99
