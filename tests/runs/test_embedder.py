"""Embedders: the default head, unit length, types of texts, pickling and warnings."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import llmcond
from llmcond import fit_head
from llmcond.bundled import DEFAULT_MODEL
from llmcond.cli import run
from llmcond.encoders.encoder import Encoder
from llmcond.errors import UserError
from llmcond.options import Precision
from llmcond.quantization import PRECISIONS
from llmcond.runs import open_run
from llmcond.runs.embedder import base_encoder
from llmcond.runs.familiarity import find_unfamiliar_conditions

SENTENCES = ["two men play in the park", "three women sit at the beach", "children in the rain"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A run with a head that dev prefers, and a worse one that was fitted last."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("fitted") / "run"))
    few = {"epochs": "3", "patience": "3"}
    scores = {}
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        result = fit_head(run=folder, head="linear", dim=4, seed=seed, set=few, name=name)
        scores[name] = result.metrics["spearman"].value
    best = max(scores, key=scores.__getitem__)
    shutil.copytree(folder / "heads" / best, folder / "heads" / "best")
    shutil.rmtree(folder / "heads" / best)
    worst = min((name for name in scores if name != best), key=scores.__getitem__)
    fit_head(run=folder, head="linear", dim=4, seed=ord(worst) - ord("a"), set=few, name=worst)
    return folder


# -- the default head ---------------------------------------------------------------------------


def test_default_head_is_best_on_dev(fitted: Path, capsys: pytest.CaptureFixture[str]):
    assert open_run(fitted).head_names()[-1] != "best"
    assert llmcond.load_embedder(fitted).name == "best"
    assert run(["similarity", "a", "b", "--condition", "c", "--run", str(fitted)]) == 0
    assert "head best (best of 3 heads on dev, Spearman" in capsys.readouterr().err


def test_fitting_worse_head_does_not_change_default(fitted: Path, tmp_path: Path):
    run_copy = Path(shutil.copytree(fitted, tmp_path / "own"))
    fit_head(
        run=run_copy,
        head="linear",
        dim=2,
        set={"epochs": "1", "learning_rate": "1e-9"},
        name="later",
    )
    assert llmcond.load_embedder(run_copy).name == "best"


def test_user_sets_default_head(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_copy = Path(shutil.copytree(fitted, tmp_path / "own"))
    other = next(name for name in open_run(run_copy).head_names() if name != "best")
    assert run(["heads", "--run", str(run_copy), "--default", other, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["heads"]}
    assert rows[other]["taken"] == "the run's default"
    assert rows["best"]["taken"] == ""
    assert rows["best"]["dev_spearman"] > rows[other]["dev_spearman"]
    assert llmcond.load_embedder(run_copy).name == other
    assert run(["heads", "--run", str(run_copy), "--default", "bst"]) == 2
    assert "no head 'bst'. Did you mean 'best'" in capsys.readouterr().err
    assert run(["heads", "--default", "best"]) == 2


def test_scored_heads_precede_heads_without_score(run_copy: Path):
    fit_head(run=run_copy, head="pca", dim=4)
    record = run_copy / "heads" / "pca@concat-sent-cond" / "head.json"
    values = json.loads(record.read_text())
    assert values.pop("dev_spearman") is not None
    record.write_text(json.dumps(values))  # earlier versions did not write the score
    assert open_run(run_copy).default_head() == ("pca@concat-sent-cond", "fitted last")
    fit_head(run=run_copy, head="random", dim=2, name="scored")
    name, why = open_run(run_copy).default_head() or ("", "")
    assert name == "scored"
    assert why.startswith("best of 2 heads on dev")


@pytest.mark.parametrize("command", ["sweep", "compare-prompts"])
def test_best_trial_is_saved_as_head(
    run_copy: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    few = ["--set", "epochs=2", "--seeds", "2", "--workers", "1", "--keep", "--run", str(run_copy)]
    if command == "sweep":
        arguments = ["sweep", "--head", "linear", "--vary", "dim=2,4"]
    else:
        model = json.loads((run_copy / "run.json").read_text())["encoder"]["model"]
        prompts = ["concat-sent-cond", "control-no-condition", "control-shuffled"]
        arguments = ["compare-prompts", "--model", model, "--heads", "linear"]
        arguments += ["--pooling", "mean", "--dtype", "float32", "--prompts", *prompts]
    assert run([*arguments, *few]) == 0
    messages = capsys.readouterr().err
    assert "saving the best on dev: linear@concat-sent-cond" in messages
    embedder = llmcond.load_embedder(run_copy)
    assert embedder.name == "linear@concat-sent-cond"
    folder = run_copy / ("sweep" if command == "sweep" else "comparisons")
    fits = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    prompt = "concat-sent-cond"
    best = max(fit["dev_score"] for fit in fits if fit["scores"][0]["prompt"] == prompt)
    assert open_run(run_copy).head_record(embedder.name)["dev_spearman"] == pytest.approx(best)


# -- embeddings and similarities ---------------------------------------------------------------


@pytest.mark.parametrize("head", ["best", "none"])
def test_embeddings_have_unit_length(fitted: Path, head: str, tmp_path: Path, write_rows: Callable):
    embedder = llmcond.load_embedder(fitted, head)
    raw = embedder.encode(SENTENCES, "the place", normalize=False)
    unit = embedder.encode(SENTENCES, "the place")
    norms = np.linalg.norm(raw, axis=1)
    assert np.abs(norms - 1).min() > 0.01
    np.testing.assert_allclose(unit, raw / norms[:, None], atol=1e-6)
    data = write_rows([(s, "the place") for s in SENTENCES], header="sentence,condition")
    for flag, expected in (("--normalize", unit), ("--no-normalize", raw)):
        out = tmp_path / "v.npy"
        command = ["embed", data, "--out", out, "--run", fitted, "--head", head, flag]
        assert run([str(part) for part in command]) == 0
        np.testing.assert_allclose(np.load(out), expected, atol=2e-3)


def test_single_texts_give_single_results(fitted: Path):
    embedder = llmcond.load_embedder(fitted)
    several = embedder.similarity(SENTENCES[:1], SENTENCES[1:2], ["the place"])
    single = embedder.similarity(*SENTENCES[:2], "the place")
    assert isinstance(single, float)
    assert single == pytest.approx(float(several[0]), abs=1e-6)
    vector = embedder.encode(SENTENCES[0], "the place")
    assert vector.shape == (embedder.dim,)
    np.testing.assert_allclose(vector, embedder.encode(SENTENCES[:1], "the place")[0], atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", ["b"], "c"),
        (["a"], "b", "c"),
        ("a", "b", ["c"]),
    ],
)
def test_mixing_texts_and_lists_is_rejected(fitted: Path, arguments: tuple[object, ...]):
    with pytest.raises(UserError, match="Give two texts, or two lists"):
        llmcond.load_embedder(fitted).similarity(*arguments)  # type: ignore[call-overload]


def test_embedder_can_be_pickled(fitted: Path):
    embedder = llmcond.load_embedder(fitted)
    unpickled = pickle.loads(pickle.dumps(embedder))
    before, after = (item.encode(SENTENCES, "the place") for item in (embedder, unpickled))
    np.testing.assert_array_equal(after, before)
    assert repr(embedder).startswith("Embedder(")
    assert repr(embedder).endswith("prompt concat-sent-cond, head best, 4 dimensions)")


def test_encoder_accepts_strings(fitted: Path):
    encoder = llmcond.load_embedder(fitted).encoder
    inputs = [llmcond.EncoderInput("", text) for text in SENTENCES]
    np.testing.assert_array_equal(encoder.encode(SENTENCES), encoder.encode(inputs))


# -- smaller embeddings, and the options of sentence-transformers ---------------------------------


def test_truncated_embeddings_are_first_dimensions_with_unit_norm(fitted: Path):
    embedder = llmcond.load_embedder(fitted)
    full, raw = (embedder.encode(SENTENCES, "the place", normalize=n) for n in (True, False))
    expected = full[:, :3] / np.linalg.norm(full[:, :3], axis=1, keepdims=True)
    truncated = embedder.encode(SENTENCES, "the place", truncate_dim=3)
    np.testing.assert_allclose(truncated, expected, atol=1e-6)
    unscaled = embedder.encode(SENTENCES, "the place", truncate_dim=3, normalize=False)
    np.testing.assert_array_equal(unscaled, raw[:, :3])
    small = llmcond.load_embedder(fitted, truncate_dim=3)
    assert small.dim == 3
    np.testing.assert_array_equal(small.encode(SENTENCES, "the place"), truncated)
    similarity = small.similarity(SENTENCES, SENTENCES[::-1], "the place")
    np.testing.assert_allclose(similarity, (expected * expected[::-1]).sum(axis=1), atol=1e-6)


def test_guides_are_fitted_on_truncated_embeddings(fitted: Path):
    labelled = ("a park", "a beach"), ("green", "blue"), "the place"
    small = llmcond.load_embedder(fitted, truncate_dim=3).guided(*labelled)
    assert small.encode(SENTENCES, "the place").shape == (3, 3)
    full = llmcond.load_embedder(fitted).guided(*labelled)
    assert full.encode(SENTENCES, "another", truncate_dim=3).shape == (3, 3)
    with pytest.raises(UserError, match="guide of 'the place' maps embeddings of 4 dimensions"):
        full.encode(SENTENCES, "the place", truncate_dim=3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_that_of_quantised_embeddings(fitted: Path, precision: Precision):
    embedder = llmcond.load_embedder(fitted)
    vectors = embedder.encode(SENTENCES, "the place")
    codes = embedder.encode(SENTENCES, "the place", precision=precision)
    expected = llmcond.quantize_embeddings(vectors, precision)
    assert codes.dtype == expected.dtype
    np.testing.assert_array_equal(codes, expected)


def test_embeddings_are_converted_as_in_sentence_transformers(fitted: Path):
    embedder = llmcond.load_embedder(fitted)
    vectors = embedder.encode(SENTENCES, "the place")
    tensor = embedder.encode(SENTENCES, "the place", convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), vectors)
    listed = embedder.encode(SENTENCES, "the place", convert_to_numpy=False)
    assert isinstance(listed, list)
    assert torch.equal(torch.stack(listed), tensor)
    single = embedder.encode(SENTENCES[0], "the place", convert_to_tensor=True)
    assert single.shape == (4,)
    scaled = embedder.encode(SENTENCES, "the place", normalize_embeddings=False)
    np.testing.assert_array_equal(scaled, embedder.encode(SENTENCES, "the place", normalize=False))


def test_batch_size_limits_inputs_of_forward_pass(fitted: Path, monkeypatch: pytest.MonkeyPatch):
    embedder = llmcond.load_embedder(fitted, device="cpu")
    engine, sizes = embedder.encoder.engine, list[int]()
    run_engine = engine.run

    def run_and_count(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in run_engine(*arguments, **options):
            sizes.append(len(batch.inputs))
            yield batch

    monkeypatch.setattr(engine, "run", run_and_count)
    expected = embedder.encode(SENTENCES, "the place")
    assert sizes == [4]  # with the condition alone
    vectors = embedder.encode(SENTENCES, "the place", batch_size=2)
    assert sizes[1:] == [2, 2]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("normalises", [True, False])
def test_encoder_has_options_of_sentence_transformers(tiny_bert: Path, normalises: bool):
    encoder = llmcond.load_encoder(tiny_bert, pooling="mean", normalize=normalises, device="cpu")
    vectors = encoder.encode(SENTENCES)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = encoder.encode(SENTENCES, normalize_embeddings=True)
    np.testing.assert_allclose(scaled, vectors / norms, rtol=1e-6)
    truncated, expected = encoder.encode(SENTENCES, truncate_dim=5), vectors[:, :5]
    if normalises:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(truncated, expected, rtol=1e-6)
    codes = encoder.encode(SENTENCES, precision="ubinary", convert_to_tensor=True)
    assert torch.equal(codes, torch.from_numpy(np.packbits(vectors > 0, axis=1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncate_dim": 5}, "truncate_dim is 5, but the embeddings have 4 dimensions"),
        ({"truncate_dim": 0}, "truncate_dim is 0.* from 1 to 4"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)
def test_invalid_options_of_encode_are_rejected(
    fitted: Path, options: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        llmcond.load_embedder(fitted).encode(SENTENCES, "the place", **options)


def test_single_text_has_no_ranges_for_int8(fitted: Path):
    with pytest.raises(UserError, match="a single embedding has none"):
        llmcond.load_embedder(fitted).encode(SENTENCES[0], "the place", precision="int8")


def test_similarity_matrix_holds_similarities_of_all_pairs(fitted: Path):
    embedder = llmcond.load_embedder(fitted)
    matrix = embedder.similarity_matrix(SENTENCES, SENTENCES[:2], "the place")
    assert matrix.shape == (3, 2)
    for column, sentence in enumerate(SENTENCES[:2]):
        rows = embedder.similarity_pairwise(SENTENCES, [sentence] * 3, "the place")
        np.testing.assert_allclose(matrix[:, column], rows, atol=1e-6)
    with pytest.raises(UserError, match="All entries of the matrix have the same condition"):
        embedder.similarity_matrix(SENTENCES, SENTENCES, ["the place"] * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "settings", "dims"),
    [
        ("pca", {}, [3, 2, 1]),
        ("ica", {}, []),
        ("linear", {"epochs": "1"}, []),
        ("linear", {"epochs": "1", "matryoshka": "4,2,3"}, [3, 2]),
    ],
)
def test_matryoshka_dims_depend_on_head(
    run_copy: Path, head: str, settings: dict[str, str], dims: list[int]
):
    fit_head(run=run_copy, head=head, dim=4, set=settings, name="head")
    assert list(llmcond.load_embedder(run_copy, "head").matryoshka_dims) == dims


# -- the training data of a head ---------------------------------------------------------------


def test_unfamiliar_conditions_are_reported(run_copy: Path, capsys: pytest.CaptureFixture[str]):
    fit_head(run=run_copy, head="pca", dim=4)
    opened = open_run(run_copy)
    embedder = llmcond.load_embedder(run_copy)
    assert embedder.fitted_on == opened.manifest["data"]["source"]
    seen = ["the place", "the number of people"]
    assert find_unfamiliar_conditions(opened, embedder, seen) == {}
    far = find_unfamiliar_conditions(opened, embedder, [*seen, "retrieve : . , kitchen"])
    assert set(far) == {"retrieve : . , kitchen"}
    assert set(far.values()) <= set(seen)
    zero_shot = llmcond.load_embedder(run_copy, "none")
    assert find_unfamiliar_conditions(opened, zero_shot, ["retrieve : . , kitchen"]) == {}
    conditions = ["--condition", "the place", "--condition", "retrieve : . , kitchen"]
    assert run(["similarity", "two men", "children", *conditions, "--run", str(run_copy)]) == 0
    messages = capsys.readouterr().err
    assert "'retrieve : . , kitchen' is unlike those that pca@concat-sent-cond" in messages
    assert "'the place' is unlike" not in messages
    assert "fitted on" in messages


def test_seen_and_unseen_conditions_are_scored_separately(
    run_copy: Path, write_rows: Callable, small_rows: list, capsys: pytest.CaptureFixture[str]
):
    fit_head(run=run_copy, head="pca", dim=4)
    rows = [*small_rows[:20], *((a, b, "the mood", r) for a, b, _, r in small_rows[20:40])]
    command = ["evaluate", "--run", str(run_copy), "--data", str(write_rows(rows, "other.csv"))]
    assert run([*command, "--json"]) == 0
    results = {row["name"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    head = results["pca@concat-sent-cond"]
    assert (head["seen"]["n"], head["unseen"]["n"]) == (20, 20)
    assert all("seen" not in row for name, row in results.items() if name.startswith("none"))
    assert run(command) == 0
    assert "seen / unseen" in " ".join(capsys.readouterr().out.split())
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    assert "seen" not in json.loads(capsys.readouterr().out)["results"][0]


def test_progress_is_shown_on_request(
    fitted: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcond.progress.EVERY_SECONDS", 0)
    caplog.set_level("INFO", "llmcond")
    embedder = llmcond.load_embedder(fitted, max_tokens_per_batch=64)
    without_progress = embedder.encode(SENTENCES, "the place")
    assert "inputs" not in caplog.text
    with_progress = embedder.encode(SENTENCES, "the place", show_progress=True)
    np.testing.assert_array_equal(with_progress, without_progress)
    # The condition alone is the fourth input.
    assert "encoding: 4/4 inputs" in caplog.text


def test_missing_run_error_names_neighbouring_runs(fitted: Path):
    with pytest.raises(UserError) as error:
        open_run(fitted.parent / "other")
    assert str(fitted) in str(error.value)
    with pytest.raises(UserError, match=r"Extract features first: llmcond extract"):
        open_run(fitted / "other")


# -- the base of an adapter --------------------------------------------------------------------


def test_base_encoder_of_bundled_model_is_minilm(minilm: Encoder):
    bundled = llmcond.load_embedder(DEFAULT_MODEL, device="cpu").encoder
    base = base_encoder(bundled)
    assert base is not None
    assert (base.name, base.identity) == ("minilm", minilm.identity)
    np.testing.assert_allclose(base.encode(SENTENCES), minilm.encode(SENTENCES), atol=1e-6)
    assert np.abs(bundled.encode(SENTENCES) - minilm.encode(SENTENCES)).max() > 0.01
    assert base_encoder(minilm) is minilm


# -- containers of texts -----------------------------------------------------------------------


def as_series(texts):
    return pytest.importorskip("pandas").Series(texts)


def as_chunks(texts):
    return pa.chunked_array([texts[:1], texts[1:]])


@pytest.mark.parametrize("kind", [tuple, iter, np.array, pa.array, as_chunks, as_series])
def test_texts_can_be_any_sequence(tiny_run: Path, kind: Callable):
    embedder = llmcond.load_embedder(tiny_run, head="none")
    conditions = ["place", "mood", "time"]
    expected = embedder.encode(SENTENCES, conditions)
    np.testing.assert_array_equal(embedder.encode(kind(SENTENCES), kind(conditions)), expected)
    cosines = embedder.similarity(kind(SENTENCES), kind(SENTENCES[::-1]), kind(conditions))
    np.testing.assert_array_equal(
        cosines, embedder.similarity(SENTENCES, SENTENCES[::-1], conditions)
    )
    vectors = embedder.encoder.encode(SENTENCES)
    np.testing.assert_array_equal(embedder.encoder.encode(kind(SENTENCES)), vectors)


def test_table_instead_of_column_is_rejected(tiny_run: Path):
    embedder = llmcond.load_embedder(tiny_run, head="none")
    columns = {"sentence": SENTENCES}
    for table in (columns, pa.table(columns), pytest.importorskip("pandas").DataFrame(columns)):
        with pytest.raises(UserError, match=f"a whole {type(table).__name__} was given as a list"):
            embedder.encode(table, "place")
        with pytest.raises(UserError, match="give one of its columns"):
            embedder.encoder.encode(table)
    with pytest.raises(UserError, match="sentence 2 of 2 is None, which is not a text"):
        embedder.encode(pa.array(["a", None]), "place")
