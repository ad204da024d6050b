"""Embedders: the default head, embeddings and their options, and the training data of a head."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond import fit_head
from llmcond.base.arrays import PRECISIONS, as_matrix, cosine
from llmcond.base.errors import UserError
from llmcond.base.package import DEFAULT_MODEL
from llmcond.cli import run
from llmcond.heads.numpy_heads import ZERO_SHOT
from llmcond.runs import open_run
from llmcond.runs.embedder import EmbeddingModel, base_encoder, find_unfamiliar_conditions
from llmcond.runs.examples import predict, zero_shot_heads
from llmcond.runs.rated import RatedExamples

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCES = ["two men play in the park", "three women sit at the beach", "children in the rain"]
PLACE = "the place"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, tiny_run):
    """A run with a head that dev prefers, and a worse one that was fitted last."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("fitted") / "run"))
    settings = {"run": folder, "head": "linear", "dim": 4, "set": {"epochs": "3", "patience": "3"}}
    scores = {
        seed: fit_head(**settings, seed=seed, name=str(seed)).metrics["spearman"].value
        for seed in (0, 1)
    }
    best = max(scores, key=scores.__getitem__)
    (folder / "heads" / str(best)).rename(folder / "heads" / "best")
    fit_head(**settings, seed=1 - best, name=str(1 - best))
    return folder


@pytest.fixture(scope="module")
def embedder(fitted):
    return llmcond.load_embedder(fitted, device="cpu")


# -- the default head ---------------------------------------------------------------------------


def test_default_head_is_best_on_dev_unless_user_sets_it(fitted, tmp_path, capsys):
    folder = Path(shutil.copytree(fitted, tmp_path / "own"))
    settings = {"epochs": "1", "learning_rate": "1e-9"}
    fit_head(run=folder, head="linear", dim=2, set=settings, name="later")
    assert open_run(folder).head_names()[-1] == "later"
    assert llmcond.load_embedder(folder).name == "best"
    assert run(["similarity", "a", "b", "--condition", "c", "--run", str(folder)]) == 0
    assert "head best (best of 3 heads on dev, Spearman" in capsys.readouterr().err
    heads = run_json(capsys, "heads", "--run", folder, "--default", "later")["heads"]
    rows = {row["name"]: row for row in heads}
    assert (rows["later"]["taken"], rows["best"]["taken"]) == ("the run's default", "")
    assert rows["best"]["dev_spearman"] > rows["later"]["dev_spearman"]
    assert llmcond.load_embedder(folder).name == "later"
    message = run_rejected(capsys, "heads", "--run", folder, "--default", "bst")
    assert "no head 'bst'. Did you mean 'best'" in message


# -- embeddings and similarities ---------------------------------------------------------------


def test_embeddings_have_unit_length(fitted):
    for head in ("best", "none"):
        embedder = llmcond.load_embedder(fitted, head)
        raw = embedder.encode(SENTENCES, PLACE, normalize=False)
        norms = np.linalg.norm(raw, axis=1, keepdims=True)
        assert np.abs(norms - 1).min() > 0.01
        np.testing.assert_allclose(embedder.encode(SENTENCES, PLACE), raw / norms, atol=1e-6)
        scaled = embedder.encode(SENTENCES, PLACE, normalize_embeddings=False)
        np.testing.assert_array_equal(scaled, raw)


def test_single_texts_give_single_results(embedder):
    several = embedder.similarity(SENTENCES[:1], SENTENCES[1:2], [PLACE])
    single = embedder.similarity(*SENTENCES[:2], PLACE)
    assert isinstance(single, float)
    assert single == pytest.approx(float(several[0]), abs=1e-6)
    vector = embedder.encode(SENTENCES[0], PLACE)
    np.testing.assert_allclose(vector, embedder.encode(SENTENCES[:1], PLACE)[0], atol=1e-6)
    for arguments in (("a", ["b"], "c"), (["a"], "b", "c"), ("a", "b", ["c"])):
        with pytest.raises(UserError, match="Give two texts, or two lists"):
            embedder.similarity(*arguments)
    with pytest.raises(UserError, match="a single embedding has none"):
        embedder.encode(SENTENCES[0], PLACE, precision="int8")


def test_truncated_embeddings_are_first_dimensions_with_unit_norm(fitted, embedder):
    full, raw = (embedder.encode(SENTENCES, PLACE, normalize=n) for n in (True, False))
    expected = full[:, :3] / np.linalg.norm(full[:, :3], axis=1, keepdims=True)
    truncated = embedder.encode(SENTENCES, PLACE, truncate_dim=3)
    np.testing.assert_allclose(truncated, expected, atol=1e-6)
    unscaled = embedder.encode(SENTENCES, PLACE, truncate_dim=3, normalize=False)
    np.testing.assert_array_equal(unscaled, raw[:, :3])
    small = llmcond.load_embedder(fitted, truncate_dim=3)
    assert small.dim == 3
    np.testing.assert_array_equal(small.encode(SENTENCES, PLACE), truncated)
    similarity = small.similarity(SENTENCES, SENTENCES[::-1], PLACE)
    np.testing.assert_allclose(similarity, (expected * expected[::-1]).sum(axis=1), atol=1e-6)
    # Guides are fitted on truncated embeddings.
    labelled = ("a park", "a beach"), ("green", "blue"), PLACE
    assert small.guided(*labelled).encode(SENTENCES, PLACE).shape == (3, 3)
    with pytest.raises(UserError, match="guide of 'the place' maps embeddings of 4 dimensions"):
        embedder.guided(*labelled).encode(SENTENCES, PLACE, truncate_dim=3)


def test_wordings_are_averaged_and_ignored_conditions_removed(fitted):
    embedder = llmcond.load_embedder(fitted, "best")
    parts = [embedder.encode(SENTENCES, text) for text in (PLACE, "the location")]
    mean = embedder.encode(SENTENCES, f"{PLACE} | the location |")
    expected = np.mean(parts, axis=0)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    texts = [f"{text} {number}" for text in SENTENCES for number in range(20)]
    condition = llmcond.Condition(PLACE, ignore=["the number"])
    ignoring = embedder.ignoring(texts, condition, directions=2)
    vectors = ignoring.encode(texts, [condition] * 60)
    spread = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False)
    assert (spread > 1e-4).sum() == embedder.dim - 2
    np.testing.assert_array_equal(ignoring.encode(texts, PLACE), embedder.encode(texts, PLACE))
    columns = {"kind": ["a", "b"] * 30}
    frame = pd.DataFrame({"text": texts, **columns}).sample(frac=1, random_state=0)
    series = embedder.ignoring(frame["text"], PLACE, {"kind": frame["kind"]})
    listed = embedder.ignoring(list(frame["text"]), PLACE, {"kind": list(frame["kind"])})
    np.testing.assert_array_equal(series.encode(texts, PLACE), listed.encode(texts, PLACE))
    guided = ignoring.guided(["a park", "a beach"], ["green", "blue"], condition)
    assert guided.guides[condition].before == ignoring.guides[condition]
    labels = ["a", None] * 30
    for arguments, message in (
        ((texts, PLACE), "'the place' ignores nothing"),
        ((texts[:30], condition), "30 distinct texts, and at least 50 are needed"),
        ((texts, PLACE, {"kind": labels}), "column 'kind' has fewer than 2 labels"),
        ((texts, PLACE, {"kind": ["a", np.nan] * 30}), "column 'kind' has fewer than 2 labels"),
        ((texts, PLACE, {"kind": ["a", "b"]}), "column 'kind' has 2 labels for 60 texts"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.ignoring(*arguments)
    with pytest.raises(UserError, match="ignores must be found in a collection"):
        embedder.encode(texts, condition)


def test_embeddings_are_converted_as_in_sentence_transformers(embedder):
    vectors = embedder.encode(SENTENCES, PLACE)
    unpickled = pickle.loads(pickle.dumps(embedder))
    np.testing.assert_array_equal(unpickled.encode(SENTENCES, PLACE), vectors)
    for precision in PRECISIONS:
        codes = embedder.encode(SENTENCES, PLACE, precision=precision)
        expected = llmcond.quantize_embeddings(vectors, precision)
        assert codes.dtype == expected.dtype
        np.testing.assert_array_equal(codes, expected)
    tensor = embedder.encode(SENTENCES, PLACE, convert_to_tensor=True)
    assert torch.equal(tensor, torch.from_numpy(vectors))
    listed = embedder.encode(SENTENCES, PLACE, convert_to_numpy=False)
    assert isinstance(listed, list)
    assert torch.equal(torch.stack(listed), tensor)
    assert embedder.encode(SENTENCES[0], PLACE, convert_to_tensor=True).shape == (4,)


@pytest.mark.parametrize("normalises", [True, False])
def test_encoder_has_options_of_sentence_transformers(tiny_bert, normalises):
    encoder = llmcond.load_encoder(tiny_bert, pooling="mean", normalize=normalises, device="cpu")
    vectors = encoder.encode(SENTENCES)
    inputs = [llmcond.EncoderInput("", text) for text in SENTENCES]
    np.testing.assert_array_equal(vectors, encoder.encode(inputs))
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = encoder.encode(SENTENCES, normalize_embeddings=True)
    np.testing.assert_allclose(scaled, vectors / norms, rtol=1e-6)
    truncated, expected = encoder.encode(SENTENCES, truncate_dim=5), vectors[:, :5]
    if normalises:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(truncated, expected, rtol=1e-6)
    codes = encoder.encode(SENTENCES, precision="ubinary", convert_to_tensor=True)
    assert torch.equal(codes, torch.from_numpy(np.packbits(vectors > 0, axis=1)))


def test_batch_size_and_progress_are_options(fitted, monkeypatch, caplog):
    monkeypatch.setattr("llmcond.base.output.EVERY_SECONDS", 0)
    caplog.set_level("INFO", "llmcond")
    embedder = llmcond.load_embedder(fitted, device="cpu")
    engine, sizes = embedder.encoder.engine, []
    run_engine = engine.run

    def run_and_count(*arguments, **options):
        for batch in run_engine(*arguments, **options):
            sizes.append(len(batch.inputs))
            yield batch

    monkeypatch.setattr(engine, "run", run_and_count)
    expected = embedder.encode(SENTENCES, PLACE)
    assert sizes == [4]  # with the condition alone
    assert "inputs" not in caplog.text
    vectors = embedder.encode(SENTENCES, PLACE, batch_size=2, show_progress=True)
    assert sizes[1:] == [2, 2]
    assert "encoding: 4/4 inputs" in caplog.text
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    for options, message in (
        ({"truncate_dim": 5}, "truncate_dim is 5, but the embeddings have 4 dimensions"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.encode(SENTENCES, PLACE, **options)


def test_matryoshka_dims_depend_on_head(run_copy):
    for head, settings, dims in (
        ("pca", {}, [3, 2, 1]),
        ("linear", {"epochs": "1", "matryoshka": "4,2,3"}, [3, 2]),
        ("ica", {}, []),
    ):
        fit_head(run=run_copy, head=head, dim=4, set=settings, name=head)
        assert llmcond.load_embedder(run_copy, head).matryoshka_dims == dims


def test_texts_can_be_any_sequence_but_not_a_table(embedder):
    conditions = ["place", "mood", "time"]
    expected = embedder.encode(SENTENCES, conditions)
    for kind in (tuple, iter, np.array, pa.array, pd.Series):
        vectors = embedder.encode(kind(SENTENCES), kind(conditions))
        np.testing.assert_array_equal(vectors, expected)
    columns = {"sentence": SENTENCES}
    for table in (columns, pa.table(columns), pd.DataFrame(columns)):
        with pytest.raises(UserError, match=f"a whole {type(table).__name__} was given as a list"):
            embedder.encode(table, "place")
    with pytest.raises(UserError, match="sentence 2 of 2 is empty"):
        embedder.encode(pa.array(["a", None]), "place")


# -- embedding models --------------------------------------------------------------------------


def test_identity_differs_between_zero_shot_and_fitted_head(fitted, caplog):
    caplog.set_level("INFO", "llmcond")
    fitted_model, zero_shot = (EmbeddingModel.find(fitted, h, quiet=True) for h in ("best", "none"))
    assert not caplog.records
    assert (fitted_model.head.is_fitted, zero_shot.head.is_fitted) == (True, False)
    assert (fitted_model.head.reference, zero_shot.head.reference) == ("best", "none")
    assert list(zero_shot.identity) == ["encoder", "prompt", "subtraction", "head"]
    assert zero_shot.identity["head"] is None
    assert fitted_model.identity["head"] == fitted_model.run.head_record("best")["weights_sha256"]
    assert {**fitted_model.identity, "head": None} == zero_shot.identity
    with pytest.raises(UserError, match="was fitted on the prompt"):
        EmbeddingModel.find(fitted, "best", "separate")


def test_zero_shot_head_predicts_cosines_of_features(fitted):
    opened = open_run(fitted)
    (prompt,), features = opened.prompts().values(), RatedExamples(opened)
    for model in zero_shot_heads(opened, prompt):
        pairs = features.pairs(model.view, "dev")
        sides = (as_matrix(pairs.first)[:], as_matrix(pairs.second)[:])
        np.testing.assert_array_equal(predict(model, pairs), cosine(*sides))
    embedder = llmcond.load_embedder(fitted, "none")
    assert embedder.head is ZERO_SHOT
    assert (embedder.name, embedder.dim, embedder.fitted_on) == ("none", embedder.encoder.dim, "")


def test_base_encoder_of_bundled_model_is_minilm(minilm):
    bundled = llmcond.load_embedder(DEFAULT_MODEL, device="cpu").encoder
    base = base_encoder(bundled)
    assert (base.name, base.identity) == ("minilm", minilm.identity)
    np.testing.assert_allclose(base.encode(SENTENCES), minilm.encode(SENTENCES), atol=1e-6)
    assert np.abs(bundled.encode(SENTENCES) - minilm.encode(SENTENCES)).max() > 0.01
    assert base_encoder(minilm) is minilm


@pytest.mark.parametrize("recipe", ["linear", "hypernet"])
def test_head_fitted_on_loaded_features_equals_fit_head(run_copy, model, recipe):
    # With a single epoch, dev selects nothing, so both fits end with the same weights.
    settings, prompt = {"epochs": 1, "batch_size": 8}, "concat-sent-cond"
    if recipe == "hypernet":
        settings, prompt = {**settings, "rank": 2}, "separate"
        options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
        llmcond.extract(model=model, run=run_copy, prompt=["separate"], **options)
    fit_head(run=run_copy, head=recipe, dim=4, prompt=prompt, set=settings, name=recipe)
    [saved] = open_run(run_copy).find_heads([recipe])
    X, y, pair, n_condition = llmcond.load_features(run_copy, recipe, prompt=prompt)  # noqa: N806
    assert (n_condition > 0) == (recipe == "hypernet")
    head = llmcond.Head(recipe, dim=4, n_condition=n_condition, settings=settings)
    head.fit(X, y, pair=pair)
    for name, weights in saved.head.tensors.items():
        np.testing.assert_array_equal(weights, head.head_.tensors[name])
    dev = llmcond.load_features(run_copy, recipe, prompt=prompt, split="dev")
    assert (len(dev.X), len(dev.y), len(dev.pair)) == (12, 12, 12)
    with pytest.raises(UserError, match="held-out"):
        llmcond.load_features(run_copy, split="held-out")


# -- the training data of a head ---------------------------------------------------------------


def test_unfamiliar_conditions_are_reported(run_copy, capsys):
    fit_head(run=run_copy, head="pca", dim=4)
    opened = open_run(run_copy)
    embedder = llmcond.load_embedder(run_copy)
    assert embedder.fitted_on == opened.manifest["data"]["source"]
    seen, new = [PLACE, "the number of people"], "retrieve : . , kitchen"
    far = find_unfamiliar_conditions(opened, embedder, [*seen, new])
    assert set(far) == {new}
    assert set(far.values()) <= set(seen)
    zero_shot = llmcond.load_embedder(run_copy, "none")
    assert find_unfamiliar_conditions(opened, zero_shot, [new]) == {}
    conditions = ["--condition", PLACE, "--condition", new]
    assert run(["similarity", "two men", "children", *conditions, "--run", str(run_copy)]) == 0
    messages = capsys.readouterr().err
    assert f"'{new}' is unlike those that pca@concat-sent-cond" in messages
    assert "'the place' is unlike" not in messages


def test_seen_and_unseen_conditions_are_scored_separately(run_copy, write_rows, small_rows, capsys):
    fit_head(run=run_copy, head="pca", dim=4)
    rows = [*small_rows[:20], *((a, b, "the mood", r) for a, b, _, r in small_rows[20:40])]
    command = ("evaluate", "--run", run_copy)
    data = ("--data", write_rows(rows, "other.csv"))
    results = {row["name"]: row for row in run_json(capsys, *command, *data)["results"]}
    head = results["pca@concat-sent-cond"]
    assert (head["seen"]["n"], head["unseen"]["n"]) == (20, 20)
    assert all("seen" not in row for name, row in results.items() if name.startswith("none"))
    assert "seen" not in run_json(capsys, *command)["results"][0]
