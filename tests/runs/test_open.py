"""load_embedder by name: the bundled model, a folder, or a model of the hub."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.hub import COMMIT, serve_hub

import llmcond
from llmcond.bundled import DEFAULT_MODEL, pretrained_folder
from llmcond.errors import UserError

#: Loads models by name and revision, and prints the sums of each model's vectors, or its error.
LOAD = """
import json, sys
import llmcond

for name, revision in json.loads(sys.argv[1]):
    try:
        embedder = llmcond.load_embedder(name, revision=revision, device="cpu")
        vectors = embedder.encode(["two men play in the park", "a dog"], "the place")
        print(json.dumps({"sums": vectors.sum(axis=1).tolist(), "size": len(vectors[0])}))
    except llmcond.LlmcondError as error:
        print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


@pytest.fixture
def hub(tmp_path):
    """A hub with the bundled model as ``me/tiny``, as push would upload it."""
    folder = shutil.copytree(pretrained_folder(DEFAULT_MODEL), tmp_path / "pushed")
    with serve_hub(folder) as url:
        yield url, folder


def load_in_process(
    tmp_path: Path, endpoint: str, *models: tuple[str, str | None], offline: str = "0"
):
    """Load models in a new process, which reads the hub's environment variables."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    process = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(models)],
        env={**os.environ, **settings, "HF_HUB_OFFLINE": offline},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines()]


def check_error(result: dict, name: str, code: int, message: str) -> None:
    """Check that an error says where a model was looked up, and with which result."""
    start = f"there is no local run at {name}, so it was looked up on the hub"
    assert result["error"].startswith(start)
    assert message in result["error"]
    assert result["code"] == code


def test_model_from_hub_is_downloaded_and_cached(hub, tmp_path):
    url, _ = hub
    vectors = llmcond.load_embedder(DEFAULT_MODEL, device="cpu").encode(
        ["two men play in the park", "a dog"], "the place"
    )
    (loaded,) = load_in_process(tmp_path, url, ("me/tiny", COMMIT))
    assert loaded["size"] == vectors.shape[1]
    assert loaded["sums"] == pytest.approx(vectors.sum(axis=1).tolist(), abs=1e-4)
    cached, missing = load_in_process(
        tmp_path, url, ("me/tiny", COMMIT), ("me/other", None), offline="1"
    )
    assert cached == loaded
    check_error(missing, "me/other", 1, "hub cannot be reached")


def test_hub_errors_name_repository_and_reason(hub, tmp_path):
    url, folder = hub
    (folder / "run.json").unlink()
    models = [("me/none", None), ("me/tiny", "v9"), ("me/tiny", None), ("me/gated", None)]
    no_repository, no_revision, encoder, gated = load_in_process(tmp_path, url, *models)
    check_error(no_repository, "me/none", 2, "the hub has no such repository")
    check_error(no_revision, "me/tiny", 2, "me/tiny has no revision 'v9'")
    assert encoder["size"] == 384  # without run.json, it is an encoder like any other
    check_error(gated, "me/gated", 2, "me/gated is gated")


def test_other_manifest_is_reported_and_known_encoder_is_loaded(hub, tmp_path):
    url, folder = hub
    (folder / "run.json").write_text('{"learning_rate": 0.1}')
    encoder = "sentence-transformers/all-MiniLM-L6-v2"
    other, known = load_in_process(tmp_path, url, ("me/tiny", None), (encoder, None))
    check_error(other, "me/tiny", 1, "or was not written by llmcond")
    assert known["size"] == 384
    # Only the manifest was downloaded.
    (snapshot,) = (tmp_path / "home/hub/models--me--tiny/snapshots").iterdir()
    assert [path.name for path in snapshot.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minlm-csts", "Did you mean 'minilm-csts' or 'minilm"),
        ("all-MiniLM-L6", "Did you mean 'all-MiniLM-L6-v2'"),
        ("NV-Embd-v2", "Did you mean 'NV-Embed-v2'"),
        ("x" * 300, "The bundled models are 'minilm-conditions', 'minilm-csts'"),
    ],
)
def test_unknown_name_suggests_known_names(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        llmcond.load_embedder(name)
    assert f"there is no run or model {name}" in str(error.value)
    assert expected in str(error.value)


def test_unknown_head_of_bundled_model_suggests_prompt():
    with pytest.raises(
        UserError, match=r"--model minilm-csts --prompt concat-cond-sent --run DIR$"
    ):
        llmcond.load_embedder("minilm-csts", head="mpl")


def test_revision_of_local_run_is_rejected(tiny_run):
    with pytest.raises(UserError, match="is not on the hub"):
        llmcond.load_embedder(tiny_run, revision="main")


# -- encoders without a run --------------------------------------------------------------------


@pytest.fixture
def encoder(tmp_path, monkeypatch, tiny_bert):
    """A small encoder in the folder ``encoder`` of the current folder, beside some texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.csv").write_text("text\na dog runs\na cat sleeps\nred wine\n")
    pq.write_table(pa.table({"text": ["a dog runs", "a cat sleeps"]}), "texts.parquet")
    return shutil.copytree(tiny_bert, tmp_path / "encoder")


@pytest.mark.parametrize("flag", ["--model", "--run"])
@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a dog", "a cat", "--condition", "the animal"),
        ("embed", "texts.csv", "--out", "v.npy", "--condition", "the animal"),
        ("embed", "texts.parquet", "--out", "v.lance", "--condition", "the animal"),
        ("index", "texts.csv", "--out", "idx", "--condition", "the animal"),
        ("cluster", "texts.csv", "--condition", "the animal", "--clusters", 2),
        ("check-condition", "texts.csv", "--condition", "the animal"),
        ("explain", "a dog runs", "--condition", "the animal"),
        ("export", "--out", "e", "--condition", "the animal", "--prompt", "concat-sent-cond"),
    ],
)
def test_commands_take_the_folder_of_an_encoder(capsys, encoder, command, flag):
    run_json(capsys, *command, flag, "encoder")
    assert not list(encoder.glob("run.json"))


def test_encoder_embeds_as_a_run_of_it_does(capsys, encoder, tiny_run):
    embedder = llmcond.load_embedder("encoder", prompt="concat-sent-cond", device="cpu")
    expected = llmcond.load_embedder(tiny_run, head="none", device="cpu")
    vectors = embedder.encode(["a dog", "a cat"], "the animal")
    np.testing.assert_allclose(
        vectors, expected.encode(["a dog", "a cat"], "the animal"), atol=1e-3
    )
    by_path = llmcond.load_embedder(encoder, device="cpu")
    assert by_path.view.name == llmcond.load_embedder("encoder").view.name
    with pytest.raises(UserError, match=r"encoder has no fitted head 'mlp'.* --run DIR"):
        llmcond.load_embedder("encoder", head="mlp")
    with pytest.raises(UserError, match=r"no features of the prompt 'nope'"):
        llmcond.load_embedder("encoder", prompt="nope")
    with pytest.raises(UserError, match="revision is 'v1', but encoder is not on the hub"):
        llmcond.load_embedder("encoder", revision="v1")
    message = run_rejected(capsys, "evaluate", "--run", "encoder")
    assert message == (
        "encoder is an encoder, and this command needs a run. Extract features with it: llmcond "
        "extract --model encoder --run DIR"
    )


def test_index_of_an_encoder_is_opened_again_in_another_process(capsys, encoder):
    run_json(capsys, "index", "texts.csv", "--out", "idx", "--model", "encoder")
    record = json.loads(Path("idx/index.json").read_text())
    assert record["made_by"]["model"] == str(encoder)
    command = ["-m", "llmcond", "search", "idx", "dogs", "--condition", "the animal", "--json"]
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert len(json.loads(process.stdout)["results"]) == 3
    temporary = Path(tempfile.gettempdir()).glob("llmcond-*/run.json")
    assert not [path for path in temporary if path.stat().st_mtime > Path("idx").stat().st_mtime]


@pytest.mark.parametrize("name", ["minilm", "sentence-transformers/all-MiniLM-L6-v2"])
def test_known_encoder_needs_no_run(capsys, in_tmp, name):
    command = ("similarity", "a dog", "a cat", "--condition", "the animal")
    result = run_json(capsys, *command, "--model", name)
    assert result["head"] == "none"
    assert llmcond.load_embedder(name, device="cpu").dim == 384


@pytest.mark.parametrize("value", [5, ["a"], b"a", {"a": 1}, 1.5])
def test_run_of_another_type_is_rejected(value):
    with pytest.raises(UserError, match=r"run is .*; expected a path"):
        llmcond.load_embedder(value)
