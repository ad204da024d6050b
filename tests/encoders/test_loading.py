"""Loading weights: missing and unexpected weights, quantisation, memory checks and pickled code."""

import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import (
    build_checkpoint,
    change_json,
    load_on_cpu,
    shard,
    write_dense,
    write_json,
    write_modules,
)
from safetensors.torch import load_file, save_file

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.system import check_capability
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.loading import (
    build_on_meta,
    load_config,
    load_model,
    measure_footprint,
    quantization_config,
)
from llmcond.encoders.torch.forward import NVEmbedModel

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


@pytest.fixture(params=["8bit", "4bit"])
def quantize(request):
    pytest.importorskip("bitsandbytes")
    return request.param


# -- missing and unexpected weights -------------------------------------------------------------


def test_missing_and_unexpected_weights_are_named(bert):
    weights = load_file(bert / "model.safetensors")
    renamed = {
        name.replace("0.output.dense.w", "0.output.thick.w"): weights[name] for name in weights
    }
    save_file(renamed, bert / "model.safetensors", {"format": "pt"})
    message = r"^.*lacks 1 weights \(.*output\.dense\.weight\).* has 1 weights \(.*\.thick\.wei.*$"
    with pytest.raises(LlmcondError, match=message):
        load_on_cpu(bert)


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_that_do_not_fit_config_are_rejected(bert, quantized):
    if quantized:
        pytest.importorskip("bitsandbytes")
    options = {"quantize": "4bit"} if quantized else {}
    for layers, size, message in (
        (1, 128, r"has 16 weights \(encoder\.layer\.1\..*, …\)"),
        (3, 128, r"lacks 16 weights \(encoder\.layer\.2\..*, …\)"),
        (2, 192, r"the weights of .* cannot be loaded"),
    ):
        change_json(bert / "config.json", num_hidden_layers=layers, intermediate_size=size)
        with pytest.raises(LlmcondError, match=message):
            load_on_cpu(bert, **options)
    change_json(bert / "config.json", intermediate_size=128)
    path = bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LlmcondError, match=r"^the weights of .* cannot be loaded.*$"):
        load_on_cpu(bert, **options)


@pytest.mark.parametrize(
    ("base_class", "task_class", "config"),
    [
        ("BertModel", "BertForPreTraining", {}),
        ("ModernBertModel", "ModernBertForMaskedLM", {}),
        ("Qwen3Model", "Qwen3ForCausalLM", GROUPED),
    ],
)
def test_task_heads_are_not_loaded(make_checkpoint, base_class, task_class, config):
    import transformers

    with_head = make_checkpoint(task_class, **config)
    base = getattr(transformers, base_class).from_pretrained(with_head)
    without_head = shutil.copytree(with_head, with_head.parent / "without")
    base.save_pretrained(without_head)
    options = {"pooling": "mean", "normalize": True}
    vectors = load_on_cpu(with_head, **options).encode(INPUTS)
    np.testing.assert_array_equal(vectors, load_on_cpu(without_head, **options).encode(INPUTS))


def test_known_unused_weights_and_files_are_ignored(bert):
    expected = load_on_cpu(bert).encode(INPUTS)
    unused = (
        "embeddings.position_ids", "bert.embeddings.position_ids", "lm_head.weight",
        "encoder.layer.0.attention.self.masked_bias", "encoder.layer.0.rotary_emb.inv_freq",
        "cls.predictions.bias", "classifier.dense.weight", "qa_outputs.bias",
    )  # fmt: skip
    weights = load_file(bert / "model.safetensors") | {name: torch.ones(64) for name in unused}
    save_file(weights, bert / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(load_on_cpu(bert).encode(INPUTS), expected)
    for name in ("tf_model.h5", "flax_model.msgpack", "model.onnx", "model.gguf"):
        shutil.copy(bert / "model.safetensors", bert / name)
    (bert / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match="are missing"):
        load_on_cpu(bert)


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_pooler_weights_are_required_only_for_pooler_pooling(bert, quantization):
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    with_pooler = load_on_cpu(bert, pooling="mean", quantize=quantization).encode(INPUTS)
    weights = load_file(bert / "model.safetensors")
    del weights["pooler.dense.weight"], weights["pooler.dense.bias"]
    save_file(weights, bert / "model.safetensors", {"format": "pt"})
    encoder = load_on_cpu(bert, pooling="mean", quantize=quantization)
    np.testing.assert_array_equal(encoder.encode(INPUTS), with_pooler)
    assert encoder.engine.model.network.pooler is None
    with pytest.raises(LlmcondError, match=r"lacks 2 weights \(pooler\.dense\.bias, pooler\."):
        load_on_cpu(bert, pooling="pooler", quantize=quantization)


# -- quantised weights -------------------------------------------------------------------------


def assert_same(first, second):
    """Compare all tensors of two networks, including the scales of quantised ones."""
    first, second = (
        {key: value for key, value in network.state_dict().items() if torch.is_tensor(value)}
        for network in (first, second)
    )
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def load_unused_network(folder, **options):
    """Load a network that has not run yet: the first run on a CPU packs quantised weights."""
    resolved = resolve(str(folder), replace(CPU, **options))
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    return load_model(resolved, config).network


@pytest.mark.usefixtures("native_16_bit")
@pytest.mark.parametrize(
    ("name", "base_class", "config", "dtype"),
    [
        ("BertModel", "BertModel", {}, "bfloat16"),
        ("MistralForCausalLM", "MistralModel", GROUPED, "float32"),
    ],
)
def test_quantised_weights_match_transformers(
    make_checkpoint, quantize, name, base_class, config, dtype
):
    import transformers

    folder = make_checkpoint(name, **config)
    pooling = "pooler" if name == "BertModel" else "mean"
    network = load_unused_network(folder, quantize=quantize, dtype=dtype, pooling=pooling)
    class_names = {type(module).__name__ for module in network.modules()}
    assert class_names & {"Linear8bitLt", "Linear4bit"}
    if pooling == "pooler":
        assert type(network.pooler.dense) is torch.nn.Linear
    # transformers maps the files into memory.
    expected = getattr(transformers, base_class).from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        quantization_config=quantization_config(quantize, dtype),
        device_map="cpu",
    )
    assert_same(network, expected)


def test_quantised_weights_do_not_depend_on_files(bert, quantize):
    whole = load_unused_network(bert, quantize=quantize, pooling="pooler")
    weights = load_file(bert / "model.safetensors")
    shard(bert)
    assert_same(whole, load_unused_network(bert, quantize=quantize, pooling="pooler"))
    for path in bert.glob("model*"):
        path.unlink()
    torch.save(weights, bert / "pytorch_model.bin")
    assert_same(whole, load_unused_network(bert, quantize=quantize, pooling="pooler"))


# -- memory ------------------------------------------------------------------------------------


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
            "llmcond.encoders.loading.available_memory",
            lambda device: devices[device.replace(":", "")],
        )

    monkeypatch.setattr("llmcond.encoders.loading.fetch_weights", fetch)
    return set_bytes


def test_estimated_memory_accounts_for_folding(tmp_path):
    folder = build_checkpoint("nv-embed", tmp_path / "model").folder
    config = load_config(resolve(str(folder), CPU).checkpoint)
    size, network = measure_footprint(build_on_meta(config)), NVEmbedModel(config)
    n_before = sum(parameter.numel() for parameter in network.parameters())
    network.latent_attention_model.fold()
    n_after = sum(parameter.numel() for parameter in network.parameters())
    assert (size.n_parameters, size.weights("float32", "none")) == (n_before, 4 * n_after)
    assert size.loading("float32", "none") == 4 * n_before > 4 * n_after


def test_insufficient_memory_is_reported_before_download(bert, set_free_memory):
    size = measure_footprint(build_on_meta(load_config(resolve(str(bert), CPU).checkpoint)))
    n_bytes = size.loading("float32", "none")
    set_free_memory(cpu=n_bytes)
    with pytest.raises(DownloadStartedError):
        load_on_cpu(bert)
    set_free_memory(cpu=n_bytes - 1)
    message = (
        rf"^{bert} does not fit into the memory of cpu.*needs {n_bytes / 2**20:.1f} MiB.* MiB are "
        r"free.*Try --quantize 8bit \(.*or --quantize 4bit \("
    )
    with pytest.raises(LlmcondError, match=message) as raised:
        load_on_cpu(bert)
    assert type(raised.value) is LlmcondError  # not an error of the user


def test_several_devices_are_used_if_one_is_too_small(bert, set_free_memory):
    pytest.importorskip("bitsandbytes")
    for device, quantization, devices, fits in (
        ("cuda:0", "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 10**9}, False),
        ("auto", "none", {"cuda0": 300_000, "cuda1": 300_000, "cpu": 0}, True),
        ("auto", "none", {"cuda0": 300_000, "cpu": 10**9}, True),
        ("auto", "8bit", {"cuda0": 60_000, "cuda1": 10**6, "cpu": 0}, True),
        # Quantised weights are not placed on the CPU, where their values would differ.
        ("auto", "8bit", {"cuda0": 60_000, "cpu": 10**9}, False),
    ):
        resolved = resolve(str(bert), replace(CPU, quantize=quantization))
        options = replace(resolved.options, device=device)
        resolved = replace(resolved, device="cuda:0", options=options)
        set_free_memory(**devices)
        with pytest.raises(DownloadStartedError if fits else LlmcondError) as raised:
            load_model(resolved, load_config(resolved.checkpoint))
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


def write_checkpoint(path, marker, weights, use_zip=True):
    content = {**weights, "extra": FileCreator(marker)}
    torch.save(content, path, _use_new_zipfile_serialization=use_zip)


def write_pickle(path, marker, _weights):
    path.write_bytes(pickle.dumps(FileCreator(marker), protocol=2))


@pytest.fixture(params=["one file", "shards"])
def pickle_weights(request, bert):
    """Path at which a test writes weights in the pickle format, and the weights to write."""
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    if request.param == "one file":
        return bert / "pytorch_model.bin", weights
    shard_path = bert / "pytorch_model-00001-of-00001.bin"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard_path.name)}
    write_json(bert / "pytorch_model.bin.index.json", index)
    return shard_path, weights


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickle_among_weights_is_never_run(bert, pickle_weights, marker, make_checkpoint):
    pytest.importorskip("bitsandbytes")
    path, weights = pickle_weights
    for write in (write_checkpoint, partial(write_checkpoint, use_zip=False), write_pickle):
        write(path, marker, weights)
        for quantization in ("none", "8bit", "4bit"):
            with pytest.raises(LlmcondError, match=r"the weights of .* cannot be loaded") as raised:
                load_on_cpu(bert, quantize=quantization)
            # The error does not explain how to run the pickle.
            for advice in ("weights_only", "will likely succeed", "\x1b", "\n"):
                assert advice not in str(raised.value)
            assert not marker.exists()
    torch.save(weights, path)
    expected = load_on_cpu(make_checkpoint("BertModel", "whole")).encode(INPUTS)
    np.testing.assert_array_equal(load_on_cpu(bert).encode(INPUTS), expected)


def test_pickle_named_safetensors_is_rejected_and_not_run(bert, marker):
    write_modules(bert, "Dense")
    write_dense(bert / "2_Dense", {"linear.weight": torch.ones(8, 64)})
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        write_pickle(bert / name, marker, {})
    assert load_on_cpu(bert).dim == 8
    assert not marker.exists()
    for name in ("2_Dense/model.safetensors", "model.safetensors"):
        write_pickle(bert / name, marker, {})
        with pytest.raises(LlmcondError, match="cannot be loaded"):
            load_on_cpu(bert)
        assert not marker.exists()


def test_gpus_that_pytorch_was_not_built_for_are_rejected():
    built_for = ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"]
    for capability in ((7, 5), (8, 9), (9, 0), (12, 1), (13, 0)):
        check_capability("cuda:0", capability, built_for)
    check_capability("cuda:0 (Radeon)", (9, 4), ["gfx942"])
    for capability, builds in (((7, 0), built_for), ((12, 0), ["sm_80", "sm_90a"])):
        with pytest.raises(UserError, match=r"capability \d+\.0, and this PyTorch was built for"):
            check_capability("cuda:0", capability, builds)
