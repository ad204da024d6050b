"""Loading weights: all of them, no others, no code, and no more than there is memory for."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import load
from safetensors.torch import load_file, save_file

from llmcond.encoders import MODELS, EncoderInput, EncoderOptions, find_model, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.nv_embed import LatentConfig, NVEmbedModel, read_config
from llmcond.encoders.loading.architecture import build_on_meta, load_config
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.loading.memory import measure_footprint
from llmcond.encoders.loading.quantization import quantization_config
from llmcond.errors import LlmcondError

CPU = EncoderOptions(dtype="float32", device="cpu")
#: Sizes that every tiny network here has. Bitsandbytes packs rows of 64 numbers.
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
INPUTS = [EncoderInput("", text) for text in ("two dogs play", "a red hat", "rain")]


@pytest.fixture
def make(tiny_checkpoint, tmp_path):
    """A maker of checkpoints from the name of a class of transformers, with a tokenizer."""

    def write(name, folder="model", **config):
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**{**SHAPE, **config}))
        path = tmp_path / folder
        model.save_pretrained(path)
        for file in tiny_checkpoint().glob("tokenizer*"):
            shutil.copy(file, path)
        return path

    return write


@pytest.fixture
def bert(make):
    """A tiny BERT with a pooler that a test may change."""
    return make("BertModel")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- all weights and no others -----------------------------------------------------------------


def test_missing_weights_are_counted_and_named(bert):
    def drop(weights):
        for key in [key for key in weights if ".layer.1." in key]:
            del weights[key]

    change_weights(bert, drop)
    first = "encoder.layer.1.attention.output.LayerNorm.bias"
    with pytest.raises(LlmcondError, match=rf"lacks 16 weights \({first}, .*, …\)") as raised:
        load(bert)
    assert "random weights would be noise" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_renamed_weight_is_named_with_both_names(bert):
    def rename(weights):
        weights["encoder.layer.0.output.thick.weight"] = weights.pop(
            "encoder.layer.0.output.dense.weight"
        )

    change_weights(bert, rename)
    expected = r"lacks 1 weights \(.*output\.dense\.weight\).* has 1 weights \(.*\.thick\.weight\)"
    with pytest.raises(LlmcondError, match=expected):
        load(bert)


def test_unexpected_weights_are_named(bert):
    def add(weights):
        weights["encoder.layer.7.output.dense.bias"] = torch.ones(64)

    change_weights(bert, add)
    expected = r"has 1 weights \(encoder\.layer\.7\.output\.dense\.bias\).*\(bert\) does not have"
    with pytest.raises(LlmcondError, match=expected):
        load(bert)


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit"])
@pytest.mark.parametrize(("layers", "verb"), [(1, "has 16"), (3, "lacks 16")])
def test_config_with_another_number_of_layers_is_refused(bert, layers, verb, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    change_json(bert / "config.json", num_hidden_layers=layers)
    with pytest.raises(LlmcondError, match=rf"{verb} weights \(encoder\.layer\.[12]\..*, …\)"):
        load(bert, quantize=quantize)


def test_weights_of_another_size_are_refused(bert):
    change_json(bert / "config.json", intermediate_size=192)
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load(bert)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_weights_that_were_cut_short_are_refused(bert, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    path = bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load(bert, quantize=quantize)
    assert "\n" not in str(raised.value)


HEADS = [
    ("BertModel", "BertForMaskedLM", {}),
    ("BertModel", "BertForPreTraining", {}),
    ("BertModel", "BertForSequenceClassification", {}),
    ("BertModel", "BertForQuestionAnswering", {}),
    ("RobertaModel", "RobertaForMaskedLM", {"pad_token_id": 1}),
    ("RobertaModel", "RobertaForSequenceClassification", {"pad_token_id": 1}),
    ("ElectraModel", "ElectraForPreTraining", {"embedding_size": 64}),
    ("ModernBertModel", "ModernBertForMaskedLM", {}),
    ("MistralModel", "MistralForCausalLM", GROUPED),
    ("MistralModel", "MistralForSequenceClassification", GROUPED),
    ("Qwen3Model", "Qwen3ForCausalLM", GROUPED),
    ("GPTNeoXModel", "GPTNeoXForCausalLM", {"pad_token_id": None}),
]


@pytest.mark.parametrize(("bare", "task", "config"), HEADS)
def test_heads_of_other_tasks_are_left_out(make, bare, task, config):
    import transformers

    with_head = make(task, **config)
    base = getattr(transformers, bare).from_pretrained(with_head)
    without = shutil.copytree(with_head, with_head.parent / "without")
    base.save_pretrained(without)
    options = {"pooling": "mean", "normalize": True}
    vectors = load(with_head, **options).encode(INPUTS)
    np.testing.assert_array_equal(vectors, load(without, **options).encode(INPUTS))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "key",
    [
        "embeddings.position_ids",
        "bert.embeddings.position_ids",
        "encoder.layer.0.attention.self.masked_bias",
        "encoder.layer.0.rotary_emb.inv_freq",
        "cls.predictions.bias",
        "lm_head.weight",
        "classifier.dense.weight",
        "qa_outputs.bias",
    ],
)
def test_what_an_encoder_may_leave_out_is_tolerated(bert, key):
    expected = load(bert).encode(INPUTS)
    change_weights(bert, lambda weights: weights.update({key: torch.ones(64)}))
    np.testing.assert_array_equal(load(bert).encode(INPUTS), expected)


@pytest.mark.parametrize(
    ("pooling", "quantize"),
    [("mean", None), ("cls", None), ("last", None), ("mean", "8bit"), ("mean", "4bit")],
)
def test_pooler_is_needed_only_to_pool_by(bert, pooling, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    with_pooler = load(bert, pooling=pooling, quantize=quantize).encode(INPUTS)

    def drop(weights):
        del weights["pooler.dense.weight"], weights["pooler.dense.bias"]

    change_weights(bert, drop)
    encoder = load(bert, pooling=pooling, quantize=quantize)
    np.testing.assert_array_equal(encoder.encode(INPUTS), with_pooler)
    with pytest.raises(LlmcondError, match=r"lacks 2 weights \(pooler\.dense\.bias, pooler\."):
        load(bert, pooling="pooler", quantize=quantize)


def test_pooler_that_is_not_used_takes_no_memory(bert):
    assert load(bert, pooling="mean").engine.model.network.pooler is None
    assert load(bert, pooling="pooler").engine.model.network.pooler is not None


def test_network_is_ready_to_encode(bert):
    network = load(bert, dtype="bfloat16").engine.model.network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


# -- quantised weights -------------------------------------------------------------------------


@pytest.fixture
def quantize(request):
    pytest.importorskip("bitsandbytes")
    return request.param


BOTH = pytest.mark.parametrize("quantize", ["8bit", "4bit"], indirect=True)


def states(network):
    """Return all tensors of a network, with the scales of those that are quantised."""
    return {key: value for key, value in network.state_dict().items() if torch.is_tensor(value)}


def assert_same(first, second):
    first, second = states(first), states(second)
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert different == []


def is_quantized(network):
    kinds = {type(module).__name__ for module in network.modules()}
    return bool(kinds & {"Linear8bitLt", "Linear4bit"})


def from_transformers(folder, quantize, kind, dtype="float32"):
    """Load as transformers does by itself: from files that are mapped into memory."""
    return kind.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        quantization_config=quantization_config(quantize, dtype),
        device_map="cpu",
    )


def unused(resolved):
    """Load a network that has not run yet: a CPU packs quantised weights when it first does."""
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    return load_model(resolved, config).network


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "config", "pooling"),
    [("BertModel", {}, "pooler"), ("MistralModel", GROUPED, "mean")],
)
def test_quantised_weights_are_those_of_transformers(make, quantize, dtype, name, config, pooling):
    import transformers

    folder = make(name, **config)
    options = replace(CPU, quantize=quantize, dtype=dtype, pooling=pooling)
    network = unused(resolve(str(folder), options))
    assert is_quantized(network)
    assert_same(network, from_transformers(folder, quantize, getattr(transformers, name), dtype))


@BOTH
def test_quantised_weights_under_a_prefix_are_those_of_transformers(make, quantize):
    from transformers import MistralModel

    folder = make("MistralForCausalLM", **GROUPED)
    network = unused(resolve(str(folder), replace(CPU, quantize=quantize)))
    assert_same(network, from_transformers(folder, quantize, MistralModel))


@BOTH
def test_quantised_weights_are_the_same_from_shards(bert, quantize):
    from transformers import BertModel

    options = replace(CPU, quantize=quantize, pooling="pooler")
    whole = unused(resolve(str(bert), options))
    model = BertModel.from_pretrained(bert)
    (bert / "model.safetensors").unlink()
    model.save_pretrained(bert, max_shard_size="50KB")
    assert len(list(bert.glob("model-*.safetensors"))) > 2
    assert_same(whole, unused(resolve(str(bert), options)))


@BOTH
def test_quantised_weights_are_the_same_from_the_old_format(bert, quantize):
    options = replace(CPU, quantize=quantize, pooling="pooler")
    whole = unused(resolve(str(bert), options))
    torch.save(load_file(bert / "model.safetensors"), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    assert_same(whole, unused(resolve(str(bert), options)))


@BOTH
def test_what_pools_is_not_quantised(bert, quantize):
    network = load(bert, quantize=quantize, pooling="pooler").engine.model.network
    assert type(network.pooler.dense) is torch.nn.Linear
    assert type(network.encoder.layer[0].output.dense) is not torch.nn.Linear


# -- memory ------------------------------------------------------------------------------------


def bytes_of(network):
    """Count what weights take, with the scales of those that are quantised."""
    tensors = list(network.parameters())
    for module in network.modules():
        blocks = getattr(getattr(module, "weight", None), "quant_state", None)
        if blocks is not None:
            tensors += [blocks.absmax, blocks.code, blocks.offset]
            tensors += [blocks.state2.absmax, blocks.state2.code]
        if type(module).__name__ == "Linear8bitLt":
            tensors.append(module.weight.SCB)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "8bit", "4bit"])
@pytest.mark.parametrize(
    ("name", "config", "pooling"),
    [("BertModel", {}, "pooler"), ("MistralModel", {"num_key_value_heads": 2}, "mean")],
)
def test_memory_is_foretold(make, name, config, pooling, quantize, dtype):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 256, "intermediate_size": 1_024, "vocab_size": 256}
    folder = make(name, **config, **wide)
    resolved = resolve(str(folder), replace(CPU, quantize=quantize, dtype=dtype, pooling=pooling))
    size = measure_footprint(build_on_meta(load_config(resolved.checkpoint)))
    foretold, found = size.weights(dtype, quantize), bytes_of(unused(resolved))
    # Tables of a kilobyte for each layer in 4 bit are not counted: at real sizes they are nothing.
    assert foretold == pytest.approx(found, rel=0.03 if quantize == "4bit" else 1e-6)
    assert size.loading(dtype, quantize) == foretold
    assert size.batch(dtype, 1_000) == 10 * size.batch(dtype, 100) > 0


@pytest.fixture
def latent_config():
    return LatentConfig(
        **{**SHAPE, **GROUPED},
        num_latents=16,
        num_cross_heads=2,
        cross_head_dim=64,
        is_causal=False,
        use_cache=False,
    )


def test_folding_is_foretold(latent_config):
    size = measure_footprint(build_on_meta(latent_config))
    network = NVEmbedModel(latent_config)
    before = sum(parameter.numel() for parameter in network.parameters())
    network.latent_attention_model.fold()
    after = sum(parameter.numel() for parameter in network.parameters())
    assert size.n_parameters == before
    assert size.n_folded == before - after > 0
    assert size.weights("float32", "none") == 4 * after
    assert size.loading("float32", "none") == 4 * before


def test_latent_block_is_not_counted_as_quantised(latent_config):
    size = measure_footprint(build_on_meta(latent_config))
    backbone = build_on_meta(latent_config).embedding_model
    assert size.n_quantized == measure_footprint(backbone).n_quantized > 0
    assert measure_footprint(backbone).n_folded == 0


#: In millions, as the hub shows them for the weights; without a head that is not loaded.
PUBLISHED = {
    "minilm": 22.7,
    "nvidia/NV-Embed-v2": 7_850,
    "Salesforce/SFR-Embedding-Mistral": 7_110,
    "intfloat/e5-mistral-7b-instruct": 7_110,
    "Alibaba-NLP/gte-Qwen2-7B-instruct": 7_070,
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": 1_540,
    "intfloat/multilingual-e5-large-instruct": 560,
    "princeton-nlp/sup-simcse-roberta-large": 355,
    "princeton-nlp/sup-simcse-bert-base-uncased": 109,
    "Qwen/Qwen3-Embedding-0.6B": 596,
    "Qwen/Qwen3-Embedding-4B": 4_020,
    "Qwen/Qwen3-Embedding-8B": 7_570,
    "google/embeddinggemma-300m": 303,
    "BAAI/bge-m3": 568,
}


def test_published_sizes_are_those_of_all_known_models():
    assert PUBLISHED.keys() == {known.name for known in MODELS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_architecture_has_the_published_size(name):
    from transformers import AutoConfig

    known = find_model(name)
    values = dict(known.architecture)
    nested = values["model_type"] == "nvembed"
    config = read_config(values) if nested else AutoConfig.for_model(**values)
    size = measure_footprint(build_on_meta(config))
    assert size.n_parameters == known.n_parameters
    assert size.n_parameters / 1e6 == pytest.approx(PUBLISHED[name], rel=0.005)
    assert config.hidden_size == known.dim
    four, eight, none = (size.weights("bfloat16", q) for q in ("4bit", "8bit", "none"))
    assert four < eight < none


class FetchedError(Exception):
    """Stands for the download, which begins when there is memory enough."""


@pytest.fixture
def free(monkeypatch):
    """A setter of the bytes that are free on each device; the download raises FetchedError."""

    def fetch(_checkpoint):
        raise FetchedError

    def put(**devices):
        gpus = sum(name.startswith("cuda") for name in devices)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr(
            "llmcond.encoders.loading.loading.available_memory",
            lambda device: devices[device.replace(":", "")],
        )

    monkeypatch.setattr("llmcond.encoders.loading.loading.fetch_weights", fetch)
    return put


def test_too_little_memory_is_told_before_weights_are_fetched(bert, free):
    free(cpu=200_000)
    with pytest.raises(LlmcondError) as raised:
        load(bert)
    message = str(raised.value)
    needed = measure_footprint(build_on_meta(load_config(resolve(str(bert), CPU).checkpoint)))
    assert type(raised.value) is LlmcondError
    assert f"{bert} does not fit into the memory of cpu" in message
    assert f"needs {needed.weights('float32', 'none') / 2**20:.1f} MiB" in message
    assert "0.2 MiB are free" in message
    assert "Try --quantize 8bit (" in message
    assert "or --quantize 4bit (" in message
    assert "\n" not in message


def test_what_does_not_fit_in_4_bit_is_answered_with_a_smaller_model(bert, free):
    pytest.importorskip("bitsandbytes")
    free(cpu=1_000)
    with pytest.raises(LlmcondError, match=r"quantize 4bit, it needs .* Try a smaller model\.$"):
        load(bert, quantize="4bit")


def test_enough_memory_lets_weights_be_fetched(bert, free):
    size = measure_footprint(build_on_meta(load_config(resolve(str(bert), CPU).checkpoint)))
    free(cpu=size.loading("float32", "none"))
    with pytest.raises(FetchedError):
        load(bert)
    free(cpu=size.loading("float32", "none") - 1)
    with pytest.raises(LlmcondError, match="does not fit"):
        load(bert)


@pytest.mark.parametrize(
    ("spread", "quantize", "devices", "fits"),
    [
        (False, "none", {"cuda0": 10**6, "cpu": 0}, True),
        (False, "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 10**9}, False),
        (True, "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 0}, True),
        (True, "none", {"cuda0": 300_000, "cpu": 10**9}, True),
        (True, "none", {"cuda0": 100_000, "cuda1": 100_000, "cpu": 100_000}, False),
        (True, "8bit", {"cuda0": 60_000, "cuda1": 10**6, "cpu": 0}, True),
        # Quantised weights do not go to the CPU: they would be other numbers.
        (True, "8bit", {"cuda0": 60_000, "cpu": 10**9}, False),
    ],
)
def test_several_devices_are_used_where_one_is_too_small(
    bert, free, spread, quantize, devices, fits
):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    resolved = resolve(str(bert), replace(CPU, quantize=quantize))
    chosen = replace(resolved.options, device="auto" if spread else "cuda:0")
    resolved = replace(resolved, device="cuda:0", options=chosen)
    free(**devices)
    config = load_config(resolved.checkpoint)
    expected = FetchedError if fits else LlmcondError
    with pytest.raises(expected) as raised:
        load_model(resolved, config)
    assert fits or "--device cpu" in str(raised.value)


# -- no code -----------------------------------------------------------------------------------


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def marker(tmp_path):
    """The file that a pickle which is loaded leaves behind."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Touch(path)))
    assert path.exists()  # so it would be left behind indeed
    path.unlink()
    return path


def write_torch(path, marker, weights):
    torch.save({**weights, "extra": Touch(marker)}, path)


def write_old_torch(path, marker, weights):
    torch.save({**weights, "extra": Touch(marker)}, path, _use_new_zipfile_serialization=False)


def write_pickle(path, marker, _weights):
    path.write_bytes(pickle.dumps(Touch(marker), protocol=2))


@pytest.fixture(params=["one file", "shards"])
def old_weights(request, bert):
    """The file of old weights that a test is to write, and what was in the checkpoint before."""
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    if request.param == "one file":
        return bert / "pytorch_model.bin", weights
    shard = bert / "pytorch_model-00001-of-00001.bin"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard.name)}
    (bert / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return shard, weights


WRITERS = pytest.mark.parametrize("write", [write_torch, write_old_torch, write_pickle])


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit"])
@WRITERS
def test_pickle_among_old_weights_is_never_run(bert, old_weights, marker, write, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    path, weights = old_weights
    write(path, marker, weights)
    with pytest.raises(LlmcondError):
        load(bert, quantize=quantize)
    assert not marker.exists()


@WRITERS
def test_pickle_among_old_weights_is_refused_in_one_line(bert, old_weights, marker, write):
    path, weights = old_weights
    write(path, marker, weights)
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load(bert)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
def test_nobody_is_told_how_to_run_a_pickle(bert, marker, protocol):
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker), protocol=protocol))
    with pytest.raises(LlmcondError) as raised:
        load(bert)
    for advice in ("can still be loaded", "weights_only", "will likely succeed", "\x1b"):
        assert advice not in str(raised.value)


def test_old_weights_without_code_are_loaded(bert, old_weights, make):
    path, weights = old_weights
    torch.save(weights, path)
    same = make("BertModel", "whole")
    np.testing.assert_array_equal(load(bert).encode(INPUTS), load(same).encode(INPUTS))


@pytest.mark.parametrize("name", ["model.safetensors", "2_Dense/model.safetensors"])
def test_pickle_under_the_name_of_safetensors_is_refused_and_not_run(bert, marker, name):
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": path, "type": f"x.{kind}"} for kind, path in paths.items()]
    (bert / "modules.json").write_text(json.dumps(modules))
    (bert / "2_Dense").mkdir()
    (bert / "2_Dense" / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.linear.Identity"})
    )
    save_file({"linear.weight": torch.ones(8, 64)}, bert / "2_Dense" / "model.safetensors")
    assert load(bert).dim == 8
    write_pickle(bert / name, marker, {})
    with pytest.raises(LlmcondError, match="cannot be loaded"):
        load(bert)
    assert not marker.exists()


def test_pickles_beside_the_weights_are_not_looked_at(bert, marker):
    expected = load(bert).encode(INPUTS)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        write_pickle(bert / name, marker, {})
    np.testing.assert_array_equal(load(bert).encode(INPUTS), expected)
    assert not marker.exists()


def test_weights_of_other_programs_are_no_weights(bert):
    for name in ("tf_model.h5", "flax_model.msgpack", "model.onnx", "model.gguf"):
        shutil.copy(bert / "model.safetensors", bert / name)
    (bert / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match="are missing"):
        Encoder(resolve(str(bert), CPU))
