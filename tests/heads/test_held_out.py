"""Held-out predictions of dev: the choice of epochs and settings, and what fits record of them."""

import numpy as np
from helpers.commands import run_json, write_pairs
from helpers.heads import fit

import llmcond
from llmcond.base.metrics import METRICS, Metric
from llmcond.heads import PairArrays
from llmcond.heads.numpy_heads import FOLDS, assign_folds, choose_settings, hold_out

SPEARMAN = METRICS["spearman"]


def simulate_epochs(seed, n_pairs=150, epochs=40):
    """Return predictions of equally good epochs, ratings and sentence pairs."""
    rng = np.random.default_rng(seed)
    pair = np.repeat(np.arange(n_pairs), 2)
    rating = rng.standard_normal(2 * n_pairs)
    noise = rng.standard_normal((epochs, 2 * n_pairs))
    return (0.5 * rating + noise).astype(np.float32), rating, pair


def test_pairs_stay_together_and_folds_have_similar_sizes():
    pair = np.random.default_rng(0).permutation(np.repeat(np.arange(95), 3))
    fold = assign_folds(pair)
    assert all(len(set(fold[pair == number])) == 1 for number in range(95))
    assert {len(set(pair[fold == number])) for number in range(FOLDS)} == {9, 10}
    assert (assign_folds(pair) == fold).all()


def test_fold_is_predicted_by_epoch_that_other_folds_choose():
    epochs, rating, pair = simulate_epochs(0)
    held_out, fold = hold_out([epochs], SPEARMAN, rating, pair), assign_folds(pair)
    for number in range(FOLDS):
        others = fold != number
        scores = [SPEARMAN(p[others].astype(float), rating[others], pair[others]) for p in epochs]
        best = int(np.argmax(scores))
        assert (held_out.predictions[~others] == epochs[best][~others]).all()
        assert held_out.scores[number] == scores[best]
    few = simulate_epochs(0, n_pairs=FOLDS - 1)
    assert hold_out([few[0]], SPEARMAN, *few[1:]) is None
    few = simulate_epochs(0, n_pairs=FOLDS)
    assert hold_out([few[0]], SPEARMAN, *few[1:]).predictions.shape == (2 * FOLDS,)


def test_other_folds_select_the_setting():
    epochs, rating, pair = simulate_epochs(0)
    informed = epochs + 2 * rating.astype(np.float32)
    error = Metric("error", lambda p, r, _: float(np.abs(p - r).mean()), higher_is_better=False)
    for metric, offset in ((SPEARMAN, 0), (error, 9)):
        worse, better = (
            [hold_out([e + shift], metric, rating, pair) for e in (part[:2], part[2:4])]
            for part, shift in ((epochs, offset), (informed, 0))
        )
        predicted, selected = choose_settings([worse, better], metric, pair)
        assert selected == [1] * FOLDS
        for seed, expected in zip(predicted, better, strict=True):
            assert (seed.predictions == expected.predictions).all()
            np.testing.assert_allclose(
                np.abs(seed.scores), np.mean([s.scores for s in better], axis=0)
            )


def test_fit_holds_out_predictions_of_dev(monkeypatch):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 60, 8))
    pairs = PairArrays(first, second, (first * second).mean(axis=1), pair=np.arange(60) // 2)
    for members in (1, 2):
        changes = {"dim": 4, "epochs": 1, "batch_size": 16, "members": members}
        head = fit("linear", pairs, pairs, **changes)
        # With only one epoch to choose, held-out predictions are those of the head.
        expected = head.similarity(first, second)
        np.testing.assert_allclose(head.fit.held_out.predictions, expected, atol=1e-5)
    assert fit("linear", pairs, None, **changes).fit.held_out is None
    for limit, held_out in ((120, True), (119, False)):
        monkeypatch.setattr("llmcond.heads.fit.MAX_VALUES", limit)
        assert (fit("linear", pairs, pairs, **changes).fit.held_out is not None) == held_out


def test_commands_report_held_out_scores(capsys, tmp_path, model, small_rows):
    """Forty sentence pairs are in dev, and two of their sentences in train."""
    new = [(f"{first} again", f"{second} again", *rest) for first, second, *rest in small_rows]
    new[:2] = [(small_rows[0][0], *row[1:]) for row in new[:2]]
    for name, rows in (("train", small_rows), ("dev", new)):
        (tmp_path / "data").mkdir(exist_ok=True)
        write_pairs(tmp_path / "data" / f"{name}.csv", rows)
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    options |= {"prompt": ["concat-sent-cond"], "data": tmp_path / "data"}
    folder = tmp_path / "run"
    llmcond.extract(model=model, run=folder, **options)
    command = ("fit-head", "--run", folder, "--set", "epochs=3", "--head")
    fitted = run_json(capsys, *command, "linear")
    low, high = fitted["held_out_spearman_ci"]
    assert low < fitted["held_out_spearman"] < high
    run_json(capsys, "fit-head", "--run", folder, "--head", "pca", "--dim", "4")
    rows = {r["head"]: r for r in run_json(capsys, "evaluate", "--run", folder)["results"]}
    assert rows["linear"]["held_out_spearman"] == fitted["held_out_spearman"]
    assert rows["linear"]["held_out_spearman_ci"] == [low, high]
    assert "held_out_spearman" not in rows["pca"]
    assert rows["linear"]["n_shared_sentences"] == 2
    assert rows["linear"]["n_unseen_sentences"] == 78
    assert "accuracy" in rows["linear"]["shared_sentences"]
    train = run_json(capsys, "evaluate", "--run", folder, "--split", "train")["results"]
    assert not any("held_out_spearman" in row for row in train)
    command = ("sweep", "--run", folder, "--head", "linear", "--seeds", "3", "--workers", "1")
    command += ("--set", "epochs=2", "--vary", "dim=4,8")
    swept = run_json(capsys, *command)
    assert run_json(capsys, *command) == swept  # from saved fits
    for row in swept["results"]:
        assert row["held_out_spearman_ci"][0] < row["held_out_spearman"]
    choice = swept["held_out_choice"]
    assert sum(choice["folds"].values()) == FOLDS
    assert choice["spearman_ci"][0] < choice["spearman"] < choice["spearman_ci"][1]
