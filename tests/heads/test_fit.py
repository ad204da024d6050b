"""Fitting by gradient: batches, dropout, repeatability, the selected epoch, and ensembles."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.heads import fit, ignore_progress, make_recipe, tensors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Metric
from llmcond.heads import ConcatenatedMatrix, Difference, PairArrays, SharedRows, cosine, fit_recipe
from llmcond.heads.conditioned import Linear
from llmcond.heads.fit import entries_since_best
from llmcond.heads.module import Batch, HeadModule, seeded
from llmcond.heads.recipes import find_family

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C = 8, 6
SHORT = {"epochs": 3, "batch_size": 32, "dropout": 0.2}
HYPER = {"dim": 4, "rank": 2}
CONTRAST = {"info_nce": 1.0, "quadruplet": 0.5, "mse": 0.5}
VARIANTS = {
    "linear, ranking": ("linear", {"dim": 4, "ranking": 1.0, "cosent": 0.5}),
    "mlp, bfloat16": ("mlp", {"dim": 4, "hidden": 5, "precision": "bfloat16"}),
    "hadamard, own masks": ("hadamard", {"masks": "own"}),
    "concat, by condition": ("concat", {"dim": 4, "batches": "conditions"}),
    "full": ("hypernet-full-mse", {"dim": 4}),
    "low rank": ("hypernet-mse", HYPER),
    "low rank, any rows": ("hypernet-mse", {**HYPER, "batches": "rows"}),
    "low rank, contrasts": ("hypernet-mse", {**HYPER, **CONTRAST}),
    "towers": ("towers", {**HYPER, "hidden": 5}),
    "two members": ("hypernet-mse", {**HYPER, "members": 2}),
}


def make_pairs(n=120, u=7, seed=0, dtype=np.float32):
    """Make rows in contrastive pairs, with values that float16 represents exactly."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, DIM)).astype(np.float16).astype(dtype)
    table = rng.normal(size=(u, DIM_C)).astype(np.float16).astype(dtype)
    rating = rng.choice([0, 0.25, 0.5, 0.75, 1], size=n)
    return PairArrays(first, second, rating, table[rng.integers(u, size=n)], np.arange(n) // 2)


def make_planted_pairs(n, seed):
    """Make pairs of rows under two of three conditions, each of which selects three features."""
    rng = np.random.default_rng(seed)
    first, second = np.repeat(rng.normal(size=(2, n // 2, 9)), 2, axis=1)
    # The two rows of a pair have different conditions.
    which = np.repeat(rng.integers(3, size=n // 2), 2)
    which[1::2] = (which[1::2] + rng.integers(1, 3, size=n // 2)) % 3
    counts = np.arange(9) // 3 == which[:, None]
    # All features count a little, so that a head without conditions learns something, too.
    rating = (1 + cosine(first * (counts + 0.3), second * (counts + 0.3)).astype(float)) / 2
    condition = SharedRows(np.eye(3, 5, dtype=np.float32), which)
    features = first.astype(np.float32), second.astype(np.float32)
    return PairArrays(*features, rating, condition, np.arange(n) // 2)


def compute_similarity(head, pairs):
    condition = pairs.condition if head.dim_condition else None
    return head.similarity(pairs.first, pairs.second, condition)


# -- the same seed -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_head_depends_on_seed_but_not_on_global_generators(name):
    kind, changes = VARIANTS[name]
    train_pairs, dev = make_pairs(), make_pairs(40, seed=1)
    heads = []
    for seed, global_seed in ((3, 1), (3, 2), (4, 2)):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
        heads.append(fit(kind, train_pairs, dev, seed, **{**SHORT, **changes}))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    first, repeated, other = heads
    assert tensors(first) == tensors(repeated)
    assert first.fit.record == repeated.fit.record
    assert tensors(first) != tensors(other)


def compute_gradient_bytes(kind, changes):
    """Return the bytes of the gradients of a batch, most of whose rows have one condition."""
    generator = torch.Generator().manual_seed(0)
    x, condition = (torch.randn(n, 256, generator=generator) for n in (4_096, 41))
    which = torch.where(torch.arange(4_096) % 5 > 0, 20, torch.arange(4_096) % 41)
    family = find_family(kind, "test")[1]
    module, _ = seeded(lambda: family(make_recipe(kind, **changes).settings, 256, 256), 0)
    module.eval()(x, condition, which).square().sum().backward()
    return b"".join(weight.grad.numpy().tobytes() for weight in module.parameters())


# A difference need not show in every run, because it depends on the order of the threads.
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("hadamard", {}),
        ("concat", {"dim": 256}),
        ("hypernet-ablation", {"rank": 1}),
        ("hypernet", {"dim": 64, "rank": 2}),
    ],
)
def test_gradients_have_same_bits_on_several_threads(two_threads, kind, changes):
    first = compute_gradient_bytes(kind, changes)
    assert all(compute_gradient_bytes(kind, changes) == first for _ in range(5))


# -- the same values in other forms ------------------------------------------------------------


def convert_to_forms(dense):
    """Return the same vectors in other types and memory layouts, by name."""
    order = np.random.default_rng(5).permutation(len(dense))
    table = np.empty_like(dense)
    table[order] = dense
    half = (dense / 2).astype(np.float16)
    return {
        "float16": dense.astype(np.float16),
        "float64": dense.astype(np.float64),
        "columns": np.asfortranarray(dense),
        "read-only": np.broadcast_to(dense, dense.shape),
        "gathered": SharedRows(table.astype(np.float16), order),
        "difference": Difference(half, -half),
        "concatenated": ConcatenatedMatrix([dense[:, :3], dense[:, 3:].astype(np.float16)]),
    }


@pytest.mark.parametrize("name", ["low rank", "low rank, contrasts", "mlp, bfloat16"])
def test_features_and_conditions_in_any_form_give_same_head(monkeypatch, name):
    """The mask of a condition and its position depend on the number that it gets."""
    (kind, changes), pairs, dev = VARIANTS[name], make_pairs(), make_pairs(40, seed=1)
    changes = {**SHORT, **changes}
    expected = fit(kind, pairs, dev, **changes)
    _, first, number = np.unique(pairs.condition, axis=0, return_index=True, return_inverse=True)
    conditions = convert_to_forms(pairs.condition)
    conditions["gathered"] = SharedRows(pairs.condition[first][::-1], 6 - number.ravel())
    forms = [(pairs.take(np.arange(120)), dev.take(np.arange(40)))]
    for form, features in convert_to_forms(pairs.first).items():
        converted = replace(pairs, first=features, condition=conditions[form])
        forms.append((converted, replace(dev, first=convert_to_forms(dev.first)[form])))
    for dense_bytes in (2**29, 0):
        monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", dense_bytes)
        for converted, converted_dev in forms:
            actual = fit(kind, converted, converted_dev, **changes)
            assert tensors(actual) == tensors(expected)
            assert actual.fit.record == expected.fit.record


# -- batches -----------------------------------------------------------------------------------


class Spy:
    """A linear head that records its batches; the first feature is the row number."""

    def __init__(self, conditioned):
        self.conditioned = conditioned
        self.batches, self.scored, self.ends = [], [], []

    @property
    def family(self):
        spy = self

        class RecordingHead(HeadModule):
            conditioned, multiplies_in_bfloat16 = spy.conditioned, True

            def __init__(self, settings, dim_in, dim_condition):
                super().__init__(settings, dim_in, dim_condition)
                self.add_weight("weight", (settings.dim, dim_in), dim_in)

            def forward(self, *batch):
                (spy.batches if self.training else spy.scored).append(Batch(*batch))
                return batch[0] @ self.weight.to(batch[0].dtype).T

        return RecordingHead

    def rows(self, batches=None):
        """Return the row numbers of each batch, which must be the same on both sides."""
        row_numbers = []
        for batch in self.batches if batches is None else batches:
            first, second = batch.x[:, 0].reshape(2, -1)
            assert torch.equal(first, second)
            row_numbers.append(first.long().tolist())
        return row_numbers

    def epochs(self):
        """Return the row numbers of the batches of each epoch."""
        rows = self.rows()
        return [rows[begin:end] for begin, end in pairwise([0, *self.ends])]


def make_numbered_pairs(n, dim=3, condition=None, pair=None, seed=0):
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, dim)).astype(np.float32)
    first[:, 0] = second[:, 0] = np.arange(n)
    return PairArrays(first, second, np.arange(n) / n, condition, pair)


def fit_with_spy(pairs, dev=None, seed=0, **changes):
    spy = Spy(pairs.condition is not None)
    base_recipe = make_recipe("linear", **{**SHORT, "dim": 2, "learning_rate": 1e-6, **changes})

    def on_epoch(epoch, epochs, entry):
        if entry is not None:
            spy.ends.append(len(spy.batches))

    recipe = replace(base_recipe, family=spy.family)
    spy.fit = fit_recipe(recipe, pairs, dev, seed, on_epoch, "cpu").fit
    return spy


@pytest.fixture
def objective_calls(monkeypatch):
    """The ratings and contrastive pairs with which the objective is called."""
    calls = []

    class RecordingObjective(torch.nn.Module):
        def __init__(self, settings):
            super().__init__()

        def forward(self, first, second, rating, batch):
            calls.append((rating.double().numpy(), batch.contrastive))
            return first.sum() * 0 + rating.sum()

    monkeypatch.setattr("llmcond.heads.fit.Objective", RecordingObjective)
    return calls


def flatten(batches):
    return [row for batch in batches for row in batch]


def move_to_disk(pairs, folder, sides=("first", "second")):
    """Save the features to files, and return the pairs with memory-mapped features."""
    features = {}
    for name in sides:
        np.save(folder / f"{name}.npy", getattr(pairs, name))
        features[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return replace(pairs, **features)


@pytest.fixture
def short_runs(monkeypatch):
    """Read files in runs of five adjacent rows, and shuffle fifteen rows at a time."""
    monkeypatch.setattr("llmcond.heads.fitted._BLOCK", 5)
    monkeypatch.setattr("llmcond.heads.fitted._BLOCKS", 3)
    monkeypatch.setattr("llmcond.heads.fitted._SCORED", 9)


def test_epoch_has_every_row_once_in_full_batches():
    for n, size in ((50, 8), (50, 50), (50, 64), (48, 8), (2, 1)):
        spy = fit_with_spy(make_numbered_pairs(n), batch_size=size)
        assert spy.fit.record["steps_per_epoch"] == -(-n // size)
        for rows in spy.epochs():
            assert [len(batch) for batch in rows[:-1]] == [size] * (len(rows) - 1)
            assert sorted(flatten(rows)) == list(range(n))
    first, second, third = fit_with_spy(make_numbered_pairs(50), batch_size=8).epochs()
    assert first != second != third


@pytest.mark.parametrize("sides", [("first", "second"), ("first",), ("second",)])
def test_epoch_from_disk_has_every_row_once(tmp_path, short_runs, sides):
    for n, size in ((53, 8), (53, 64), (50, 8)):
        pairs = move_to_disk(make_numbered_pairs(n), tmp_path, sides)
        spy = fit_with_spy(pairs, pairs, batch_size=size)
        for rows in spy.epochs():
            assert sorted(flatten(rows)) == list(range(n))
            assert max(len(batch) for batch in rows) <= size
        assert flatten(spy.rows(spy.scored)) == list(range(n)) * 3


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_rows_keep_their_ratings_and_conditions(tmp_path, short_runs, objective_calls, storage):
    n, table = 37, np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    which = np.random.default_rng(1).integers(5, size=n)
    pairs = make_numbered_pairs(n, condition=SharedRows(table, which))
    pairs = move_to_disk(pairs, tmp_path) if storage == "disk" else pairs
    spy = fit_with_spy(pairs, batch_size=10, batches="conditions")
    for batch, rows, (rating, _) in zip(spy.batches, spy.rows(), objective_calls, strict=True):
        np.testing.assert_allclose(rating * n, rows, atol=1e-3)
        conditions = batch.condition[batch.which].numpy()
        np.testing.assert_array_equal(conditions, np.tile(table[which[rows]], (2, 1)))
        assert len(batch.condition) == len(np.unique(which[rows]))
    if storage == "memory":  # on disk, equal conditions are adjacent within blocks only
        orders = [which[flatten(rows)] for rows in spy.epochs()]
        assert all(np.count_nonzero(np.diff(order)) == len(table) - 1 for order in orders)


CONTRASTING = {"mse": 0.0, "info_nce": 1.0}


def assert_pairs_are_whole(spy, pair, size, from_memory=True):
    """Check that both rows of a pair are adjacent in one batch, in their original order."""
    for rows in spy.epochs():
        assert sorted(flatten(rows)) == list(range(len(pair)))
        assert max(len(batch) for batch in rows) <= max(size, 2)
        # No batch could have taken the first pair of the next one, too.
        next_pairs = [np.count_nonzero(pair == pair[batch[0]]) for batch in rows[1:]]
        assert not from_memory or all(
            len(batch) + more > size for batch, more in zip(rows, next_pairs, strict=False)
        )
        for batch in rows:
            for row in batch:
                pair_rows = np.flatnonzero(pair == pair[row])
                assert batch[batch.index(pair_rows[0]) :][: len(pair_rows)] == pair_rows.tolist()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 2), min_size=1, max_size=15), st.integers(1, 9))
@example([1, 2, 2, 1], 1)
def test_contrastive_pairs_stay_in_one_batch(counts, size):
    pair = np.repeat(np.arange(len(counts) + 1)[::-1], [*counts, 2])
    spy = fit_with_spy(make_numbered_pairs(len(pair), pair=pair), batch_size=size, **CONTRASTING)
    assert_pairs_are_whole(spy, pair, size)


def test_contrastive_pairs_from_disk_stay_together(tmp_path, short_runs, monkeypatch):
    # The only row of the last run moves to the run before, where its pair begins.
    moving = np.array([0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 9])
    for block, pair in ((5, np.repeat(np.arange(25), 2)), (4, np.arange(50) // 2), (5, moving)):
        monkeypatch.setattr("llmcond.heads.fitted._BLOCK", block)
        pairs = move_to_disk(make_numbered_pairs(len(pair), pair=pair), tmp_path)
        for seed in range(3):
            spy = fit_with_spy(pairs, batch_size=6, seed=seed, **CONTRASTING)
            assert_pairs_are_whole(spy, pair, 6, from_memory=False)


def test_contrastive_objectives_override_batches_and_receive_their_pairs(objective_calls):
    pair = np.array([3, 3, 1, 0, 0, 2, 2, 5, 4, 4, 3, 3])  # the first pair occurs again
    pairs = make_numbered_pairs(12, condition=np.eye(4)[np.arange(12) % 4], pair=pair)
    spy = fit_with_spy(pairs, batch_size=4, batches="conditions", **CONTRASTING)
    for rows, (_, contrastive) in zip(spy.rows(), objective_calls, strict=True):
        row_pairs = {tuple(rows[index] for index in indices) for indices in contrastive.tolist()}
        expected = [(0, 1), (3, 4), (5, 6), (8, 9), (10, 11)]
        assert row_pairs == {row_pair for row_pair in expected if row_pair[0] in rows}


# -- weights and dropout -----------------------------------------------------------------------


def test_initial_weights_are_uniform_within_bound_by_fan_in():
    """The only step is so small that it does not move the weights."""
    c = DIM_C
    cases = [
        ("mlp", {"dim": 4, "hidden": 5, "depth": 3}, {"weight1": DIM, "weight2": 5, "weight3": 5}),
        ("hadamard", {}, {"transform": c, "transform_bias": c}),
        ("hypernet-full", {"dim": 4}, {"matrix": c}),
        (
            "hypernet-ablation",
            {"rank": 2, "transform": False},
            {"up": c, "up_bias": c, "down": 2 * DIM, "down_bias": 2 * DIM},
        ),
    ]
    one_step = {"epochs": 1, "batch_size": 120, "learning_rate": 1e-12}
    for kind, changes, fan_in in cases:
        head = fit(kind, make_pairs(), **{**one_step, **changes})
        assert set(head.tensors) == set(fan_in)
        for name, value in head.tensors.items():
            scaled = np.abs(value) * fan_in[name] ** 0.5
            assert scaled.max() <= 1 + 1e-6
            if value.size >= 24:
                assert scaled.max() > 0.8
                assert scaled.mean() == pytest.approx(0.5, abs=0.15)
        sizes = sum(value.size for value in head.tensors.values())
        assert head.fit.record["n_parameters"] == sizes


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_first_step_is_that_of_adam_with_decoupled_decay(decay):
    """The first step of Adam is as long as the learning rate in every direction."""
    values = {"epochs": 1, "batch_size": 120, "dropout": 0.0, "learning_rate": 0.01}
    pairs = make_pairs()
    head = fit("linear", pairs, dim=4, **values, weight_decay=decay)
    start = torch.empty(4, DIM).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    start = start.numpy() / DIM**0.5
    step = head.tensors["weight"] - start * (1 - 0.01 * decay)
    np.testing.assert_allclose(np.abs(step), 0.01, rtol=1e-3)
    similarity = cosine(pairs.first @ start.T, pairs.second @ start.T)
    loss = np.square(similarity - pairs.rating).mean()
    assert head.fit.record["curve"][0]["loss"] == pytest.approx(loss, rel=1e-4)


def make_dropping_head(share, seed=0):
    """Create a head in training mode, which drops units."""
    module = Linear(make_recipe("linear", dim=4, dropout=share).settings, DIM)
    module.seed_dropout(seed)
    return module.train()


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_dropout_drops_its_share_and_rescales(share):
    module = make_dropping_head(share)
    values = torch.full((400, 500), 3.0, requires_grad=True)
    dropped = module.dropout(values)
    mask = dropped != 0
    assert mask.float().mean().item() == pytest.approx(1 - share, abs=0.005)
    torch.testing.assert_close(dropped[mask], (values / (1 - share))[mask], rtol=1e-3, atol=0)
    # No row or column is dropped as a whole, and each call drops other units.
    for dim in (0, 1):
        assert mask.float().mean(dim=dim).std() < 4 * (share * (1 - share) / 400) ** 0.5
    assert not torch.equal(module.dropout(values) != 0, mask)
    dropped.sum().backward()
    torch.testing.assert_close(3 * values.grad, dropped.detach())
    assert module.dropout(torch.ones(3, 2).bfloat16()).dtype == torch.bfloat16


# -- the selected epoch, and the record --------------------------------------------------------

ERROR = Metric("error", lambda p, r, _: float(np.abs(p - r).mean()), higher_is_better=False)


@pytest.mark.parametrize("metric", [METRICS["spearman"], METRICS["accuracy"], ERROR])
def test_epoch_with_best_score_on_dev_is_selected(metric):
    few, dev = make_planted_pairs(60, seed=3), make_planted_pairs(300, seed=2)
    changes = {"epochs": 40, "patience": 40, "batch_size": 64, "learning_rate": 0.05}
    recipe, splits = make_recipe("hypernet-mse", dim=8, rank=4, **changes), {"test": few}
    head = fit_recipe(recipe, few, dev, 0, ignore_progress, "cpu", metric, curve_splits=splits)
    curve = head.fit.record["curve"]
    scores = [epoch[f"dev_{metric.name}"] for epoch in curve]
    assert head.fit.record["selected_on"] == "dev"
    assert scores.index(metric.best(scores)) == head.fit.record["best_epoch"] - 1 < 39
    similarity = compute_similarity(head, dev).astype(np.float64)
    assert metric(similarity, dev.rating, dev.pair) == pytest.approx(metric.best(scores), abs=1e-4)
    best = curve[head.fit.record["best_epoch"] - 1][f"test_{metric.name}"]
    similarity = compute_similarity(head, few).astype(np.float64)
    assert metric(similarity, few.rating, few.pair) == pytest.approx(best, abs=1e-4)


def test_best_score_is_first_of_equals_and_never_undefined():
    cases = [([0.1, 0.3, 0.2], 1), ([0.3, 0.3], 0), ([None, None], 1), ([None, 0.1, None], 1)]
    for scores, best_index in [*cases, ([0.2, None, 0.1], 0), ([-0.1], 0)]:
        curve = [{"dev": score} for score in scores]
        since = len(scores) - 1 - best_index
        assert entries_since_best(curve, "dev", METRICS["spearman"]) == since
        # If lower is better, the negated scores have the same best entry.
        curve = [{"dev": score and -score} for score in scores]
        assert entries_since_best(curve, "dev", METRICS["mean_rank"]) == since


def test_fitting_stops_when_patience_ends():
    pairs, dev = make_planted_pairs(300, 1), make_planted_pairs(100, 2)
    changes = {"epochs": 200, "patience": 3, "batch_size": 50, "learning_rate": 0.05}
    record = fit("hypernet-mse", pairs, dev, **HYPER, **changes).fit.record
    assert len(record["curve"]) == record["best_epoch"] + 3 < 200


def test_without_informative_dev_rows_the_last_epoch_is_selected():
    dev = make_pairs(40, seed=1)
    empty, equal = dev.take(np.arange(0)), replace(dev, rating=np.full(40, 0.5))
    for split, n_notes in ((None, 0), (empty, 1), (equal, 1)):
        head = fit("hypernet-mse", make_pairs(), split, **SHORT, **HYPER)
        record = head.fit.record
        assert (record["selected_on"], record["best_epoch"]) == (None, 3)
        assert [epoch["dev_spearman"] for epoch in record["curve"]] == [None] * 3
        assert len(head.fit.notes) == n_notes
        assert not n_notes or "dev score is undefined" in head.fit.notes[0]


def test_large_heads_use_bfloat16_if_cpu_supports_it(monkeypatch):
    for precision, native, large, expected in (
        ("auto", True, True, "bfloat16"),
        ("auto", True, False, "float32"),
        ("float32", True, True, "float32"),
        ("bfloat16", False, False, "bfloat16"),
    ):
        monkeypatch.setattr("llmcond.heads.fit.computes_natively", lambda *_, native=native: native)
        monkeypatch.setattr("llmcond.heads.fit._MIN_BFLOAT16_PARAMETERS", 32 if large else 33)
        head = fit("linear", make_pairs(), **SHORT, dim=4, precision=precision)
        assert (head.fit.record["n_parameters"], head.fit.record["precision"]) == (32, expected)
        assert head.tensors["weight"].dtype == np.float32


# -- ensembles and initial parameters ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"), [("mlp", {"dim": 8, "hidden": 32}), ("hypernet-mse", HYPER)]
)
def test_similarity_of_ensemble_is_mean_of_members(kind, changes):
    pairs, stages = make_pairs(), []
    recipe = make_recipe(kind, **SHORT, **changes, members=3)
    head = fit_recipe(recipe, pairs, pairs, 5, lambda *call: stages.append(call[2] or {}))
    assert head.dim_out == 3 * changes["dim"]
    assert {entry["stage"] for entry in stages if entry} == {f"member-{i}" for i in range(3)}
    singles = [fit(kind, pairs, pairs, 5 + i * 2**20, **SHORT, **changes) for i in range(3)]
    similarity = compute_similarity(head, pairs)
    condition = pairs.condition if head.dim_condition else None
    sides = [torch.tensor(head.transform(s, condition)) for s in (pairs.first, pairs.second)]
    np.testing.assert_allclose(head.module.similarity(*sides), similarity, atol=1e-5)
    expected = np.mean([compute_similarity(single, pairs) for single in singles], axis=0)
    np.testing.assert_allclose(similarity, expected, atol=1e-5)
    curves = [member["curve"] for member in head.fit.record["members"]]
    assert curves == [single.fit.record["curve"] for single in singles]


def test_fit_starts_from_parameters_of_another_head():
    pairs, changes = make_pairs(), {**SHORT, "dim": 4, "members": 2}
    start = fit("linear", pairs, **changes)
    still = make_recipe("linear", **changes).with_settings({"learning_rate": 1e-12}, "test")
    head = fit_recipe(still, pairs, None, 9, ignore_progress, start=start)
    for name, value in head.tensors.items():
        np.testing.assert_allclose(value, start.tensors[name], atol=1e-9)
    for other, message in (
        ({"members": 3}, "has 2 members, but the new head has 3"),
        ({"dim": 3}, "of weight, it has the shape 4x8, and the new head has the shape 3x8"),
    ):
        with pytest.raises(UserError, match=message):
            fit_recipe(
                still.with_settings(other, "t"), pairs, None, 0, ignore_progress, start=start
            )


# -- rejected input ----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["first", "second"])
def test_equal_vectors_are_rejected(monkeypatch, side):
    monkeypatch.setattr("llmcond.heads.fit._BLOCK", 4)
    pairs = PairArrays(np.ones((9, DIM)), np.ones((9, DIM)), np.linspace(0, 1, 9))
    with pytest.raises(UserError, match="all 18 training vectors are equal"):
        fit("linear", pairs, **SHORT, dim=4)
    getattr(pairs, side)[8, 3] = 2
    fit("linear", pairs, **SHORT, dim=4)


def test_data_that_a_head_cannot_learn_from_are_rejected():
    pairs = make_pairs()
    single = replace(pairs, pair=np.arange(120))
    infinite = np.where(pairs.first > 2, np.inf, pairs.first)
    short = {**SHORT, "dim": 4}
    cases = [
        (single, {**short, "quadruplet": 1.0}, r"no sentence pair has two .*--set info_nce=0"),
        (replace(pairs, first=infinite), short, r"loss became nan in epoch 1.*to about 0\.0001"),
        (pairs, {**short, "dim": 9}, r"dim is 9, but the features have 8.*Set dim to 8 or less"),
        (replace(pairs, rating=np.full(120, 0.5)), short, "1 distinct ratings over 120 rated"),
    ]
    for data, changes, message in cases:
        with pytest.raises(UserError, match=message):
            fit("linear", data, **changes)


def test_rows_of_contrastive_pair_need_not_be_adjacent():
    pairs, changes = make_pairs(), {**SHORT, **HYPER, **CONTRAST}
    separated = pairs.take(np.concatenate([np.arange(0, 120, 2), np.arange(1, 120, 2)]))
    expected, actual = (fit("hypernet-mse", data, **changes) for data in (pairs, separated))
    assert tensors(actual) == tensors(expected)
    tied = int((pairs.rating[::2] == pairs.rating[1::2]).sum())
    record = actual.fit.record
    assert (record["n_contrastive_pairs"], record["n_tied_pairs"]) == (60, tied)


# -- learning ----------------------------------------------------------------------------------

LEARNING = {**HYPER, "dim": 9, "rank": 4, "epochs": 12, "batch_size": 100, "learning_rate": 0.01}


@pytest.mark.parametrize("weights", [{"mse": 1.0}, {"mse": 0.0, "info_nce": 1.0}])
def test_objectives_learn_ratings_that_depend_on_the_condition(weights):
    train, dev = make_planted_pairs(1_600, 1), make_planted_pairs(600, 2)
    head = fit("hypernet-mse", train, dev, **LEARNING, dropout=0.0, **weights)
    similarity = compute_similarity(head, dev)
    differences = (similarity[::2] - similarity[1::2]) * (dev.rating[::2] - dev.rating[1::2])
    assert (differences > 0).mean() > 0.75
    if weights["mse"]:
        assert spearmanr(similarity, dev.rating).statistic > 0.7  # 0.59 without conditions
