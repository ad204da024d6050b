"""Adapters as encoders: peft's own folders give what peft's own models compute.

Adapters are made and run by peft itself, unmerged and one text at a time; nothing of the
references uses llmcond but NV-Embed-v2's network, which is tested against plain code elsewhere.
"""

import copy
import importlib.util
import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import tune
from helpers.checkpoints import load
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
    inject,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.encoders.checkpoints.checkpoint import find_checkpoint
from llmcond.encoders.engine.nv_embed import NVEmbedModel
from llmcond.encoders.loading.architecture import build_on_meta, load_config
from llmcond.errors import LlmcondError, UserError

# What is this small is done before a second thread has woken up.
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


def inputs(texts=TEXTS):
    return [EncoderInput("", text) for text in texts]


def vectors(folder, **options):
    return load(folder, **options).encode(inputs())


def far(found, expected):
    """Return how far vectors are from others at most, as a share of their norm."""
    away = np.linalg.norm(found - expected, axis=1)
    return float((away / np.linalg.norm(expected, axis=1)).max())


def minilm_folder():
    return resolve("minilm", CPU).checkpoint.folder


# -- references --------------------------------------------------------------------------------


def one_by_one(all_ids, compute):
    with torch.no_grad():
        found = torch.stack([compute(torch.tensor([ids])) for ids in all_ids])
    return nn.functional.normalize(found, dim=1).numpy()


def ids_of(made, texts=TEXTS):
    found = [made.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[*made.before, *ids, *made.after] for ids in found]


def minilm_ids(texts=TEXTS):
    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(text).ids for text in texts]


def decoded(model, ids, blocked):
    """Return token vectors under a mask that is added: blocked(i, j) tells what i does not see."""
    places = torch.arange(ids.shape[1])
    hidden = blocked(places[:, None], places[None])
    mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)[None, None]
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[0]


def later(i, j):
    return j > i


def nothing(i, j):
    return (j > i) & (i > j)


class Case:
    """An encoder on which peft has put an adapter, and the vectors that peft computes with it."""

    def __init__(self, folder, base, expected, like=None):
        self.folder, self.base, self.expected, self.like = folder, base, expected, like

    def load(self, **options):
        return load(self.folder, like=self.like, **options)


def minilm_case(place):
    from transformers import AutoModel

    # Its pooler is called dense too: it gets an adapter, and is not used.
    network = AutoModel.from_pretrained(minilm_folder())
    model = tune(network, place / "tuned", "minilm", target_modules=["query", "value", "dense"])
    assert any("pooler" in name for name in load_file(place / "tuned" / WEIGHTS))

    def mean(ids):
        return model(input_ids=ids).last_hidden_state[0].mean(0)

    return Case(place / "tuned", "minilm", one_by_one(minilm_ids(), mean))


def mistral_case(place):
    made = checkpoints.make("mistral", place / "base")
    model = tune(made.network, place / "tuned", made.folder, target_modules=ATTENTION)
    expected = one_by_one(ids_of(made), lambda ids: decoded(model, ids, later)[-1])
    return Case(place / "tuned", made.folder, expected, "intfloat/e5-mistral-7b-instruct")


def language_model_case(place):
    """An adapter of a model for another task, whose layers have the encoder's name in front."""
    from transformers import MistralForCausalLM

    made = checkpoints.make("mistral", place / "base", head=True)
    whole = MistralForCausalLM.from_pretrained(
        made.folder, attn_implementation="eager", dtype=torch.float32
    )
    model = tune(
        whole, place / "tuned", made.folder,
        target_modules=["model.layers.1.self_attn.k_proj", "down_proj", "lm_head"],
        task_type="CAUSAL_LM", use_dora=True,
    )  # fmt: skip
    names = load_file(place / "tuned" / WEIGHTS)
    assert any(name.startswith("base_model.model.model.layers.1.self_attn") for name in names)
    assert any("lm_head" in name for name in names)
    inner = model.base_model.model.model
    expected = one_by_one(ids_of(made), lambda ids: decoded(inner, ids, later)[-1])
    return Case(place / "tuned", made.folder, expected, "intfloat/e5-mistral-7b-instruct")


def qwen_case(place):
    made = checkpoints.make("gte-qwen2", place / "base")
    targets = r".*\.\d+\.(self_attn\.o_proj|mlp\.(up|gate)_proj)"
    model = tune(made.network, place / "tuned", made.folder, target_modules=targets)
    expected = one_by_one(ids_of(made), lambda ids: decoded(model, ids, nothing)[-1])
    return Case(place / "tuned", made.folder, expected, QWEN)


def gemma_case(place):
    made = checkpoints.make("gemma", place / "base")
    model = tune(
        made.network, place / "tuned", made.folder,
        target_modules=[*ATTENTION, "embed_tokens"], rank_pattern={"v_proj": 2}, use_rslora=True,
        alpha_pattern={"layers.1.self_attn.q_proj": 32},
    )  # fmt: skip

    def pooled(ids):
        places = torch.arange(ids.shape[1])
        window = (places[:, None] - places).abs() > 4
        masks = {"sliding_attention": window, "full_attention": torch.zeros_like(window)}
        least = torch.finfo(torch.float32).min
        masks = {name: torch.where(m, least, 0.0)[None, None] for name, m in masks.items()}
        hidden = model(input_ids=ids, attention_mask=masks).last_hidden_state[0]
        return made.weights["3_Dense"] @ (made.weights["2_Dense"] @ hidden.mean(0))

    expected = one_by_one(ids_of(made), pooled)
    return Case(place / "tuned", made.folder, expected)


def xlm_r_case(place):
    made = checkpoints.make("xlm-r", place / "base")
    model = tune(
        made.network, place / "tuned", made.folder,
        target_modules=["key", "intermediate.dense"], modules_to_save=["LayerNorm", "classifier"],
        layers_to_transform=[1],
    )  # fmt: skip
    expected = one_by_one(
        ids_of(made), lambda ids: model(input_ids=ids).last_hidden_state[0].mean(0)
    )
    return Case(place / "tuned", made.folder, expected)


def pooler_case(place):
    made = checkpoints.make("simcse-bert", place / "base")
    model = tune(made.network, place / "tuned", made.folder, target_modules=["query", "dense"])
    expected = one_by_one(ids_of(made), lambda ids: model(input_ids=ids).pooler_output[0])
    return Case(
        place / "tuned", made.folder, expected, "princeton-nlp/sup-simcse-bert-base-uncased"
    )


def nv_embed_case(place):
    made = checkpoints.make("nv-embed", place / "base")
    config = load_config(resolve(str(made.folder), CPU).checkpoint)
    network = NVEmbedModel.from_pretrained(made.folder, config=config, dtype=torch.float32)
    # Its latent block too, which is folded after loading.
    model = tune(
        network, place / "tuned", made.folder, target_modules=[*ATTENTION, "to_kv", "net.2"]
    )
    expected = one_by_one(
        ids_of(made),
        lambda ids: model(
            input_ids=ids, attention_mask=torch.ones_like(ids)
        ).last_hidden_state[0].mean(0),
    )  # fmt: skip
    return Case(place / "tuned", made.folder, expected)


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
    """An adapter's folder on MiniLM that a test may change."""
    return shutil.copytree(tuned_minilm.folder, tmp_path / "tuned")


@pytest.fixture
def bert(tiny_checkpoint, tmp_path):
    """A tiny BERT, and an adapter on it, that a test may change."""
    from transformers import BertModel

    base = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    network = BertModel.from_pretrained(base, add_pooling_layer=False)
    tune(network, tmp_path / "adapter", base, target_modules=["query", "value"])
    return base, tmp_path / "adapter"


# -- vectors -----------------------------------------------------------------------------------


@pytest.mark.matrix
def test_vectors_are_those_of_peft(case):
    encoder = case.load()
    found = encoder.encode(inputs())
    assert far(found, case.expected) < 1e-4
    # The adapter does something, so a base without it would be found out.
    base = load(case.base, like=case.like)
    assert far(base.encode(inputs()), case.expected) > 0.05
    network = encoder.engine.model.network
    assert not any("lora" in type(module).__module__ for module in network.modules())
    assert not hasattr(network, "peft_config")
    assert not network.training
    assert not any(weight.requires_grad for weight in network.parameters())
    assert encoder.engine.packs == base.engine.packs


def test_vectors_in_bfloat16_are_near_those_in_float32(tuned_minilm):
    encoder = tuned_minilm.load(dtype="bfloat16")
    assert cosines(encoder.encode(inputs()), tuned_minilm.expected).min() > 0.999
    network = encoder.engine.model.network
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("written", ["float32", "bfloat16"])
def test_what_is_added_to_weights_of_16_bit_is_rounded_once(bert, written):
    from transformers import BertModel

    base, folder = bert
    tensors = load_file(folder / WEIGHTS)
    tensors = {name: value.to(getattr(torch, written)) for name, value in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    network = BertModel.from_pretrained(base, add_pooling_layer=False, dtype=torch.bfloat16)
    query = network.encoder.layer[1].attention.self.query
    prefix = "base_model.model.encoder.layer.1.attention.self.query.lora_"
    first, second = (tensors[f"{prefix}{side}.weight"].float() for side in "AB")
    expected = (query.weight.float() + 8 / 4 * second @ first).bfloat16()
    attach(network, folder, "x", merge=True)
    assert network.encoder.layer[1].attention.self.query is query
    torch.testing.assert_close(query.weight, expected, rtol=0, atol=0)


def test_unfolded_latents_give_the_same_vectors(tmp_path):
    case = nv_embed_case(tmp_path)
    assert far(vectors(case.folder, fold_latents=False), case.expected) < 1e-4


@pytest.mark.parametrize(("quantize", "dtype"), [("4bit", "bfloat16"), ("8bit", "float32")])
def test_adapter_beside_quantised_weights_is_not_merged(tuned_minilm, quantize, dtype):
    pytest.importorskip("bitsandbytes")
    encoder = tuned_minilm.load(quantize=quantize, dtype=dtype)
    network = encoder.engine.model.network
    layer = network.encoder.layer[0].attention.self.query
    assert type(layer).__module__ == "peft.tuners.lora.bnb"
    assert layer.lora_A["default"].weight.dtype == getattr(torch, dtype)
    assert not network.training
    assert not any(weight.requires_grad for weight in network.parameters())
    found = encoder.encode(inputs())
    assert np.isfinite(found).all()
    whole = load("minilm", quantize=quantize, dtype=dtype).encode(inputs())
    assert far(whole, found) > 0.05
    # What quantising alone changes of the base, the adapter aside.
    least = 0.9 if quantize == "4bit" else 0.99
    assert cosines(found, tuned_minilm.expected).min() > least
    again = tuned_minilm.load(quantize=quantize, dtype=dtype).encode(inputs())
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("dora", [False, True])
def test_vectors_on_4_bit_weights_are_those_of_peft(tmp_path, dora):
    pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import BertModel

    from llmcond.encoders.loading.quantization import quantization_config

    made = checkpoints.make("simcse-bert", tmp_path / "base", hidden=64)
    tune(made.network, tmp_path / "tuned", made.folder, target_modules=["query"], use_dora=dora)
    base = BertModel.from_pretrained(
        made.folder,
        dtype=torch.float32,
        quantization_config=quantization_config("4bit", "float32"),
        device_map="cpu",
    )
    model = PeftModel.from_pretrained(base, tmp_path / "tuned").eval()
    expected = one_by_one(
        ids_of(made), lambda ids: model(input_ids=ids).last_hidden_state[0].mean(0)
    )
    # A CPU multiplies 4 bit weights in another type for one row than for several.
    assert far(vectors(tmp_path / "tuned", quantize="4bit", pooling="mean"), expected) < 0.02


def test_what_pools_gets_its_adapter_where_the_rest_is_quantised(tmp_path):
    """What folds NV-Embed-v2's latent block reads its weights, and not those of an adapter."""
    pytest.importorskip("bitsandbytes")
    case = nv_embed_case(tmp_path)
    folded = vectors(case.folder, quantize="8bit")
    assert cosines(folded, case.expected).min() > 0.99
    assert far(folded, vectors(case.folder, quantize="8bit", fold_latents=False)) < 0.01


def test_attaching_works_on_weights_that_accelerate_put_off(bert):
    from accelerate import cpu_offload
    from transformers import BertModel

    base, folder = bert
    ids = torch.tensor([[2, 5, 6, 7, 3]])

    def computed(network):
        with torch.no_grad():
            return network(input_ids=ids).last_hidden_state

    plain = BertModel.from_pretrained(base, add_pooling_layer=False).eval()
    before = computed(plain)
    expected = computed(attach(copy.deepcopy(plain), folder, "x", merge=True))
    away = cpu_offload(plain, torch.device("cpu"))
    assert all(weight.is_meta for weight in away.parameters())
    found = computed(attach(away, folder, "x", merge=True))
    assert (found - before).abs().max() > 0.01
    torch.testing.assert_close(found, expected)


def test_attaching_does_not_ask_for_a_network_or_other_devices(bert, monkeypatch):
    """Peft's own loading moves models about; nothing here may leave where it is."""
    from transformers import BertModel

    base, folder = bert
    monkeypatch.setattr("peft.utils.infer_device", lambda: "cuda")
    network = BertModel.from_pretrained(base, add_pooling_layer=False)
    network.hf_device_map = {"": "cpu"}
    assert attach(network, folder, "x", merge=True) is network
    assert type(network.encoder.layer[0].attention.self.query) is nn.Linear
    assert {weight.device.type for weight in network.parameters()} == {"cpu"}


# -- identity ----------------------------------------------------------------------------------


def test_weights_name_the_adapter_and_its_base(tuned_minilm):
    weights = tuned_minilm.load().identity.weights
    own, _, base = weights.partition(" on ")
    assert base == load("minilm").identity.weights
    assert own.startswith("sha256:")
    assert len(own) == len("sha256:") + 64


def fingerprint(folder, **options):
    return load_identity(folder, **options).fingerprint


def load_identity(folder, **options):
    fixed = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    return resolve(str(folder), EncoderOptions(**{**fixed, **options})).identity


def test_adapter_has_another_fingerprint_than_its_base_and_than_other_adapters(tuned, tmp_path):
    other = shutil.copytree(tuned, tmp_path / "other")
    assert fingerprint(other) == fingerprint(tuned)
    tensors = load_file(other / WEIGHTS)
    first = next(iter(tensors))
    tensors[first][0, 0] += 1
    save_file(tensors, other / WEIGHTS, {"format": "pt"})
    assert len({fingerprint(other), fingerprint(tuned), fingerprint("minilm")}) == 3


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
def test_what_decides_nothing_leaves_the_fingerprint(tuned, change):
    before = fingerprint(tuned)
    checkpoints.change_json(tuned / CONFIG, **change)
    assert fingerprint(tuned) == before


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
def test_what_decides_vectors_changes_the_fingerprint(tuned, change):
    before = fingerprint(tuned)
    checkpoints.change_json(tuned / CONFIG, **change)
    assert fingerprint(tuned) != before


def test_scale_of_the_config_is_used(tuned, tuned_minilm):
    checkpoints.change_json(tuned / CONFIG, lora_alpha=0)
    assert far(vectors(tuned), vectors("minilm")) < 1e-6
    assert far(tuned_minilm.expected, vectors("minilm")) > 0.05


# -- its base ----------------------------------------------------------------------------------


def test_base_is_found_by_the_name_in_the_adapters_config(tuned):
    found = resolve(str(tuned), CPU)
    assert found.checkpoint.known is MINILM
    assert found.checkpoint.folder == minilm_folder()
    assert found.checkpoint.adapter == tuned
    assert found.checkpoint.name == str(tuned)
    assert found.assumed == ()
    assert found.identity.max_length == 256  # as the alias has it


def test_the_base_by_itself_has_its_own_settings(bert):
    base, folder = bert
    record(folder, base=str(base), like=None, settings={"pooling": "cls", "max_length": 16})
    adapted, own = resolve(str(folder), CPU), resolve(str(base), CPU)
    assert adapted.identity.pooling == "cls"
    assert resolve_base(adapted).identity == own.identity
    assert resolve_base(adapted).checkpoint.name == str(base)
    # An encoder that was not trained is its own base; of one trained as a whole none is known.
    assert resolve_base(own) is own
    record(base, base=None, like=None, settings={"pooling": "cls"})
    assert resolve_base(resolve(str(base), CPU)) is None


def test_base_may_lie_beside_the_adapter(bert, monkeypatch, tmp_path):
    base, folder = bert
    expected = fingerprint(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=f"../{base.name}")
    assert fingerprint(folder) == expected


def test_revision_of_a_base_that_is_a_folder_now_is_passed_by(bert):
    base, folder = bert
    expected = fingerprint(folder)
    checkpoints.change_json(folder / CONFIG, revision="main")
    assert fingerprint(folder) == expected
    record(folder, base=str(base), revision="0" * 40, like=None, settings={})
    assert fingerprint(folder) == expected


def test_adapter_of_an_unknown_base_can_be_taken_for_a_known_model(tmp_path):
    case = qwen_case(tmp_path)
    assert find_checkpoint(str(case.folder), None).known is None
    options = EncoderOptions(device="cpu", like=QWEN)
    assert resolve(str(case.folder), options).checkpoint.known is find_model(QWEN)


def test_adapter_of_a_known_base_cannot_be_taken_for_another(tuned):
    assert load_identity(tuned, like="minilm") == load_identity(tuned)
    with pytest.raises(UserError, match=rf"with the settings of minilm, so like cannot be {QWEN}"):
        load_identity(tuned, like=QWEN)
    with pytest.raises(UserError, match="not a known model"):
        load_identity(tuned, like="nothing")


def test_revision_of_an_adapters_folder_is_refused(tuned):
    with pytest.raises(
        UserError, match=r"revision is 'main', but .* is a folder, and only models on the hub have"
    ):
        load_identity(tuned, revision="main")


def test_missing_base_is_named_with_who_wants_it(bert):
    base, folder = bert
    shutil.rmtree(base)
    with pytest.raises(UserError) as raised:
        load(folder)
    assert f"{folder} is an adapter of {base}, according to its {CONFIG}, but" in str(raised.value)
    assert f"Restore the base, or change base_model_name_or_path in {CONFIG}." in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [None, "", 5])
def test_adapter_that_names_no_base_is_refused(bert, name):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=name)
    expected = rf"its {CONFIG} does not name the encoder .* Set base_model_name_or_path"
    with pytest.raises(UserError, match=expected):
        load(folder)


def test_base_that_is_an_adapter_is_refused(tuned, tmp_path):
    second = shutil.copytree(tuned, tmp_path / "second")
    for base in (tuned, second):  # itself too
        checkpoints.change_json(second / CONFIG, base_model_name_or_path=str(base))
        with pytest.raises(
            UserError, match=rf"{base} is an adapter, so it cannot be the base of .*\. Merge it"
        ):
            load(second)


# -- adapters that are not used ----------------------------------------------------------------


def without(folder, part):
    tensors = {k: v for k, v in load_file(folder / WEIGHTS).items() if part not in k}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_missing_tensors_are_counted_and_named(bert):
    _, folder = bert
    without(folder, "layer.1.")
    expected = r"lacks 4 tensors \(encoder\.layer\.1\.attention\.self\.query\.lora_A\.weight, .*…\)"
    with pytest.raises(UserError, match=expected):
        load(folder)


def test_unexpected_tensors_are_counted_and_named(bert):
    _, folder = bert
    tensors = load_file(folder / WEIGHTS)
    tensors["base_model.model.encoder.layer.7.attention.self.query.lora_A.weight"] = torch.ones(1)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"has 1 tensors \(encoder\.layer\.7\..*do not belong"):
        load(folder)


def test_tensors_of_layers_that_the_config_does_not_name_are_refused(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, target_modules=["query"])
    with pytest.raises(UserError, match=r"has 4 tensors .*value\.lora_A.* do not belong to it"):
        load(folder)


def test_tensors_of_another_size_are_refused(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, r=8)
    with pytest.raises(
        UserError, match=r"lora_A\.weight of the shape \(4, 32\); expected \(8, 32\)"
    ):
        load(folder)


def test_adapter_of_a_wider_base_is_refused(bert, tiny_checkpoint):
    _, folder = bert
    wide = tiny_checkpoint(hidden=64)
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=str(wide))
    with pytest.raises(UserError, match=r"\(4, 32\); expected \(4, 64\)\. .* another base"):
        load(folder)


def test_adapter_of_another_architecture_names_the_layers_there_are(bert, tiny_checkpoint):
    _, folder = bert
    checkpoints.change_json(
        folder / CONFIG, base_model_name_or_path=str(tiny_checkpoint("mistral"))
    )
    with pytest.raises(UserError) as raised:
        load(folder)
    message = str(raised.value)
    assert (
        "is an adapter of the layers query, value, but its base (mistral) has none of them"
        in message
    )
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in message


@pytest.mark.parametrize("config", [{"r": 10**7}, {"rank_pattern": {"query": 10**12}}])
def test_ranks_that_no_tensor_has_take_no_memory(bert, config):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, **config)
    with pytest.raises(UserError, match=r"has a rank of 10?,000,.*tensors have at most 32"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_8_bit_are_added_as_they_are(bert, dtype):
    _, folder = bert
    rounded = {key: value.to(dtype) for key, value in load_file(folder / WEIGHTS).items()}
    save_file(rounded, folder / WEIGHTS, {"format": "pt"})
    found = vectors(folder)
    wide = {key: value.float() for key, value in rounded.items()}
    save_file(wide, folder / WEIGHTS, {"format": "pt"})
    np.testing.assert_array_equal(found, vectors(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bert, value):
    _, folder = bert
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(LlmcondError, match=r"has NaN or infinity in 1 tensors"):
        load(folder)


def test_merged_weights_that_overflow_are_refused(bert):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, lora_alpha=1e8)
    with pytest.raises(LlmcondError, match=r"overflow in torch\.float16. Try another dtype"):
        load(folder, dtype="float16")


@pytest.mark.parametrize("change", [lambda data: data[:-10], lambda data: b"not safetensors"])
def test_damaged_weights_are_refused(bert, change):
    _, folder = bert
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    with pytest.raises(LlmcondError, match=rf"{WEIGHTS} of .* cannot be read") as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_pickled_weights_are_not_read(bert):
    _, folder = bert
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"adapter_model\.bin is not read.*safe_serialization"):
        load(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match=rf"is an adapter without {WEIGHTS}\. Save it again"):
        load(folder)


def test_other_kinds_of_adapters_are_refused(bert):
    _, folder = bert
    for kind in ("IA3", "PREFIX_TUNING", None):
        checkpoints.change_json(folder / CONFIG, peft_type=kind)
        with pytest.raises(UserError, match=rf"of the type {kind!r}, and only LORA is supported"):
            load(folder)


@pytest.mark.parametrize(
    ("change", "named"),
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
def test_what_is_not_supported_is_named(bert, change, named):
    _, folder = bert
    checkpoints.change_json(folder / CONFIG, **change)
    with pytest.raises(UserError, match=named) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_settings_of_later_versions_of_peft_are_ignored_with_a_warning(bert, caplog):
    _, folder = bert
    expected = vectors(folder)
    checkpoints.change_json(folder / CONFIG, of_later_versions=3, off_in_later_versions=None)
    np.testing.assert_array_equal(vectors(folder), expected)
    assert "another version of peft, and of_later_versions in its" in caplog.text


@pytest.mark.parametrize("begun", [True, False, "gaussian", "eva", "orthogonal"])
def test_how_an_adapter_was_begun_changes_nothing(bert, begun):
    _, folder = bert
    expected = vectors(folder)
    checkpoints.change_json(folder / CONFIG, init_lora_weights=begun)
    np.testing.assert_array_equal(vectors(folder), expected)


def test_config_that_is_no_json_is_refused(bert):
    _, folder = bert
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match="is not a readable JSON file"):
        load(folder)


def test_adapter_beside_whole_weights_is_refused(bert):
    base, folder = bert
    shutil.copy(base / "config.json", folder)
    with pytest.raises(UserError, match=r"both a model and an adapter\. Remove config\.json"):
        load(folder)


def test_peft_that_is_not_installed_is_named_before_weights_are_fetched(bert, monkeypatch):
    _, folder = bert
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "peft" else found(name)
    )
    monkeypatch.setattr(
        "llmcond.encoders.loading.loading.fetch_weights",
        lambda _: pytest.fail("weights were fetched"),
    )
    expected = r"is an adapter, which needs peft\. Install it: pip install '\.\[lora\]'"
    with pytest.raises(UserError, match=expected):
        load(folder)


def test_wrong_adapter_is_told_before_weights_are_fetched(bert, monkeypatch):
    _, folder = bert
    without(folder, "layer.1.")
    monkeypatch.setattr(
        "llmcond.encoders.loading.loading.fetch_weights",
        lambda _: pytest.fail("weights were fetched"),
    )
    with pytest.raises(UserError, match="lacks 4 tensors"):
        load(folder)


# -- what training recorded --------------------------------------------------------------------

SETTINGS = {
    "attention": "bidirectional",
    "pooling": "cls",
    "pool_over": "all",
    "normalize": False,
    "max_length": 24,
    "instruction_format": "{instruction}: {text}",
    "special_tokens": "tokenizer",
}


def record(folder, **changes):
    given = {
        "base": "minilm",
        "revision": None,
        "like": MINILM.repo,
        "settings": SETTINGS,
        "quantize": "none",
        "base_weights": None,
        **changes,
    }
    write_encoder_record(folder, EncoderRecord(**given))


def test_record_of_training_is_read_as_it_was_written(tmp_path):
    assert read_encoder_record(tmp_path) is None
    tuned = EncoderRecord("a/b", "0" * 40, "minilm", SETTINGS, "4bit", "hub:a/b@" + "0" * 40)
    write_encoder_record(tmp_path, tuned)
    assert json.loads((tmp_path / ENCODER_RECORD).read_text())["format"] == 1
    assert read_encoder_record(tmp_path) == tuned


def test_settings_of_training_are_used_where_none_are_given(tuned):
    record(tuned)
    own = load_identity(tuned)
    assert {name: getattr(own, name) for name in SETTINGS} == SETTINGS
    given = {"pooling": "mean", "max_length": 32, "normalize": True, "instruction_format": ""}
    own = load_identity(tuned, **given)
    assert {name: getattr(own, name) for name in SETTINGS} == {**SETTINGS, **given}


def test_settings_of_training_decide_the_vectors(tuned):
    given = {name: SETTINGS[name] for name in ("pooling", "normalize", "max_length")}
    expected = vectors(tuned, **given)
    assert far(vectors(tuned), expected) > 0.1
    record(tuned)
    np.testing.assert_array_equal(vectors(tuned), expected)


def test_tokens_that_were_pooled_go_with_their_pooling(tuned):
    record(tuned, settings={"pooling": "mean", "pool_over": "text"})
    assert load_identity(tuned).pool_over == "text"
    assert load_identity(tuned, pooling="last").pool_over == "text"
    assert load_identity(tuned, pooling="cls").pool_over == "all"


def test_recorded_base_goes_before_the_one_in_the_adapters_config(tuned, bert):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path=str(bert[0]), revision="x")
    record(tuned)
    assert resolve(str(tuned), CPU).checkpoint.known is MINILM


def test_recorded_kin_is_that_of_the_base(tmp_path):
    case = qwen_case(tmp_path)
    record(case.folder, base=str(case.base), like=QWEN, settings={})
    found = load(case.folder)
    assert found.resolved.checkpoint.known is find_model(QWEN)
    assert far(found.encode(inputs()), case.expected) < 1e-4
    with pytest.raises(UserError, match=rf"with the settings of {QWEN}, so like cannot be minilm"):
        load(case.folder, like="minilm")


def test_another_base_than_in_training_is_refused_with_both_named(bert, tiny_checkpoint):
    base, folder = bert
    trained = load_identity(base).weights
    record(folder, base=str(base), like=None, settings={}, base_weights=trained)
    assert fingerprint(folder)
    shutil.rmtree(base)
    shutil.copytree(tiny_checkpoint(seed=1), base)
    with pytest.raises(UserError) as raised:
        load(folder)
    assert f"was trained on {base} with the weights {trained}" in str(raised.value)
    assert f"are {load_identity(base).weights}" in str(raised.value)


def test_base_that_was_quantised_in_training_is_told(tuned):
    record(tuned, quantize="4bit")
    (told,) = resolve(str(tuned), CPU).assumed
    assert "trained on 4bit" in told
    assert "--quantize 4bit" in told
    options = EncoderOptions(device="cpu", quantize="4bit")
    assert resolve(str(tuned), options).assumed == ()
    record(tuned)
    assert resolve(str(tuned), CPU).assumed == ()


@pytest.mark.parametrize(
    ("change", "named"),
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
def test_damaged_record_is_named(tuned, change, named):
    record(tuned)
    checkpoints.change_json(tuned / ENCODER_RECORD, **change)
    with pytest.raises(LlmcondError, match=named) as raised:
        load_identity(tuned)
    assert ENCODER_RECORD in str(raised.value)
    assert "\n" not in str(raised.value)


def test_record_that_is_no_json_is_refused(tuned):
    (tuned / ENCODER_RECORD).write_text("{")
    with pytest.raises(UserError, match="is not a readable JSON file"):
        load_identity(tuned)


def test_record_without_a_base_is_refused_for_an_adapter(tuned):
    record(tuned, base=None)
    with pytest.raises(
        UserError, match=rf"its {ENCODER_RECORD} does not name the encoder .* Set base to"
    ):
        load_identity(tuned)


def test_whole_checkpoint_has_the_settings_it_was_trained_with(bert):
    base, _ = bert
    weights = load_identity(base).weights
    plain = load_identity(base)
    record(base, base=None, like=None, base_weights="sha256:00", quantize="4bit")
    own = resolve(str(base), CPU)
    assert {name: getattr(own.identity, name) for name in SETTINGS} == SETTINGS
    assert own.assumed == ()
    assert own.identity.weights == weights  # settings have fields of their own
    assert load_identity(base, **{name: getattr(plain, name) for name in SETTINGS}) == plain
    given = {name: SETTINGS[name] for name in ("pooling", "normalize", "max_length")}
    expected = vectors(base)
    (base / ENCODER_RECORD).unlink()
    np.testing.assert_array_equal(vectors(base, **given), expected)


def test_whole_checkpoint_is_taken_for_the_model_it_was_trained_as(tmp_path):
    made = checkpoints.make("gte-qwen2", tmp_path / "model")
    record(made.folder, base=None, like=QWEN, settings={})
    assert resolve(str(made.folder), CPU).checkpoint.known is find_model(QWEN)
    assert load_identity(made.folder, like=QWEN) == load_identity(made.folder)
    with pytest.raises(UserError, match="so like cannot be minilm"):
        load_identity(made.folder, like="minilm")


def test_vocabulary_of_the_same_name_is_passed_by(bert):
    base, _ = bert
    expected = fingerprint(base)
    (base / ENCODER_RECORD).write_text(json.dumps({"the": 5, "format": 18_982, "settings": 33_692}))
    assert fingerprint(base) == expected


# -- beside other files ------------------------------------------------------------------------


def modules(folder, *kinds, pooling="cls"):
    """Write what sentence-transformers saves beside an adapter."""
    kinds = ["Transformer", "Pooling", *kinds]
    entries = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    checkpoints.write_json(folder / "modules.json", entries)
    checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 48})


def test_settings_of_sentence_transformers_beside_an_adapter_are_used(tuned):
    modules(tuned)
    own = load_identity(tuned)
    assert (own.pooling, own.normalize, own.max_length) == ("cls", False, 48)
    assert load_identity(tuned, pooling="mean").pooling == "mean"
    record(tuned, settings={"pooling": "last"})
    assert load_identity(tuned).pooling == "last"


def test_modules_beside_an_adapter_that_would_be_left_out_are_refused(tuned):
    modules(tuned, "Dense")
    with pytest.raises(UserError, match="dense layer after its pooling, which is not supported"):
        load_identity(tuned)
    modules(tuned, "LSTM")
    with pytest.raises(UserError, match="module 'LSTM'"):
        load_identity(tuned)


# -- the hub -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub with nothing behind it."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def test_adapter_on_the_hub_of_a_base_on_the_hub(cache, tmp_path):
    case = xlm_r_case(tmp_path)
    commit = checkpoints.put_into_hub_cache(case.base, cache, "me/base")
    checkpoints.change_json(
        case.folder / CONFIG, base_model_name_or_path="me/base", revision=commit
    )
    checkpoints.put_into_hub_cache(case.folder, cache, "me/tuned")
    encoder = load("me/tuned")
    assert far(encoder.encode(inputs()), case.expected) < 1e-4
    assert encoder.name == "me/tuned"
    assert encoder.identity.weights.endswith(f" on hub:me/base@{commit}")
    assert not encoder.identity.weights.startswith("hub:")
    assert encoder.identity == load(case.folder).identity


def test_base_on_the_hub_that_cannot_be_had_is_no_fault_of_the_users(cache, tuned):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path="me/base")
    with pytest.raises(LlmcondError, match=rf"{tuned} is an adapter of me/base.*cannot be") as got:
        load(tuned)
    assert type(got.value) is LlmcondError


def test_adapter_on_the_hub_that_is_its_own_base_is_refused(cache, tuned):
    checkpoints.change_json(tuned / CONFIG, base_model_name_or_path="me/tuned")
    checkpoints.put_into_hub_cache(tuned, cache, "me/tuned")
    with pytest.raises(
        UserError, match="me/tuned is an adapter, so it cannot be the base of me/tuned"
    ):
        load("me/tuned")


def test_repository_with_neither_checkpoint_nor_adapter_is_refused(cache, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "README.md").write_text("x")
    checkpoints.put_into_hub_cache(tmp_path / "x", cache, "me/x")
    with pytest.raises(UserError, match=r"me/x has no config\.json"):
        load("me/x")


# -- commands ----------------------------------------------------------------------------------


def test_check_tells_an_adapters_base(tuned, capsys):
    record(tuned, quantize="4bit")
    assert run(["models", "--check", str(tuned), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == str(tuned)
    assert report["source"] == f"{tuned} on {minilm_folder()}"
    assert report["pooling"] == "cls"
    assert "--quantize 4bit" in report["assumed"][0]
    assert run(["models", "--check", str(tuned)]) == 0


def test_check_refuses_an_adapter_that_does_not_fit(tuned, capsys):
    without(tuned, "layer.5.")
    assert run(["models", "--check", str(tuned)]) == 2
    assert "tensors (encoder.layer.5." in capsys.readouterr().err


def test_run_of_an_adapter_finds_it_again(tuned, tmp_path, capsys, monkeypatch, write_rows):
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
    # Another adapter in its place is another encoder.
    checkpoints.change_json(tuned / CONFIG, lora_alpha=9)
    capsys.readouterr()
    assert run(["extract", "--model", tuned.name, *arguments]) == 2
    assert "holds features of" in capsys.readouterr().err


def test_whether_an_adapter_fits_is_seen_without_weights(bert):
    base, folder = bert
    network = build_on_meta(load_config(resolve(str(base), CPU).checkpoint))
    network.pooler = None
    inject(network, folder, "x")
    assert all(weight.is_meta for weight in network.parameters())
