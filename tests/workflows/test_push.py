"""Pushing to the hub: the real client against a local server that stores what it receives."""

import json
import re
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import write_modules, write_to_hub_cache
from helpers.commands import run_json, run_rejected
from helpers.hub import REPO, serve_storing_hub, use_hub
from huggingface_hub import ModelCard, constants

import llmcond
from llmcond import push
from llmcond.base.errors import LlmcondError, UserError
from llmcond.cli import run
from llmcond.runs import open_any_run
from llmcond.runs.portable import _PATH, save_portable_run

pytestmark = pytest.mark.usefixtures("one_thread")

#: Nothing listens on this port.
UNREACHABLE = "http://127.0.0.1:9"
MLP, LINEAR = "mlp@concat-sent-cond", "linear@concat-sent-cond"
TEXTS = ["two men play in the park", "three women read"]
RECORDS = {"README.md", "encoder.json", "run.json", "training.json"}
MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MODEL_FILES |= {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"}


def head_files(name: str) -> set[str]:
    return {f"heads/{name}/head.json", f"heads/{name}/head.safetensors"}


EXPECTED = {
    "merged": RECORDS | MODEL_FILES | head_files(f"{MLP}+c"),
    "adapter": RECORDS
    | {"adapter_config.json", "adapter_model.safetensors"}
    | head_files("none@concat-sent-cond+c"),
    "frozen": {"README.md", "run.json"} | head_files(MLP) | head_files(LINEAR),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub as the client's endpoint, with a token and an empty cache."""
    with serve_storing_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "client")
        yield server


@pytest.fixture(scope="module")
def data(tiny_run, tmp_path_factory) -> Path:
    """A file with the small rows."""
    path = tmp_path_factory.mktemp("home") / "secret-rows.csv"
    return Path(shutil.copy(tiny_run.parent / "rows.csv", path))


@pytest.fixture(scope="module")
def base(tiny_checkpoint) -> Path:
    """A small random BERT with sentence-transformers pooling, whose files name a local path."""
    folder = tiny_checkpoint()
    for name, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        edit(folder / name, {key: "/data/ada/bert"})
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    write_modules(folder, pooling=pooling)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    return folder


def train(model, data, folder, *arguments) -> Path:
    options = "--epochs 1 --batch-size 16 --dtype float32 --max-length 32 --rank 2".split()
    training_arguments = ["--model", model, "--data", data, "--run", folder, *options, *arguments]
    assert run(["train-lora", *map(str, training_arguments)]) == 0
    # Other files in the folder are not part of the run.
    (folder / "heads" / ".half").mkdir()
    (folder / "heads" / ".half" / "head.json").write_text("{}")
    for name in ("predictions.csv", "mine.json", "rows.txt", "heads/none.txt"):
        (folder / name).write_text("mine")
    return folder


@pytest.fixture(scope="module")
def merged(base, data, tmp_path_factory) -> Path:
    """A BERT with merged adapters and an MLP head."""
    folder = tmp_path_factory.mktemp("merged") / "run"
    return train(base, data, folder, "--merge", "--head", "mlp", "--dim", "8")


@pytest.fixture(scope="module")
def adapter(data, tmp_path_factory) -> Path:
    """An adapter of MiniLM, without head weights."""
    return train("minilm", data, tmp_path_factory.mktemp("adapter") / "run", "--head", "none")


@pytest.fixture(scope="module")
def frozen(data, tmp_path_factory) -> Path:
    """Two heads on the unchanged MiniLM, of which the first is the default."""
    return fit_heads("minilm", data, tmp_path_factory.mktemp("frozen") / "run")


def fit_heads(model, data, folder: Path) -> Path:
    options = ["--model", model, "--data", data, "--dtype", "float32", "--max-length", "32"]
    fit = ["fit-head", "--run", folder, "--dim", "8", "--set", "epochs=2"]
    for command in (
        ["extract", "--run", folder, "--prompt", "concat-sent-cond", *options],
        [*fit, "--head", "mlp"],
        [*fit, "--head", "linear"],
        ["heads", "--run", folder, "--default", MLP],
    ):
        assert run([str(part) for part in command]) == 0
    return folder


def edit(path: Path, changes: dict) -> None:
    """Change the values of a JSON file, in which a key may name a nested object."""
    record = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, name = key.split(".")
        reduce(getitem, parents, record)[name] = value
    path.write_text(json.dumps(record))


def read_file_states(folder: Path) -> dict[Path, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def encode_texts(folder: Path | str, head: str | None = None) -> np.ndarray:
    return llmcond.load_embedder(folder, head, device="cpu").encode(TEXTS, "the place")


# -- pushed files ------------------------------------------------------------------------------


def assert_nothing_private(hub, folder: Path) -> None:
    """Check that no pushed file has a text of the rows, or a path below a temporary folder."""
    for name, content in hub.files().items():
        if name != "README.md":
            assert str(folder).encode() not in content, name
            assert b"two men play" not in content, name


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_pushed_files_suffice_to_load_model_and_have_no_local_paths(
    request, hub, base, data, capsys, tmp_path, tmp_path_factory, kind
):
    folder = request.getfixturevalue(kind)
    expected, before = encode_texts(folder), read_file_states(folder)
    result = run_json(capsys, "push", REPO, "--run", folder)
    assert result == {
        "repo": REPO,
        "url": f"{hub.url}/{REPO}",
        "commit": f"{1:040x}",
        "files": sorted(EXPECTED[kind]),
    }
    assert set(hub.files()) - {".gitattributes"} == EXPECTED[kind]
    assert len(hub.commits) == 1
    assert hub.tokens == {"Bearer hf_test"}
    assert hub.private[REPO] is False
    assert read_file_states(folder) == before
    np.testing.assert_array_equal(encode_texts(hub.download(tmp_path / "tuned")), expected)
    card = ModelCard(hub.files()["README.md"].decode())
    assert hub.files()["README.md"] == (folder / "README.md").read_bytes()
    assert card.data.library_name == ("peft" if kind == "adapter" else "llmcond")
    assert {one.dataset_name for one in card.data.eval_results} == {"secret-rows.csv"}
    # A second push changes nothing.
    assert push(run=folder, repo=REPO).items() == result.items()
    assert len(hub.commits) == 1
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["data"]["source"] == str(data)
    assert manifest["encoder"]["name"] == str(folder)
    assert_nothing_private(hub, tmp_path_factory.getbasetemp())
    for name, content in hub.files().items():
        if name.endswith(".json") and name != "tokenizer.json":
            assert str(Path.home()) not in content.decode()
            assert re.findall(r'"/[^"]*"', content.decode()) == [], name
    name = next(name for name in hub.files() if name.endswith("head.json"))
    pushed, training, head = (
        json.loads(hub.files()[file]) for file in ("run.json", "training.json", name)
    )
    assert {record["data"]["source"] for record in (pushed, training, head)} == {"secret-rows.csv"}
    assert (pushed["encoder"]["model"], pushed["encoder"]["name"]) == (".", "run")
    assert training["summary"]["run"] == "run"
    assert training["base"]["model"] == (base.name if kind == "merged" else "minilm")
    # Everything else is unchanged.
    assert training["curve"] == json.loads((folder / "training.json").read_text())["curve"]
    # A path in the configuration of the encoder is part of its identity.
    if kind == "merged":
        assert json.loads(hub.files()["config.json"])["_name_or_path"] == "bert"
        for key in ("fingerprint", "identity"):
            assert pushed["encoder"][key] == head["encoder"][key] != manifest["encoder"][key]


def test_only_paths_are_removed_from_records(hub, adapter, tmp_path):
    text = (
        "read /home/ada/x (~/data/x.csv), see https://arxiv.org/abs/1.2 and/or ./a/b 1/2 /nothink"
    )
    expected = "read x (x.csv), see https://arxiv.org/abs/1.2 and/or ./a/b 1/2 /nothink"
    assert _PATH.sub(r"\1", text) == expected
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    changes = {
        "data.source": "../../ada/rows.csv",
        "encoder.name": "/home/ada/my runs/tuned",
        "encoder.assumed": [f"8 bit of {adapter}."],
        "encoder.identity.special_tokens": "/think/now {text}",
    }
    edit(copy / "run.json", changes)
    push(run=copy, repo=REPO)
    manifest = json.loads(hub.files()["run.json"])
    encoder = manifest["encoder"]
    assert (manifest["data"]["source"], encoder["name"]) == ("rows.csv", "tuned")
    assert encoder["assumed"] == ["8 bit of run."]
    assert encoder["identity"]["special_tokens"] == "/think/now {text}"


def test_frozen_encoder_is_pushed_as_heads_and_name(hub, frozen, capsys, tmp_path_factory):
    expected, expected_linear = encode_texts(frozen), encode_texts(frozen, LINEAR)
    assert not np.array_equal(expected, expected_linear)
    result = run_json(capsys, "push", REPO, "--run", frozen)
    assert result["files"] == sorted(EXPECTED["frozen"])
    assert_nothing_private(hub, tmp_path_factory.getbasetemp())
    manifest = json.loads(hub.files()["run.json"])
    assert manifest["data"]["source"] == "secret-rows.csv"
    assert (manifest["encoder"]["model"], manifest["encoder"]["revision"]) == ("minilm", None)
    card = hub.files()["README.md"].decode()
    for text in (
        "base_model: sentence-transformers/all-MiniLM-L6-v2",
        '"licence": "Apache-2.0"',
        f'"fingerprint": "{manifest["encoder"]["fingerprint"]}"',
    ):
        assert text in card
    np.testing.assert_array_equal(encode_texts(REPO), expected)
    np.testing.assert_array_equal(encode_texts(REPO, LINEAR), expected_linear)


def test_head_that_cannot_be_loaded_does_not_prevent_a_copy_of_another(frozen, tmp_path):
    folder = Path(shutil.copytree(frozen, tmp_path / "run"))
    edit(folder / "heads" / LINEAR / "head.json", {"encoder.identity.max_length": 9})
    with pytest.raises(UserError, match="max_length"):
        save_portable_run(folder, tmp_path / "all")
    (other,) = {*open_any_run(folder).head_names()} - {LINEAR}
    llmcond.load_embedder(folder, other).save_pretrained(tmp_path / "copy")
    np.testing.assert_array_equal(encode_texts(tmp_path / "copy"), encode_texts(frozen, other))


def test_best_head_is_the_default_of_a_copy_if_zero_shot_was(frozen, tmp_path):
    for best in open_any_run(frozen).head_names():
        folder = Path(shutil.copytree(frozen, tmp_path / best))
        manifest = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**manifest, "default_head": ""}))
        for path in folder.glob("heads/*/head.json"):
            record = json.loads(path.read_text())
            record["dev_spearman"] = 0.8 if path.parent.name == best else 0.7
            record["zero_shot"] = {"name": "none@separate", "dev_spearman": 0.9}
            path.write_text(json.dumps(record))
        assert open_any_run(folder).default_head()[0] == "none@separate"
        save_portable_run(folder, tmp_path / f"{best}-copy")
        manifest = json.loads((tmp_path / f"{best}-copy" / "run.json").read_text())
        assert manifest["default_head"] == best


def test_frozen_hub_encoder_is_named_with_its_commit(hub, monkeypatch, base, data, tmp_path):
    commit = write_to_hub_cache(base, Path(constants.HF_HUB_CACHE), "me/base")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = fit_heads("me/base", data, tmp_path / "run")
    expected = encode_texts(folder)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        push(run=folder, repo=REPO)
    cache = Path(constants.HF_HUB_CACHE) / "models--me--base"
    encoder = json.loads(hub.files()["run.json"])["encoder"]
    assert (encoder["model"], encoder["revision"]) == ("me/base", commit)
    assert f"at revision `{commit}`" in hub.files()["README.md"].decode()
    downloaded = hub.download(tmp_path / "tuned")
    # A newer commit on the hub does not matter.
    (cache / "refs" / "main").write_text("0" * 40)
    np.testing.assert_array_equal(encode_texts(downloaded), expected)
    (cache / "snapshots" / commit).rename(cache / "snapshots" / ("1" * 40))
    with pytest.raises(LlmcondError, match=f"me/base .* at revision '{commit}'"):
        encode_texts(downloaded)


def test_custom_card_keeps_its_text_and_metadata(hub, frozen, capfd, tmp_path):
    push(run=frozen, repo=REPO)
    assert "the model card names no licence" in capfd.readouterr().err
    copy = Path(shutil.copytree(frozen, tmp_path / "copy"))
    (copy / "README.md").write_text(f"---\nlicense: mit\ntags: [mine]\n---\nIn {frozen}.\n")
    push(run=copy, repo=REPO)
    messages = capfd.readouterr().err
    assert "names no licence" not in messages
    assert f"is not changed, and contains the path {frozen}" in messages
    card = ModelCard(hub.files()["README.md"].decode())
    assert card.text == f"In {frozen}.\n"
    assert (card.data.license, card.data.tags) == ("mit", ["mine"])
    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    push(run=copy, repo=REPO, license="apache-2.0", datasets=["a/b", "c/d"])
    data = ModelCard(hub.files()["README.md"].decode()).data
    assert (data.license, data.datasets) == ("apache-2.0", ["a/b", "c/d"])


# -- models that are loaded from the hub -------------------------------------------------------


def test_pushed_model_is_loaded_by_its_name(hub, merged, monkeypatch):
    push(run=merged, repo=REPO)
    expected = encode_texts(merged)
    # Neither code nor pickles are downloaded.
    for name in ("model.py", "pytorch_model.bin", "optimizer.pt", "head.pkl"):
        hub.files()[name] = b"\x80"
    embedder = llmcond.Embedder.from_pretrained(REPO, device="cpu")
    np.testing.assert_array_equal(embedder.encode(TEXTS, "the place"), expected)
    assert sorted(hub.downloaded) == sorted(EXPECTED["merged"])
    commit = embedder.folder.name
    about = embedder.explain("two men play", "the place").about
    assert (about["model"], about["revision"]) == (REPO, commit)
    # A newer version does not change an older commit, which is in the cache.
    del hub.files()["run.json"]
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{UNREACHABLE}/{{filename}}")
    cached = llmcond.load_embedder(REPO, revision=commit, device="cpu")
    np.testing.assert_array_equal(cached.encode(TEXTS, "the place"), expected)


def test_downloaded_record_does_not_decide_where_features_are_written(
    hub, frozen, capsys, tmp_path
):
    push(run=frozen, repo=REPO)
    manifest = json.loads(hub.files()["run.json"])
    hub.files()["run.json"] = json.dumps({**manifest, "store": str(tmp_path / "theirs")}).encode()
    (tmp_path / "texts.csv").write_text("sentence,condition\na man,the place\n")
    out = tmp_path / "vectors.npy"
    run_json(capsys, "embed", tmp_path / "texts.csv", "--out", out, "--model", REPO)
    assert np.load(out).shape == (1, 8)
    assert not (tmp_path / "theirs").exists()


def test_downloaded_record_does_not_send_texts_to_a_server(hub, frozen, monkeypatch):
    push(run=frozen, repo=REPO)
    manifest = json.loads(hub.files()["run.json"])
    manifest["encoder"]["model"] = "http://127.0.0.1:9/v1#m"
    hub.files()["run.json"] = json.dumps(manifest).encode()
    monkeypatch.setattr("llmcond.encoders.server.probe", None)
    with pytest.raises(UserError, match=rf"{REPO}@\w+ names the server http://127.0.0.1:9/v1#m"):
        encode_texts(REPO)


def test_embedder_is_saved_and_pushed_with_its_head(hub, frozen, tmp_path):
    embedder = llmcond.load_embedder(frozen, LINEAR, device="cpu")
    expected, out = embedder.encode(TEXTS, "the place"), tmp_path / "saved"
    embedder.save_pretrained(out)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    saved = llmcond.Embedder.from_pretrained(out, device="cpu")
    assert saved.name == LINEAR
    np.testing.assert_array_equal(saved.encode(TEXTS, "the place"), expected)
    with pytest.raises(UserError, match="already exists"):
        embedder.save_pretrained(out)
    assert saved.push_to_hub(REPO, private=True, license="mit") == f"{hub.url}/{REPO}"
    assert hub.private[REPO]
    assert {name for name in hub.files() if name.startswith("heads/")} == head_files(LINEAR)
    np.testing.assert_array_equal(encode_texts(REPO), expected)
    with pytest.raises(UserError, match="zero-shot embedder has no weights to save"):
        llmcond.load_embedder(frozen, "none").save_pretrained(tmp_path / "zero-shot")
    with pytest.raises(UserError, match="guides of an embedder cannot be saved"):
        saved.guided(["a man", "a dog"], ["x", "y"], "the place").push_to_hub(REPO)


# -- repositories ------------------------------------------------------------------------------


def test_push_deletes_files_of_earlier_push_on_its_branch(hub, merged, adapter, capfd):
    push(run=merged, repo=REPO)
    hub.files()["LICENSE"] = b"theirs"
    other = {".gitattributes", "LICENSE"}
    for _ in range(2):
        result = run_json(capfd, "push", REPO, "--run", adapter, "--revision", "rank/2")
        assert result["url"] == f"{hub.url}/{REPO}/tree/rank/2"
        assert set(hub.files(branch="rank/2")) == EXPECTED["adapter"] | other
    assert set(hub.files()) == EXPECTED["merged"] | other
    assert len(hub.commits) == 2
    deleted = {name for name, operation in hub.commits[1][2].items() if operation == "deletedFile"}
    assert deleted == EXPECTED["merged"] - EXPECTED["adapter"]
    push(run=adapter, repo="ada/closed", private=True)
    messages = capfd.readouterr().err
    assert f"{adapter} -> {hub.url}/ada/closed" in messages
    assert 'llmcond.load_embedder("ada/closed")' in messages
    assert hub.private["ada/closed"]
    assert "public" in run_rejected(capfd, "push", REPO, "--run", adapter, "--private")


# -- rejected pushes ---------------------------------------------------------------------------


def test_runs_that_others_cannot_use_are_rejected(
    hub, adapter, merged, frozen, tiny_run, capsys, tmp_path
):
    copies = iter(range(100))

    def rejected(folder: Path, name: str, change) -> str:
        """Change a file of a copy of a run, and return the message of its push."""
        copy = Path(shutil.copytree(folder, tmp_path / str(next(copies))))
        (path,) = copy.glob(name)
        change(path)
        return run_rejected(capsys, "push", REPO, "--run", copy)

    assert "expected OWNER/NAME" in run_rejected(capsys, "push", "tuned", "--run", adapter)
    (tmp_path / "begun" / "training").mkdir(parents=True)
    for folder, expected in (
        (tmp_path, "is not a run of llmcond"),
        (tmp_path / "begun", "is not finished"),
        (tiny_run, "a folder that nobody else has"),
    ):
        assert expected in run_rejected(capsys, "push", REPO, "--run", folder)
    assert "llmcond fit-head --head mlp --run" in rejected(frozen, "heads", shutil.rmtree)
    weights, linear = "heads/*/head-*.safetensors", f"heads/{LINEAR}/head.json"
    # A template is not changed, because its words decide what is computed.
    template = {"encoder.identity.special_tokens": f"Read {Path.home()} {{text}}"}
    for folder, name, changes, expected in (
        (adapter, "adapter_config.json", {"lora_alpha": 3.0}, "has changed since it was trained"),
        (merged, "config.json", {"lora_alpha": 3.0}, "has changed since it was trained"),
        (frozen, linear, {"store_dtype": "float32"}, "features stored as 'float32', not 'float16'"),
        (adapter, "encoder.json", {"base": "/data/ada/gone", "like": None}, "whole encoder."),
        (adapter, "encoder.json", {"base": "/data/ada/gone", "like": "a/b"}, ", or use a/b if"),
        (tiny_run, "run.json", {"encoder.like": "ada/base"}, "or use ada/base if the folder"),
        (tiny_run, "run.json", {"encoder.model": "http://localhost:9/v1#m"}, "may not reach"),
        (adapter, "run.json", template, "would publish a path of this machine: special_tokens"),
    ):
        message = rejected(folder, name, lambda path, changes=changes: edit(path, changes))
        assert expected in message
    for name, expected in (("encoder.json", "encoder.json"), (weights, "head.safetensors")):
        assert expected in rejected(adapter, name, Path.unlink)
    for folder, name, text, expected in (
        (merged, weights, "something else", "is damaged"),
        (adapter, "README.md", "---\n- license\n---\n", "metadata of README.md is not valid"),
    ):
        message = rejected(folder, name, lambda path, text=text: path.write_text(text))
        assert expected in message
    assert hub.branches == {}


@pytest.mark.parametrize("name", ["vocab.txt", "README.md", "heads/*/head-*.safetensors"])
def test_links_out_of_run_are_rejected(hub, merged, capsys, tmp_path, name):
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    path = next(copy.glob(name), copy / name)
    secret = tmp_path / "secret"
    (shutil.move(path, secret) if path.exists() else secret.touch())
    path.symlink_to(secret)
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert f"{path} is a link to {secret}" in message
    assert hub.branches == {}


def test_answers_of_hub_are_reported_in_one_line(hub, adapter, capsys, monkeypatch):
    def read_error(code: int, *options: str) -> str:
        capsys.readouterr()
        assert run(["push", REPO, "--run", str(adapter), *options]) == code
        captured = capsys.readouterr()
        assert (captured.out, "Traceback" in captured.err) == ("", False)
        lines = captured.err.splitlines()
        (line,) = (line for line in lines if line.startswith("llmcond: error: "))
        return line

    denied = json.dumps({"error": "You may not.\nNot here."})
    not_allowed = f"does not accept the push to {REPO} (403: "
    for end, status, body, code, expected in (
        ("/repos/create", 403, denied, 2, not_allowed),
        ("/commit/main", 403, denied, 2, not_allowed),
        ("/branch/x..y", 400, json.dumps({"error": "Invalid branch"}), 2, "Invalid branch"),
        ("/repos/create", 500, "{}", 1, "the hub failed (500: Internal Server Error)"),
        ("/validate-yaml", 503, "<html>Busy</html>", 1, f"pushing to {REPO} failed"),
    ):
        hub.failing = {end: (status, body)}
        options = ("--revision", "x..y") if "branch" in end else ()
        assert expected in read_error(code, *options)
    hub.failing = {}
    hub.files()["config.json"] = b"{}"
    assert "holds a model that llmcond did not push" in read_error(2)
    assert hub.commits == []
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in read_error(1)
    hub.tokens.clear()
    monkeypatch.delenv("HF_TOKEN")
    assert "Log in (hf auth login), or set HF_TOKEN" in read_error(2)
    assert hub.tokens == set()
