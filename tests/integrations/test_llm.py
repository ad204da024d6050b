"""llm's commands embed texts and search collections under conditions that are registered."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.paths import ROOT

import llmcond
from llmcond.integrations.conditioned import ConditionedModel

TEXTS = ["two men ride", "a dog plays in the park", "women read at the beach", "rain"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command of llm with a new folder of settings, and return its output."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    [(name, module)] = entry_points["llm"].items()
    from llm.plugins import load_plugins, pm

    load_plugins()
    if not pm.has_plugin(name):  # the installed metadata may be older than the entry point
        pm.register(EntryPoint(name, module, "llm").load(), name=name)
    from llm.cli import cli

    def run(*arguments, fails=False):
        result = CliRunner().invoke(cli, list(map(str, arguments)))
        assert (result.exit_code != 0) == fails, result.output
        assert not fails or isinstance(result.exception, SystemExit), result.exception
        return result.output

    return run


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS)))
    return path


def read_vectors(folder, collection):
    """Read the vectors of a collection, in the order of its ids, and the id of its model."""
    import llm
    from sqlite_utils import Database

    stored = llm.Collection(collection, Database(folder / "embeddings.db"), create=False)
    rows = stored.db["embeddings"].rows_where("collection_id = ?", [stored.id], order_by="id")
    return np.array([llm.decode(row["embedding"]) for row in rows]), stored.model_id


def test_errors_of_other_causes_are_one_line(run, monkeypatch):
    def fail(*_):
        raise llmcond.LlmcondError("the hub cannot be reached")

    monkeypatch.setattr(ConditionedModel, "embedder", property(fail))
    assert run("llmcond", "add", "places", "the place", fails=True).endswith("be reached\n")


def test_collections_keep_their_condition(run, table, tmp_path, tiny_run):
    model = ("--model", tiny_run, "--head", "none")
    embedder = llmcond.load_embedder(tiny_run, "none")
    run("llmcond", "add", "places", "the place | where", *model)
    run("embed-multi", "texts", table, "-m", "places", "--store")
    condition = llmcond.Condition("the place | where")
    vectors, first = read_vectors(tmp_path, "texts")
    expected = embedder.encode(TEXTS, condition)
    np.testing.assert_array_equal(vectors, expected)
    hits = list(map(json.loads, run("similar", "texts", "-c", "the park").splitlines()))
    scores = expected @ embedder.encode("the park", condition)
    assert [int(hit["id"]) for hit in hits] == np.argsort(-scores).tolist()
    assert hits[0]["score"] == pytest.approx(scores.max(), abs=1e-6)

    # The name of another condition is an alias of another id; the collection keeps its own.
    run("llmcond", "add", "places", "the mood", "--values", "happy, sad", *model)
    vector = json.loads(run("embed", "-m", "places", "-c", TEXTS[0]))
    condition = llmcond.Condition("the mood", ["happy", "sad"])
    assert vector == embedder.encode(TEXTS[0], condition).tolist()
    run("embed", "texts", "5", "-m", "places", "-c", "a happy man")
    vectors, model_id = read_vectors(tmp_path, "texts")
    assert model_id == first
    np.testing.assert_array_equal(
        vectors[4], embedder.encode("a happy man", llmcond.Condition("the place | where"))
    )
    listed = run("llmcond", "list").splitlines()
    assert [line.split()[1].split("/")[1] for line in listed] == ["topic", "places", "places"]
    run("llmcond", "remove", "places")
    assert "places" not in run("embed-models")
    run("llmcond", "add", "again", "the place | where", *model)
    run("llmcond", "add", "places", "the place | where", *model)
    assert len(run("similar", "texts", "-c", "the park").splitlines()) == 5


def test_changed_model_is_an_error(run, table, tmp_path, tiny_run):
    run("llmcond", "add", "places", "the place", "--model", tiny_run, "--head", "none")
    path = tmp_path / "llmcond.json"
    path.write_text(path.read_text().replace('"the place"', '"the mood"'))
    output = run("embed-multi", "texts", table, "-m", "places", fails=True)
    assert "Embed the texts again" in output
    assert "Traceback" not in output
    for damaged, message in (
        ("{,}", "is not a readable JSON file"),
        ('{"a": {}}', "invalid entry"),
        ('{"llmcond/a/0": {"fingerprint": "0", "model": "minilm-csts"}}', "invalid entry"),
    ):
        path.write_text(damaged)
        output = run("embed-models", fails=True)
        assert message in output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("places", ""), "the condition is empty"),
        (("a/b", "the place"), "the name 'a/b'"),
        (("3-small", "the place"), "that of another model"),
        (("places", "the place", "--truncate-dim", 4000), "from 1 to 32"),
        (("places", "the place", "--model", "no-such-model"), "no-such-model"),
    ],
)
def test_invalid_registration_is_an_error(run, tmp_path, tiny_run, arguments, message):
    if "--model" not in arguments:
        arguments = (*arguments, "--model", tiny_run, "--head", "none")
    assert message in run("llmcond", "add", *arguments, fails=True)
    assert not (tmp_path / "llmcond.json").exists()


def test_model_without_registration_is_the_bundled_one(run):
    from llmcond.integrations.conditioned import ConditionedModel
    from llmcond.integrations.llm import _READY

    assert ConditionedModel("the topic", model="minilm-conditions").to_json() == _READY
    line = f"llmcond: llmcond/topic/{_READY['fingerprint'][:12]} (the topic) (aliases: topic)"
    assert line in run("embed-models").splitlines()
    run("llmcond", "add", "topic", "the mood", "--model", "minilm-conditions")
    assert "(the topic) (aliases" not in run("embed-models")
    run("llmcond", "add", "topic", "the topic", "--model", "minilm-conditions")
    assert run("embed-models").splitlines().count(line) == 1


def test_start_of_llm_loads_no_model():
    code = "import sys, llm; before = {*sys.modules}; import llmcond.integrations.llm;"
    code += "print(*(name for name in {*sys.modules} - before if name.startswith('llmcond.')))"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in process.stdout.split()}
    assert loaded == {"base", "integrations"}
