"""What load_embedder takes by name: the bundled model, a folder, or a model of the hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hub import COMMIT, serving

import llmcond
from llmcond.bundled import DEFAULT_MODEL, pretrained_folder
from llmcond.errors import UserError

#: Load models by their names and revisions; print the sums of each one's vectors, or its error.
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
    """A hub whose me/tiny is the bundled model, as push would upload it."""
    folder = shutil.copytree(pretrained_folder(DEFAULT_MODEL), tmp_path / "pushed")
    with serving(folder) as url:
        yield url, folder


def load(tmp_path: Path, endpoint: str, *models: tuple[str, str | None], offline: str = "0"):
    """Load them in a process of its own, which reads the hub's settings anew."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(models)],
        env={**os.environ, **settings, "HF_HUB_OFFLINE": offline},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(failed: dict, name: str, code: int, words: str) -> None:
    """Check that an error says where a model was looked up, and what came of it."""
    start = f"there is no local run at {name}, so it was looked up on the hub"
    assert failed["error"].startswith(start)
    assert words in failed["error"]
    assert failed["code"] == code


def test_a_model_of_the_hub_is_downloaded_and_stays(hub, tmp_path):
    url, _ = hub
    vectors = llmcond.load_embedder(DEFAULT_MODEL, device="cpu").encode(
        ["two men play in the park", "a dog"], "the place"
    )
    (loaded,) = load(tmp_path, url, ("me/tiny", COMMIT))
    assert loaded["size"] == vectors.shape[1]
    assert loaded["sums"] == pytest.approx(vectors.sum(axis=1).tolist(), abs=1e-4)
    again, other = load(tmp_path, url, ("me/tiny", COMMIT), ("me/other", None), offline="1")
    assert again == loaded
    check(other, "me/other", 1, "hub cannot be reached")


def test_what_was_tried_is_said(hub, tmp_path):
    url, folder = hub
    (folder / "run.json").unlink()
    models = [("me/none", None), ("me/tiny", "v9"), ("me/tiny", None), ("me/gated", None)]
    none, no_revision, no_run, gated = load(tmp_path, url, *models)
    check(none, "me/none", 2, "the hub has no such repository")
    check(no_revision, "me/tiny", 2, "me/tiny has no revision 'v9'")
    check(no_run, "me/tiny", 2, "has no run.json, so it is not a model of llmcond")
    check(gated, "me/gated", 2, "me/gated is gated")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("minlm-csts", "Did you mean 'minilm-csts' or 'minilm-conditions'?"),
        ("all-MiniLM-L6-v2", "load_encoder('all-MiniLM-L6-v2') loads it"),
        ("all-MiniLM-L6-v2", "'minilm-csts'"),
        ("NV-Embd-v2", "Did you mean 'NV-Embed-v2'"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        llmcond.load_embedder(name)
    assert f"there is no run at {name}" in str(raised.value)
    assert words in str(raised.value)


def test_an_unknown_head_of_the_bundled_model_is_told_with_its_prompt():
    with pytest.raises(UserError, match=r"--model minilm-csts --prompt concat-cond-sent$"):
        llmcond.load_embedder("minilm-csts", head="mpl")


def test_a_folder_has_no_revision(tiny_run):
    with pytest.raises(UserError, match="is not on the hub"):
        llmcond.load_embedder(tiny_run, revision="main")
