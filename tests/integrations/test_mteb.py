"""mteb runs the wrapper on the tasks, and gets the scores that llmcond computes."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

import llmcond
from llmcond.data.datasets import read_rows, sample_folder


@pytest.fixture(scope="module")
def wrapper():
    """The tested module, imported late because it imports mteb, which takes seconds."""
    from llmcond.integrations import mteb

    return mteb


def run_mteb(model, task):
    """Return mteb's scores, by subset."""
    import mteb

    options = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
    results = mteb.evaluate(model, task, **options, encode_kwargs={"batch_size": 16})
    [scores] = results.task_results[0].scores.values()
    return {row["hf_subset"]: row for row in scores}


def evaluate_with_mteb(model, task):
    return run_mteb(model, task)["default"]["main_score"]


@pytest.fixture
def aspects(tmp_path):
    """A folder with two datasets of the same texts; ``nested`` has no triples."""
    texts = [
        {"text": f"{number} {noun} {verb} in the park", "attrs": {"number": number, "verb": verb}}
        for noun in ("men", "dogs")
        for number in ("two", "three")
        for verb in ("ride", "read", "play")
    ]
    conditions = {"number": {"text": "the number"}, "verb": {"text": "the activity"}}
    content = {"texts": texts, "conds": conditions}
    triples = [
        [0, 1, 3, "number", "verb"],
        [4, 5, 1, "number", "verb"],
        [8, 5, 6, "verb", "number"],
    ]
    folder = tmp_path / "aspects"
    (folder / "triples").mkdir(parents=True)
    for name in ("short", "long", "nested"):
        added = {"triples": triples[:1]} if name == "short" else {}
        (folder / f"{name}.json").write_text(json.dumps(content | added))
    (folder / "triples" / "long.json").write_text(json.dumps({"triples": triples}))
    return folder


def test_score_of_bundled_sample_matches_embedder(wrapper, tiny_run):
    rows, _ = read_rows(sample_folder(), "test")
    embedder = llmcond.load_embedder(tiny_run, "none")
    similarities = embedder.similarity(rows.sentence1, rows.sentence2, rows.condition)
    score = evaluate_with_mteb(wrapper.MtebEncoder(tiny_run, head="none"), wrapper.CSTS())
    assert score == pytest.approx(spearmanr(similarities, rows.rating).statistic, abs=1e-4)


def test_accuracy_of_triples_matches_embedder(wrapper, tiny_run, aspects):
    model, task = wrapper.MtebEncoder(tiny_run, head="none"), wrapper.AspectTriples(aspects)
    scores = run_mteb(model, task)
    texts = [item["text"] for item in json.loads((aspects / "long.json").read_text())["texts"]]
    triples = [
        (0, 1, 3, "the number"), (0, 3, 1, "the activity"), (4, 5, 1, "the number"),
        (4, 1, 5, "the activity"), (8, 5, 6, "the activity"), (8, 6, 5, "the number"),
    ]  # fmt: skip

    def is_right(anchor, right, wrong, condition):
        pair = [texts[right], texts[wrong]]
        first, second = model.embedder.similarity([texts[anchor]] * 2, pair, condition)
        return first > second

    right = np.array([is_right(*triple) for triple in triples])
    assert 0 < right.mean() < 1
    assert [*scores] == ["long", "short"]
    assert scores["long"]["main_score"] == pytest.approx(right.mean())
    assert scores["long"]["right_under_both"] == right.reshape(3, 2).all(axis=1).mean()
    assert scores["short"]["triple_accuracy"] == right[:2].mean()
    # A second run finds the data and the subsets again.
    assert run_mteb(model, task) == scores
    with pytest.raises(llmcond.UserError, match=r"nested in .* no triples\. Add triples/nested"):
        wrapper.AspectTriples(aspects, ["long", "nested"])
    # A model that ignores the condition is right under one of the two.
    task = wrapper.AspectTriples(aspects, ["long"])
    task.input1_column_name = {"sentence1": "text"}
    task.input2_column_name = {"sentence2": "text"}
    model = wrapper.MtebEncoder(tiny_run, head="none", condition="the place")
    scores = run_mteb(model, task)["long"]
    assert (scores["triple_accuracy"], scores["right_under_both"]) == (0.5, 0)


# -- what mteb requires of tasks and models ------------------------------------------------------


def test_revisions_differ_where_vectors_do(wrapper, tiny_run):
    names = ("none@concat-sent-cond", "none@concat-sent-cond+c")
    models = [wrapper.MtebEncoder(tiny_run, head=name) for name in names]
    models.append(wrapper.MtebEncoder(tiny_run, head=names[0], truncate_dim=4))
    assert len({model.mteb_model_meta.revision for model in models}) == 3


def test_blank_texts_get_zero_vectors_and_invalid_arguments_are_reported(wrapper, tiny_run):
    model = wrapper.MtebEncoder(tiny_run, head="none", condition="the place", truncate_dim=4)
    vectors = model.encode([{"text": ["a park", " "]}, {"text": [""]}], task_metadata=None)
    assert vectors.shape == (3, 4)
    np.testing.assert_array_equal(vectors.any(axis=1), [True, False, False])
    with pytest.raises(TypeError, match="heads"):
        wrapper.MtebEncoder(tiny_run, heads="none")
    with pytest.raises(llmcond.UserError, match="the condition is empty"):
        wrapper.MtebEncoder(tiny_run, condition=" ")
    with pytest.raises(llmcond.UserError, match="revision is 'v1'"):
        wrapper.MtebEncoder(tiny_run, "v1")


def test_proposed_tasks_import_nothing_of_llmcond():
    source = (Path(llmcond.__file__).parent / "integrations" / "mteb_tasks.py").read_text()
    modules = [node.module for node in ast.walk(ast.parse(source)) if hasattr(node, "module")]
    modules = {module.partition(".")[0] for module in modules}
    assert "mteb" in modules
    assert "llmcond" not in modules


def test_description_of_bundled_model_is_complete(wrapper):
    from huggingface_hub import metadata_load

    from llmcond.base.package import pretrained_folder

    model = wrapper.MtebEncoder("minilm-csts", device="cpu")
    meta = model.mteb_model_meta
    record = json.loads((pretrained_folder("minilm-csts") / "training.json").read_text())
    card = metadata_load(pretrained_folder("minilm-csts") / "README.md")
    assert meta.release_date == record["created"][:10]
    assert meta.adapted_from == record["base"]["repo"] == card["base_model"]
    # The base has a pooler that is not used.
    assert 0 <= meta.n_parameters - record["summary"]["weights"]["of"] < 200_000
    assert (meta.embed_dim, meta.max_tokens, meta.open_weights) == (384, 256, True)
    assert "CSTS" in meta.training_datasets
    assert not meta.is_zero_shot_on(["CSTS"])
    assert meta.is_zero_shot_on(["AspectTriples"])
    assert "MSMARCO" in meta.get_training_datasets()  # of the base, which mteb knows
    loaded = meta.load_model(device="cpu")
    assert loaded.mteb_model_meta.revision == meta.revision


def test_task_without_conditions_uses_condition_of_encoder(
    wrapper, tiny_run, write_rows, small_rows
):
    source = write_rows([*small_rows, ("a", "b", "c", -1)])
    rows, _ = read_rows(source)
    rows = rows.take(rows.rated)
    embedder = llmcond.load_embedder(tiny_run, "none")
    similarities = embedder.similarity(rows.sentence1, rows.sentence2, "the place")
    task = wrapper.CSTS(source)
    task.column_names = ("sentence1", "sentence2")
    model = wrapper.MtebEncoder(tiny_run, head="none", condition="the place")
    expected = spearmanr(similarities, rows.rating).statistic
    assert evaluate_with_mteb(model, task) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(llmcond.UserError, match="has no conditions"):
        evaluate_with_mteb(wrapper.MtebEncoder(tiny_run, head="none"), task)
    changed = wrapper.CSTS(write_rows(small_rows[1:]))
    assert changed.metadata.dataset["revision"] != task.metadata.dataset["revision"]
