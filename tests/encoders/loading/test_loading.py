"""Loading weights: missing and unexpected weights, quantisation, memory checks and pickled code."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import load_on_cpu
from safetensors.torch import load_file, save_file

from llmcond.encoders import MODELS, EncoderInput, EncoderOptions, find_model, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.nv_embed import LatentConfig, NVEmbedModel, read_config
from llmcond.encoders.loading.loading import build_on_meta, load_config, load_model
from llmcond.encoders.loading.memory import measure_footprint, quantization_config
from llmcond.errors import LlmcondError

CPU = EncoderOptions(dtype="float32", device="cpu")
#: Sizes of every tiny network in this file. bitsandbytes packs rows of 64 numbers.
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
def make_checkpoint(tiny_checkpoint, tmp_path):
    """Function that writes a checkpoint, with a tokenizer, of a class of transformers by name."""

    def write_checkpoint(name, folder="model", **config):
        import transformers

        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**{**SHAPE, **config}))
        path = tmp_path / folder
        model.save_pretrained(path)
        for file in tiny_checkpoint().glob("tokenizer*"):
            shutil.copy(file, path)
        return path

    return write_checkpoint


@pytest.fixture
def bert(make_checkpoint):
    """A tiny BERT with a pooler that a test may change."""
    return make_checkpoint("BertModel")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- missing and unexpected weights -------------------------------------------------------------


def test_missing_weights_are_counted_and_named(bert):
    def drop(weights):
        for key in [key for key in weights if ".layer.1." in key]:
            del weights[key]

    change_weights(bert, drop)
    first = "encoder.layer.1.attention.output.LayerNorm.bias"
    with pytest.raises(LlmcondError, match=rf"lacks 16 weights \({first}, .*, …\)") as raised:
        load_on_cpu(bert)
    assert "random weights would be noise" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_renamed_weight_is_reported_under_both_names(bert):
    def rename(weights):
        weights["encoder.layer.0.output.thick.weight"] = weights.pop(
            "encoder.layer.0.output.dense.weight"
        )

    change_weights(bert, rename)
    expected = r"lacks 1 weights \(.*output\.dense\.weight\).* has 1 weights \(.*\.thick\.weight\)"
    with pytest.raises(LlmcondError, match=expected):
        load_on_cpu(bert)


def test_unexpected_weights_are_named(bert):
    def add(weights):
        weights["encoder.layer.7.output.dense.bias"] = torch.ones(64)

    change_weights(bert, add)
    expected = r"has 1 weights \(encoder\.layer\.7\.output\.dense\.bias\).*\(bert\) does not have"
    with pytest.raises(LlmcondError, match=expected):
        load_on_cpu(bert)


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit"])
@pytest.mark.parametrize(("layers", "verb"), [(1, "has 16"), (3, "lacks 16")])
def test_config_with_wrong_number_of_layers_is_rejected(bert, layers, verb, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    change_json(bert / "config.json", num_hidden_layers=layers)
    with pytest.raises(LlmcondError, match=rf"{verb} weights \(encoder\.layer\.[12]\..*, …\)"):
        load_on_cpu(bert, quantize=quantize)


def test_weights_of_wrong_size_are_rejected(bert):
    change_json(bert / "config.json", intermediate_size=192)
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load_on_cpu(bert)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_truncated_weights_are_rejected(bert, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    path = bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load_on_cpu(bert, quantize=quantize)
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


@pytest.mark.parametrize(("base_class", "task_class", "config"), HEADS)
def test_task_heads_are_not_loaded(make_checkpoint, base_class, task_class, config):
    import transformers

    with_head = make_checkpoint(task_class, **config)
    base = getattr(transformers, base_class).from_pretrained(with_head)
    without_head = shutil.copytree(with_head, with_head.parent / "without")
    base.save_pretrained(without_head)
    options = {"pooling": "mean", "normalize": True}
    vectors = load_on_cpu(with_head, **options).encode(INPUTS)
    np.testing.assert_array_equal(vectors, load_on_cpu(without_head, **options).encode(INPUTS))


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
def test_known_unused_weights_are_ignored(bert, key):
    expected = load_on_cpu(bert).encode(INPUTS)
    change_weights(bert, lambda weights: weights.update({key: torch.ones(64)}))
    np.testing.assert_array_equal(load_on_cpu(bert).encode(INPUTS), expected)


@pytest.mark.parametrize(
    ("pooling", "quantize"),
    [("mean", None), ("cls", None), ("last", None), ("mean", "8bit"), ("mean", "4bit")],
)
def test_pooler_weights_are_required_only_for_pooler_pooling(bert, pooling, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    with_pooler = load_on_cpu(bert, pooling=pooling, quantize=quantize).encode(INPUTS)

    def drop(weights):
        del weights["pooler.dense.weight"], weights["pooler.dense.bias"]

    change_weights(bert, drop)
    encoder = load_on_cpu(bert, pooling=pooling, quantize=quantize)
    np.testing.assert_array_equal(encoder.encode(INPUTS), with_pooler)
    with pytest.raises(LlmcondError, match=r"lacks 2 weights \(pooler\.dense\.bias, pooler\."):
        load_on_cpu(bert, pooling="pooler", quantize=quantize)


def test_unused_pooler_is_not_created(bert):
    assert load_on_cpu(bert, pooling="mean").engine.model.network.pooler is None
    assert load_on_cpu(bert, pooling="pooler").engine.model.network.pooler is not None


@pytest.mark.usefixtures("native_16_bit")
def test_network_is_in_inference_mode(bert):
    network = load_on_cpu(bert, dtype="bfloat16").engine.model.network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


# -- quantised weights -------------------------------------------------------------------------


@pytest.fixture
def quantize(request):
    pytest.importorskip("bitsandbytes")
    return request.param


QUANTIZATIONS = pytest.mark.parametrize("quantize", ["8bit", "4bit"], indirect=True)


def tensors_of(network):
    """Return all tensors of a network, including the scales of quantised ones."""
    return {key: value for key, value in network.state_dict().items() if torch.is_tensor(value)}


def assert_same(first, second):
    first, second = tensors_of(first), tensors_of(second)
    assert first.keys() == second.keys()
    differing_keys = [key for key in first if not torch.equal(first[key], second[key])]
    assert differing_keys == []


def is_quantized(network):
    class_names = {type(module).__name__ for module in network.modules()}
    return bool(class_names & {"Linear8bitLt", "Linear4bit"})


def load_with_transformers(folder, quantize, model_class, dtype="float32"):
    """Load with transformers, which maps the files into memory."""
    return model_class.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        quantization_config=quantization_config(quantize, dtype),
        device_map="cpu",
    )


def load_unused_network(resolved):
    """Load a network that has not run yet: the first run on a CPU packs quantised weights."""
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    return load_model(resolved, config).network


@pytest.mark.usefixtures("native_16_bit")
@QUANTIZATIONS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "config", "pooling"),
    [("BertModel", {}, "pooler"), ("MistralModel", GROUPED, "mean")],
)
def test_quantised_weights_match_transformers(
    make_checkpoint, quantize, dtype, name, config, pooling
):
    import transformers

    folder = make_checkpoint(name, **config)
    options = replace(CPU, quantize=quantize, dtype=dtype, pooling=pooling)
    network = load_unused_network(resolve(str(folder), options))
    assert is_quantized(network)
    assert_same(
        network, load_with_transformers(folder, quantize, getattr(transformers, name), dtype)
    )


@QUANTIZATIONS
def test_quantised_weights_under_prefix_match_transformers(make_checkpoint, quantize):
    from transformers import MistralModel

    folder = make_checkpoint("MistralForCausalLM", **GROUPED)
    network = load_unused_network(resolve(str(folder), replace(CPU, quantize=quantize)))
    assert_same(network, load_with_transformers(folder, quantize, MistralModel))


@QUANTIZATIONS
def test_quantised_weights_from_shards_match_single_file(bert, quantize):
    from transformers import BertModel

    options = replace(CPU, quantize=quantize, pooling="pooler")
    whole = load_unused_network(resolve(str(bert), options))
    model = BertModel.from_pretrained(bert)
    (bert / "model.safetensors").unlink()
    model.save_pretrained(bert, max_shard_size="50KB")
    assert len(list(bert.glob("model-*.safetensors"))) > 2
    assert_same(whole, load_unused_network(resolve(str(bert), options)))


@QUANTIZATIONS
def test_quantised_weights_from_pickle_match_safetensors(bert, quantize):
    options = replace(CPU, quantize=quantize, pooling="pooler")
    whole = load_unused_network(resolve(str(bert), options))
    torch.save(load_file(bert / "model.safetensors"), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    assert_same(whole, load_unused_network(resolve(str(bert), options)))


@QUANTIZATIONS
def test_pooler_is_not_quantised(bert, quantize):
    network = load_on_cpu(bert, quantize=quantize, pooling="pooler").engine.model.network
    assert type(network.pooler.dense) is torch.nn.Linear
    assert type(network.encoder.layer[0].output.dense) is not torch.nn.Linear


# -- memory ------------------------------------------------------------------------------------


def count_bytes(network):
    """Count the bytes of a network's weights, including the scales of quantised ones."""
    tensors = list(network.parameters())
    for module in network.modules():
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if quant_state is not None:
            tensors += [quant_state.absmax, quant_state.code, quant_state.offset]
            tensors += [quant_state.state2.absmax, quant_state.state2.code]
        if type(module).__name__ == "Linear8bitLt":
            tensors.append(module.weight.SCB)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.usefixtures("native_16_bit")
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "8bit", "4bit"])
@pytest.mark.parametrize(
    ("name", "config", "pooling"),
    [("BertModel", {}, "pooler"), ("MistralModel", {"num_key_value_heads": 2}, "mean")],
)
def test_estimated_memory_matches_loaded_weights(
    make_checkpoint, name, config, pooling, quantize, dtype
):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    wide_shape = {"hidden_size": 256, "intermediate_size": 1_024, "vocab_size": 256}
    folder = make_checkpoint(name, **config, **wide_shape)
    resolved = resolve(str(folder), replace(CPU, quantize=quantize, dtype=dtype, pooling=pooling))
    size = measure_footprint(build_on_meta(load_config(resolved.checkpoint)))
    estimated, actual = size.weights(dtype, quantize), count_bytes(load_unused_network(resolved))
    # The estimate omits a table of one kilobyte per 4-bit layer, which is negligible at real sizes.
    assert estimated == pytest.approx(actual, rel=0.03 if quantize == "4bit" else 1e-6)
    assert size.loading(dtype, quantize) == estimated
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


def test_estimated_memory_accounts_for_folding(latent_config):
    size = measure_footprint(build_on_meta(latent_config))
    network = NVEmbedModel(latent_config)
    n_before = sum(parameter.numel() for parameter in network.parameters())
    network.latent_attention_model.fold()
    n_after = sum(parameter.numel() for parameter in network.parameters())
    assert size.n_parameters == n_before
    assert size.n_folded == n_before - n_after > 0
    assert size.weights("float32", "none") == 4 * n_after
    assert size.loading("float32", "none") == 4 * n_before


def test_latent_block_is_not_counted_as_quantised(latent_config):
    size = measure_footprint(build_on_meta(latent_config))
    backbone = build_on_meta(latent_config).embedding_model
    assert size.n_quantized == measure_footprint(backbone).n_quantized > 0
    assert measure_footprint(backbone).n_folded == 0


#: Parameters in millions, as the hub shows them for the weights, less any head that is not loaded.
PUBLISHED_SIZES = {
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


def test_published_sizes_cover_all_known_models():
    assert PUBLISHED_SIZES.keys() == {model.name for model in MODELS}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_known_architecture_has_published_size(name):
    from transformers import AutoConfig

    model = find_model(name)
    values = dict(model.architecture)
    is_nv_embed = values["model_type"] == "nvembed"
    config = read_config(values) if is_nv_embed else AutoConfig.for_model(**values)
    size = measure_footprint(build_on_meta(config))
    assert size.n_parameters == model.n_parameters
    assert size.n_parameters / 1e6 == pytest.approx(PUBLISHED_SIZES[name], rel=0.005)
    assert config.hidden_size == model.dim
    weights_4bit, weights_8bit, unquantized_weights = (
        size.weights("bfloat16", quantize) for quantize in ("4bit", "8bit", "none")
    )
    assert weights_4bit < weights_8bit < unquantized_weights


class DownloadStartedError(Exception):
    """Raised in place of the download, which starts once there is enough memory."""


@pytest.fixture
def set_free_memory(monkeypatch):
    """Function that sets the free bytes of each device; a download raises an error."""

    def fetch(_checkpoint):
        raise DownloadStartedError

    def set_bytes(**devices):
        n_gpus = sum(name.startswith("cuda") for name in devices)
        monkeypatch.setattr("torch.cuda.device_count", lambda: n_gpus)
        monkeypatch.setattr(
            "llmcond.encoders.loading.loading.available_memory",
            lambda device: devices[device.replace(":", "")],
        )

    monkeypatch.setattr("llmcond.encoders.loading.loading.fetch_weights", fetch)
    return set_bytes


def test_insufficient_memory_is_reported_before_download(bert, set_free_memory):
    set_free_memory(cpu=200_000)
    with pytest.raises(LlmcondError) as raised:
        load_on_cpu(bert)
    message = str(raised.value)
    size = measure_footprint(build_on_meta(load_config(resolve(str(bert), CPU).checkpoint)))
    assert type(raised.value) is LlmcondError
    assert f"{bert} does not fit into the memory of cpu" in message
    assert f"needs {size.weights('float32', 'none') / 2**20:.1f} MiB" in message
    assert "0.2 MiB are free" in message
    assert "Try --quantize 8bit (" in message
    assert "or --quantize 4bit (" in message
    assert "\n" not in message


def test_model_too_large_in_4bit_suggests_smaller_model(bert, set_free_memory):
    pytest.importorskip("bitsandbytes")
    set_free_memory(cpu=1_000)
    with pytest.raises(LlmcondError, match=r"quantize 4bit, it needs .* Try a smaller model\.$"):
        load_on_cpu(bert, quantize="4bit")


def test_sufficient_memory_starts_download(bert, set_free_memory):
    size = measure_footprint(build_on_meta(load_config(resolve(str(bert), CPU).checkpoint)))
    set_free_memory(cpu=size.loading("float32", "none"))
    with pytest.raises(DownloadStartedError):
        load_on_cpu(bert)
    set_free_memory(cpu=size.loading("float32", "none") - 1)
    with pytest.raises(LlmcondError, match="does not fit"):
        load_on_cpu(bert)


@pytest.mark.parametrize(
    ("multi_device", "quantize", "devices", "fits"),
    [
        (False, "none", {"cuda0": 10**6, "cpu": 0}, True),
        (False, "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 10**9}, False),
        (True, "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 0}, True),
        (True, "none", {"cuda0": 300_000, "cpu": 10**9}, True),
        (True, "none", {"cuda0": 100_000, "cuda1": 100_000, "cpu": 100_000}, False),
        (True, "8bit", {"cuda0": 60_000, "cuda1": 10**6, "cpu": 0}, True),
        # Quantised weights are not placed on the CPU, where their values would differ.
        (True, "8bit", {"cuda0": 60_000, "cpu": 10**9}, False),
    ],
)
def test_several_devices_are_used_if_one_is_too_small(
    bert, set_free_memory, multi_device, quantize, devices, fits
):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    resolved = resolve(str(bert), replace(CPU, quantize=quantize))
    options = replace(resolved.options, device="auto" if multi_device else "cuda:0")
    resolved = replace(resolved, device="cuda:0", options=options)
    set_free_memory(**devices)
    config = load_config(resolved.checkpoint)
    expected_error = DownloadStartedError if fits else LlmcondError
    with pytest.raises(expected_error) as raised:
        load_model(resolved, config)
    assert fits or "--device cpu" in str(raised.value)


# -- pickled code ------------------------------------------------------------------------------


class FileCreator:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def marker(tmp_path):
    """Path of the file that is created if a pickle is run."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(FileCreator(path)))
    assert path.exists()  # running the pickle does create it
    path.unlink()
    return path


def write_zip_checkpoint(path, marker, weights):
    torch.save({**weights, "extra": FileCreator(marker)}, path)


def write_legacy_checkpoint(path, marker, weights):
    torch.save(
        {**weights, "extra": FileCreator(marker)}, path, _use_new_zipfile_serialization=False
    )


def write_pickle(path, marker, _weights):
    path.write_bytes(pickle.dumps(FileCreator(marker), protocol=2))


@pytest.fixture(params=["one file", "shards"])
def pickle_weights(request, bert):
    """Path at which a test writes weights in the pickle format, and the weights to write."""
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    if request.param == "one file":
        return bert / "pytorch_model.bin", weights
    shard = bert / "pytorch_model-00001-of-00001.bin"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard.name)}
    (bert / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return shard, weights


WRITERS = pytest.mark.parametrize(
    "write", [write_zip_checkpoint, write_legacy_checkpoint, write_pickle]
)


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit"])
@WRITERS
def test_pickle_among_weights_is_never_run(bert, pickle_weights, marker, write, quantize):
    if quantize:
        pytest.importorskip("bitsandbytes")
    path, weights = pickle_weights
    write(path, marker, weights)
    with pytest.raises(LlmcondError):
        load_on_cpu(bert, quantize=quantize)
    assert not marker.exists()


@WRITERS
def test_pickle_among_weights_is_rejected_in_one_line(bert, pickle_weights, marker, write):
    path, weights = pickle_weights
    write(path, marker, weights)
    with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
        load_on_cpu(bert)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
def test_error_does_not_explain_how_to_run_pickle(bert, marker, protocol):
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(FileCreator(marker), protocol=protocol))
    with pytest.raises(LlmcondError) as raised:
        load_on_cpu(bert)
    for advice in ("can still be loaded", "weights_only", "will likely succeed", "\x1b"):
        assert advice not in str(raised.value)


def test_pickle_format_weights_without_code_are_loaded(bert, pickle_weights, make_checkpoint):
    path, weights = pickle_weights
    torch.save(weights, path)
    original = make_checkpoint("BertModel", "whole")
    np.testing.assert_array_equal(
        load_on_cpu(bert).encode(INPUTS), load_on_cpu(original).encode(INPUTS)
    )


@pytest.mark.parametrize("name", ["model.safetensors", "2_Dense/model.safetensors"])
def test_pickle_named_safetensors_is_rejected_and_not_run(bert, marker, name):
    module_paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": path, "type": f"x.{kind}"} for kind, path in module_paths.items()]
    (bert / "modules.json").write_text(json.dumps(modules))
    (bert / "2_Dense").mkdir()
    (bert / "2_Dense" / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.linear.Identity"})
    )
    save_file({"linear.weight": torch.ones(8, 64)}, bert / "2_Dense" / "model.safetensors")
    assert load_on_cpu(bert).dim == 8
    write_pickle(bert / name, marker, {})
    with pytest.raises(LlmcondError, match="cannot be loaded"):
        load_on_cpu(bert)
    assert not marker.exists()


def test_pickles_next_to_weights_are_ignored(bert, marker):
    expected = load_on_cpu(bert).encode(INPUTS)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        write_pickle(bert / name, marker, {})
    np.testing.assert_array_equal(load_on_cpu(bert).encode(INPUTS), expected)
    assert not marker.exists()


def test_weights_of_other_frameworks_are_ignored(bert):
    for name in ("tf_model.h5", "flax_model.msgpack", "model.onnx", "model.gguf"):
        shutil.copy(bert / "model.safetensors", bert / name)
    (bert / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match="are missing"):
        Encoder(resolve(str(bert), CPU))
