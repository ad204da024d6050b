"""Fitting by gradient: batches, dropout, repeatability, and what is learned."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.heads import fit, ignore_progress, make_recipe, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from llmcond.arrays import as_matrix
from llmcond.errors import UserError
from llmcond.heads import ConcatenatedMatrix, Difference, PairArrays, SharedRows, fit_recipe
from llmcond.heads.conditioned import ConditionGroups
from llmcond.heads.dense import Linear
from llmcond.heads.fit import fit_by_gradient
from llmcond.heads.module import Batch, HeadModule, seeded
from llmcond.heads.recipes import find_family

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C = 8, 6


def make_pairs(n=120, u=7, seed=0, dtype=np.float32):
    """Make rows in contrastive pairs, with values that float16 represents exactly."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, DIM)).astype(np.float16).astype(dtype)
    table = rng.normal(size=(u, DIM_C)).astype(np.float16).astype(dtype)
    rating = rng.choice([0, 0.25, 0.5, 0.75, 1], size=n)
    return PairArrays(first, second, rating, table[rng.integers(u, size=n)], np.arange(n) // 2)


SHORT = {"epochs": 3, "batch_size": 32, "dropout": 0.2}
HYPER = {"dim": 4, "rank": 2}
CONTRAST = {"info_nce": 1.0, "quadruplet": 0.5, "mse": 0.5}
VARIANTS = {
    "linear": ("linear", {"dim": 4}),
    "linear, ranking": ("linear", {"dim": 4, "ranking": 1.0, "cosent": 0.5}),
    "mlp": ("mlp", {"dim": 4, "hidden": 5}),
    "hadamard": ("hadamard", {}),
    "hadamard, own masks": ("hadamard", {"masks": "own"}),
    "concat": ("concat", {"dim": 4}),
    "concat, by condition": ("concat", {"dim": 4, "batches": "conditions"}),
    "full": ("hypernet-full-mse", {"dim": 4}),
    "low rank": ("hypernet-mse", HYPER),
    "low rank, any rows": ("hypernet-mse", {**HYPER, "batches": "rows"}),
    "low rank, own masks": ("hypernet-mse", {**HYPER, "transform": True, "masks": "own"}),
    "low rank, contrasts": ("hypernet-mse", {**HYPER, **CONTRAST}),
    "low rank, bfloat16": ("hypernet-mse", {**HYPER, "precision": "bfloat16"}),
    "mlp, bfloat16": ("mlp", {"dim": 4, "hidden": 5, "precision": "bfloat16"}),
    "low rank, relu": ("hypernet-mse", {**HYPER, "activation": "relu"}),
    "ablation": ("hypernet-ablation", {"rank": 2}),
    "towers": ("towers", {**HYPER, "hidden": 5}),
    "two members": ("hypernet-mse", {**HYPER, "members": 2}),
}

FAMILIES = {
    kind: find_family(kind, "test")[1]
    for kind in ("hadamard", "concat", "hypernet", "hypernet-ablation")
}


# -- the same seed -----------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", VARIANTS)
def test_same_seed_gives_same_bits(name):
    kind, changes = VARIANTS[name]
    train_pairs, dev = make_pairs(), make_pairs(40, seed=1)
    first, repeated, other = (
        fit(kind, train_pairs, dev, seed, **{**SHORT, **changes}) for seed in (3, 3, 4)
    )
    assert tensors(first) == tensors(repeated)
    assert first.fit.record == repeated.fit.record
    assert tensors(first) != tensors(other)


@pytest.mark.parametrize("name", ["low rank, own masks", "concat, by condition"])
def test_fit_does_not_use_global_generators(name):
    kind, changes = VARIANTS[name]
    heads, states = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
        heads.append(fit(kind, make_pairs(), **{**SHORT, **changes}))
        states.append(
            torch.equal(before[0], torch.get_rng_state())
            and np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
        )
    assert states == [True, True]
    assert tensors(heads[0]) == tensors(heads[1])


def compute_gradient_bytes(name):
    """Return the bytes of the gradients of a batch whose conditions have many rows each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4_096, 256, generator=generator)
    which = torch.randint(3, (4_096,), generator=generator)
    batch = Batch(x, torch.randn(3, 32, generator=generator), which)
    if name == "by condition":
        # Most rows have the condition in the middle.
        which = torch.where(torch.arange(4_096) % 5 > 0, 20, torch.arange(4_096) % 41)
        weights = {"factor": torch.randn(41, 256, 64, generator=generator).requires_grad_()}
        groups = ConditionGroups(which, 41)
        matrices = weights["factor"].index_select(0, groups.order)
        output = groups.restore(groups.multiply(groups.pad(x), matrices))
    else:
        changes = {"concat": {"dim": 256}, "hypernet-ablation": {"rank": 2}}.get(name, {})
        module, _ = seeded(
            lambda: FAMILIES[name](make_recipe(name, **changes).settings, 256, 32), 0
        )
        weights = dict(module.named_parameters())
        output = module.eval()(*batch)
    output.square().sum().backward()
    return b"".join(weight.grad.numpy().tobytes() for weight in weights.values())


# A difference need not show in every run, because it depends on the order of the threads.
@pytest.mark.parametrize("name", ["hadamard", "concat", "hypernet-ablation", "by condition"])
def test_gradients_have_same_bits_on_several_threads(two_threads, name):
    first = compute_gradient_bytes(name)
    assert all(compute_gradient_bytes(name) == first for _ in range(7))


# -- the same values in other forms ------------------------------------------------------------


def convert_to_forms(dense):
    """Return the same vectors in other types and memory layouts, by name."""
    n = len(dense)
    order = np.random.default_rng(5).permutation(n)
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


FORMS = list(convert_to_forms(np.zeros((2, 4), dtype=np.float32)))


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["linear", "low rank", "low rank, contrasts", "mlp, bfloat16"])
def test_features_in_any_form_give_same_head(monkeypatch, name, form):
    (kind, changes), pairs, dev = VARIANTS[name], make_pairs(), make_pairs(40, seed=1)
    changes = {**SHORT, **changes}
    expected = fit(kind, pairs, dev, **changes)
    converted, converted_dev = (
        replace(
            split, first=convert_to_forms(split.first)[form], second=as_matrix(split.second).read()
        )
        for split in (pairs, dev)
    )
    for dense_bytes in (2**29, 0):
        monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", dense_bytes)
        actual = fit(kind, converted, converted_dev, **changes)
        assert tensors(actual) == tensors(expected)
        assert actual.fit.record == expected.fit.record


@pytest.mark.parametrize("dense_bytes", [2**29, 0])
def test_differences_are_not_rounded_to_float16(monkeypatch, dense_bytes):
    pairs, other = make_pairs(dtype=np.float16), make_pairs(seed=1, dtype=np.float16)
    differences = {
        side: Difference(getattr(pairs, side), getattr(other, side)) for side in ("first", "second")
    }
    dense = {side: as_matrix(matrix).read() for side, matrix in differences.items()}
    assert (dense["first"] != dense["first"].astype(np.float16)).any()
    monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", dense_bytes)
    heads = [
        fit("linear", replace(pairs, **sides), **SHORT, dim=4) for sides in (differences, dense)
    ]
    assert tensors(heads[0]) == tensors(heads[1])


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["low rank, any rows", "concat", "hadamard"])
def test_conditions_in_any_form_give_nearly_same_head(name, form):
    (kind, changes), pairs, dev = VARIANTS[name], make_pairs(), make_pairs(40, seed=1)
    changes = {**SHORT, **changes, "dropout": 0.0}
    expected = fit(kind, pairs, dev, **changes)
    converted = replace(pairs, condition=convert_to_forms(pairs.condition)[form])
    actual = fit(kind, converted, dev, **changes)
    for key, value in expected.tensors.items():
        np.testing.assert_allclose(actual.tensors[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "form",
    [
        "columns",
        "read-only",
        "difference",
        "concatenated",
        "float16",
        "float64",
        "gathered",
        "taken",
    ],
)
@pytest.mark.parametrize("name", ["low rank", "low rank, any rows"])
def test_conditions_in_any_form_give_same_head(name, form):
    """The mask of a condition and its position depend on the number that it gets."""
    (kind, changes), pairs = VARIANTS[name], make_pairs()
    expected = fit(kind, pairs, **{**SHORT, **changes})
    if form == "taken":
        converted = pairs.take(np.arange(len(pairs)))
    elif form == "gathered":
        _, first, number = np.unique(
            pairs.condition, axis=0, return_index=True, return_inverse=True
        )
        converted = replace(
            pairs, condition=SharedRows(pairs.condition[first][::-1], 6 - number.ravel())
        )
    else:
        converted = replace(pairs, condition=convert_to_forms(pairs.condition)[form])
    assert tensors(fit(kind, converted, **{**SHORT, **changes})) == tensors(expected)


# -- batches -----------------------------------------------------------------------------------


class Spy:
    """A linear head that records its batches; the first feature is the row number."""

    def __init__(self):
        self.batches, self.scored, self.weights, self.ends = [], [], [], []

    @property
    def family(self):
        spy = self

        class RecordingHead(HeadModule):
            multiplies_in_bfloat16 = True

            def __init__(self, settings, dim_in, dim_condition):
                super().__init__(settings, dim_in, dim_condition)
                self.add_weight("weight", (settings.dim, dim_in), dim_in)
                self.add_weight("other", (3, 50), 50)

            def forward(self, *batch):
                if not spy.weights:
                    spy.weights.append(
                        {name: tensor.clone() for name, tensor in self.state_dict().items()}
                    )
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


def make_numbered_pairs(n, dim=3, condition=None, pair=None, seed=0):
    """Make pairs whose first feature is the number of their row."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, dim)).astype(np.float32)
    first[:, 0] = second[:, 0] = np.arange(n)
    return PairArrays(first, second, rng.uniform(size=n), condition, pair)


def fit_with_spy(pairs, dev=None, kind="linear", seed=0, **changes):
    """Fit a head with a spy, and return the spy."""
    spy = Spy()
    base_recipe = make_recipe(kind, **{**SHORT, "dim": 2, "learning_rate": 1e-6, **changes})
    spy_recipe = replace(base_recipe, family=spy.family)

    def on_epoch(epoch, epochs, entry):
        if entry is not None:
            spy.ends.append(len(spy.batches))

    spy.head, spy.fit = fit_by_gradient(spy_recipe, pairs, dev, seed, on_epoch)
    return spy


def make_objective(function):
    """Return an objective class that calls a function of embeddings, ratings and the batch."""

    class FunctionObjective(torch.nn.Module):
        def __init__(self, settings):
            super().__init__()

        def forward(self, first, second, rating, batch):
            return function(first, second, rating, batch)

    return FunctionObjective


def split_by_epoch(spy):
    """Return the row numbers of the batches of each epoch."""
    rows = spy.rows()
    return [rows[begin:end] for begin, end in pairwise([0, *spy.ends])]


def flatten(batches):
    """Return all rows in the order of the batches."""
    return [row for batch in batches for row in batch]


def move_to_disk(pairs, folder):
    """Save the features to files, and return the pairs with memory-mapped features."""
    features = {}
    for name in ("first", "second"):
        np.save(folder / f"{name}.npy", getattr(pairs, name))
        features[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return replace(pairs, **features)


@pytest.fixture
def short_runs(monkeypatch):
    """Read files in runs of five adjacent rows, and shuffle fifteen rows at a time."""
    monkeypatch.setattr("llmcond.heads.fitted._BLOCK", 5)
    monkeypatch.setattr("llmcond.heads.fitted._BLOCKS", 3)
    monkeypatch.setattr("llmcond.heads.fitted._SCORED", 9)


@pytest.mark.parametrize(("n", "size"), [(50, 8), (50, 50), (50, 64), (48, 8), (2, 1)])
def test_epoch_has_every_row_once_in_full_batches(n, size):
    spy = fit_with_spy(make_numbered_pairs(n), batch_size=size)
    assert spy.fit.record["steps_per_epoch"] == -(-n // size)
    for rows in split_by_epoch(spy):
        assert [len(batch) for batch in rows[:-1]] == [size] * (len(rows) - 1)
        assert sorted(flatten(rows)) == list(range(n))
    first, second, third = split_by_epoch(fit_with_spy(make_numbered_pairs(50), batch_size=8))
    assert first != second != third


@pytest.mark.parametrize("side", ["both", "first", "second"])
@pytest.mark.parametrize(("n", "size"), [(53, 8), (53, 64), (50, 8), (7, 2)])
def test_epoch_from_disk_has_every_row_once(tmp_path, short_runs, n, size, side):
    pairs = make_numbered_pairs(n)
    disk_pairs = move_to_disk(pairs, tmp_path)
    if side != "both":
        disk_pairs = replace(pairs, **{side: getattr(disk_pairs, side)})
    spy = fit_with_spy(disk_pairs, disk_pairs, batch_size=size)
    for rows in split_by_epoch(spy):
        assert sorted(flatten(rows)) == list(range(n))
        assert max(len(batch) for batch in rows) <= size
    scored = flatten(spy.rows(spy.scored))
    assert scored == list(range(n)) * 3


def test_rows_from_disk_are_shuffled_by_runs(tmp_path, short_runs):
    spy = fit_with_spy(move_to_disk(make_numbered_pairs(60), tmp_path), batch_size=15)
    epochs = split_by_epoch(spy)
    for rows in epochs:
        # A batch has three runs of five adjacent rows, in any order; the runs need not be adjacent.
        assert [len({row // 5 for row in batch}) for batch in rows] == [3] * 4
        assert all(batch != sorted(batch) for batch in rows)
    run_sets = [frozenset(row // 5 for row in batch) for rows in epochs for batch in rows]
    assert len(set(run_sets)) > 4


@pytest.mark.parametrize("form", ["gathered", "difference", "concatenated", "taken"])
def test_matrices_built_from_files_keep_their_rows(tmp_path, short_runs, form):
    pairs = make_numbered_pairs(40)
    disk_pairs = move_to_disk(pairs, tmp_path)
    order = np.random.default_rng(0).permutation(40)
    zeros = np.zeros_like(pairs.first)
    build = {
        "gathered": lambda side: SharedRows(side, order),
        "difference": lambda side: Difference(side, zeros),
        "concatenated": lambda side: ConcatenatedMatrix([side[:, :1], side[:, 1:]]),
        "taken": lambda side: side,
    }[form]
    disk_pairs = replace(disk_pairs, first=build(disk_pairs.first), second=build(disk_pairs.second))
    if form == "taken":
        disk_pairs = disk_pairs.take(order)
    expected = pairs.take(order) if form in ("gathered", "taken") else pairs
    spy = fit_with_spy(disk_pairs, batch_size=8, epochs=1)
    features = torch.cat([batch.x[: len(batch.x) // 2] for batch in spy.batches])
    dense = torch.tensor(as_matrix(expected.first).read())
    assert torch.equal(features[features[:, 0].argsort()], dense[dense[:, 0].argsort()])


def make_relevant_pairs(n, seed):
    """Make pairs whose rating is the cosine in three of nine directions."""
    first, second = np.random.default_rng(seed).normal(size=(2, n, 9)).astype(np.float32)
    norms = np.linalg.norm(first[:, :3], axis=1) * np.linalg.norm(second[:, :3], axis=1)
    cosine = (first[:, :3] * second[:, :3]).sum(axis=1) / norms
    return PairArrays(first, second, (1 + cosine.astype(float)) / 2)


@pytest.mark.parametrize("form", ["float32", "float16"])
def test_head_fitted_from_disk_scores_as_well(tmp_path, short_runs, form):
    train, dev = make_relevant_pairs(900, 1), make_relevant_pairs(300, 2)
    if form == "float16":
        train = replace(train, first=train.first.astype(form), second=train.second.astype(form))
    changes = {"dim": 3, "epochs": 15, "batch_size": 60, "dropout": 0.0, "learning_rate": 0.05}
    scores = [
        dev_score(fit("linear", pairs, dev, **changes), dev)
        for pairs in (train, move_to_disk(train, tmp_path))
    ]
    assert min(scores) > 0.95
    assert scores[1] == pytest.approx(scores[0], abs=0.02)


@pytest.mark.parametrize("form", ["memory", "disk"])
def test_rows_keep_their_ratings_and_conditions(tmp_path, short_runs, form):
    """Each row of a batch comes with its own rating and condition."""
    n, ratings = 37, []
    table = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    which = np.random.default_rng(1).integers(5, size=n)
    pairs = make_numbered_pairs(n, condition=SharedRows(table, which))
    pairs = replace(pairs, rating=np.arange(n) / n)
    pairs = move_to_disk(pairs, tmp_path) if form == "disk" else pairs

    def spy(first, second, rating, batch):
        ratings.append(rating.numpy() * n)
        return (first - second).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", make_objective(spy))
        head_spy = fit_with_spy(pairs, batch_size=10, batches="conditions")
    assert len(ratings) == len(head_spy.batches)
    for batch, rows, rating in zip(head_spy.batches, head_spy.rows(), ratings, strict=True):
        np.testing.assert_allclose(rating, rows, atol=1e-3)
        expected = table[which[rows]]
        np.testing.assert_array_equal(
            batch.condition[batch.which].numpy(), np.tile(expected, (2, 1))
        )
        assert len(batch.condition) == len(np.unique(which[rows]))


@pytest.mark.parametrize("form", ["plain", "gathered"])
@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_batches_of_conditions_keep_equal_conditions_adjacent(form, size):
    which = np.random.default_rng(0).integers(9, size=60)
    table = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    condition = SharedRows(table, which) if form == "gathered" else table[which]
    spy = fit_with_spy(
        make_numbered_pairs(60, condition=condition), batches="conditions", batch_size=size
    )
    orders = []
    for rows in split_by_epoch(spy):
        assert [len(batch) for batch in rows[:-1]] == [size] * (len(rows) - 1)
        order = which[flatten(rows)]
        assert sorted(flatten(rows)) == list(range(60))
        changes = np.flatnonzero(np.diff(order)) + 1
        assert len(changes) == 8
        orders.append(tuple(order[[0, *changes]].tolist()))
    assert len(set(orders)) == 3


@st.composite
def pairs_of_rows(draw):
    """Draw the sentence pair of each row; pairs have one or two adjacent rows, at least one two."""
    counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=15))
    numbers = draw(st.permutations(range(len(counts) + 1)))
    position = draw(st.integers(0, len(counts)))
    return np.repeat(numbers, [*counts[:position], 2, *counts[position:]])


CONTRASTING = {"mse": 0.0, "info_nce": 1.0}


@settings(deadline=None, max_examples=30)
@given(pairs_of_rows(), st.integers(2, 9))
def test_contrastive_pairs_stay_in_one_batch(pair, size):
    n = len(pair)
    spy = fit_with_spy(make_numbered_pairs(n, pair=pair), batch_size=size, **CONTRASTING)
    for rows in split_by_epoch(spy):
        assert sorted(flatten(rows)) == list(range(n))
        assert max(len(batch) for batch in rows) <= size
        assert_pairs_are_whole(rows, pair)


def assert_pairs_are_whole(rows, pair):
    """Check that both rows of a pair are adjacent in one batch, in their original order."""
    for batch in rows:
        for row in batch:
            pair_rows = np.flatnonzero(pair == pair[row])
            assert batch[batch.index(pair_rows[0]) :][: len(pair_rows)] == pair_rows.tolist()


def test_contrastive_pairs_stay_together_with_batch_size_one():
    pair = np.repeat(np.arange(6), 2)
    spy = fit_with_spy(make_numbered_pairs(12, pair=pair), batch_size=1, **CONTRASTING)
    for rows in split_by_epoch(spy):
        assert_pairs_are_whole(rows, pair)


def test_contrastive_pairs_from_disk_stay_together_within_runs(tmp_path, short_runs, monkeypatch):
    monkeypatch.setattr("llmcond.heads.fitted._BLOCK", 4)
    pair = np.repeat(np.arange(25), 2)
    spy = fit_with_spy(
        move_to_disk(make_numbered_pairs(50, pair=pair), tmp_path), batch_size=6, **CONTRASTING
    )
    for rows in split_by_epoch(spy):
        assert sorted(flatten(rows)) == list(range(50))
        assert_pairs_are_whole(rows, pair)


def test_contrastive_pairs_from_disk_stay_together_across_runs(tmp_path, short_runs):
    pair = np.repeat(np.arange(25), 2)
    spy = fit_with_spy(
        move_to_disk(make_numbered_pairs(50, pair=pair), tmp_path), batch_size=6, **CONTRASTING
    )
    for rows in split_by_epoch(spy):
        assert_pairs_are_whole(rows, pair)


def test_last_run_on_disk_may_be_left_without_rows(tmp_path, short_runs):
    """Its only row moves to the run before, where its pair begins, and it may be shuffled alone."""
    pair = np.array([0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 9])
    for seed in range(3):
        spy = fit_with_spy(
            move_to_disk(make_numbered_pairs(16, pair=pair), tmp_path), seed=seed, **CONTRASTING
        )
        for rows in split_by_epoch(spy):
            assert sorted(flatten(rows)) == list(range(16))
            assert_pairs_are_whole(rows, pair)


def test_objective_receives_contrastive_pairs_of_batch():
    pair = np.array([3, 3, 1, 0, 0, 2, 2, 5, 4, 4, 3, 3])  # the first pair occurs again
    contrastive = []

    def spy(first, second, rating, batch):
        contrastive.append(batch.contrastive)
        return (first - second).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", make_objective(spy))
        head_spy = fit_with_spy(make_numbered_pairs(12, pair=pair), batch_size=4, **CONTRASTING)
    for rows, index_pairs in zip(head_spy.rows(), contrastive, strict=True):
        row_pairs = {tuple(rows[index] for index in indices) for indices in index_pairs.tolist()}
        expected = [(0, 1), (3, 4), (5, 6), (8, 9), (10, 11)]
        assert row_pairs == {row_pair for row_pair in expected if row_pair[0] in rows}


def test_contrastive_pairs_stay_together_despite_batches_setting():
    """Contrastive objectives override ``batches``; other objectives ignore the pairs."""
    table = np.eye(4, dtype=np.float32)
    pair = np.repeat(np.arange(20), 2)
    pairs = make_numbered_pairs(40, condition=table[np.arange(40) % 4], pair=pair)
    for rows in split_by_epoch(
        fit_with_spy(pairs, batches="conditions", batch_size=6, **CONTRASTING)
    ):
        assert_pairs_are_whole(rows, pair)
    epochs = split_by_epoch(fit_with_spy(pairs, batch_size=6))
    assert any(len(set(pair[batch])) > 3 for rows in epochs for batch in rows)


def test_dev_rows_are_scored_in_order_without_dropout(monkeypatch):
    monkeypatch.setattr("llmcond.heads.fitted._SCORED", 9)
    spy = fit_with_spy(make_numbered_pairs(20), make_numbered_pairs(30, seed=1), dropout=0.5)
    assert flatten(spy.rows(spy.scored)) == list(range(30)) * 3
    assert [len(batch) for batch in spy.rows(spy.scored)] == [9, 9, 9, 3] * 3


# -- weights and dropout -----------------------------------------------------------------------


def test_initial_weights_are_uniform_and_ignore_global_generator():
    initial_weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        initial_weights.append(fit_with_spy(make_numbered_pairs(40, dim=400), dim=50).weights[0])
    for name, fan_in in (("weight", 400), ("other", 50)):
        assert torch.equal(initial_weights[0][name], initial_weights[1][name])
        values = initial_weights[0][name].flatten() * fan_in**0.5
        assert values.abs().max() <= 1
        # A uniform distribution has the same share in each fifth.
        counts = torch.histc(values, 5, -1, 1) / len(values)
        assert torch.allclose(counts, torch.full((5,), 0.2), atol=0.1 if name == "other" else 0.02)
    other_seed = fit_with_spy(make_numbered_pairs(40, dim=400), dim=50, seed=1).weights[0]
    assert not torch.equal(other_seed["weight"], initial_weights[0]["weight"])


@pytest.mark.parametrize(
    ("kind", "changes", "fan_in"),
    [
        ("linear", {"dim": 4}, {"weight": DIM}),
        ("mlp", {"dim": 4, "hidden": 5, "depth": 3}, {"weight1": DIM, "weight2": 5, "weight3": 5}),
        ("hadamard", {}, {"transform": DIM_C, "transform_bias": DIM_C}),
        ("hadamard", {"bias": False}, {"transform": DIM_C}),
        (
            "concat",
            {"dim": 4, "transform": False},
            {"sentence": DIM + DIM_C, "condition": DIM + DIM_C, "bias": DIM + DIM_C},
        ),
        (
            "hypernet",
            {**HYPER, "transform": True, "bias": True},
            {
                "transform": DIM_C,
                "transform_bias": DIM_C,
                "factor1": DIM_C,
                "factor1_bias": DIM_C,
                "factor2": DIM_C,
                "factor2_bias": DIM_C,
            },
        ),
        ("hypernet-full", {"dim": 4}, {"matrix": DIM_C}),
        (
            "hypernet-ablation",
            {"rank": 2, "transform": False},
            {"up": DIM_C, "up_bias": DIM_C, "down": 2 * DIM, "down_bias": 2 * DIM},
        ),
    ],
)
def test_initial_weights_are_bounded_by_fan_in(kind, changes, fan_in):
    """The only step is so small that it does not move the weights."""
    one_step = {"epochs": 1, "batch_size": 120, "learning_rate": 1e-12}
    head = fit(kind, make_pairs(), **{**one_step, **changes})
    assert set(head.tensors) == set(fan_in)
    for name, value in head.tensors.items():
        assert np.abs(value).max() <= fan_in[name] ** -0.5 + 1e-6
        # With enough values one is close to the bound, so the weights are not too narrow.
        if value.size >= 24:
            assert np.abs(value).max() > 0.8 * fan_in[name] ** -0.5
    sizes = sum(value.size for value in head.tensors.values())
    assert head.fit.record["n_parameters"] == sizes


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_first_step_is_that_of_adam_with_decoupled_decay(decay):
    """The first step of Adam is as long as the learning rate in every direction."""
    values = {"epochs": 1, "batch_size": 120, "dropout": 0.0, "learning_rate": 0.01}
    head = fit("linear", make_pairs(), dim=4, **values, weight_decay=decay)
    start = torch.empty(4, DIM).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    start = start.numpy() / DIM**0.5
    step = head.tensors["weight"] - start * (1 - 0.01 * decay)
    np.testing.assert_allclose(np.abs(step), 0.01, rtol=1e-3)


def make_dropping_head(share, seed=0):
    """Create a head in training mode, which drops units."""
    module = Linear(make_recipe("linear", dim=4, dropout=share).settings, DIM)
    module.seed_dropout(seed)
    return module.train()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_dropout_drops_its_share_and_rescales(share):
    module = make_dropping_head(share)
    values = torch.full((400, 500), 3.0)
    dropped = module.dropout(values)
    mask = dropped != 0
    assert mask.float().mean().item() == pytest.approx(1 - share, abs=0.005)
    torch.testing.assert_close(dropped[mask], (values / (1 - share))[mask], rtol=1e-3, atol=0)
    assert dropped.mean().item() == pytest.approx(3, rel=0.02)
    # No row or column is dropped as a whole, and each call drops other units.
    for dim in (0, 1):
        shares = mask.float().mean(dim=dim)
        assert shares.std() < 4 * (share * (1 - share) / 400) ** 0.5
    assert not torch.equal(module.dropout(values) != 0, mask)


def test_dropout_scales_gradients_like_values():
    values = torch.ones(50, 40).requires_grad_()
    dropped = make_dropping_head(0.25).dropout(values)
    dropped.sum().backward()
    torch.testing.assert_close(values.grad, dropped.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_keeps_dtype(dtype):
    assert make_dropping_head(0.5).dropout(torch.ones(3, 2, dtype=dtype)).dtype == dtype


def test_nothing_is_dropped_at_inference_or_with_share_zero():
    values = torch.randn(20, 30)
    assert make_dropping_head(0.5).eval().dropout(values) is values
    assert make_dropping_head(0.0).dropout(values) is values
    assert make_dropping_head(0.5, seed=None).dropout(values) is not values


def test_dropout_of_nearly_all_units_is_allowed():
    fit("linear", make_pairs(), **{**SHORT, "dropout": 0.999_999}, dim=4)


MASKED = [
    ("hadamard", {}),
    ("concat", {"dim": 4, "activation": "none"}),
    ("concat", {"dim": 4, "activation": "none", "transform": False}),
    ("hypernet", HYPER),
    ("hypernet", {"dim": 4, "rank": 0, "transform": True}),
    ("hypernet-ablation", {"rank": 2}),
    ("hypernet-ablation", {"rank": 2, "transform": False}),
]


@pytest.mark.parametrize("masks", ["shared", "own"])
@pytest.mark.parametrize(("kind", "changes"), MASKED)
def test_masks_are_shared_by_condition_or_separate_per_row(kind, changes, masks):
    """Rows and conditions are equal, so outputs differ only by what was dropped."""
    head_settings = make_recipe(kind, **changes, masks=masks, dropout=0.5).settings
    module, _ = seeded(lambda: FAMILIES[kind](head_settings, DIM, 64), 0)
    module.seed_dropout(0)
    # Concatenation drops the sentence row by row in any case, so its sentences are zero.
    x = torch.zeros(8, DIM) if kind == "concat" else torch.ones(8, DIM)
    batch = Batch(x, torch.ones(2, 64), torch.arange(8) % 2)
    output = module.train()(*batch).detach()
    distinct = {tuple(np.round(row, 4)) for row in output.tolist()}
    assert len(distinct) == (2 if masks == "shared" else 8)
    if masks == "shared":
        torch.testing.assert_close(output[:2].repeat(4, 1), output)
    without_dropout = module.eval()(*batch)
    torch.testing.assert_close(without_dropout[:1].expand_as(without_dropout), without_dropout)


@pytest.mark.parametrize("masks", ["shared", "own"])
@pytest.mark.parametrize(("kind", "changes"), MASKED)
def test_sentences_of_row_share_condition_mask_if_set(kind, changes, masks):
    """The two sentences of each pair have the same features."""
    outputs = []

    class RecordingHead(FAMILIES[kind]):
        def forward(self, x, condition, which):
            outputs.append(super().forward(x * 0 if kind == "concat" else x, condition, which))
            return outputs[-1]

    pairs = make_pairs()
    pairs = replace(pairs, second=pairs.first)
    spy_recipe = replace(
        make_recipe(kind, **{**SHORT, **changes}, masks=masks), family=RecordingHead
    )
    fit_by_gradient(spy_recipe, pairs, None, 0, ignore_progress)
    for output in outputs:
        first, second = output.detach().reshape(2, len(output) // 2, -1)
        equal_rows = torch.isclose(first, second, rtol=1e-4, atol=1e-6).all(dim=1)
        assert equal_rows.all() if masks == "shared" else equal_rows.float().mean() < 0.7


# -- the selected epoch, and notes -------------------------------------------------------------


@pytest.mark.parametrize("name", ["low rank", "concat"])
def test_heads_with_conditions_stop_when_patience_ends(name):
    (kind, changes), pairs, dev = (
        VARIANTS[name],
        make_planted_pairs(300, 1),
        make_planted_pairs(100, 2),
    )
    settings = {"epochs": 200, "patience": 3, "batch_size": 50, "learning_rate": 0.05}
    head = fit(kind, pairs, dev, **{**changes, **settings})
    scores = [epoch["dev_spearman"] for epoch in head.fit.record["curve"]]
    best = head.fit.record["best_epoch"]
    assert len(scores) == best + 3 < 200
    assert best == 1 + int(np.argmax(scores))
    assert dev_score(head, dev) == pytest.approx(max(scores), abs=1e-4)


def test_training_set_smaller_than_batch_is_noted():
    (note,) = fit("hypernet-mse", make_pairs(), **{**SHORT, **HYPER, "batch_size": 121}).fit.notes
    assert "the 120 training rows are fewer than batch_size 121" in note
    assert "lower batch_size" in note
    assert (
        fit("hypernet-mse", make_pairs(), **{**SHORT, **HYPER, "batch_size": 120}).fit.notes == ()
    )


@pytest.mark.parametrize("ratings", ["equal", "none"])
def test_uninformative_dev_set_selects_no_epoch(ratings):
    dev = make_pairs(40, seed=1)
    dev = replace(dev, rating=np.full(40, 0.5)) if ratings == "equal" else dev.take(np.arange(0))
    head = fit("hypernet-mse", make_pairs(), dev, **{**SHORT, **HYPER})
    assert head.fit.record["selected_on"] is None
    assert head.fit.record["best_epoch"] == 3
    assert "dev score is undefined" in head.fit.notes[0]


def test_epoch_loss_is_mean_over_rows():
    """The last batch, of four rows, counts less than the others."""
    pairs = make_pairs(100)
    losses = []

    def sum_ratings(first, second, rating, batch):
        losses.append((len(rating), float(rating.sum())))
        return first.sum() * 0 + rating.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", make_objective(sum_ratings))
        head = fit("linear", pairs, dim=4, epochs=1, batch_size=32)
    assert [rows for rows, _ in losses] == [32, 32, 32, 4]
    expected = sum(rows * loss for rows, loss in losses) / 100
    assert head.fit.record["curve"][0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "native", "large", "expected"),
    [
        ("auto", True, True, "bfloat16"),
        ("auto", False, True, "float32"),
        ("auto", True, False, "float32"),
        ("float32", True, True, "float32"),
        ("bfloat16", False, False, "bfloat16"),
    ],
)
def test_large_heads_use_bfloat16_if_cpu_supports_it(
    monkeypatch, precision, native, large, expected
):
    monkeypatch.setattr("llmcond.heads.fit.native_bfloat16", lambda: native)
    monkeypatch.setattr("llmcond.heads.fit._MIN_BFLOAT16_PARAMETERS", 32 if large else 33)
    head = fit("linear", make_pairs(), **SHORT, dim=4, precision=precision)
    assert head.fit.record["n_parameters"] == 32
    assert head.fit.record["precision"] == expected
    assert head.tensors["weight"].dtype == np.float32


@pytest.mark.parametrize("kind", ["linear", "hypernet"])
def test_heads_fitted_in_bfloat16_score_as_well(kind):
    train, dev = make_planted_pairs(900, 1), make_planted_pairs(300, 2)
    changes = {key: value for key, value in LEARNING.items() if kind == "hypernet" or key != "rank"}
    scores = [
        dev_score(fit(kind, train, dev, **changes, precision=precision), dev)
        for precision in ("float32", "bfloat16")
    ]
    assert scores[0] > 0.5
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


# -- refusals ----------------------------------------------------------------------------------


def test_equal_vectors_are_rejected():
    pairs = PairArrays(np.ones((9, DIM)), np.ones((9, DIM)), np.linspace(0, 1, 9), np.eye(9))
    for kind, changes in (("hypernet-mse", HYPER), ("linear", {"dim": 4})):
        with pytest.raises(UserError, match="all 18 training vectors are equal"):
            fit(kind, pairs, **{**SHORT, **changes})


@pytest.mark.parametrize("side", ["first", "second"])
def test_one_different_vector_is_enough(monkeypatch, side):
    monkeypatch.setattr("llmcond.heads.fit._BLOCK", 4)
    pairs = PairArrays(np.ones((9, DIM)), np.ones((9, DIM)), np.linspace(0, 1, 9))
    getattr(pairs, side)[8, 3] = 2
    fit("linear", pairs, **SHORT, dim=4)


@pytest.mark.parametrize("weights", [{"info_nce": 1.0}, {"quadruplet": 1.0}, CONTRAST])
def test_contrastive_objectives_without_pairs_are_rejected(weights):
    changes = {**SHORT, **HYPER, **weights}
    with pytest.raises(
        UserError, match=r"no pairs were given\. Pass the sentence pair of each row"
    ):
        fit("hypernet-mse", replace(make_pairs(), pair=None), **changes)
    with pytest.raises(
        UserError, match=r"no sentence pair has two rated rows\. Use mse.*--set info_nce=0"
    ):
        fit("hypernet-mse", replace(make_pairs(), pair=np.arange(120)), **changes)


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_rows_of_contrastive_pair_need_not_be_adjacent(tmp_path, short_runs, storage):
    pairs, changes = make_pairs(), {**SHORT, **HYPER, **CONTRAST}
    separated = pairs.take(np.concatenate([np.arange(0, 120, 2), np.arange(1, 120, 2)]))
    if storage == "disk":
        folders = tmp_path / "adjacent", tmp_path / "separated"
        for folder in folders:
            folder.mkdir()
        pairs, separated = map(move_to_disk, (pairs, separated), folders)
    expected, actual = (
        fit("hypernet-mse", pairs, **changes),
        fit("hypernet-mse", separated, **changes),
    )
    assert tensors(actual) == tensors(expected)
    assert actual.fit.record["n_contrastive_pairs"] == 60


def test_other_objectives_ignore_pairs():
    changes = {**SHORT, **HYPER, "mse": 0.0, "ranking": 1.0}
    expected = fit("hypernet-mse", replace(make_pairs(), pair=None), **changes)
    actual = fit("hypernet-mse", replace(make_pairs(), pair=np.zeros(120, dtype=int)), **changes)
    assert tensors(actual) == tensors(expected)
    assert "n_contrastive_pairs" not in actual.fit.record


def test_contrastive_pairs_and_ties_are_counted():
    pairs = make_pairs()
    pair = np.concatenate([np.arange(100) // 2, np.arange(100, 120)])
    record = fit(
        "hypernet-mse", replace(pairs, pair=pair), **{**SHORT, **HYPER, **CONTRAST}
    ).fit.record
    tied = pairs.rating[:100:2] == pairs.rating[1:100:2]
    assert (record["n_contrastive_pairs"], record["n_tied_pairs"]) == (50, tied.sum())
    assert 0 < tied.sum() < 50


def test_diverging_loss_with_conditions_raises_error():
    pairs = make_pairs()
    broken = replace(pairs, condition=np.where(pairs.condition > 1, np.inf, pairs.condition))
    message = r"loss became nan in epoch 1.*learning_rate, to about 0\.0001"
    with pytest.raises(UserError, match=message):
        fit("hypernet-mse", broken, **SHORT, **HYPER)


# -- learning ----------------------------------------------------------------------------------


def make_planted_pairs(n, seed):
    """Make pairs of rows under two of three conditions, each of which selects three features."""
    rng = np.random.default_rng(seed)
    first, second = np.repeat(rng.normal(size=(2, -(-n // 2), 9)), 2, axis=1)[:, :n]
    # The two rows of a pair have different conditions.
    which = np.repeat(rng.integers(3, size=-(-n // 2)), 2)[:n]
    which[1::2] = (which[1::2] + rng.integers(1, 3, size=n // 2)) % 3
    counts = np.arange(9) // 3 == which[:, None]
    # All features count a little, so that a head without conditions learns something, too.
    weighted_first, weighted_second = first * (counts + 0.3), second * (counts + 0.3)
    norms = np.linalg.norm(weighted_first, axis=1) * np.linalg.norm(weighted_second, axis=1)
    rating = (1 + (weighted_first * weighted_second).sum(axis=1) / norms) / 2
    condition = SharedRows(np.eye(3, 5, dtype=np.float32), which)
    features = first.astype(np.float32), second.astype(np.float32)
    return PairArrays(*features, rating, condition, np.arange(n) // 2)


def compute_similarity(head, pairs):
    condition = pairs.condition if head.dim_condition else None
    return head.similarity(pairs.first, pairs.second, condition)


def dev_score(head, dev):
    return spearmanr(compute_similarity(head, dev), dev.rating).statistic


def pair_order_accuracy(head, pairs):
    """Return the share of contrastive pairs whose similarities have the order of their ratings."""
    scores = compute_similarity(head, pairs)
    return float(
        ((scores[::2] - scores[1::2]) * (pairs.rating[::2] - pairs.rating[1::2]) > 0).mean()
    )


@pytest.fixture(scope="module")
def train_and_dev():
    return make_planted_pairs(1_600, 1), make_planted_pairs(600, 2)


LEARNING = {
    "dim": 9,
    "rank": 4,
    "epochs": 12,
    "patience": 12,
    "batch_size": 100,
    "dropout": 0.0,
    "learning_rate": 0.01,
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "weights",
    [
        {"info_nce": 1.0},
        {"info_nce": 1.0, "ties": "gap", "temperature": 0.1},
        {"info_nce": 1.0, "info_nce_form": "v1"},
        {"info_nce": 1.0, "info_nce_form": "self-negatives", "temperature": 0.1},
        {"quadruplet": 1.0},
        {"info_nce": 1.0, "temperature": 0.1, "precision": "bfloat16"},
    ],
)
def test_contrastive_objectives_learn_order_within_pairs(train_and_dev, weights):
    head = fit("hypernet-mse", *train_and_dev, **LEARNING, **{"mse": 0.0, **weights})
    # Form v1 lacks the positive in the denominator, so it does not optimise the order itself.
    assert pair_order_accuracy(head, train_and_dev[1]) > (0.6 if "v1" in weights.values() else 0.75)
    losses = [epoch["loss"] for epoch in head.fit.record["curve"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("weights", [{"mse": 1.0}, {"cosent": 1.0}, {"ranking": 1.0}])
def test_other_objectives_learn_order_of_all_rows(train_and_dev, weights):
    head = fit("hypernet-mse", *train_and_dev, **LEARNING, **{"mse": 0.0, **weights})
    assert dev_score(head, train_and_dev[1]) > 0.7  # 0.59 without conditions
    assert pair_order_accuracy(head, train_and_dev[1]) > 0.7


def test_contrasts_of_inverted_ratings_learn_inverted_order(train_and_dev):
    pairs = replace(train_and_dev[0], rating=1 - train_and_dev[0].rating)
    head = fit("hypernet-mse", pairs, **LEARNING, mse=0.0, info_nce=1.0)
    assert pair_order_accuracy(head, train_and_dev[1]) < 0.4


def test_progress_is_reported_after_every_step():
    reported = []
    linear_recipe = make_recipe("linear", dim=4, **SHORT)  # 120 rows are four steps
    fit_recipe(
        linear_recipe, make_pairs(), make_pairs(40, seed=1), 0, lambda *args: reported.append(args)
    )
    assert [epochs for epochs, _, _ in reported] == [step / 4 for step in range(1, 13)]
    assert {n_epochs for _, n_epochs, _ in reported} == {3}
    scored = [epochs for epochs, _, score in reported if score is not None]
    assert scored == [1, 2, 3]
