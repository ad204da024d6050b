"""Models by name: a bundled one, an encoder, or one of the hub; kinds of task, and credits."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.hub import COMMIT, serve_hub, use_hub
from huggingface_hub import ModelCard, constants

import llmcond
from llmcond import cli
from llmcond.base import metrics
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.package import (
    DEFAULT_MODEL,
    bundled_folder,
    pretrained_folder,
    pretrained_names,
)
from llmcond.encoders.adapter import CREDITS
from llmcond.runs.open import open_any_run
from llmcond.runs.portable import read_credits
from llmcond.tasks import KINDS, find_kind


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the bundled model as ``me/tiny``, as push would upload it."""
    with serve_hub(pretrained_folder(DEFAULT_MODEL)) as server:
        use_hub(monkeypatch, server.url, tmp_path)
        yield server


def test_model_from_hub_is_downloaded_and_cached(hub, monkeypatch):
    inputs = ["two men play in the park", "a dog"], "the place"
    expected = llmcond.load_embedder(DEFAULT_MODEL, device="cpu").encode(*inputs)
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        embedder = llmcond.load_embedder("me/tiny", revision=COMMIT, device="cpu")
        np.testing.assert_allclose(embedder.encode(*inputs), expected, atol=1e-5)
    with pytest.raises(LlmcondError, match=r"no local run at me/other, .* hub cannot be reached"):
        llmcond.load_embedder("me/other")


def test_hub_errors_name_repository_and_reason(hub, tmp_path):
    files = hub.files("me/tiny")
    files["run.json"] = b'{"learning_rate": 0.1}'
    for name, revision, code, message in (
        ("me/none", None, 2, "the hub has no such repository"),
        ("me/tiny", "v9", 2, "me/tiny has no revision 'v9'"),
        ("me/tiny", None, 1, "or was not written by llmcond"),
        ("me/gated", None, 2, "me/gated is gated"),
    ):
        with pytest.raises(LlmcondError) as error:
            llmcond.load_embedder(name, revision=revision)
        start = f"there is no local run at {name}, so it was looked up on the hub"
        assert str(error.value).startswith(start)
        assert message in str(error.value)
        assert error.value.exit_code == code
    # Only the manifest was downloaded.
    (snapshot,) = (tmp_path / "cache/models--me--tiny/snapshots").iterdir()
    assert [path.name for path in snapshot.iterdir()] == ["run.json"]
    # Without run.json, it is an encoder like any other. A known one is not downloaded.
    shutil.rmtree(tmp_path / "cache")
    del files["run.json"]
    for name in ("me/tiny", "sentence-transformers/all-MiniLM-L6-v2"):
        assert llmcond.load_embedder(name, device="cpu").dim == 384


def test_unknown_name_suggests_known_names(in_tmp, tiny_run):
    for name, expected in (
        ("minlm-csts", "Did you mean 'minilm-csts'"),
        ("NV-Embd-v2", "Did you mean 'nvidia/NV-Embed-v2'"),
        ("x" * 300, "The bundled models are 'minilm-conditions', 'minilm-csts', "),
    ):
        with pytest.raises(UserError) as error:
            llmcond.load_embedder(name)
        assert f"there is no run or model {name}" in str(error.value)
        assert expected in str(error.value)
    message = r"^minilm-csts \(bundled\) has no features.*--model minilm-csts .*--run DIR$"
    with pytest.raises(UserError, match=message):
        llmcond.load_embedder("minilm-csts", head="none", prompt="pair-cond")
    message = r"--model minilm-csts --prompt concat-cond-sent --run DIR$"
    with pytest.raises(UserError, match=message):
        llmcond.load_embedder("minilm-csts", head="mpl")
    with pytest.raises(UserError, match="is not on the hub"):
        llmcond.load_embedder(tiny_run, revision="main")
    with pytest.raises(UserError, match=f"Name an existing one .*{tiny_run}"):
        llmcond.runs.open_run(tiny_run.parent / "other")
    with pytest.raises(UserError, match=r"run is .*; expected a path"):
        llmcond.load_embedder(["a"])


# -- encoders without a run --------------------------------------------------------------------


@pytest.fixture
def encoder(tmp_path, monkeypatch, tiny_bert):
    """A small encoder in the folder ``encoder`` of the current folder, beside some texts."""
    monkeypatch.chdir(tmp_path)
    Path("texts.csv").write_text("text\na dog runs\na cat sleeps\nred wine\n")
    pq.write_table(pa.table({"text": ["a dog runs", "a cat sleeps"]}), "texts.parquet")
    return shutil.copytree(tiny_bert, tmp_path / "encoder")


@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a dog", "a cat"),
        ("embed", "texts.csv", "--out", "v.npy"),
        ("embed", "texts.parquet", "--out", "v.lance"),
        ("index", "texts.csv", "--out", "idx"),
        ("cluster", "texts.csv", "--clusters", 2),
        ("check-condition", "texts.csv"),
        ("explain", "a dog runs"),
        ("export", "--out", "e", "--prompt", "concat-sent-cond"),
    ],
)
def test_commands_take_the_folder_of_an_encoder(capsys, encoder, command):
    run_json(capsys, *command, "--condition", "the animal", "--model", "encoder")
    assert not list(encoder.glob("run.json"))


def test_encoder_embeds_as_a_run_of_it_does(capsys, encoder, tiny_run):
    embedder = llmcond.load_embedder("encoder", prompt="concat-sent-cond", device="cpu")
    expected = llmcond.load_embedder(tiny_run, head="none", device="cpu")
    vectors, expected_vectors = (
        item.encode(["a dog", "a cat"], "the animal") for item in (embedder, expected)
    )
    np.testing.assert_allclose(vectors, expected_vectors, atol=1e-3)
    with pytest.raises(UserError, match=r"encoder has no fitted head 'mlp'.* --run DIR"):
        llmcond.load_embedder("encoder", head="mlp")
    message = run_rejected(capsys, "evaluate", "--run", "encoder")
    assert message == (
        "encoder is an encoder, and this command needs a run. Extract features with it: llmcond "
        "extract --model encoder --run DIR"
    )
    command = ("similarity", "a dog", "a cat", "--condition", "the animal", "--model", "minilm")
    assert run_json(capsys, *command)["head"] == "none"


# -- kinds of task of packages -----------------------------------------------------------------

#: A package that adds a kind of task, a task of this kind, a head and a metric.
PACKAGE = """
from llmcond import Task
from llmcond.heads.conditioned import Linear


class Answers(Task):
    name, kind, metrics = "answers", "pairs", ("pearson",)


class Scaled(Linear):
    pass


def overlap(prediction, rating, group):
    return float((prediction > 0) @ (rating > 0)) / len(rating)
"""
ENTRY_POINTS = """
[llmcond.kinds]
pairs = pairs_kind:Answers
[llmcond.tasks]
answers = pairs_kind:Answers
[llmcond.heads]
scaled = pairs_kind:Scaled
[llmcond.metrics]
overlap = pairs_kind:overlap
gone = pairs_kind:Gone
"""


def test_package_adds_kind_task_head_and_metric(
    tmp_path, monkeypatch, capsys, write_rows, small_rows, model
):
    (tmp_path / "pairs_kind.py").write_text(PACKAGE)
    metadata = tmp_path / "pairs_kind-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs-kind\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pairs_kind", raising=False)
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.chdir(tmp_path)
    assert all(find_kind(name).kind == name for name in KINDS)
    with pytest.raises(UserError, match=r"no kind of task 'rankin'.*'ranking'"):
        find_kind("rankin")
    recipe = (bundled_folder("heads") / "linear.toml").read_text()
    recipe = recipe.replace('kind = "linear"', 'kind = "scaled"').replace(
        "epochs = 200", "epochs = 1"
    )
    Path("scaled.toml").write_text(recipe)
    options = ["--run", "run", "--prompt", "pair-cond", "--task", "answers", "--pooling", "mean"]
    data = ["--model", model, "--data", str(write_rows(small_rows))]
    assert cli.run(["extract", *data, *options, "--device", "cpu"]) == 0
    assert open_any_run(Path("run")).kind.kind == "pairs"
    assert cli.run(["fit-head", "--head", "scaled.toml", "--run", "run", "--set", "epochs=1"]) == 0
    capsys.readouterr()
    results = run_json(capsys, "evaluate", "--run", "run", "--metric", "overlap")["results"]
    assert [row["head"] for row in results].count("scaled") == 1
    for row in results:
        assert (row["n"], row["task"], "pearson" in row) == (12, "answers", True)
        assert 0 <= row["overlap"] <= 1
    with pytest.raises(UserError, match=r"metric 'gone' of an installed package, pairs_kind:Gone"):
        metrics.choose_metrics((), ["gone"])


# -- credits of models -------------------------------------------------------------------------

WORK = {"name": "Data", "use": "texts", "authors": "Ada", "licence": "MIT", "url": "https://a.b/c"}


def write_credits(folder, **changes):
    record = {"format": 1, "licence": "Apache-2.0", "works": [WORK], **changes}
    (folder / CREDITS).write_text(json.dumps(record))


@pytest.mark.parametrize("name", pretrained_names())
def test_card_of_bundled_model_names_every_work(name):
    folder = pretrained_folder(name)
    works = read_credits(folder).works
    card = ModelCard.load(folder / "README.md")
    expected = ("apache-2.0", ["LivNLP/C-STS-Reannotated"])
    assert (card.data.license, card.data.datasets) == expected
    assert works[0].use.startswith("base encoder")
    assert "rated sentence pairs" in {work.use for work in works}
    for work in works:
        assert f"[{work.name}]({work.url})" in card.text
        assert work.authors in card.text
    if name == "minilm-conditions":  # it continues a model that was trained on dev
        assert not card.data.eval_results
        return
    score, *_ = card.data.eval_results
    split = "dev (5 folds)" if name == "minilm-csts" else "dev"
    assert (score.metric_type, score.dataset_split) == ("spearmanr", split)


def test_texts_of_credits_are_not_markdown(tmp_path):
    hostile = "a|b\n\n# <script> [x](javascript:x) `y`"
    changes = {"authors": hostile, "origin": hostile, "url": hostile, "licence": "My-1.0"}
    write_credits(tmp_path, works=[{**WORK, **changes, "year": 2026}])
    section = read_credits(tmp_path).to_markdown()
    escaped = r"a\|b \# &lt;script&gt; \[x\](javascript:x) \`y\`"
    assert section.count(escaped) == 2
    assert "| Data | texts |" in section
    assert section.replace(escaped, "").count("](") == 1  # the licence of the model
    assert read_credits(tmp_path).metadata == {"license": "apache-2.0"}


def test_invalid_credits_are_reported(tmp_path):
    for changes in ({"works": []}, {"licence": 3}, {"works": [{"name": "x"}]}, {"format": None}):
        write_credits(tmp_path, **changes)
        with pytest.raises(LlmcondError, match=CREDITS):
            read_credits(tmp_path)
    write_credits(tmp_path, format=2)
    with pytest.raises(UserError, match="newer version"):
        read_credits(tmp_path)
    assert read_credits(tmp_path / "none") is None
    llmcond.load_embedder("minilm-csts", device="cpu").save_pretrained(tmp_path / "copy")
    assert read_credits(tmp_path / "copy") == read_credits(pretrained_folder("minilm-csts"))
