"""load_embedder by name: the bundled model, a folder, or a model of the hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
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
    no_repository, no_revision, no_run, gated = load_in_process(tmp_path, url, *models)
    check_error(no_repository, "me/none", 2, "the hub has no such repository")
    check_error(no_revision, "me/tiny", 2, "me/tiny has no revision 'v9'")
    check_error(no_run, "me/tiny", 2, "has no run.json, so it is not a model of llmcond")
    check_error(gated, "me/gated", 2, "me/gated is gated")


def test_other_manifest_and_known_encoder_are_reported(hub, tmp_path):
    url, folder = hub
    (folder / "run.json").write_text('{"learning_rate": 0.1}')
    encoder = "sentence-transformers/all-MiniLM-L6-v2"
    other, known = load_in_process(tmp_path, url, ("me/tiny", None), (encoder, None))
    check_error(other, "me/tiny", 1, "or was not written by llmcond")
    assert known["code"] == 2
    assert f"load_encoder('{encoder}') loads it" in known["error"]
    # Only the manifest was downloaded.
    (snapshot,) = (tmp_path / "home/hub/models--me--tiny/snapshots").iterdir()
    assert [path.name for path in snapshot.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minlm-csts", "Did you mean 'minilm-csts' or 'minilm-conditions'?"),
        ("all-MiniLM-L6-v2", "load_encoder('all-MiniLM-L6-v2') loads it"),
        ("all-MiniLM-L6-v2", "'minilm-csts'"),
        ("NV-Embd-v2", "Did you mean 'NV-Embed-v2'"),
    ],
)
def test_unknown_name_suggests_known_names(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        llmcond.load_embedder(name)
    assert f"there is no run at {name}" in str(error.value)
    assert expected in str(error.value)


def test_unknown_head_of_bundled_model_suggests_prompt():
    with pytest.raises(UserError, match=r"--model minilm-csts --prompt concat-cond-sent$"):
        llmcond.load_embedder("minilm-csts", head="mpl")


def test_revision_of_local_run_is_rejected(tiny_run):
    with pytest.raises(UserError, match="is not on the hub"):
        llmcond.load_embedder(tiny_run, revision="main")
