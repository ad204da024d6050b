"""The known models on tiny checkpoints: against plain transformers, one text at a time.

No reference here uses llmcond: ids, masks, pooling and NV-Embed-v2's latent block are written out,
and attention is eager, which knows no direction but that of the mask it is given.
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
from helpers.vectors import cosines, near
from torch import nn
from torch.nn import functional

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine import engine
from llmcond.errors import LlmcondError, UserError

# What is this small is done before a second thread has woken up.
pytestmark = pytest.mark.usefixtures("one_thread")

INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: two dogs"
OTHERS = ["classification", "find {text} in\nthe river", "the time of the day is given :"]
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
#: Batch mates of one word to many: they decide how much padding the others get.
MATES = ["the dogs " * n for n in range(1, 16)]


def inputs(texts, instruction=""):
    return [EncoderInput(instruction, text) for text in texts]


def load(name, **options):
    fixed = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    options = {**fixed, "max_tokens_per_batch": 100_000, **options}
    return load_encoder(str(name), **options)


def causal(length):
    """A mask that is added to the scores: none of a token's followers."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def both_ways(length):
    return torch.zeros(1, 1, length, length)


def window(length):
    """EmbeddingGemma's: both ways, half of its 8 tokens on either side.

    transformers has two masks for it: with ``config.is_causal`` False on top of the model's own
    ``use_bidirectional_attention``, a token sees one more on either side.
    """
    places = torch.arange(length)
    far = (places[:, None] - places).abs() > 4
    return torch.where(far, torch.finfo(torch.float32).min, 0.0)[None, None]


@torch.no_grad()
def decode(made, ids, mask):
    return made.network(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]


# -- references --------------------------------------------------------------------------------


def by_mask(mask):
    return lambda made, ids: decode(made, ids, mask(len(ids)))


def by_windows(made, ids):
    n = len(ids)
    return decode(made, ids, {"sliding_attention": window(n), "full_attention": both_ways(n)})


def from_position(start):
    """The token vectors of an encoder whose first token has this position."""

    @torch.no_grad()
    def hidden(made, ids):
        output = made.network(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            token_type_ids=torch.zeros(1, len(ids), dtype=torch.long),
            position_ids=torch.arange(start, start + len(ids))[None],
        )
        return output.last_hidden_state[0]

    return hidden


def last(made, hidden):
    return hidden[-1]


def mean(made, hidden):
    return hidden.sum(dim=0) / len(hidden)


def cls(made, hidden):
    return hidden[0]


def pooler(made, hidden):
    weights = made.weights
    return torch.tanh(weights["pooler.dense.weight"] @ hidden[0] + weights["pooler.dense.bias"])


def mean_and_dense(made, hidden):
    return made.weights["3_Dense"] @ (made.weights["2_Dense"] @ mean(made, hidden))


@dataclass(frozen=True)
class Case:
    """How a model is made, and how its authors use it."""

    kind: str
    hidden: Callable
    pool: Callable
    form: str = ""
    options: dict = field(default_factory=dict)


CASES = {
    "Salesforce/SFR-Embedding-Mistral": Case(
        "mistral", by_mask(causal), last, INSTRUCT, {"head": True, "end": False}
    ),
    "intfloat/e5-mistral-7b-instruct": Case("mistral", by_mask(causal), last, INSTRUCT),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": Case("gte-qwen2", by_mask(both_ways), last, INSTRUCT),
    "intfloat/multilingual-e5-large-instruct": Case("xlm-r", from_position(2), mean, INSTRUCT),
    "princeton-nlp/sup-simcse-roberta-large": Case("simcse-roberta", from_position(2), pooler),
    "princeton-nlp/sup-simcse-bert-base-uncased": Case("simcse-bert", from_position(0), pooler),
    "Qwen/Qwen3-Embedding-0.6B": Case(
        "qwen", by_mask(causal), last, "Instruct: {instruction}\nQuery:{text}"
    ),
    "google/embeddinggemma-300m": Case(
        "gemma", by_windows, mean_and_dense, "task: {instruction} | query: {text}"
    ),
    "BAAI/bge-m3": Case("xlm-r", from_position(2), cls, "", {"pooling": "cls"}),
}


@dataclass(frozen=True)
class Known:
    """A tiny checkpoint that the hub's cache holds under a known name."""

    name: str
    case: Case
    made: checkpoints.Made
    commit: str

    def ids(self, text, instruction="", max_length=None):
        made = self.made
        if instruction:
            # Not str.format: texts have braces of their own.
            before, _, between = self.case.form.partition("{instruction}")
            text = before + instruction + between.replace("{text}", "") + text
        content = made.tokenizer.encode(text, add_special_tokens=False).ids
        if max_length is not None:
            content = content[: max_length - len(made.before) - len(made.after)]
        return [*made.before, *content, *made.after]

    def vector(self, text, instruction="", max_length=None):
        ids = self.ids(text, instruction, max_length)
        pooled = self.case.pool(self.made, self.case.hidden(self.made, ids))
        return (pooled / pooled.norm()).numpy()

    def vectors(self, texts, instruction="", max_length=None):
        return np.stack([self.vector(text, instruction, max_length) for text in texts])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the hub in a folder of ours, with nothing behind it."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        # Read from the environment when the library is imported, which was before.
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield folder


@pytest.fixture(scope="module", params=CASES)
def known(request, cache, tmp_path_factory):
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("made") / "model"
    made = checkpoints.make(case.kind, folder, **case.options)
    commit = checkpoints.put_into_hub_cache(folder, cache, request.param)
    return Known(request.param, case, made, commit)


@pytest.fixture(scope="module")
def loaded(known):
    return load(known.name)


# -- known models ------------------------------------------------------------------------------


def test_known_model_comes_from_the_hubs_cache(known, loaded):
    assert loaded.identity.weights == f"hub:{known.name}@{known.commit}"
    assert loaded.resolved.assumed == ()


def test_known_model_equals_plain_transformers(known, loaded):
    near(loaded.encode(inputs(TEXTS)), known.vectors(TEXTS))


def test_known_model_counts_the_tokens_of_its_own_tokenizer(known, loaded):
    counts = loaded.encode_counted(inputs(TEXTS)).n_tokens
    assert counts.tolist() == [len(known.ids(text)) for text in TEXTS]


def test_known_model_gives_the_same_vector_alone(known, loaded):
    alone = np.concatenate([loaded.encode(inputs([text])) for text in TEXTS])
    near(alone, known.vectors(TEXTS))


def test_known_model_gives_the_same_vector_with_mates_of_every_length(known, loaded):
    text = "the color of the dress"
    pairs = np.stack([loaded.encode(inputs([text, mate])) for mate in MATES])
    near(pairs[:, 0], np.stack([known.vector(text)] * len(MATES)))
    near(pairs[:, 1], known.vectors(MATES))


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 40, 150])
def test_known_model_gives_the_same_vectors_at_any_budget(known, budget):
    encoder = load(known.name, max_tokens_per_batch=budget)
    near(encoder.encode(inputs([*TEXTS, *MATES])), known.vectors([*TEXTS, *MATES]))


def test_known_model_has_its_own_instruction_format(known, loaded):
    if not known.case.form:
        with pytest.raises(UserError, match="takes no instruction"):
            loaded.encode(inputs(["dogs"], INSTRUCTION))
        return
    vectors = loaded.encode(inputs(TEXTS, INSTRUCTION))
    near(vectors, known.vectors(TEXTS, INSTRUCTION))
    assert np.abs(vectors - known.vectors(TEXTS)).max() > 0.01


def test_known_model_takes_another_instruction_for_each_input(known, loaded):
    tasks = ["", *OTHERS] if known.case.form else [""]
    mixed = [EncoderInput(task, text) for text in TEXTS for task in tasks]
    near(
        loaded.encode(mixed),
        np.stack([known.vector(item.text, item.instruction) for item in mixed]),
    )


@pytest.mark.matrix
@pytest.mark.parametrize("max_length", [24, 30])
@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_truncated_inputs_keep_their_special_tokens(known, max_length):
    encoder = load(known.name, max_length=max_length)
    texts = [*TEXTS, *MATES]
    near(encoder.encode(inputs(texts)), known.vectors(texts, max_length=max_length))
    if known.case.form:
        items = inputs(texts, "classification")
        near(encoder.encode(items), known.vectors(texts, "classification", max_length))


def test_dense_layers_that_are_not_downloaded_yet_are_fetched(tmp_path, monkeypatch):
    """What transformers leaves in the cache: its own files, and none of sentence-transformers."""
    made = checkpoints.make("gemma", tmp_path / "model")
    name, cache = "google/embeddinggemma-300m", tmp_path / "hub"
    commit = checkpoints.put_into_hub_cache(made.folder, cache, name)
    snapshot = cache / "models--google--embeddinggemma-300m" / "snapshots" / commit
    for layer in ("2_Dense", "3_Dense"):
        (snapshot / layer / "model.safetensors").unlink()

    def download(repo, allow_patterns, **options):
        if "*.safetensors" in allow_patterns:
            for layer in ("2_Dense", "3_Dense"):
                file = f"{layer}/model.safetensors"
                shutil.copyfile(made.folder / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    expected = Known(name, CASES[name], made, commit).vectors(["", "dogs"])
    near(load(name).encode(inputs(["", "dogs"])), expected)


def test_copy_of_a_known_model_is_taken_for_it(tmp_path):
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    made = checkpoints.make("gte-qwen2", tmp_path / "model")
    encoder = load(made.folder, like=name)
    expected = Known(name, CASES[name], made, "")
    near(encoder.encode(inputs(TEXTS, INSTRUCTION)), expected.vectors(TEXTS, INSTRUCTION))


def test_sharded_copy_of_a_known_model_loads_alike(tmp_path):
    made = checkpoints.make("mistral", tmp_path / "model", head=True)
    options = {"like": "Salesforce/SFR-Embedding-Mistral"}
    whole = load(made.folder, **options).encode(inputs(TEXTS))
    checkpoints.shard(made.folder)
    np.testing.assert_array_equal(load(made.folder, **options).encode(inputs(TEXTS)), whole)


def test_code_of_gte_qwen2_never_runs(cache, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    made = checkpoints.make("gte-qwen2", tmp_path / "model", marker=marker)
    name = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    checkpoints.put_into_hub_cache(made.folder, cache, name)
    # Were a question asked, "y" would run it.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    from_cache = load(name).encode(inputs(TEXTS))
    from_folder = load(made.folder, like=name).encode(inputs(TEXTS))
    np.testing.assert_array_equal(from_cache, from_folder)
    with pytest.raises(UserError, match=r"needs code from its repository.*--like NAME"):
        load(made.folder)
    assert not marker.exists()


# -- the ends of an input ----------------------------------------------------------------------


def given(encoder, items):
    """Return the ids that the network itself is given for each input."""
    rows = []

    def note(module, args, kwargs):
        if "packed" not in kwargs:
            masks = kwargs["attention_mask"].bool()
            pairs = zip(kwargs["input_ids"], masks, strict=True)
            rows.extend(ids[mask].tolist() for ids, mask in pairs)
            return
        ids, positions = (kwargs[name][0].tolist() for name in ("input_ids", "position_ids"))
        starts = [at for at, position in enumerate(positions) if position == min(positions)]
        rows.extend(ids[start:stop] for start, stop in pairwise([*starts, len(ids)]))

    hook = encoder.engine.model.network.register_forward_pre_hook(note, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "shares_prefixes", False)
        encoder.encode_counted(items)
    hook.remove()
    return rows


@pytest.mark.parametrize("max_length", [60, 4096])
@pytest.mark.parametrize("end", [True, False], ids=["config-asks", "config-does-not-ask"])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_e5_mistral_gets_both_ends_though_its_tokenizer_adds_one(
    tmp_path, tokenizer_class, end, max_length
):
    made = checkpoints.make("mistral", tmp_path / "model", tokenizer_class=tokenizer_class, end=end)
    # What made transformers 5 lose the end: the files say two things (mteb #5237).
    assert made.tokenizer.encode("dogs").tokens[0] == "<s>"
    assert made.tokenizer.encode("dogs").tokens[-1] != "</s>"
    encoder = load(made.folder, like="intfloat/e5-mistral-7b-instruct", max_length=max_length)
    items = [*inputs([*TEXTS, *MATES]), *inputs(TEXTS, INSTRUCTION)]
    rows = given(encoder, items)
    assert len(rows) == len(items)
    assert {row[0] for row in rows} == {1}
    assert {row[-1] for row in rows} == {2}
    assert {row.count(1) + row.count(2) for row in rows} == {2}
    assert max(map(len, rows)) <= max_length


def test_unknown_mistral_whose_config_asks_for_an_end_gets_it(tmp_path):
    made = checkpoints.make("mistral", tmp_path / "model")
    rows = given(load(made.folder, pooling="last"), inputs(TEXTS))
    assert {(row[0], row[-1]) for row in rows} == {(1, 2)}


def test_every_known_model_gets_its_own_ids(known, loaded):
    texts = sorted(TEXTS)
    rows = given(loaded, inputs(texts))
    assert sorted(rows) == sorted(known.ids(text) for text in texts)


# -- NV-Embed-v2 -------------------------------------------------------------------------------


def latent_block(weights, hidden, heads):
    """NV-Embed-v2's latent attention, as its paper and its code have it, a head at a time."""
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


def nv_ids(made, prefix, text, max_length=None):
    ids = made.tokenizer.encode(prefix + text + "</s>").ids
    # The original cuts </s> off; what is kept here instead is stated in the documentation.
    return ids if max_length is None or len(ids) <= max_length else [*ids[: max_length - 1], 2]


def nv_vector(made, text, instruction="", form=INSTRUCT, max_length=None, heads=2):
    """Encode as the original's ``encode`` does, for one text."""
    prefix = form.partition("{text}")[0].replace("{instruction}", instruction)
    prefix = prefix if instruction else ""
    ids = nv_ids(made, prefix, text, max_length)
    hidden = latent_block(made.weights, decode(made, ids, both_ways(len(ids))), heads)
    pool_mask = torch.ones(len(ids), 1)
    pool_mask[: len(made.tokenizer.encode(prefix, add_special_tokens=False).tokens)] = 0
    pooled = (hidden * pool_mask).sum(dim=0) / pool_mask.sum()
    return functional.normalize(pooled, dim=0).numpy()


def nv_vectors(made, items, **options):
    return np.stack([nv_vector(made, item.text, item.instruction, **options) for item in items])


@pytest.fixture(scope="module")
def nv(tmp_path_factory):
    return checkpoints.make("nv-embed", tmp_path_factory.mktemp("nv") / "model")


@pytest.fixture(scope="module", params=[True, False], ids=["folded", "unfolded"])
def fold(request):
    return request.param


@pytest.fixture(scope="module")
def nv_loaded(nv, fold):
    return load(nv.folder, fold_latents=fold)


@pytest.mark.matrix
@pytest.mark.parametrize("instruction", ["", INSTRUCTION, *OTHERS])
def test_nv_embed_equals_the_original(nv, nv_loaded, instruction):
    items = inputs([*TEXTS, *MATES], instruction)
    near(nv_loaded.encode(items), nv_vectors(nv, items))


@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_nv_embed_gives_the_same_vector_alone(nv, nv_loaded, instruction):
    items = inputs(TEXTS, instruction)
    alone = np.concatenate([nv_loaded.encode([item]) for item in items])
    near(alone, nv_vectors(nv, items))


@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_nv_embed_gives_the_same_vector_with_mates_of_every_length(nv, nv_loaded, instruction):
    text = "the color of the dress"
    pairs = [nv_loaded.encode(inputs([text, mate], instruction)) for mate in MATES]
    near(np.stack(pairs)[:, 0], np.stack([nv_vector(nv, text, instruction)] * len(MATES)))


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 33, 64, 1_000])
def test_nv_embed_gives_the_same_vectors_at_any_budget(nv, fold, budget):
    encoder = load(nv.folder, fold_latents=fold, max_tokens_per_batch=budget)
    items = [*inputs([*TEXTS, *MATES]), *inputs(TEXTS, INSTRUCTION)]
    near(encoder.encode(items), nv_vectors(nv, items))


def test_nv_embed_takes_another_instruction_for_each_input(nv, nv_loaded):
    items = [EncoderInput(task, text) for text in TEXTS for task in ("", INSTRUCTION, *OTHERS)]
    together = nv_loaded.encode(items)
    near(together, np.concatenate([nv_loaded.encode([item]) for item in items]))
    near(together, nv_vectors(nv, items))
    assert np.abs(together[0] - together[1]).max() > 0.01


@pytest.mark.parametrize(
    "form",
    [
        "Instruct: {instruction}\nQuery: {text}",
        # Without a space at its end one of the instruction's own tokens is pooled: so it was.
        "Instruct: {instruction}\nQuery:{text}",
        "{instruction} {text}",
        "{instruction}{text}",
        "{instruction}  \n{text}",
    ],
)
def test_nv_embed_masks_as_many_tokens_as_the_original(nv, nv_loaded, fold, form):
    encoder = load(nv.folder, fold_latents=fold, instruction_format=form)
    items = inputs(TEXTS, INSTRUCTION)
    near(encoder.encode(items), nv_vectors(nv, items, form=form))


@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_nv_embed_keeps_its_end_where_it_is_truncated(nv, fold):
    encoder = load(nv.folder, fold_latents=fold, max_length=24)
    items = [*inputs([*TEXTS, *MATES]), *inputs([*TEXTS, *MATES], OTHERS[0])]
    assert max(len(nv_ids(nv, "", item.text)) for item in items) > 24
    near(encoder.encode(items), nv_vectors(nv, items, max_length=24))


def test_nv_embed_refuses_an_instruction_that_leaves_no_token(nv):
    with pytest.raises(UserError, match="too long without its sentence: 'dogs'"):
        load(nv.folder, max_length=8).encode(inputs(["dogs"], INSTRUCTION))


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_nv_embed_tokenises_as_its_tokenizer_json_says(tmp_path, tokenizer_class):
    made = checkpoints.make("nv-embed", tmp_path / "model", tokenizer_class=tokenizer_class)
    encoder = load(made.folder)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    expected = [nv_ids(made, "", text) for text in TEXTS]
    expected += [nv_ids(made, f"Instruct: {INSTRUCTION}\nQuery: ", text) for text in TEXTS]
    assert sorted(given(encoder, items)) == sorted(expected)
    near(encoder.encode(items), nv_vectors(made, items))


@pytest.mark.parametrize("sizes", [(1, 32, 5), (4, 16, 8), (3, 40, 1)], ids=str)
def test_nv_embed_has_a_latent_block_of_any_size(tmp_path, fold, sizes):
    heads, size, latents = sizes
    options = {"hidden": 32, "cross_heads": heads, "cross_head_dim": size, "latents": latents}
    made = checkpoints.make("nv-embed", tmp_path / "model", **options)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    vectors = load(made.folder, fold_latents=fold).encode(items)
    near(vectors, nv_vectors(made, items, heads=heads))


def test_nv_embed_is_known_by_its_name(nv, cache):
    commit = checkpoints.put_into_hub_cache(nv.folder, cache, "nvidia/NV-Embed-v2")
    encoder = load("nvidia/NV-Embed-v2")
    assert encoder.identity.weights == f"hub:nvidia/NV-Embed-v2@{commit}"
    items = inputs(TEXTS, INSTRUCTION)
    near(encoder.encode(items), nv_vectors(nv, items))


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_sharded_nv_embed_loads_alike(nv, tmp_path, quantize):
    folder = shutil.copytree(nv.folder, tmp_path / "model")
    checkpoints.shard(folder)
    items = inputs(TEXTS, INSTRUCTION)
    np.testing.assert_array_equal(
        load(folder, quantize=quantize).encode(items),
        load(nv.folder, quantize=quantize).encode(items),
    )


def test_nv_embed_equals_what_its_own_code_gave(fold):
    data = os.environ.get("LLMCOND_DATA")
    folder = Path(data).parent / "fixtures" / "nvembed-tiny" if data else None
    if folder is None or not folder.is_dir():
        pytest.skip("LLMCOND_DATA is not set, or no fixtures/nvembed-tiny lies beside it")
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
    return checkpoints.make(request.param, folder, **DECODERS[request.param])


def reference_of(made, mask, texts):
    case = Case("", by_mask(mask), last)
    # Neither folder is known: its tokenizer's files decide the ends.
    return Known("", case, made, "").vectors(texts)


def test_direction_of_a_decoder_is_that_which_is_asked_for(decoder):
    options = {"pooling": "last"}
    if not decoder.before:
        options["special_tokens"] = "{text} <|endoftext|>"
    texts = [text for text in TEXTS if text]
    one = load(decoder.folder, attention="causal", **options).encode(inputs(texts))
    both = load(decoder.folder, attention="bidirectional", **options).encode(inputs(texts))
    near(one, reference_of(decoder, causal, texts))
    near(both, reference_of(decoder, both_ways, texts))
    assert cosines(one[1:], both[1:]).max() < 0.99


def turned(monkeypatch, to_causal):
    """Have transformers attend the other way, as a version that ignores its config would.

    With None the config says nothing, as it did before transformers read it.
    """
    honest = engine.load_config

    def load_config(checkpoint, attention):
        config = honest(checkpoint, attention)
        if to_causal is None:
            del config.is_causal
        else:
            config.is_causal = to_causal
        return config

    monkeypatch.setattr(engine, "load_config", load_config)


@pytest.mark.parametrize("kind", ["gte-qwen2", "nv-embed"])
def test_bidirectional_model_that_runs_causally_is_caught(tmp_path, monkeypatch, kind):
    made = checkpoints.make(kind, tmp_path / "model")
    like = {"gte-qwen2": "Alibaba-NLP/gte-Qwen2-7B-instruct"}.get(kind)
    turned(monkeypatch, to_causal=True)
    with pytest.raises(
        LlmcondError, match=r"have bidirectional attention, but its attention is causal"
    ):
        load(made.folder, like=like)


def test_causal_model_that_runs_in_both_directions_is_caught(tmp_path, monkeypatch):
    made = checkpoints.make("mistral", tmp_path / "model")
    turned(monkeypatch, to_causal=False)
    with pytest.raises(
        LlmcondError, match=r"have causal attention, but its attention is bidirectional"
    ):
        load(made.folder, like="intfloat/e5-mistral-7b-instruct")


def test_direction_that_holds_without_padding_only_is_caught(tmp_path, monkeypatch):
    """What code of checkpoints does: set on the layers, SDPA is causal again for padded batches."""
    made = checkpoints.make("gte-qwen2", tmp_path / "model")
    honest = engine.load_model

    def load_model(resolved, config):
        model = honest(resolved, config)
        for layer in model.network.layers:
            layer.self_attn.is_causal = False
        return model

    turned(monkeypatch, to_causal=None)
    monkeypatch.setattr(engine, "load_model", load_model)
    with pytest.raises(LlmcondError, match=r"attention is causal in a padded batch"):
        load(made.folder, like="Alibaba-NLP/gte-Qwen2-7B-instruct")


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_direction_of_a_quantised_model_is_checked(tmp_path, monkeypatch, quantize):
    made = checkpoints.make("nv-embed", tmp_path / "model")
    turned(monkeypatch, to_causal=True)
    with pytest.raises(
        LlmcondError, match=r"have bidirectional attention, but its attention is causal"
    ):
        load(made.folder, quantize=quantize)


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
def test_known_model_keeps_its_direction(tmp_path, kind, like, attention):
    made = checkpoints.make(kind, tmp_path / "model")
    with pytest.raises(UserError, match=rf"attention is '{attention}', but .* was trained with"):
        load(made.folder, like=like, attention=attention)


def test_encoder_of_no_known_name_is_not_made_causal(tmp_path):
    made = checkpoints.make("simcse-bert", tmp_path / "model")
    with pytest.raises(UserError, match=r"is an encoder \(bert\), which is bidirectional"):
        load(made.folder, attention="causal")


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [True, False])
def test_rotary_decoder_gives_the_same_vectors_padded_on_either_side(decoder, is_causal):
    """Why every model may be padded on the right, whatever its card pads."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(decoder.folder)
    config.is_causal = is_causal
    options = {"config": config, "dtype": torch.float32}
    network = AutoModel.from_pretrained(decoder.folder, **options).eval()
    rows = [decoder.tokenizer.encode(text).ids for text in TEXTS if text]
    width = max(map(len, rows))
    found = {}
    for side in ("left", "right"):
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, place], mask[i, place] = torch.tensor(row), 1
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
        found[side] = torch.stack([hidden[i][mask[i].bool()][-1] for i in range(len(rows))])
    near(found["left"], found["right"])


# -- types of numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("gte-qwen2", "Alibaba-NLP/gte-Qwen2-7B-instruct", r"vectors collapse.*mteb #4935"),
        ("gemma", "google/embeddinggemma-300m", "activations overflow in float16"),
    ],
)
def test_model_that_float16_breaks_is_not_computed_in_it(tmp_path, monkeypatch, kind, name, reason):
    # On a CPU without bfloat16 too, where auto is float32 for any other model.
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    made = checkpoints.make(kind, tmp_path / "model")
    with pytest.raises(UserError, match=rf"does not work in float16: .*{reason}"):
        load(made.folder, like=name, dtype="float16")
    options = EncoderOptions(like=name, device="cpu")
    assert resolve(str(made.folder), options).identity.dtype == "bfloat16"


def test_auto_computes_gte_qwen2_in_bfloat16(tmp_path):
    made = checkpoints.make("gte-qwen2", tmp_path / "model")
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    encoder = load(made.folder, like=name, dtype="auto")
    # Its config.json says float16: that is the type of the weights on disk, not for computing.
    assert {weight.dtype for weight in encoder.engine.model.network.parameters()} == {
        torch.bfloat16
    }
    expected = Known(name, CASES[name], made, "").vectors(TEXTS)
    assert cosines(encoder.encode(inputs(TEXTS)), expected).min() > 0.99


def test_nv_embed_in_bfloat16_is_close_to_float32(nv, fold):
    encoder = load(nv.folder, dtype="bfloat16", fold_latents=fold)
    assert {weight.dtype for weight in encoder.engine.model.network.parameters()} == {
        torch.bfloat16
    }
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    assert cosines(encoder.encode(items), nv_vectors(nv, items)).min() > 0.99


# -- quantised ---------------------------------------------------------------------------------

QUANTISED = {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}


def linear_kinds(module):
    return {type(part).__name__ for part in module.modules() if isinstance(part, nn.Linear)}


def dequantised(made, quantize):
    """The reference whose matrices went through NF4; 8 bit hardly changes them."""
    if quantize == "8bit":
        return made
    bits = pytest.importorskip("bitsandbytes").functional
    network = copy.deepcopy(made.network)
    for part in network.modules():
        if isinstance(part, nn.Linear):
            packed = bits.quantize_4bit(
                part.weight.data, quant_type="nf4", compress_statistics=True
            )
            part.weight.data = bits.dequantize_4bit(*packed).float()
    return replace(made, network=network)


@pytest.mark.parametrize("quantize", QUANTISED)
def test_nv_embed_is_quantised_but_for_its_latent_block(nv, fold, quantize):
    pytest.importorskip("bitsandbytes")
    encoder = load(nv.folder, quantize=quantize, fold_latents=fold)
    network = encoder.engine.model.network
    assert linear_kinds(network.embedding_model) == {QUANTISED[quantize]}
    assert linear_kinds(network.latent_attention_model) == {"Linear"}
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    vectors, full = encoder.encode(items), nv_vectors(nv, items)
    assert np.isfinite(vectors).all()
    assert cosines(vectors, full).min() > 0.9
    assert cosines(vectors, nv_vectors(dequantised(nv, quantize), items)).min() > 0.99
    assert np.abs(vectors - full).max() > 1e-4  # its weights were quantised indeed


@pytest.mark.parametrize("quantize", QUANTISED)
def test_quantised_nv_embed_gives_the_same_bits_again(nv, quantize):
    """The first forward pass of 4 bit on a CPU packs its weights anew, in place."""
    pytest.importorskip("bitsandbytes")
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    first = load(nv.folder, quantize=quantize)
    vectors = first.encode(items)
    np.testing.assert_array_equal(first.encode(items), vectors)
    np.testing.assert_array_equal(load(nv.folder, quantize=quantize).encode(items), vectors)


@pytest.mark.parametrize("quantize", QUANTISED)
@pytest.mark.parametrize("kind", ["bert-base-uncased", "roberta-large"])
def test_quantised_simcse_keeps_its_pooler(tmp_path, kind, quantize):
    pytest.importorskip("bitsandbytes")
    name = f"princeton-nlp/sup-simcse-{kind}"
    made = checkpoints.make(CASES[name].kind, tmp_path / "model", hidden=64)
    encoder = load(made.folder, like=name, quantize=quantize)
    network = encoder.engine.model.network
    assert linear_kinds(network.encoder) == {QUANTISED[quantize]}
    assert linear_kinds(network.pooler) == {"Linear"}
    expected = Known(name, CASES[name], dequantised(made, quantize), "")
    vectors = encoder.encode(inputs(TEXTS))
    assert np.isfinite(vectors).all()
    assert cosines(vectors, expected.vectors(TEXTS)).min() > 0.99


@pytest.mark.parametrize("quantize", QUANTISED)
def test_quantised_decoder_is_read_from_under_its_head(tmp_path, quantize):
    """Read tensor by tensor, the names still have to lose the ``model.`` that the others have."""
    pytest.importorskip("bitsandbytes")
    name = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    made = checkpoints.make("gte-qwen2", tmp_path / "model", hidden=64)
    encoder = load(made.folder, like=name, quantize=quantize)
    assert linear_kinds(encoder.engine.model.network) == {QUANTISED[quantize]}
    expected = Known(name, CASES[name], dequantised(made, quantize), "")
    vectors = encoder.encode(inputs(TEXTS, INSTRUCTION))
    assert cosines(vectors, expected.vectors(TEXTS, INSTRUCTION)).min() > 0.99


def test_8_bit_is_advised_against_where_float16_breaks_a_model(tmp_path):
    made = checkpoints.make("gte-qwen2", tmp_path / "model")
    like = "Alibaba-NLP/gte-Qwen2-7B-instruct"
    assumed = {
        quantize: resolve(
            str(made.folder), EncoderOptions(like=like, device="cpu", quantize=quantize)
        ).assumed
        for quantize in QUANTISED
    }
    assert assumed["4bit"] == ()
    assert "8 bit multiplies in float16" in assumed["8bit"][0]
    assert "--quantize 4bit" in assumed["8bit"][0]


@pytest.mark.parametrize("quantize", QUANTISED)
def test_quantised_vectors_do_not_depend_on_padding_much(nv, quantize):
    pytest.importorskip("bitsandbytes")
    encoder = load(nv.folder, quantize=quantize)
    items = [*inputs(TEXTS), *inputs(TEXTS, INSTRUCTION)]
    alone = np.concatenate([encoder.encode([item]) for item in items])
    assert cosines(alone, encoder.encode(items)).min() > 0.99
