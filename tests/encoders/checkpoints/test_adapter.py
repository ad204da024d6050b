"""Encoders with adapters: llmcond computes the same vectors from a saved adapter as peft does.

The references create and run adapters with peft, unmerged and one text at a time. They do not use
llmcond, except for the network of NV-Embed-v2, which is tested against plain code elsewhere.
"""

import copy
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import save_adapter
from helpers.checkpoints import load_on_cpu
from helpers.vectors import cosines
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from llmcond.cli import run
from llmcond.encoders import EncoderInput, EncoderOptions, find_model, resolve, resolve_base
from llmcond.encoders.checkpoints.adapter import (
    CONFIG,
    ENCODER_RECORD,
    WEIGHTS,
    EncoderRecord,
    attach,
    check_adapter,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.encoders.checkpoints.checkpoint import find_checkpoint
from llmcond.encoders.engine.nv_embed import NVEmbedModel
from llmcond.encoders.loading.loading import build_on_meta, load_config
from llmcond.errors import LlmcondError, UserError

# Work on networks this small is done before a second thread has woken up.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

TEXTS = ["dogs", "the number of people", "what sport is played in the park", "  two spaces: 東京"]
CPU = EncoderOptions(dtype="float32", device="cpu")
NV_EMBED = "nvidia/NV-Embed-v2"
QWEN = "Alibaba-NLP/gte-Qwen2-7B-instruct"
MINILM = find_model("minilm")
ATTENTION = ["q_proj", "v_proj"]


def make_inputs(texts=TEXTS):
    return [EncoderInput("", text) for text in texts]


def encode_texts(folder, **options):
    return load_on_cpu(folder, **options).encode(make_inputs())


def max_deviation(actual, expected):
    """Return the largest distance of a vector from its reference, relative to the norm."""
    distances = np.linalg.norm(actual - expected, axis=1)
    return float((distances / np.linalg.norm(expected, axis=1)).max())


def minilm_folder():
    return resolve("minilm", CPU).checkpoint.folder


# -- references --------------------------------------------------------------------------------


def compute_one_by_one(all_ids, compute):
    with torch.no_grad():
        result = torch.stack([compute(torch.tensor([ids])) for ids in all_ids])
    return nn.functional.normalize(result, dim=1).numpy()


def tokenize(checkpoint, texts=TEXTS):
    text_ids = [checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[*checkpoint.first_ids, *ids, *checkpoint.last_ids] for ids in text_ids]


def tokenize_for_minilm(texts=TEXTS):
    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(text).ids for text in texts]


def run_decoder(model, ids, is_hidden):
    """Return token vectors under an additive mask that hides token j from i if is_hidden(i, j)."""
    positions = torch.arange(ids.shape[1])
    hidden = is_hidden(positions[:, None], positions[None])
    mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)[None, None]
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[0]


def is_later(i, j):
    return j > i


def is_never(i, j):
    return (j > i) & (i > j)


class Case:
    """An encoder with an adapter from peft, and the vectors that peft computes with it."""

    def __init__(self, folder, base, expected, like=None):
        self.folder, self.base, self.expected, self.like = folder, base, expected, like

    def load(self, **options):
        return load_on_cpu(self.folder, like=self.like, **options)


def minilm_case(folder):
    from transformers import AutoModel

    # The pooler of MiniLM is also called "dense". It gets an adapter, but is not used.
    network = AutoModel.from_pretrained(minilm_folder())
    model = save_adapter(
        network, folder / "tuned", "minilm", target_modules=["query", "value", "dense"]
    )
    assert any("pooler" in name for name in load_file(folder / "tuned" / WEIGHTS))

    def pool_mean(ids):
        return model(input_ids=ids).last_hidden_state[0].mean(0)

    return Case(folder / "tuned", "minilm", compute_one_by_one(tokenize_for_minilm(), pool_mean))


def mistral_case(folder):
    checkpoint = checkpoints.build_checkpoint("mistral", folder / "base")
    model = save_adapter(
        checkpoint.network, folder / "tuned", checkpoint.folder, target_modules=ATTENTION
    )
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: run_decoder(model, ids, is_later)[-1]
    )
    return Case(folder / "tuned", checkpoint.folder, expected, "intfloat/e5-mistral-7b-instruct")


def language_model_case(folder):
    """An adapter of a model for another task, whose layer names start with the encoder's name."""
    from transformers import MistralForCausalLM

    checkpoint = checkpoints.build_checkpoint("mistral", folder / "base", head=True)
    language_model = MistralForCausalLM.from_pretrained(
        checkpoint.folder, attn_implementation="eager", dtype=torch.float32
    )
    model = save_adapter(
        language_model, folder / "tuned", checkpoint.folder,
        target_modules=["model.layers.1.self_attn.k_proj", "down_proj", "lm_head"],
        task_type="CAUSAL_LM", use_dora=True,
    )  # fmt: skip
    names = load_file(folder / "tuned" / WEIGHTS)
    assert any(name.startswith("base_model.model.model.layers.1.self_attn") for name in names)
    assert any("lm_head" in name for name in names)
    encoder = model.base_model.model.model
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: run_decoder(encoder, ids, is_later)[-1]
    )
    return Case(folder / "tuned", checkpoint.folder, expected, "intfloat/e5-mistral-7b-instruct")


def qwen_case(folder):
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", folder / "base")
    targets = r".*\.\d+\.(self_attn\.o_proj|mlp\.(up|gate)_proj)"
    model = save_adapter(
        checkpoint.network, folder / "tuned", checkpoint.folder, target_modules=targets
    )
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: run_decoder(model, ids, is_never)[-1]
    )
    return Case(folder / "tuned", checkpoint.folder, expected, QWEN)


def gemma_case(folder):
    checkpoint = checkpoints.build_checkpoint("gemma", folder / "base")
    model = save_adapter(
        checkpoint.network, folder / "tuned", checkpoint.folder,
        target_modules=[*ATTENTION, "embed_tokens"], rank_pattern={"v_proj": 2}, use_rslora=True,
        alpha_pattern={"layers.1.self_attn.q_proj": 32},
    )  # fmt: skip

    def embed(ids):
        positions = torch.arange(ids.shape[1])
        window = (positions[:, None] - positions).abs() > 4
        masks = {"sliding_attention": window, "full_attention": torch.zeros_like(window)}
        minimum = torch.finfo(torch.float32).min
        masks = {name: torch.where(mask, minimum, 0.0)[None, None] for name, mask in masks.items()}
        hidden = model(input_ids=ids, attention_mask=masks).last_hidden_state[0]
        return checkpoint.weights["3_Dense"] @ (checkpoint.weights["2_Dense"] @ hidden.mean(0))

    expected = compute_one_by_one(tokenize(checkpoint), embed)
    return Case(folder / "tuned", checkpoint.folder, expected)


def xlm_r_case(folder):
    checkpoint = checkpoints.build_checkpoint("xlm-r", folder / "base")
    model = save_adapter(
        checkpoint.network, folder / "tuned", checkpoint.folder,
        target_modules=["key", "intermediate.dense"], modules_to_save=["LayerNorm", "classifier"],
        layers_to_transform=[1],
    )  # fmt: skip
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: model(input_ids=ids).last_hidden_state[0].mean(0)
    )
    return Case(folder / "tuned", checkpoint.folder, expected)


def pooler_case(folder):
    checkpoint = checkpoints.build_checkpoint("simcse-bert", folder / "base")
    model = save_adapter(
        checkpoint.network, folder / "tuned", checkpoint.folder, target_modules=["query", "dense"]
    )
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: model(input_ids=ids).pooler_output[0]
    )
    return Case(
        folder / "tuned", checkpoint.folder, expected, "princeton-nlp/sup-simcse-bert-base-uncased"
    )


def nv_embed_case(folder):
    checkpoint = checkpoints.build_checkpoint("nv-embed", folder / "base")
    config = load_config(resolve(str(checkpoint.folder), CPU).checkpoint)
    network = NVEmbedModel.from_pretrained(checkpoint.folder, config=config, dtype=torch.float32)
    # The adapter also covers the latent block, which is folded after loading.
    model = save_adapter(
        network, folder / "tuned", checkpoint.folder, target_modules=[*ATTENTION, "to_kv", "net.2"]
    )
    expected = compute_one_by_one(
        tokenize(checkpoint),
        lambda ids: model(
            input_ids=ids, attention_mask=torch.ones_like(ids)
        ).last_hidden_state[0].mean(0),
    )  # fmt: skip
    return Case(folder / "tuned", checkpoint.folder, expected)


CASES = {
    "minilm": minilm_case,
    "mistral": mistral_case,
    "language model": language_model_case,
    "qwen2": qwen_case,
    "gemma": gemma_case,
    "xlm-r": xlm_r_case,
    "pooler": pooler_case,
    "nv-embed": nv_embed_case,
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return CASES[request.param](tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def tuned_minilm(tmp_path_factory):
    return minilm_case(tmp_path_factory.mktemp("minilm"))


@pytest.fixture
def tuned(tuned_minilm, tmp_path):
    """Folder of an adapter on MiniLM that a test may change."""
    return shutil.copytree(tuned_minilm.folder, tmp_path / "tuned")


@pytest.fixture
def bert(tiny_checkpoint, tmp_path):
    """Folders of a tiny BERT and of an adapter on it, which a test may change."""
    from transformers import BertModel

    base = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    network = BertModel.from_pretrained(base, add_pooling_layer=False)
    save_adapter(network, tmp_path / "adapter", base, target_modules=["query", "value"])
    return base, tmp_path / "adapter"


# -- vectors -----------------------------------------------------------------------------------


@pytest.mark.matrix
def test_vectors_match_peft(case):
    encoder = case.load()
    actual = encoder.encode(make_inputs())
    assert max_deviation(actual, case.expected) < 1e-4
    # The adapter has an effect, so the check above fails for a base without it.
    base = load_on_cpu(case.base, like=case.like)
    assert max_deviation(base.encode(make_inputs()), case.expected) > 0.05
    network = encoder.engine.model.network
    assert not any("lora" in type(module).__module__ for module in network.modules())
    assert not hasattr(network, "peft_config")
    assert not network.training
    assert not any(weight.requires_grad for weight in network.parameters())
    assert encoder.engine.packs == base.engine.packs


@pytest.mark.usefixtures("native_16_bit")
def test_bfloat16_vectors_are_close_to_float32(tuned_minilm):
    encoder = tuned_minilm.load(dtype="bfloat16")
    assert cosines(encoder.encode(make_inputs()), tuned_minilm.expected).min() > 0.999
    network = encoder.engine.model.network
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_merging_into_16_bit_weights_rounds_once(bert, adapter_dtype):
    from transformers import BertModel

    base, folder = bert
    tensors = load_file(folder / WEIGHTS)
    tensors = {name: value.to(getattr(torch, adapter_dtype)) for name, value in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    network = BertModel.from_pretrained(base, add_pooling_layer=False, dtype=torch.bfloat16)
    query = network.encoder.layer[1].attention.self.query
    prefix = "base_model.model.encoder.layer.1.attention.self.query.lora_"
    lora_a, lora_b = (tensors[f"{prefix}{side}.weight"].float() for side in "AB")
    expected = (query.weight.float() + 8 / 4 * lora_b @ lora_a).bfloat16()
    attach(network, folder, "x", merge=True)
    assert network.encoder.layer[1].attention.self.query is query
    torch.testing.assert_close(query.weight, expected, rtol=0, atol=0)


def test_unfolded_latents_give_same_vectors(tmp_path):
    case = nv_embed_case(tmp_path)
    assert max_deviation(encode_texts(case.folder, fold_latents=False), case.expected) < 1e-4


@pytest.mark.usefixtures("native_16_bit")
@pytest.mark.parametrize(("quantize", "dtype"), [("4bit", "bfloat16"), ("8bit", "float32")])
def test_adapter_on_quantised_weights_is_not_merged(tuned_minilm, quantize, dtype):
    pytest.importorskip("bitsandbytes")
    encoder = tuned_minilm.load(quantize=quantize, dtype=dtype)
    network = encoder.engine.model.network
    layer = network.encoder.layer[0].attention.self.query
    assert type(layer).__module__ == "peft.tuners.lora.bnb"
    assert layer.lora_A["default"].weight.dtype == getattr(torch, dtype)
    assert not network.training
    assert not any(weight.requires_grad for weight in network.parameters())
    actual = encoder.encode(make_inputs())
    assert np.isfinite(actual).all()
    base_vectors = load_on_cpu("minilm", quantize=quantize, dtype=dtype).encode(make_inputs())
    assert max_deviation(base_vectors, actual) > 0.05
    # Quantisation of the base alone, without an adapter, lowers the cosines to about this value.
    min_cosine = 0.9 if quantize == "4bit" else 0.99
    assert cosines(actual, tuned_minilm.expected).min() > min_cosine
    reloaded = tuned_minilm.load(quantize=quantize, dtype=dtype).encode(make_inputs())
    np.testing.assert_array_equal(reloaded, actual)


@pytest.mark.parametrize("dora", [False, True])
def test_vectors_on_4_bit_weights_match_peft(tmp_path, dora):
    pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import BertModel

    from llmcond.encoders.loading.memory import quantization_config

    checkpoint = checkpoints.build_checkpoint("simcse-bert", tmp_path / "base", hidden=64)
    save_adapter(
        checkpoint.network,
        tmp_path / "tuned",
        checkpoint.folder,
        target_modules=["query"],
        use_dora=dora,
    )
    base = BertModel.from_pretrained(
        checkpoint.folder,
        dtype=torch.float32,
        quantization_config=quantization_config("4bit", "float32"),
        device_map="cpu",
    )
    model = PeftModel.from_pretrained(base, tmp_path / "tuned").eval()
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: model(input_ids=ids).last_hidden_state[0].mean(0)
    )
    # A CPU multiplies 4-bit weights by one row in another dtype than by several rows.
    assert (
        max_deviation(encode_texts(tmp_path / "tuned", quantize="4bit", pooling="mean"), expected)
        < 0.02
    )


def test_latent_block_of_quantised_model_gets_its_adapter(tmp_path):
    """Folding NV-Embed-v2's latent block reads its weights, but not those of an adapter."""
    pytest.importorskip("bitsandbytes")
    case = nv_embed_case(tmp_path)
    folded = encode_texts(case.folder, quantize="8bit")
    assert cosines(folded, case.expected).min() > 0.99
    assert (
        max_deviation(folded, encode_texts(case.folder, quantize="8bit", fold_latents=False)) < 0.01
    )


def test_attach_works_on_weights_offloaded_by_accelerate(bert):
    from accelerate import cpu_offload
    from transformers import BertModel

    base, folder = bert
    ids = torch.tensor([[2, 5, 6, 7, 3]])

    def compute_states(network):
        with torch.no_grad():
            return network(input_ids=ids).last_hidden_state

    plain = BertModel.from_pretrained(base, add_pooling_layer=False).eval()
    base_states = compute_states(plain)
    expected = compute_states(attach(copy.deepcopy(plain), folder, "x", merge=True))
    offloaded = cpu_offload(plain, torch.device("cpu"))
    assert all(weight.is_meta for weight in offloaded.parameters())
    actual = compute_states(attach(offloaded, folder, "x", merge=True))
    assert (actual - base_states).abs().max() > 0.01
    torch.testing.assert_close(actual, expected)


def test_attach_keeps_device(bert, monkeypatch):
    """Loading with peft itself may move a model to another device; ``attach`` must not."""
    from transformers import BertModel

    base, folder = bert
    monkeypatch.setattr("peft.utils.infer_device", lambda: "cuda")
    network = BertModel.from_pretrained(base, add_pooling_layer=False)
    network.hf_device_map = {"": "cpu"}
    assert attach(network, folder, "x", merge=True) is network
    assert type(network.encoder.layer[0].attention.self.query) is nn.Linear
    assert {weight.device.type for weight in network.parameters()} == {"cpu"}


# -- identity ----------------------------------------------------------------------------------


def test_identity_names_adapter_and_base(tuned_minilm):
    weights = tuned_minilm.load().identity.weights
    adapter, _, base = weights.partition(" on ")
    assert base == load_on_cpu("minilm").identity.weights
    assert adapter.startswith("sha256:")
    assert len(adapter) == len("sha256:") + 64


def load_fingerprint(folder, **options):
    return load_identity(folder, **options).fingerprint


def load_identity(folder, **options):
    defaults = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    return resolve(str(folder), EncoderOptions(**{**defaults, **options})).identity


def test_fingerprint_differs_between_adapters_and_base(tuned, tmp_path):
    other = shutil.copytree(tuned, tmp_path / "other")
    assert load_fingerprint(other) == load_fingerprint(tuned)
    tensors = load_file(other / WEIGHTS)
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    save_file(tensors, other / WEIGHTS, {"format": "pt"})
    assert len({load_fingerprint(other), load_fingerprint(tuned), load_fingerprint("minilm")}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"base_model_name_or_path": MINILM.repo},
        {"base_model_name_or_path": "MiniLM"},
        {"peft_version": "9.9"},
        {"inference_mode": False},
        {"task_type": "FEATURE_EXTRACTION"},
        {"lora_dropout": 0.5},
        {"auto_mapping": None},
        {"target_modules": ["value", "query", "dense"]},
        {"rank_pattern": None},
        {"a_field_of_later_versions": None},
    ],
)
def test_irrelevant_config_fields_do_not_change_fingerprint(tuned, change):
    before = load_fingerprint(tuned)
    checkpoints.change_json(tuned / CONFIG, **change)
    assert load_fingerprint(tuned) == before


@pytest.mark.parametrize(
    "change",
    [
        {"r": 8},
        {"lora_alpha": 16},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["query"]},
        {"exclude_modules": ["key"]},
        {"alpha_pattern": {"query": 3}},
        {"rank_pattern": {"query": 3}},
        {"layers_to_transform": [1]},
        {"fan_in_fan_out": True},
    ],
)
def test_config_fields_that_affect_vectors_change_fingerprint(tuned, change):
    before = load_fingerprint(tuned)
    checkpoints.change_json(tuned / CONFIG, **change)
    assert load_fingerprint(tuned) != before


def test_scale_is_read_from_config(tuned, tuned_minilm):
    checkpoints.change_json(tuned / CONFIG, lora_alpha=0)
    assert max_deviation(encode_texts(tuned), encode_texts("minilm")) < 1e-6
    assert max_deviation(tuned_minilm.expected, encode_texts("minilm")) > 0.05


# -- base --------------------------------------------------------------------------------------


def test_base_is_resolved_by_name_in_adapter_config(tuned):
    resolved = resolve(str(tuned), CPU)
    assert resolved.checkpoint.known is MINILM
    assert resolved.checkpoint.folder == minilm_folder()
    assert resolved.checkpoint.adapter == tuned
    assert resolved.checkpoint.name == str(tuned)
    assert resolved.assumed == ()
    assert resolved.identity.max_length == 256  # the value of the alias


def test_base_alone_keeps_its_settings(bert):
    base, folder = bert
    write_record(folder, base=str(base), like=None, settings={"pooling": "cls", "max_length": 16})
    resolved_adapter, resolved_base = resolve(str(folder), CPU), resolve(str(base), CPU)
    assert resolved_adapter.identity.pooling == "cls"
    assert resolve_base(resolved_adapter).identity == resolved_base.identity
    assert resolve_base(resolved_adapter).checkpoint.name == str(base)
    # An encoder that was not trained is its own base. One trained as a whole has no known base.
    assert resolve_base(resolved_base) is resolved_base
    write_record(base, base=None, like=None, settings={"pooling": "cls"})
    assert resolve_base(resolve(str(base), CPU)) is None


def test_base_path_may_be_relative_to_adapter(bert, monkeypatch, tmp_path):
    base, folder = bert
    expected = load_fingerprint(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=f"../{base.name}")
    assert load_fingerprint(folder) == expected


def test_revision_of_base_in_folder_is_ignored(bert):
    base, folder = bert
    expected = load_fingerprint(folder)
    checkpoints.change_json(folder / CONFIG, revision="main")
    assert load_fingerprint(folder) == expected
    write_record(folder, base=str(base), revision="0" * 40, like=None, settings={})
    assert load_fingerprint(folder) == expected


def test_like_is_accepted_for_adapter_of_unknown_base(tmp_path):
    case = qwen_case(tmp_path)
    assert find_checkpoint(str(case.folder), None).known is None
    options = EncoderOptions(device="cpu", like=QWEN)
    assert resolve(str(case.folder), options).checkpoint.known is find_model(QWEN)


def test_like_must_match_known_base_of_adapter(tuned):
    assert load_identity(tuned, like="minilm") == load_identity(tuned)
    with pytest.raises(UserError, match=rf"with the settings of minilm, so like cannot be {QWEN}"):
        load_identity(tuned, like=QWEN)
    with pytest.raises(UserError, match="not a known model"):
        load_identity(tuned, like="nothing")


def test_revision_of_adapter_folder_is_rejected(tuned):
    with pytest.raises(
        UserError, match=r"revision is 'main', but .* is a folder, and only models on the hub have"
    ):
        load_identity(tuned, revision="main")


def test_missing_base_error_names_base_and_adapter(bert):
    base, folder = bert
    shutil.rmtree(base)
    with pytest.raises(UserError) as raised:
        load_on_cpu(folder)
    assert f"{folder} is an adapter of {base}, according to its {CONFIG}, but" in str(raised.value)
    assert f"Restore the base, or change base_model_name_or_path in {CONFIG}." in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [None, "", 5])
def test_adapter_without_base_name_is_rejected(bert, name):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=name)
    expected = rf"its {CONFIG} does not name the encoder .* Set base_model_name_or_path"
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


def test_adapter_as_base_is_rejected(tuned, tmp_path):
    second = shutil.copytree(tuned, tmp_path / "second")
    for base in (tuned, second):  # second: the adapter names itself
        checkpoints.change_json(second / CONFIG, base_model_name_or_path=str(base))
        with pytest.raises(
            UserError, match=rf"{base} is an adapter, so it cannot be the base of .*\. Merge it"
        ):
            load_on_cpu(second)


# -- invalid adapters --------------------------------------------------------------------------


def remove_tensors(folder, part):
    tensors = {
        name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if part not in name
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_missing_tensors_are_counted_and_named(bert):
    _, folder = bert
    remove_tensors(folder, "layer.1.")
    expected = r"lacks 4 tensors \(encoder\.layer\.1\.attention\.self\.query\.lora_A\.weight, .*…\)"
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


def test_unexpected_tensors_are_counted_and_named(bert):
    _, folder = bert
    tensors = load_file(folder / WEIGHTS)
    tensors["base_model.model.encoder.layer.7.attention.self.query.lora_A.weight"] = torch.ones(1)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"has 1 tensors \(encoder\.layer\.7\..*do not belong"):
        load_on_cpu(folder)


def test_tensors_of_layers_missing_from_config_are_rejected(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, target_modules=["query"])
    with pytest.raises(UserError, match=r"has 4 tensors .*value\.lora_A.* do not belong to it"):
        load_on_cpu(folder)


def test_tensors_of_wrong_size_are_rejected(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, r=8)
    with pytest.raises(
        UserError, match=r"lora_A\.weight of the shape \(4, 32\); expected \(8, 32\)"
    ):
        load_on_cpu(folder)


def test_adapter_of_narrower_base_is_rejected(bert, tiny_checkpoint):
    _, folder = bert
    wide_base = tiny_checkpoint(hidden=64)
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=str(wide_base))
    with pytest.raises(UserError, match=r"\(4, 32\); expected \(4, 64\)\. .* another base"):
        load_on_cpu(folder)


def test_adapter_of_other_architecture_error_lists_available_layers(bert, tiny_checkpoint):
    _, folder = bert
    checkpoints.change_json(
        folder / CONFIG, base_model_name_or_path=str(tiny_checkpoint("mistral"))
    )
    with pytest.raises(UserError) as raised:
        load_on_cpu(folder)
    message = str(raised.value)
    assert (
        "is an adapter of the layers query, value, but its base (mistral) has none of them"
        in message
    )
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in message


@pytest.mark.parametrize("config", [{"r": 10**7}, {"rank_pattern": {"query": 10**12}}])
def test_excessive_ranks_are_rejected(bert, config):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, **config)
    with pytest.raises(UserError, match=r"has a rank of 10?,000,.*tensors have at most 32"):
        load_on_cpu(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_weights_are_upcast_without_loss(bert, dtype):
    _, folder = bert
    rounded = {key: value.to(dtype) for key, value in load_file(folder / WEIGHTS).items()}
    save_file(rounded, folder / WEIGHTS, {"format": "pt"})
    actual = encode_texts(folder)
    upcast = {key: value.float() for key, value in rounded.items()}
    save_file(upcast, folder / WEIGHTS, {"format": "pt"})
    np.testing.assert_array_equal(actual, encode_texts(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_rejected(bert, value):
    _, folder = bert
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(LlmcondError, match=r"has NaN or infinity in 1 tensors"):
        load_on_cpu(folder)


@pytest.mark.usefixtures("native_16_bit")
def test_overflow_of_merged_weights_is_rejected(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, lora_alpha=1e8)
    with pytest.raises(LlmcondError, match=r"overflow in torch\.float16. Try another dtype"):
        load_on_cpu(folder, dtype="float16")


@pytest.mark.parametrize("change", [lambda data: data[:-10], lambda data: b"not safetensors"])
def test_damaged_weights_are_rejected(bert, change):
    _, folder = bert
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    with pytest.raises(LlmcondError, match=rf"{WEIGHTS} of .* cannot be read") as raised:
        load_on_cpu(folder)
    assert "\n" not in str(raised.value)


def test_pickled_weights_are_not_read(bert):
    _, folder = bert
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"adapter_model\.bin is not read.*safe_serialization"):
        load_on_cpu(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match=rf"is an adapter without {WEIGHTS}\. Save it again"):
        load_on_cpu(folder)


def test_other_peft_types_are_rejected(bert):
    _, folder = bert
    for kind in ("IA3", "PREFIX_TUNING", None):
        checkpoints.change_json(folder / CONFIG, peft_type=kind)
        with pytest.raises(UserError, match=rf"of the type {kind!r}, and only LORA is supported"):
            load_on_cpu(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "all"}, "bias = 'all', which is not supported"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication = "),
        ({"target_parameters": ["weight"]}, "target_parameters = "),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices = "),
        ({"megatron_config": {"x": 1}, "megatron_core": "antigravity"}, "megatron_con?"),
        ({"megatron_core": "antigravity"}, "megatron_core = 'antigravity'"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights too. Convert it"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": "many"}, "cannot be applied to its base \\(bert\\)"),
        ({"r": 0}, "cannot be applied to its base \\(bert\\)"),
        ({"target_modules": "(("}, "cannot be applied to its base \\(bert\\)"),
        ({"target_modules": ["LayerNorm"]}, "cannot be applied to its base \\(bert\\)"),
    ],
)
def test_unsupported_settings_are_named(bert, change, message):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, **change)
    with pytest.raises(UserError, match=message) as raised:
        load_on_cpu(folder)
    assert "\n" not in str(raised.value)


def test_settings_of_newer_peft_are_ignored_with_warning(bert, caplog):
    _, folder = bert
    expected = encode_texts(folder)
    checkpoints.change_json(folder / CONFIG, of_later_versions=3, off_in_later_versions=None)
    np.testing.assert_array_equal(encode_texts(folder), expected)
    assert "another version of peft, and of_later_versions in its" in caplog.text


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_initialisation_of_adapter_does_not_affect_vectors(bert, init):
    _, folder = bert
    expected = encode_texts(folder)
    checkpoints.change_json(folder / CONFIG, init_lora_weights=init)
    np.testing.assert_array_equal(encode_texts(folder), expected)


def test_invalid_json_in_config_is_rejected(bert):
    _, folder = bert
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match="is not a readable JSON file"):
        load_on_cpu(folder)


def test_folder_with_both_model_and_adapter_is_rejected(bert):
    base, folder = bert
    shutil.copy(base / "config.json", folder)
    with pytest.raises(UserError, match=r"both a model and an adapter\. Remove config\.json"):
        load_on_cpu(folder)


@pytest.fixture
def no_peft(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it raises an ImportError


def test_plain_adapter_needs_no_peft(bert, no_peft):
    base, folder = bert
    adapted = encode_texts(folder)
    assert np.abs(adapted - encode_texts(base)).max() > 0.01


def test_missing_peft_is_reported_before_download(bert, monkeypatch, no_peft):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, use_dora=True)
    monkeypatch.setattr(
        "llmcond.encoders.loading.loading.fetch_weights",
        lambda _: pytest.fail("weights were fetched"),
    )
    expected = (
        r"is an adapter that is not plain LoRA on unquantised weights, which needs peft\. "
        r"Install it: pip install 'llmcond\[lora\]'"
    )
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


def test_invalid_adapter_is_reported_before_download(bert, monkeypatch):
    _, folder = bert
    remove_tensors(folder, "layer.1.")
    monkeypatch.setattr(
        "llmcond.encoders.loading.loading.fetch_weights",
        lambda _: pytest.fail("weights were fetched"),
    )
    with pytest.raises(UserError, match="lacks 4 tensors"):
        load_on_cpu(folder)


# -- training record ---------------------------------------------------------------------------

SETTINGS = {
    "attention": "bidirectional",
    "pooling": "cls",
    "pool_over": "all",
    "normalize": False,
    "max_length": 24,
    "instruction_format": "{instruction}: {text}",
    "special_tokens": "tokenizer",
}


def write_record(folder, **changes):
    fields = {
        "base": "minilm",
        "revision": None,
        "like": MINILM.repo,
        "settings": SETTINGS,
        "quantize": "none",
        "base_weights": None,
        **changes,
    }
    write_encoder_record(folder, EncoderRecord(**fields))


def test_training_record_round_trip(tmp_path):
    assert read_encoder_record(tmp_path) is None
    record = EncoderRecord("a/b", "0" * 40, "minilm", SETTINGS, "4bit", "hub:a/b@" + "0" * 40)
    write_encoder_record(tmp_path, record)
    assert json.loads((tmp_path / ENCODER_RECORD).read_text())["format"] == 1
    assert read_encoder_record(tmp_path) == record


def test_settings_of_training_are_the_defaults(tuned):
    write_record(tuned)
    identity = load_identity(tuned)
    assert {name: getattr(identity, name) for name in SETTINGS} == SETTINGS
    options = {"pooling": "mean", "max_length": 32, "normalize": True, "instruction_format": ""}
    identity = load_identity(tuned, **options)
    assert {name: getattr(identity, name) for name in SETTINGS} == {**SETTINGS, **options}


def test_settings_of_training_affect_vectors(tuned):
    options = {name: SETTINGS[name] for name in ("pooling", "normalize", "max_length")}
    expected = encode_texts(tuned, **options)
    assert max_deviation(encode_texts(tuned), expected) > 0.1
    write_record(tuned)
    np.testing.assert_array_equal(encode_texts(tuned), expected)


def test_recorded_pool_over_applies_to_compatible_pooling_only(tuned):
    write_record(tuned, settings={"pooling": "mean", "pool_over": "text"})
    assert load_identity(tuned).pool_over == "text"
    assert load_identity(tuned, pooling="last").pool_over == "text"
    assert load_identity(tuned, pooling="cls").pool_over == "all"


def test_recorded_base_overrides_adapter_config(tuned, bert):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path=str(bert[0]), revision="x")
    write_record(tuned)
    assert resolve(str(tuned), CPU).checkpoint.known is MINILM


def test_recorded_like_applies_to_base(tmp_path):
    case = qwen_case(tmp_path)
    write_record(case.folder, base=str(case.base), like=QWEN, settings={})
    encoder = load_on_cpu(case.folder)
    assert encoder.resolved.checkpoint.known is find_model(QWEN)
    assert max_deviation(encoder.encode(make_inputs()), case.expected) < 1e-4
    with pytest.raises(UserError, match=rf"with the settings of {QWEN}, so like cannot be minilm"):
        load_on_cpu(case.folder, like="minilm")


def test_base_with_other_weights_than_in_training_is_rejected(bert, tiny_checkpoint):
    base, folder = bert
    trained_weights = load_identity(base).weights
    write_record(folder, base=str(base), like=None, settings={}, base_weights=trained_weights)
    assert load_fingerprint(folder)
    shutil.rmtree(base)
    shutil.copytree(tiny_checkpoint(seed=1), base)
    with pytest.raises(UserError) as raised:
        load_on_cpu(folder)
    assert f"was trained on {base} with the weights {trained_weights}" in str(raised.value)
    assert f"are {load_identity(base).weights}" in str(raised.value)


def test_quantisation_in_training_is_reported(tuned):
    write_record(tuned, quantize="4bit")
    (message,) = resolve(str(tuned), CPU).assumed
    assert "trained on 4bit" in message
    assert "--quantize 4bit" in message
    options = EncoderOptions(device="cpu", quantize="4bit")
    assert resolve(str(tuned), options).assumed == ()
    write_record(tuned)
    assert resolve(str(tuned), CPU).assumed == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantize": "5bit"}, "quantize = '5bit'"),
        ({"base": 5}, "base = 5"),
        ({"like": ["minilm"]}, "like = "),
        ({"settings": None}, "settings = None"),
        ({"settings": {"pooling": "max"}}, "pooling = 'max'"),
        ({"settings": {"attention": None}}, "attention = None"),
        ({"settings": {"max_length": True}}, "max_length = True"),
        ({"settings": {"dtype": "float32"}}, "dtype = 'float32'"),
        ({"format": None}, "states no format"),
        ({"format": 2}, "newer version"),
        ({"like": "nothing"}, "not a known model"),
    ],
)
def test_damaged_record_is_named(tuned, change, message):
    write_record(tuned)
    checkpoints.change_json(tuned / ENCODER_RECORD, **change)
    with pytest.raises(LlmcondError, match=message) as raised:
        load_identity(tuned)
    assert ENCODER_RECORD in str(raised.value)
    assert "\n" not in str(raised.value)


def test_invalid_json_in_record_is_rejected(tuned):
    (tuned / ENCODER_RECORD).write_text("{")
    with pytest.raises(UserError, match="is not a readable JSON file"):
        load_identity(tuned)


def test_adapter_record_without_base_is_rejected(tuned):
    write_record(tuned, base=None)
    with pytest.raises(
        UserError, match=rf"its {ENCODER_RECORD} does not name the encoder .* Set base to"
    ):
        load_identity(tuned)


def test_full_checkpoint_uses_settings_of_training(bert):
    base, _ = bert
    weights = load_identity(base).weights
    plain = load_identity(base)
    write_record(base, base=None, like=None, base_weights="sha256:00", quantize="4bit")
    resolved = resolve(str(base), CPU)
    assert {name: getattr(resolved.identity, name) for name in SETTINGS} == SETTINGS
    assert resolved.assumed == ()
    assert resolved.identity.weights == weights  # the identity has separate fields for the settings
    assert load_identity(base, **{name: getattr(plain, name) for name in SETTINGS}) == plain
    options = {name: SETTINGS[name] for name in ("pooling", "normalize", "max_length")}
    expected = encode_texts(base)
    (base / ENCODER_RECORD).unlink()
    np.testing.assert_array_equal(encode_texts(base, **options), expected)


def test_full_checkpoint_uses_recorded_like(tmp_path):
    checkpoint = checkpoints.build_checkpoint("gte-qwen2", tmp_path / "model")
    write_record(checkpoint.folder, base=None, like=QWEN, settings={})
    assert resolve(str(checkpoint.folder), CPU).checkpoint.known is find_model(QWEN)
    assert load_identity(checkpoint.folder, like=QWEN) == load_identity(checkpoint.folder)
    with pytest.raises(UserError, match="so like cannot be minilm"):
        load_identity(checkpoint.folder, like="minilm")


def test_vocabulary_named_like_record_is_ignored(bert):
    base, _ = bert
    expected = load_fingerprint(base)
    (base / ENCODER_RECORD).write_text(json.dumps({"the": 5, "format": 18_982, "settings": 33_692}))
    assert load_fingerprint(base) == expected


# -- modules of sentence-transformers ----------------------------------------------------------


def write_modules(folder, *kinds, pooling="cls"):
    """Write the files that sentence-transformers saves next to an adapter."""
    kinds = ["Transformer", "Pooling", *kinds]
    entries = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    checkpoints.write_json(folder / "modules.json", entries)
    checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 48})


def test_sentence_transformers_settings_next_to_adapter_are_used(tuned):
    write_modules(tuned)
    identity = load_identity(tuned)
    assert (identity.pooling, identity.normalize, identity.max_length) == ("cls", False, 48)
    assert load_identity(tuned, pooling="mean").pooling == "mean"
    write_record(tuned, settings={"pooling": "last"})
    assert load_identity(tuned).pooling == "last"


def test_unsupported_modules_next_to_adapter_are_rejected(tuned):
    write_modules(tuned, "Dense")
    with pytest.raises(UserError, match="dense layer after its pooling, which is not supported"):
        load_identity(tuned)
    write_modules(tuned, "LSTM")
    with pytest.raises(UserError, match="module 'LSTM'"):
        load_identity(tuned)


# -- the hub -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, in offline mode."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def test_adapter_and_base_are_loaded_from_hub(cache, tmp_path):
    case = xlm_r_case(tmp_path)
    commit = checkpoints.write_to_hub_cache(case.base, cache, "me/base")
    checkpoints.change_json(
        case.folder / CONFIG, base_model_name_or_path="me/base", revision=commit
    )
    checkpoints.write_to_hub_cache(case.folder, cache, "me/tuned")
    encoder = load_on_cpu("me/tuned")
    assert max_deviation(encoder.encode(make_inputs()), case.expected) < 1e-4
    assert encoder.name == "me/tuned"
    assert encoder.identity.weights.endswith(f" on hub:me/base@{commit}")
    assert not encoder.identity.weights.startswith("hub:")
    assert encoder.identity == load_on_cpu(case.folder).identity


def test_unavailable_base_on_hub_is_not_user_error(cache, tuned):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path="me/base")
    with pytest.raises(
        LlmcondError, match=rf"{tuned} is an adapter of me/base.*cannot be"
    ) as error:
        load_on_cpu(tuned)
    assert type(error.value) is LlmcondError


def test_adapter_on_hub_that_names_itself_as_base_is_rejected(cache, tuned):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path="me/tuned")
    checkpoints.write_to_hub_cache(tuned, cache, "me/tuned")
    with pytest.raises(
        UserError, match="me/tuned is an adapter, so it cannot be the base of me/tuned"
    ):
        load_on_cpu("me/tuned")


def test_repository_without_checkpoint_or_adapter_is_rejected(cache, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "README.md").write_text("x")
    checkpoints.write_to_hub_cache(tmp_path / "x", cache, "me/x")
    with pytest.raises(UserError, match=r"me/x has no config\.json"):
        load_on_cpu("me/x")


# -- commands ----------------------------------------------------------------------------------


def test_check_reports_base_of_adapter(tuned, capsys):
    write_record(tuned, quantize="4bit")
    assert run(["models", "--check", str(tuned), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == str(tuned)
    assert report["source"] == f"{tuned} on {minilm_folder()}"
    assert report["pooling"] == "cls"
    assert "--quantize 4bit" in report["assumed"][0]
    assert run(["models", "--check", str(tuned)]) == 0


def test_check_rejects_adapter_that_does_not_fit(tuned, capsys):
    remove_tensors(tuned, "layer.5.")
    assert run(["models", "--check", str(tuned)]) == 2
    assert "tensors (encoder.layer.5." in capsys.readouterr().err


def test_run_records_adapter_and_rejects_changed_one(
    tuned, tmp_path, capsys, monkeypatch, write_rows
):
    rows = [("two men play", f"{n} dogs", "the number", 1 + n % 5) for n in range(6)]
    data = write_rows(rows)
    monkeypatch.chdir(tmp_path)
    arguments = ["--data", str(data), "--run", "made", "--device", "cpu", "--dtype", "float32"]
    assert run(["extract", "--model", tuned.name, *arguments]) == 0
    manifest = json.loads(Path("made/run.json").read_text())["encoder"]
    assert manifest["model"] == str(tuned)
    assert manifest["revision"] is None
    assert manifest["identity"]["weights"] == load_identity(tuned).weights
    assert run(["extract", "--model", tuned.name, *arguments]) == 0
    from llmcond.runs import open_run

    assert open_run(Path("made")).resolve_encoder("cpu").identity == load_identity(tuned)
    # A changed adapter at the same path is a different encoder.
    checkpoints.change_json(tuned / CONFIG, lora_alpha=9)
    capsys.readouterr()
    assert run(["extract", "--model", tuned.name, *arguments]) == 2
    assert "holds features of" in capsys.readouterr().err


@pytest.mark.parametrize("merge", [True, False])
def test_adapter_fit_is_checked_without_weights(bert, merge):
    base, folder = bert
    network = build_on_meta(load_config(resolve(str(base), CPU).checkpoint))
    network.pooler = None
    check_adapter(network, folder, "x", merge=merge)
    assert all(weight.is_meta for weight in network.parameters())
