"""Encoders with adapters: llmcond computes the same vectors from a saved adapter as peft does.

The references create and run adapters with peft, unmerged and one text at a time. They do not use
llmcond, except for the network of NV-Embed-v2, which is tested against plain code elsewhere.
"""

import importlib.util
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import save_adapter
from helpers.checkpoints import change_json, load_on_cpu
from helpers.vectors import cosines
from safetensors.torch import load_file, save_file
from torch import nn

from llmcond.base.errors import LlmcondError, UserError
from llmcond.commands.lists import check_model
from llmcond.encoders import EncoderInput, EncoderOptions, find_model, resolve, resolve_base
from llmcond.encoders.adapter import (
    CONFIG,
    ENCODER_RECORD,
    WEIGHTS,
    EncoderRecord,
    attach,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.encoders.loading import load_config, quantization_config
from llmcond.encoders.torch.forward import NVEmbedModel

# Work on networks this small is done before a second thread has woken up.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

TEXTS = ["dogs", "the number of people", "what sport is played in the park", "  two spaces: 東京"]
INPUTS = [EncoderInput("", text) for text in TEXTS]
CPU = EncoderOptions(dtype="float32", device="cpu", runtime="torch")
QWEN = "Alibaba-NLP/gte-Qwen2-7B-instruct"
MINILM = find_model("minilm")
ATTENTION = ["q_proj", "v_proj"]


def encode_texts(folder, **options):
    return load_on_cpu(folder, **options).encode(INPUTS)


def identify(folder, **options):
    settings = {"dtype": "float32", "device": "cpu", "runtime": "torch", **options}
    return resolve(str(folder), EncoderOptions(**settings)).identity


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


def tokenize(checkpoint):
    text_ids = [checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    return [[*checkpoint.first_ids, *ids, *checkpoint.last_ids] for ids in text_ids]


def run_decoder(model, ids, *, causal=True):
    """Return the state of the last token under an additive mask."""
    mask = torch.full((ids.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1) * causal
    return model(input_ids=ids, attention_mask=mask[None, None]).last_hidden_state[0, -1]


def pool_mean(model, ids):
    mask = torch.ones_like(ids)
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[0].mean(0)


def adapt(kind, folder, **config):
    """Return a tiny checkpoint, and its network with an adapter that is saved in a folder."""
    checkpoint = checkpoints.build_checkpoint(kind, folder / "base")
    model = save_adapter(checkpoint.network, folder / "tuned", checkpoint.folder, **config)
    return checkpoint, model


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
    assert any("lm_head" in name for name in load_file(folder / "tuned" / WEIGHTS))
    encoder = model.base_model.model.model
    expected = compute_one_by_one(tokenize(checkpoint), lambda ids: run_decoder(encoder, ids))
    return checkpoint.folder, "intfloat/e5-mistral-7b-instruct", expected


def qwen_case(folder):
    checkpoint, model = adapt(
        "gte-qwen2", folder, use_rslora=True, rank_pattern={"up_proj": 2},
        target_modules=r"embed_tokens|.*\.\d+\.(self_attn\.o_proj|mlp\.(up|gate)_proj)",
        alpha_pattern={"layers.1.self_attn.o_proj": 32},
    )  # fmt: skip
    expected = compute_one_by_one(
        tokenize(checkpoint), lambda ids: run_decoder(model, ids, causal=False)
    )
    return checkpoint.folder, QWEN, expected


def xlm_r_case(folder):
    checkpoint, model = adapt(
        "xlm-r", folder, target_modules=["key", "intermediate.dense"],
        modules_to_save=["LayerNorm", "classifier"], layers_to_transform=[1],
    )  # fmt: skip
    expected = compute_one_by_one(tokenize(checkpoint), lambda ids: pool_mean(model, ids))
    return checkpoint.folder, None, expected


def nv_embed_case(folder):
    checkpoint = checkpoints.build_checkpoint("nv-embed", folder / "base")
    config = load_config(resolve(str(checkpoint.folder), CPU).checkpoint)
    network = NVEmbedModel.from_pretrained(checkpoint.folder, config=config, dtype=torch.float32)
    # The adapter also covers the latent block, which is folded after loading.
    targets = [*ATTENTION, "to_kv", "net.2"]
    model = save_adapter(network, folder / "tuned", checkpoint.folder, target_modules=targets)
    expected = compute_one_by_one(tokenize(checkpoint), lambda ids: pool_mean(model, ids))
    return checkpoint.folder, None, expected


CASES = {
    "language model": language_model_case,
    "qwen2": qwen_case,
    "xlm-r": xlm_r_case,
    "nv-embed": nv_embed_case,
}


@pytest.fixture
def tuned(tmp_path):
    """Folder of an adapter on MiniLM that a test may change."""
    from transformers import AutoModel

    # The pooler of MiniLM is also called "dense". It gets an adapter, but is not used.
    network, targets = AutoModel.from_pretrained(minilm_folder()), ["query", "value", "dense"]
    save_adapter(network, tmp_path / "tuned", "minilm", target_modules=targets)
    assert any("pooler" in name for name in load_file(tmp_path / "tuned" / WEIGHTS))
    return tmp_path / "tuned"


@pytest.fixture
def bert(tiny_checkpoint, tmp_path):
    """Folders of a tiny BERT and of an adapter on it, which a test may change."""
    from transformers import BertModel

    base = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    network = BertModel.from_pretrained(base, add_pooling_layer=False)
    save_adapter(network, tmp_path / "adapter", base, target_modules=["query", "value"])
    return base, tmp_path / "adapter"


# -- vectors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CASES)
def test_vectors_match_peft(tmp_path, kind):
    base_folder, like, expected = CASES[kind](tmp_path)
    encoder = load_on_cpu(tmp_path / "tuned", like=like)
    assert max_deviation(encoder.encode(INPUTS), expected) < 1e-4
    # The adapter has an effect, so the check above fails for a base without it.
    base = load_on_cpu(base_folder, like=like)
    assert max_deviation(base.encode(INPUTS), expected) > 0.05
    assert encoder.engine.packs == base.engine.packs
    network = encoder.engine.model.network
    assert not any("lora" in type(module).__module__ for module in network.modules())
    assert not any(weight.requires_grad for weight in network.parameters())
    if kind == "nv-embed":
        unfolded = encode_texts(tmp_path / "tuned", fold_latents=False)
        assert max_deviation(unfolded, expected) < 1e-4
        # Folding the latent block reads its weights, but not those of an adapter.
        pytest.importorskip("bitsandbytes")
        assert cosines(encode_texts(tmp_path / "tuned", quantize="8bit"), expected).min() > 0.99


def test_merging_into_16_bit_weights_rounds_once(bert):
    from transformers import BertModel

    base, folder = bert
    tensors = {name: value.bfloat16() for name, value in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    network = BertModel.from_pretrained(base, add_pooling_layer=False, dtype=torch.bfloat16)
    query = network.encoder.layer[1].attention.self.query
    prefix = "base_model.model.encoder.layer.1.attention.self.query.lora_"
    lora_a, lora_b = (tensors[f"{prefix}{side}.weight"].float() for side in "AB")
    expected = (query.weight.float() + 8 / 4 * lora_b @ lora_a).bfloat16()
    assert attach(network, folder, "x", merge=True) is network
    assert network.encoder.layer[1].attention.self.query is query
    torch.testing.assert_close(query.weight, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dora", [False, True])
def test_vectors_on_4_bit_weights_match_peft(tmp_path, dora):
    pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import BertModel

    checkpoint = checkpoints.build_checkpoint("simcse-bert", tmp_path / "base", hidden=64)
    folder, network = tmp_path / "tuned", checkpoint.network
    save_adapter(network, folder, checkpoint.folder, target_modules=["query"], use_dora=dora)
    base = BertModel.from_pretrained(
        checkpoint.folder,
        dtype=torch.float32,
        quantization_config=quantization_config("4bit", "float32"),
        device_map="cpu",
    )
    model = PeftModel.from_pretrained(base, folder).eval()
    expected = compute_one_by_one(tokenize(checkpoint), lambda ids: pool_mean(model, ids))
    # A CPU multiplies 4-bit weights by one row in another dtype than by several rows.
    assert max_deviation(encode_texts(folder, quantize="4bit", pooling="mean"), expected) < 0.02


def test_attach_works_on_weights_offloaded_by_accelerate(bert, monkeypatch):
    from accelerate import cpu_offload
    from transformers import BertModel

    base, folder = bert
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    # Loading with peft itself may move a model to another device; ``attach`` must not.
    monkeypatch.setattr("peft.utils.infer_device", lambda: "cuda")
    merged, plain = (BertModel.from_pretrained(base, add_pooling_layer=False) for _ in range(2))
    merged.hf_device_map = {"": "cpu"}
    attach(merged.eval(), folder, "x", merge=True)
    assert {weight.device.type for weight in merged.parameters()} == {"cpu"}
    offloaded = cpu_offload(plain.eval(), torch.device("cpu"))
    assert all(weight.is_meta for weight in offloaded.parameters())
    attach(offloaded, folder, "x", merge=True)
    with torch.no_grad():
        actual, expected = (network(ids).last_hidden_state for network in (offloaded, merged))
    torch.testing.assert_close(actual, expected)


# -- identity and base -------------------------------------------------------------------------


def test_fingerprint_depends_on_weights_and_fields_that_affect_vectors(tuned):
    adapter, _, base = identify(tuned).weights.partition(" on ")
    tensors = load_file(tuned / WEIGHTS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, tuned / WEIGHTS, {"format": "pt"})
    changed = identify(tuned).weights
    assert changed != f"{adapter} on {base}"
    assert changed.endswith(f" on {identify('minilm').weights}")
    original = json.loads((tuned / CONFIG).read_text())

    def fingerprint(change):
        checkpoints.write_json(tuned / CONFIG, {**original, **change})
        return identify(tuned).fingerprint

    expected = fingerprint({})
    for change in (
        {"base_model_name_or_path": MINILM.repo, "lora_dropout": 0.5},
        {"target_modules": ["value", "query", "dense"]},  # in another order
        {"rank_pattern": None, "a_field_of_later_versions": None},
    ):
        assert fingerprint(change) == expected, change
    for change in (
        {"r": 8},
        {"lora_alpha": 16},
        {"use_rslora": True},
        {"target_modules": ["query"]},
        {"rank_pattern": {"query": 3}},
        {"layers_to_transform": [1]},
    ):
        assert fingerprint(change) != expected, change
    expected = fingerprint({"r": 8, "lora_alpha": 8})  # the defaults of peft
    del original["r"], original["lora_alpha"]
    assert fingerprint({}) == expected


def test_base_alone_keeps_its_settings(bert):
    base, folder = bert
    write_record(folder, base=str(base), like=None, settings={"pooling": "cls", "max_length": 16})
    resolved_adapter, resolved_base = resolve(str(folder), CPU), resolve(str(base), CPU)
    assert resolve_base(resolved_adapter).identity == resolved_base.identity
    # An encoder that was not trained is its own base. One trained as a whole has no known base.
    assert resolve_base(resolved_base) is resolved_base
    write_record(base, base=None, like=None, settings={"pooling": "cls"})
    assert resolve_base(resolve(str(base), CPU)) is None


def test_base_may_be_relative_to_adapter_and_its_revision_is_ignored(bert, monkeypatch, tmp_path):
    base, folder = bert
    expected = identify(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    change_json(folder / CONFIG, base_model_name_or_path=f"../{base.name}", revision="main")
    assert identify(folder) == expected


@pytest.mark.usefixtures("cache")
def test_missing_base_is_reported(bert, tuned):
    base, folder = bert
    shutil.rmtree(base)
    for name, message in (
        (str(base), f"{folder} is an adapter of {base}, according to its {CONFIG}, but.*Restore"),
        (None, rf"its {CONFIG} does not name the encoder .* Set base_"),
        (str(tuned), f"{tuned} is an adapter, so it cannot be the base of"),
        (str(folder), f"{folder} is an adapter, so it cannot be the base of"),
    ):
        change_json(folder / CONFIG, base_model_name_or_path=name)
        with pytest.raises(UserError, match=message):
            load_on_cpu(folder)
    change_json(folder / CONFIG, base_model_name_or_path="me/base")
    with pytest.raises(LlmcondError, match=rf"{folder} is an adapter of me/base") as raised:
        load_on_cpu(folder)
    assert type(raised.value) is LlmcondError  # the hub was not reached


# -- invalid adapters --------------------------------------------------------------------------


def change_tensors(folder, removed=None, **added):
    tensors = load_file(folder / WEIGHTS)
    kept = {name: value for name, value in tensors.items() if not removed or removed not in name}
    added = {f"base_model.model.{name}": value for name, value in added.items()}
    save_file(kept | added, folder / WEIGHTS, {"format": "pt"})


UNEXPECTED = {"encoder.layer.7.attention.self.query.lora_A.weight": torch.ones(1)}
NAN = {"encoder.layer.0.attention.self.query.lora_A.weight": torch.full((4, 32), torch.nan)}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"removed": "layer.1."}, r"lacks 4 tensors \(encoder\.layer\.1\.attention\.self\.qu"),
        ({}, UNEXPECTED, r"has 1 tensors \(encoder\.layer\.7\..*do not belong"),
        ({}, NAN, "has NaN or infinity in 1 tensors"),
        ({"target_modules": ["query"]}, {}, r"has 4 tensors .*value\.lora_A.* do not belong to it"),
        ({"r": 8}, {}, r"lora_A\.weight of the shape \(4, 32\); expected \(8, 32\)"),
        ({"r": 10**7, "use_dora": True}, {}, "has a rank of 10,000,000, but its tensors have at m"),
        ({"r": 10**9}, {}, r"of the shape \(4, 32\); expected \(1000000000, 32\)"),
        ({"lora_alpha": 1e8}, {}, r"overflow in torch\.float16. Try another dtype"),
        ({"peft_type": "IA3"}, {}, "of the type 'IA3', and only LORA is supported"),
        ({"bias": "all"}, {}, "bias = 'all', which is not supported"),
        ({"init_lora_weights": "pissa"}, {}, "changes the base's weights too. Convert it"),
        ({"target_modules": "(("}, {}, r"cannot be applied to its base \(bert\)"),
    ],
)
@pytest.mark.usefixtures("native_16_bit")
def test_invalid_adapters_are_rejected_before_download(bert, monkeypatch, config, tensors, message):
    _, folder = bert
    change_json(folder / CONFIG, **config)
    change_tensors(folder, **tensors)
    if "overflow" not in message:
        monkeypatch.setattr(
            "llmcond.encoders.loading.fetch_weights",
            lambda _: pytest.fail("weights were fetched"),
        )
    with pytest.raises(LlmcondError, match=message) as raised:
        load_on_cpu(folder, dtype="float16")
    assert "\n" not in str(raised.value)


def test_adapter_of_other_base_is_rejected(bert, tiny_checkpoint):
    _, folder = bert
    change_json(folder / CONFIG, base_model_name_or_path=str(tiny_checkpoint(hidden=64)))
    with pytest.raises(UserError, match=r"\(4, 32\); expected \(4, 64\)\. .* another base"):
        load_on_cpu(folder)
    change_json(folder / CONFIG, base_model_name_or_path=str(tiny_checkpoint("mistral")))
    expected = r"layers query, value, but its base \(mistral\) has none .* are q_proj, k_proj, v_"
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


def test_unreadable_files_are_rejected(bert):
    base, folder = bert
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-10])
    with pytest.raises(LlmcondError, match=rf"{WEIGHTS} of .* cannot be read"):
        load_on_cpu(folder)
    torch.save({}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"adapter_model\.bin is not read.*safe_serialization"):
        load_on_cpu(folder)
    shutil.copy(base / "config.json", folder)
    with pytest.raises(UserError, match=r"both a model and an adapter\. Remove config\.json"):
        load_on_cpu(folder)


def test_only_special_adapters_need_peft(bert, monkeypatch):
    base, folder = bert
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it raises an ImportError
    assert np.abs(encode_texts(folder) - encode_texts(base)).max() > 0.01
    change_json(folder / CONFIG, use_dora=True)
    expected = r"not plain LoRA on unquantised .*needs peft\. .*pip install 'llmcond\[lora\]'"
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


# -- training record ---------------------------------------------------------------------------

SETTINGS = {
    "attention": "bidirectional", "pooling": "cls", "pool_over": "all", "normalize": False,
    "max_length": 24, "instruction_format": "{instruction}: {text}", "special_tokens": "tokenizer",
}  # fmt: skip


def write_record(folder, **changes):
    fields = {"base": "minilm", "revision": None, "like": MINILM.repo, "settings": SETTINGS}
    fields |= {"quantize": "none", "base_weights": None, **changes}
    write_encoder_record(folder, EncoderRecord(**fields))


def test_settings_of_training_are_the_defaults(tuned):
    assert read_encoder_record(tuned) is None
    settings = {name: SETTINGS[name] for name in ("pooling", "normalize", "max_length")}
    expected = encode_texts(tuned, **settings)
    assert max_deviation(encode_texts(tuned), expected) > 0.1
    write_record(tuned)
    np.testing.assert_array_equal(encode_texts(tuned), expected)
    options = {"pooling": "mean", "max_length": 32, "normalize": True, "instruction_format": ""}
    for changes in ({}, options):
        identity = identify(tuned, **changes)
        assert {name: getattr(identity, name) for name in SETTINGS} == {**SETTINGS, **changes}


def test_settings_of_sentence_transformers_next_to_an_adapter_count(bert):
    _, folder = bert
    checkpoints.write_modules(folder, "Normalize", pooling="cls")
    prompts = {"prompts": {"q": "Instruct: Find\nQuery: "}, "default_prompt_name": "q"}
    change_json(folder / "config_sentence_transformers.json", **prompts, truncate_dim=8)
    for length, expected in ((16, 16), (1_000, 64), (True, 64), ("16", 64)):
        change_json(folder / "sentence_bert_config.json", max_seq_length=length)
        resolved = resolve(str(folder), EncoderOptions())
        assert resolved.identity.max_length == expected
    assert resolved.identity.pooling == "cls"
    assert resolved.identity.instruction_format == "Instruct: {instruction}\nQuery: {text}"
    notes = " ".join(resolved.assumed)
    assert "without the prefix 'Instruct: Find" in notes
    assert "truncates to 8" in notes
    checkpoints.write_modules(folder, "Normalize", pooling="weightedmean")
    with pytest.raises(UserError, match="pools by 'weightedmean', which is not supported"):
        resolve(str(folder), EncoderOptions())


def test_recorded_base_and_like_override_adapter_config(tmp_path, bert):
    base, like, expected = qwen_case(tmp_path / "qwen")
    folder = tmp_path / "qwen" / "tuned"
    change_json(folder / CONFIG, base_model_name_or_path=str(bert[0]), revision="x")
    write_record(folder, base=str(base), like=like, settings={})
    encoder = load_on_cpu(folder)
    assert encoder.resolved.checkpoint.known is find_model(QWEN)
    assert max_deviation(encoder.encode(INPUTS), expected) < 1e-4
    write_record(base, base=None, like=QWEN, settings={})
    for model in (folder, base):
        assert identify(model, like=QWEN) == identify(model)
        with pytest.raises(UserError, match="so like cannot be minilm"):
            identify(model, like="minilm")


def test_base_with_other_weights_than_in_training_is_rejected(bert, tiny_checkpoint):
    base, folder = bert
    trained_weights = identify(base).weights
    write_record(folder, base=str(base), like=None, settings={}, base_weights=trained_weights)
    assert identify(folder).weights.endswith(f" on {trained_weights}")
    shutil.rmtree(base)
    shutil.copytree(tiny_checkpoint(seed=1), base)
    expected = (
        rf"trained on {base} with the weights {trained_weights}.* are {identify(base).weights}"
    )
    with pytest.raises(UserError, match=expected):
        load_on_cpu(folder)


def test_quantisation_in_training_is_reported(tuned):
    write_record(tuned, quantize="4bit")
    (message,) = resolve(str(tuned), CPU).assumed
    assert "trained on 4bit" in message
    assert resolve(str(tuned), EncoderOptions(device="cpu", quantize="4bit")).assumed == ()
    resolved = resolve(str(tuned), CPU)
    assert (resolved.checkpoint.known, resolved.identity.max_length) == (MINILM, 24)
    report, _ = check_model(str(tuned), CPU)
    assert report["source"] == f"{tuned} on {minilm_folder()}"
    assert "--quantize 4bit" in report["assumed"][0]
    change_tensors(tuned, removed="layer.5.")
    with pytest.raises(UserError, match=r"tensors \(encoder\.layer\.5\."):
        check_model(str(tuned), CPU)


def test_damaged_records_are_named(tuned):
    for change, message in (
        ({"quantize": "5bit"}, "'quantize' is '5bit'"),
        ({"settings": {"max_length": True}}, "--max-length is True"),
        ({"settings": {"dtype": "float32"}}, "unknown setting 'dtype'"),
        ({"settings": {"pooling": "means"}}, "--pooling is 'means'"),
        ({"settings": ["mean"]}, "'settings' is "),
        ({"like": "nothing"}, "not a known model"),
        ({"base": None}, "does not name the encoder .* Set base to"),
    ):
        write_record(tuned)
        change_json(tuned / ENCODER_RECORD, **change)
        with pytest.raises(LlmcondError, match=rf"{ENCODER_RECORD}.*{message}"):
            identify(tuned)


def test_full_checkpoint_uses_settings_of_training(bert):
    base, _ = bert
    plain = identify(base)
    write_record(base, base=None, like=None, base_weights="sha256:00", quantize="4bit")
    resolved = resolve(str(base), CPU)
    assert {name: getattr(resolved.identity, name) for name in SETTINGS} == SETTINGS
    # The weights have the same digest, because the identity has fields for the settings.
    assert identify(base, **{name: getattr(plain, name) for name in SETTINGS}) == plain
    (base / ENCODER_RECORD).write_text(json.dumps({"the": 5, "format": 18_982, "settings": 33_692}))
    assert identify(base) == plain  # a vocabulary of the same name


# -- the hub, and runs -------------------------------------------------------------------------


def test_adapter_and_base_are_loaded_from_hub(cache, tmp_path):
    base, _, expected = xlm_r_case(tmp_path)
    folder = tmp_path / "tuned"
    commit = checkpoints.write_to_hub_cache(base, cache, "me/base")
    change_json(folder / CONFIG, base_model_name_or_path="me/base", revision=commit)
    checkpoints.write_to_hub_cache(folder, cache, "me/tuned")
    encoder = load_on_cpu("me/tuned")
    assert max_deviation(encoder.encode(INPUTS), expected) < 1e-4
    assert encoder.name == "me/tuned"
    assert encoder.identity.weights.endswith(f" on hub:me/base@{commit}")
    assert encoder.identity == identify(folder)
