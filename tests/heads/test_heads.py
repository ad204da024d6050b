"""Heads: the paper's equations, reproducible fits, and saved files."""

import hashlib
import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.heads import fit, ignore_progress, make_recipe, tensors
from safetensors.numpy import load_file, save
from scipy.stats import spearmanr

import llmcond.heads.storage
from llmcond.errors import LlmcondError, UserError
from llmcond.heads import PairArrays, cosine, fit_recipe, load_head, load_recipe, save_head
from llmcond.metrics import METRICS, Metric

# Products this small are slower on two threads, much slower where the cores are shared.
pytestmark = pytest.mark.usefixtures("one_thread")

DIM = 24


def make_planted_pairs(n, seed):
    """Make pairs whose rating is the cosine in 4 of 24 directions; the others vary more."""
    rng = np.random.default_rng(seed)
    directions, _ = np.linalg.qr(np.random.default_rng(99).normal(size=(DIM, DIM)))
    parts = rng.normal(size=(2, n, DIM)) * np.where(np.arange(DIM) < 4, 1, 1.5)
    first, second = (parts @ directions).astype(np.float32)
    return PairArrays(first, second, (1 + cosine(parts[0, :, :4], parts[1, :, :4])) / 2)


@pytest.fixture(scope="module")
def train():
    return make_planted_pairs(1_500, seed=1)


@pytest.fixture(scope="module")
def dev():
    return make_planted_pairs(300, seed=2)


SHORT = {"dim": 4, "epochs": 5, "batch_size": 64, "patience": 5}
KINDS = ["linear", "mlp"]
FITTED = {
    "none": {},
    "linear": SHORT,
    "mlp": {**SHORT, "hidden": 8},
    "pca": {"dim": 4},
    "ica": {"dim": 4},
}


def test_linear_head_is_equation_3(train, dev):
    head = fit("linear", train, **{**SHORT, "dropout": 0.5})
    expected = dev.first @ head.tensors["weight"].T
    assert expected.shape == (300, 4)
    np.testing.assert_allclose(head.transform(dev.first), expected, rtol=1e-5, atol=1e-5)


def test_mlp_head_is_equations_4_and_5(train, dev):
    head = fit("mlp", train, **{**SHORT, "hidden": 8, "dropout": 0.5})
    weight1, weight2 = head.tensors["weight1"], head.tensors["weight2"]
    assert (weight1.shape, weight2.shape) == ((8, DIM), (4, 8))
    hidden = np.where(dev.first @ weight1.T > 0, dev.first @ weight1.T, 0)
    expected = np.where(hidden @ weight2.T > 0, hidden @ weight2.T, 0)
    embedded = head.transform(dev.first)
    np.testing.assert_allclose(embedded, expected, rtol=1e-5, atol=1e-5)
    assert (embedded == 0).any()
    assert (embedded > 0).any()


def test_hidden_layer_defaults_to_width_of_embeddings(train):
    head = fit("mlp", train, **{**SHORT, "hidden": 0})
    assert head.tensors["weight1"].shape == (4, DIM)


def test_head_none_returns_features_unchanged(train, dev):
    head = fit("none", train)
    np.testing.assert_array_equal(head.transform(dev.first), dev.first)
    assert head.dim_out == DIM


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_off_at_inference_and_on_in_training(train, dev, kind):
    head = fit(kind, train, **{**SHORT, "dropout": 0.5})
    np.testing.assert_array_equal(head.transform(dev.first), head.transform(dev.first))
    assert tensors(head) != tensors(fit(kind, train, **{**SHORT, "dropout": 0.0}))


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_same_bits(train, dev, kind):
    first, repeated = (fit(kind, train, dev, seed=3, **SHORT) for _ in range(2))
    assert tensors(first) == tensors(repeated)
    assert first.fit.record == repeated.fit.record


@pytest.mark.parametrize("kind", KINDS)
def test_different_seeds_give_different_heads(train, dev, kind):
    assert tensors(fit(kind, train, dev, 3, **SHORT)) != tensors(fit(kind, train, dev, 4, **SHORT))


@pytest.mark.parametrize("kind", [*KINDS, "ica"])
def test_fit_does_not_use_global_generators(train, kind):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = fit(kind, train, **FITTED[kind])
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    assert torch.equal(torch_state, torch.manual_seed(1).get_state())
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert tensors(fit(kind, train, **FITTED[kind])) == tensors(first)
    np.random.seed(1)  # noqa: NPY002
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def dev_score(head, dev):
    return spearmanr(head.similarity(dev.first, dev.second), dev.rating).statistic


@pytest.mark.parametrize("kind", KINDS)
def test_best_epoch_on_dev_is_selected(dev, kind):
    few = make_planted_pairs(60, seed=3)  # overfitted long before the last epoch
    settings = {"dim": 8, "epochs": 60, "patience": 60, "batch_size": 64, "dropout": 0.0}
    head = fit(kind, few, dev, **settings, learning_rate=0.01)
    scores = [epoch["dev_spearman"] for epoch in head.fit.record["curve"]]
    assert head.fit.record["selected_on"] == "dev"
    assert head.fit.record["best_epoch"] == 1 + int(np.argmax(scores)) < 60
    assert dev_score(head, dev) == pytest.approx(max(scores), abs=1e-4)
    assert max(scores) - scores[-1] > 1e-3


ERROR = Metric("error", lambda p, r, _: float(np.abs(p - r).mean()), higher_is_better=False)


@pytest.mark.parametrize("metric", [METRICS["accuracy"], ERROR], ids=lambda metric: metric.name)
def test_metric_selects_epoch(dev, metric):
    few, dev = make_planted_pairs(60, seed=3), replace(dev, pair=np.arange(len(dev)) // 2)
    linear_recipe = make_recipe(
        "linear", dim=8, epochs=40, patience=40, batch_size=64, learning_rate=0.01
    )
    head = fit_recipe(linear_recipe, few, dev, 0, ignore_progress, "cpu", metric)
    scores = [epoch[f"dev_{metric.name}"] for epoch in head.fit.record["curve"]]
    assert scores.index(metric.best(scores)) == head.fit.record["best_epoch"] - 1
    similarity = head.similarity(dev.first, dev.second).astype(np.float64)
    assert metric(similarity, dev.rating, dev.pair) == pytest.approx(metric.best(scores), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_last_epoch_is_selected_without_dev(train, kind):
    record = fit(kind, train, **SHORT).fit.record
    assert record["selected_on"] is None
    assert record["best_epoch"] == 5
    assert [epoch["dev_spearman"] for epoch in record["curve"]] == [None] * 5


def test_fitting_stops_when_patience_ends(train, dev):
    settings = {**SHORT, "epochs": 200, "patience": 3, "learning_rate": 0.05}
    record = fit("linear", train, dev, **settings).fit.record
    assert len(record["curve"]) == record["best_epoch"] + 3 < 200


def test_progress_and_epoch_scores_are_reported(train, dev):
    calls = []
    head = fit_recipe(
        make_recipe("linear", **SHORT), train, dev, 0, lambda *call: calls.append(call)
    )
    curve = head.fit.record["curve"]
    ended = [call for call in calls if call[2] is not None]
    assert ended == [(number, 5, curve[number - 1]) for number in range(1, 6)]
    assert all(-1 <= entry["dev_spearman"] <= 1 for entry in curve)
    progress = [epoch for epoch, *_ in calls]
    assert progress == sorted(progress)
    assert len(calls) > 3 * len(ended)


def test_linear_head_learns_planted_relation(train, dev):
    assert spearmanr(cosine(dev.first, dev.second), dev.rating).statistic < 0.3
    head = fit(
        "linear", train, dev, dim=4, epochs=60, batch_size=64, dropout=0.0, learning_rate=0.1
    )
    assert dev_score(head, dev) > 0.8


def test_mlp_learns_nonlinear_relation():
    rng = np.random.default_rng(5)
    # The rating is the cosine of |x|, so signs do not matter.
    first, second = rng.normal(size=(2, 2_000, 8)).astype(np.float32)
    rating = cosine(np.abs(first), np.abs(second)).astype(float)
    pairs, dev = (
        PairArrays(first[part], second[part], rating[part])
        for part in (slice(500, None), slice(500))
    )
    settings = {"dim": 8, "epochs": 40, "batch_size": 64, "dropout": 0.0, "learning_rate": 0.01}
    linear = fit("linear", pairs, dev, **settings)
    mlp = fit("mlp", pairs, dev, **settings, hidden=64)
    assert dev_score(mlp, dev) > dev_score(linear, dev) + 0.3


def test_loss_is_mean_squared_error_of_cosine(train):
    head = fit("linear", train, **{**SHORT, "epochs": 1, "batch_size": 1_500, "dropout": 0.0})
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(4, DIM).uniform_(-(DIM**-0.5), DIM**-0.5, generator=generator).numpy()
    similarity = cosine(train.first @ weight.T, train.second @ weight.T)
    loss = np.square(similarity - train.rating).mean()
    assert head.fit.record["curve"][0]["loss"] == pytest.approx(loss, rel=1e-4)


def test_diverging_loss_raises_error(train):
    broken = replace(train, first=np.where(train.first > 5, np.float32(np.inf), train.first))
    message = r"loss became nan in epoch 1.*learning_rate, to about 0\.0001"
    with pytest.raises(UserError, match=message):
        fit("linear", broken, **SHORT)


def test_matryoshka_improves_truncated_embeddings(train, dev, tmp_path):
    changes = {**SHORT, "dim": 8, "dropout": 0.0, "learning_rate": 0.01, "mse": 0.0, "ranking": 1.0}
    plain, matryoshka = (
        fit("linear", train, dev, **changes, **extra) for extra in ({}, {"matryoshka": [4]})
    )

    def correlation(head):
        sides = [head.transform(side)[:, :4] for side in (dev.first, dev.second)]
        return spearmanr(cosine(*sides), dev.rating)[0]

    assert correlation(matryoshka) > correlation(plain) + 0.1
    save_head(matryoshka, tmp_path, {})
    assert load_head(tmp_path)[0].settings.matryoshka == (4,)


def test_pca_equals_scikit_learn(train, dev):
    from sklearn.decomposition import PCA

    head = fit("pca", train, dev, dim=5)
    reference = PCA(5, svd_solver="full").fit(np.concatenate([train.first, train.second]))
    np.testing.assert_allclose(head.transform(dev.first), reference.transform(dev.first), atol=1e-3)
    explained = reference.explained_variance_ratio_.sum()
    assert head.fit.record["explained_variance"] == pytest.approx(explained, rel=1e-4)


@pytest.mark.parametrize("kind", ["pca", "ica"])
def test_projections_are_fitted_on_training_vectors_only(train, dev, kind):
    assert tensors(fit(kind, train, dev, dim=3)) == tensors(fit(kind, train, dim=3))
    assert fit(kind, train, dev, dim=3).fit.record["selected_on"] is None


def test_ica_finds_planted_sources():
    rng = np.random.default_rng(3)
    sources = rng.uniform(-1, 1, size=(4_000, 3)) ** 3
    mixed = (sources @ rng.normal(size=(3, 3))).astype(np.float32)
    pairs = PairArrays(mixed[:2_000], mixed[2_000:], rng.uniform(size=2_000))
    head = fit("ica", pairs, dim=3)
    correlations = np.abs(np.corrcoef(head.transform(mixed).T, sources.T)[:3, 3:])
    assert head.fit.record["converged"]
    assert correlations.max(axis=1).min() > 0.99
    assert sorted(correlations.argmax(axis=1)) == [0, 1, 2]


def test_ica_of_low_rank_features_notes_fewer_components(train):
    basis = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    pairs = replace(train, first=train.first[:, :3] @ basis, second=train.second[:, :3] @ basis)
    head = fit("ica", pairs, dim=10)
    assert head.dim_out == 3
    assert "3 components instead of 10" in head.fit.notes[0]
    assert np.isfinite(head.transform(pairs.first)).all()


def test_ica_without_convergence_is_noted(train):
    head = fit("ica", train, dim=10, max_iterations=1)
    assert head.fit.record["converged"] is False
    assert "max_iterations=2" in head.fit.notes[0]


@pytest.mark.parametrize("kind", ["linear", "mlp", "pca", "ica"])
def test_head_dim_above_features_is_rejected(train, kind):
    with pytest.raises(UserError, match=r"dim is 25, but the features have 24.*dim to 24 or less"):
        fit(kind, train, dim=DIM + 1)


def test_pca_needs_as_many_vectors_as_components():
    few = make_planted_pairs(3, seed=0)
    with pytest.raises(UserError, match=r"at least 7 training vectors; there are 6"):
        fit("pca", few, dim=7)


@pytest.mark.parametrize("rows", [0, 1, 50])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_fewer_than_two_distinct_ratings_are_rejected(train, kind, rows):
    pairs = PairArrays(train.first[:rows], train.second[:rows], np.full(rows, 0.5))
    with pytest.raises(UserError, match=rf"{min(rows, 1)} distinct ratings over {rows} rated"):
        fit(kind, pairs, dim=1)


@pytest.mark.parametrize("kind", ["pca", "ica", "whitening", "random"])
def test_unsupervised_heads_ignore_ratings(train, kind):
    rated = fit(kind, train, dim=4)
    equal = fit(kind, replace(train, rating=np.full(len(train), 0.5)), dim=4)
    np.testing.assert_array_equal(rated.transform(train.first), equal.transform(train.first))
    with pytest.raises(UserError, match="all 0 training vectors are equal"):
        fit(kind, train.take(np.arange(0)), dim=1)


def test_transform_in_blocks_gives_same_result(train, dev, monkeypatch):
    head = fit("mlp", train, **SHORT)
    expected = head.transform(dev.first)
    monkeypatch.setattr("llmcond.heads.numpy_heads._BLOCK", 7)
    np.testing.assert_allclose(head.transform(dev.first), expected, rtol=1e-5, atol=1e-6)
    assert head.transform(dev.first[:0]).shape == (0, 4)


def test_cosine_equals_its_definition(dev):
    norms = np.linalg.norm(dev.first, axis=1) * np.linalg.norm(dev.second, axis=1)
    expected = (dev.first * dev.second).sum(axis=1) / norms
    np.testing.assert_allclose(cosine(dev.first, dev.second), expected, atol=1e-6)


def test_cosine_of_zero_vector_is_zero():
    first = np.array([[0, 0], [1, 2], [0, 0]], dtype=np.float32)
    second = np.array([[3, 4], [0, 0], [0, 0]], dtype=np.float32)
    np.testing.assert_array_equal(cosine(first, second), [0, 0, 0])


def test_cosine_is_exact_for_tiny_and_huge_vectors():
    tiny_bert = np.full((1, 3), 1e-25, dtype=np.float32)
    huge = np.full((1, 3), 1e25, dtype=np.float32)
    assert cosine(tiny_bert, tiny_bert)[0] == pytest.approx(1)
    assert cosine(huge, huge)[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mlp", {"dimm": 4}, "unknown key 'dimm'.*Did you mean 'dim'"),
        ("linear", {"hidden": 4}, "unknown key 'hidden'"),
        ("none", {"dim": 4}, "unknown key 'dim'"),
        ("mlp", {"dim": "4"}, "'dim' is '4'"),
        ("mlp", {"dim": 4.5}, "'dim' is 4.5"),
        ("mlp", {"dim": True}, "'dim' is True"),
        ("mlp", {"dropout": 1.0}, "'dropout' is 1.0: .*below 1"),
        ("mlp", {"dropout": -0.1}, "'dropout' is -0.1: .*at least 0"),
        ("mlp", {"learning_rate": 0.0}, "'learning_rate' is 0.0: .*above 0"),
        ("mlp", {"epochs": 0}, "'epochs' is 0: .*at least 1"),
        ("mlp", {"batch_size": 0}, "'batch_size' is 0: .*at least 1"),
        ("mlp", {"patience": 0}, "'patience' is 0: .*at least 1"),
        ("mlp", {"dim": 0}, "'dim' is 0: .*at least 1"),
        ("pca", {"dim": 0}, "'dim' is 0: .*at least 1"),
        ("mlp", {"hidden": -1}, "'hidden' is -1: .*at least 0"),
        ("ica", {"max_iterations": 0}, "'max_iterations' is 0: .*at least 1"),
        ("ica", {"tolerance": 0.0}, "'tolerance' is 0.0: .*above 0"),
        ("mlp", {"learning_rate": float("inf")}, "learning_rate"),
        ("mlp", {"matryoshka": [4, 0]}, "'matryoshka.1' is 0: .*at least 1"),
    ],
)
def test_invalid_settings_are_rejected(kind, changes, message):
    with pytest.raises(UserError, match=message):
        make_recipe(kind, **changes)


def test_set_values_are_parsed_by_setting_types():
    changes = {"epochs": "7", "learning_rate": "1e-2", "dropout": "0", "matryoshka": "8,4"}
    parsed = load_recipe("mlp").parse_changes(changes, "--set")
    assert parsed == {"epochs": 7, "learning_rate": 0.01, "dropout": 0.0, "matryoshka": [8, 4]}
    assert [type(value) for value in parsed.values()] == [int, float, float, list]
    assert load_recipe("mlp").with_settings(parsed, "--set").settings.epochs == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": "7"}, r"--set: the head mlp has no setting 'epoch'. Did you mean 'epochs'"),
        ({"epochs": "7.5"}, "epochs is '7.5', not int"),
        ({"dropout": "much"}, "dropout is 'much', not float"),
        ({"matryoshka": "8x4"}, "matryoshka is '8x4', not whole numbers, such as 256,128"),
    ],
)
def test_invalid_set_values_are_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        load_recipe("mlp").parse_changes(changes, "--set")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "mlpp"\ndescription = ""\nsource = ""', "there is no kind of head 'mlpp'.*'mlp'"),
        ('kind = "none"\nsource = ""', "the key 'description' is missing"),
        ('kind = "pca"\ndescription = ""\nsource = ""', "the key 'dim' is missing"),
        ("kind = ", "cannot be read as TOML"),
    ],
)
def test_invalid_recipe_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(str(path))


def test_recipe_is_named_after_its_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "pca"\ndescription = "d"\nsource = "s"\ndim = 3\n')
    loaded = load_recipe(str(path))
    assert (loaded.name, loaded.kind, loaded.dim) == ("mine", "pca", 3)


def test_unknown_recipe_suggests_similar_name():
    with pytest.raises(UserError, match=r"unknown head 'linaer'. Did you mean 'linear'"):
        load_recipe("linaer")


@pytest.mark.parametrize("kind", FITTED)
def test_loaded_head_has_same_transform(tmp_path, train, dev, kind):
    head = fit(kind, train, dev, seed=5, **FITTED[kind])
    save_head(head, tmp_path / "head", {"prompt": "cond"})
    loaded, description = load_head(tmp_path / "head")
    np.testing.assert_array_equal(loaded.transform(dev.first), head.transform(dev.first))
    assert (loaded.settings, loaded.seed, loaded.dim_in) == (head.settings, 5, DIM)
    assert loaded.fit.record == head.fit.record
    assert description["prompt"] == "cond"


def find_weights(folder):
    (path,) = folder.glob("head-*.safetensors")
    return path


@pytest.fixture(scope="module")
def linear_head(train):
    return fit("linear", train, **SHORT)


@pytest.fixture
def saved_head(tmp_path, linear_head):
    save_head(linear_head, tmp_path / "head", {})
    return tmp_path / "head"


def test_head_folder_holds_no_pickle(saved_head):
    files = {path.name for path in saved_head.iterdir()} - {".lock"}
    assert files == {"head.json", find_weights(saved_head).name}
    json.loads((saved_head / "head.json").read_text())
    content = find_weights(saved_head).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert set(json.loads(content[8 : 8 + length])) == {"weight"}


def test_changed_weights_are_rejected(saved_head):
    path = find_weights(saved_head)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LlmcondError, match=r"is damaged: .*Fit the head again"):
        load_head(saved_head)


def test_missing_weights_are_rejected(saved_head):
    find_weights(saved_head).unlink()
    with pytest.raises(LlmcondError, match="cannot be read: No such file"):
        load_head(saved_head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, r"newer version of llmcond \(format 3.*Upgrade llmcond"),
        ({"format": None}, "states no format version"),
        ({"format": True}, "states no format version"),
        ({"format": 0}, "states no format version"),
        ({"seed": "0"}, r"was damaged: 'seed' is '0': it should be a valid integer\. Fit"),
        ({"dim_in": 2**40}, "'dim_in' is "),
        ({"dim_in": 2**24}, "does not hold the parameters"),
        ({"fit": []}, r"'fit' is \[\]"),
        ({"fit": {"curve": [{"epoch": 1}]}}, r"the key 'fit\.curve\.0\.loss' is missing"),
        ({"settings": {}, "kind": 3}, "'kind' is 3"),
        ({"kind": "hypernat"}, "there is no kind of head 'hypernat'.*Did you mean 'hypernet'"),
        ({"settings": {"dim": 4}}, "the key 'dropout' is missing"),
    ],
)
def test_invalid_description_is_rejected(saved_head, changes, message):
    path = saved_head / "head.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(LlmcondError, match=message):
        load_head(saved_head)


@pytest.mark.parametrize("key", ["kind", "settings", "seed", "dim_in", "fit"])
def test_description_without_key_is_rejected(saved_head, key):
    path = saved_head / "head.json"
    description = json.loads(path.read_text())
    del description[key]
    path.write_text(json.dumps(description))
    with pytest.raises(
        LlmcondError, match=f"was damaged: the key '{key}' is missing. Fit the head again"
    ):
        load_head(saved_head)


def test_folder_without_head_is_rejected(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_head(tmp_path / "nothing")


def test_saving_replaces_existing_head(saved_head, train):
    save_head(fit("pca", train, dim=2), saved_head, {})
    head, _ = load_head(saved_head)
    assert (head.kind, head.dim_out) == ("pca", 2)
    assert list(saved_head.parent.iterdir()) == [saved_head]
    assert len(list(saved_head.iterdir())) == 3  # the old weights are gone


def test_head_of_format_1_is_loaded_and_replaced(saved_head, train, dev):
    before, description = load_head(saved_head)
    find_weights(saved_head).rename(saved_head / "head.safetensors")
    (saved_head / "head.json").write_text(json.dumps({**description, "format": 1}))
    head, _ = load_head(saved_head)
    np.testing.assert_array_equal(head.transform(dev.first), before.transform(dev.first))
    save_head(fit("pca", train, dim=2), saved_head, {})
    assert load_head(saved_head)[0].kind == "pca"
    assert not (saved_head / "head.safetensors").exists()


@pytest.mark.parametrize("stop", range(4))
def test_interrupted_replacement_leaves_loadable_head(saved_head, train, monkeypatch, stop):
    """Whenever a save is killed, the old or the new head can be loaded; the next save cleans up."""
    changes, loaded_kinds = [], []

    def interrupt(original):
        def load_and_change(path, *arguments, **options):
            loaded_kinds.append(load_head(saved_head)[0].kind)
            changes.append(path)
            if len(changes) == stop:
                raise SystemExit
            return original(path, *arguments, **options)

        return load_and_change

    for name in ("replace", "unlink"):
        monkeypatch.setattr(type(saved_head), name, interrupt(getattr(type(saved_head), name)))
    with suppress(SystemExit):
        save_head(fit("pca", train, dim=2), saved_head, {})
    monkeypatch.undo()
    assert loaded_kinds[0] == "linear"
    assert set(loaded_kinds) <= {"linear", "pca"}
    save_head(fit("pca", train, dim=2), saved_head, {})
    assert len(list(saved_head.iterdir())) == 3


def test_reader_loads_new_head_if_writer_replaces_it(saved_head, train, monkeypatch):
    new_head = fit("pca", train, dim=2)
    check_record = llmcond.heads.storage.check_record

    def replace_head(*arguments):
        monkeypatch.setattr(llmcond.heads.storage, "check_record", check_record)
        save_head(new_head, saved_head, {})

    monkeypatch.setattr(llmcond.heads.storage, "check_record", replace_head)
    assert load_head(saved_head)[0].kind == "pca"


@pytest.mark.parametrize("name", ["components", "mean"])
def test_wrong_parameter_shape_is_rejected_despite_matching_digest(saved_head, train, name):
    save_head(fit("pca", train, dim=2), saved_head, {})
    tensors = load_file(find_weights(saved_head))
    cut = save({**tensors, name: np.ascontiguousarray(tensors[name][..., :-1])})
    digest = hashlib.sha256(cut).hexdigest()
    (saved_head / f"head-{digest[:16]}.safetensors").write_bytes(cut)
    record = json.loads((saved_head / "head.json").read_text())
    (saved_head / "head.json").write_text(json.dumps({**record, "weights_sha256": digest}))
    with pytest.raises(LlmcondError, match="does not hold the parameters of a pca head"):
        load_head(saved_head)


def test_failed_save_leaves_old_head(saved_head, train):
    before = {path.name: path.read_bytes() for path in saved_head.iterdir()}
    with pytest.raises(ValueError, match="JSON"):
        save_head(fit("pca", train, dim=2), saved_head, {"share": float("nan")})
    assert {path.name: path.read_bytes() for path in saved_head.iterdir()} == before
    assert list(saved_head.parent.iterdir()) == [saved_head]
