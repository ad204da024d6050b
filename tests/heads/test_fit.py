"""Fitting by gradient: batches, dropout, repeatability, and what is learned."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.heads import fit, quiet, recipe, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from llmcond.arrays import as_matrix
from llmcond.errors import UserError
from llmcond.heads import ConcatenatedMatrix, Difference, PairArrays, SharedRows, fit_recipe
from llmcond.heads.conditioned import multiply_by_condition
from llmcond.heads.dense import Linear
from llmcond.heads.fit import fit_by_gradient
from llmcond.heads.module import Batch, HeadModule, seeded
from llmcond.heads.recipes import find_family

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C = 8, 6


def paired(n=120, u=7, seed=0, dtype=np.float32):
    """Rows in contrastive pairs, of values that 16 bits hold."""
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
def test_the_same_seed_gives_the_same_bits(name):
    kind, changes = VARIANTS[name]
    train_pairs, dev = paired(), paired(40, seed=1)
    first, again, other = (
        fit(kind, train_pairs, dev, seed, **{**SHORT, **changes}) for seed in (3, 3, 4)
    )
    assert tensors(first) == tensors(again)
    assert first.fit.record == again.fit.record
    assert tensors(first) != tensors(other)


@pytest.mark.parametrize("name", ["low rank, own masks", "concat, by condition"])
def test_fit_neither_reads_nor_moves_the_global_generators(name):
    kind, changes = VARIANTS[name]
    heads, states = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
        heads.append(fit(kind, paired(), **{**SHORT, **changes}))
        states.append(
            torch.equal(before[0], torch.get_rng_state())
            and np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
        )
    assert states == [True, True]
    assert tensors(heads[0]) == tensors(heads[1])


def bits_of_gradients(name):
    """The gradients of a batch whose conditions have many rows each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4_096, 256, generator=generator)
    which = torch.randint(3, (4_096,), generator=generator)
    batch = Batch(x, torch.randn(3, 32, generator=generator), which)
    if name == "by condition":
        # Most rows have the condition in the middle, which is cut into many pieces.
        which = torch.where(torch.arange(4_096) % 5 > 0, 20, torch.arange(4_096) % 41)
        weights = {"factor": torch.randn(41, 256, 64, generator=generator).requires_grad_()}
        output = multiply_by_condition(x, which, [weights["factor"]])
    else:
        changes = {"concat": {"dim": 256}, "hypernet-ablation": {"rank": 2}}.get(name, {})
        module, _ = seeded(lambda: FAMILIES[name](recipe(name, **changes).settings, 256, 32), 0)
        weights = dict(module.named_parameters())
        output = module.eval()(*batch)
    output.square().sum().backward()
    return b"".join(weight.grad.numpy().tobytes() for weight in weights.values())


# Not strict: it depends on which thread comes first.
@pytest.mark.parametrize("name", ["hadamard", "concat", "hypernet-ablation", "by condition"])
def test_gradients_have_the_same_bits_on_several_threads(two_threads, name):
    first = bits_of_gradients(name)
    assert all(bits_of_gradients(name) == first for _ in range(7))


# -- the same values in another form -----------------------------------------------------------


def other_forms(dense):
    """The same vectors, held otherwise."""
    n = len(dense)
    place = np.random.default_rng(5).permutation(n)
    table = np.empty_like(dense)
    table[place] = dense
    half = (dense / 2).astype(np.float16)
    return {
        "float16": dense.astype(np.float16),
        "float64": dense.astype(np.float64),
        "columns": np.asfortranarray(dense),
        "read-only": np.broadcast_to(dense, dense.shape),
        "gathered": SharedRows(table.astype(np.float16), place),
        "difference": Difference(half, -half),
        "concatenated": ConcatenatedMatrix([dense[:, :3], dense[:, 3:].astype(np.float16)]),
    }


FORMS = list(other_forms(np.zeros((2, 4), dtype=np.float32)))


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["linear", "low rank", "low rank, contrasts", "mlp, bfloat16"])
def test_features_in_any_form_give_the_same_head(monkeypatch, name, form):
    (kind, changes), pairs, dev = VARIANTS[name], paired(), paired(40, seed=1)
    changes = {**SHORT, **changes}
    expected = fit(kind, pairs, dev, **changes)
    held, dev_held = (
        replace(one, first=other_forms(one.first)[form], second=as_matrix(one.second).read())
        for one in (pairs, dev)
    )
    for bytes_made_dense in (2**29, 0):
        monkeypatch.setattr("llmcond.heads.batches._DENSE_BYTES", bytes_made_dense)
        found = fit(kind, held, dev_held, **changes)
        assert tensors(found) == tensors(expected)
        assert found.fit.record == expected.fit.record


@pytest.mark.parametrize("bytes_made_dense", [2**29, 0])
def test_differences_that_16_bits_do_not_hold_are_not_rounded(monkeypatch, bytes_made_dense):
    pairs, other = paired(dtype=np.float16), paired(seed=1, dtype=np.float16)
    made = {
        side: Difference(getattr(pairs, side), getattr(other, side)) for side in ("first", "second")
    }
    dense = {side: as_matrix(matrix).read() for side, matrix in made.items()}
    assert (dense["first"] != dense["first"].astype(np.float16)).any()
    monkeypatch.setattr("llmcond.heads.batches._DENSE_BYTES", bytes_made_dense)
    heads = [fit("linear", replace(pairs, **sides), **SHORT, dim=4) for sides in (made, dense)]
    assert tensors(heads[0]) == tensors(heads[1])


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["low rank, any rows", "concat", "hadamard"])
def test_conditions_in_any_form_give_the_same_head_but_for_rounding(name, form):
    (kind, changes), pairs, dev = VARIANTS[name], paired(), paired(40, seed=1)
    changes = {**SHORT, **changes, "dropout": 0.0}
    expected = fit(kind, pairs, dev, **changes)
    held = replace(pairs, condition=other_forms(pairs.condition)[form])
    found = fit(kind, held, dev, **changes)
    for key, value in expected.tensors.items():
        np.testing.assert_allclose(found.tensors[key], value, rtol=1e-3, atol=1e-4)


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
def test_conditions_in_any_form_give_the_same_head(name, form):
    """Which mask a condition has, and when it comes, hangs on the number that it is given."""
    (kind, changes), pairs = VARIANTS[name], paired()
    expected = fit(kind, pairs, **{**SHORT, **changes})
    if form == "taken":
        held = pairs.take(np.arange(len(pairs)))
    elif form == "gathered":
        _, first, number = np.unique(
            pairs.condition, axis=0, return_index=True, return_inverse=True
        )
        held = replace(
            pairs, condition=SharedRows(pairs.condition[first][::-1], 6 - number.ravel())
        )
    else:
        held = replace(pairs, condition=other_forms(pairs.condition)[form])
    assert tensors(fit(kind, held, **{**SHORT, **changes})) == tensors(expected)


# -- batches -----------------------------------------------------------------------------------


class Spy:
    """A linear head that remembers what it is applied to; features begin with their row."""

    def __init__(self):
        self.batches, self.scored, self.weights, self.ends = [], [], [], []

    @property
    def family(self):
        spy = self

        class Seen(HeadModule):
            multiplies_in_bfloat16 = True

            def __init__(self, settings, dim_in, dim_condition):
                super().__init__(settings, dim_in, dim_condition)
                self.add_weight("weight", (settings.dim, dim_in), dim_in)
                self.add_weight("other", (3, 50), 50)

            def forward(self, *batch):
                if not spy.weights:
                    spy.weights.append(
                        {name: one.clone() for name, one in self.state_dict().items()}
                    )
                (spy.batches if self.training else spy.scored).append(Batch(*batch))
                return batch[0] @ self.weight.to(batch[0].dtype).T

        return Seen

    def rows(self, batches=None):
        """The rows of each batch, as both sides name them."""
        named = []
        for batch in self.batches if batches is None else batches:
            first, second = batch.x[:, 0].reshape(2, -1)
            assert torch.equal(first, second)
            named.append(first.long().tolist())
        return named


def named(n, dim=3, condition=None, pair=None, seed=0):
    """Pairs whose features begin with the number of their row."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, dim)).astype(np.float32)
    first[:, 0] = second[:, 0] = np.arange(n)
    return PairArrays(first, second, rng.uniform(size=n), condition, pair)


def spied(pairs, dev=None, kind="linear", seed=0, **changes):
    """What a fit gave to its network."""
    spy = Spy()
    changed = recipe(kind, **{**SHORT, "dim": 2, "learning_rate": 1e-6, **changes})
    chosen = replace(changed, family=spy.family)

    def on_epoch(epoch, epochs, score):
        if score is not None:
            spy.ends.append(len(spy.batches))

    spy.head, spy.fit = fit_by_gradient(chosen, pairs, dev, seed, on_epoch)
    return spy


def objective(function):
    """An objective that is a function of embeddings, ratings and what else is told of a batch."""

    class Told(torch.nn.Module):
        def __init__(self, settings):
            super().__init__()

        def forward(self, first, second, rating, batch):
            return function(first, second, rating, batch)

    return Told


def epochs_of(spy):
    """The batches' rows, epoch by epoch."""
    rows = spy.rows()
    return [rows[begin:end] for begin, end in pairwise([0, *spy.ends])]


def flat(batches):
    """All rows, in the order of the batches."""
    return [row for batch in batches for row in batch]


def on_disk(pairs, folder):
    """The same features, read from files."""
    held = {}
    for name in ("first", "second"):
        np.save(folder / f"{name}.npy", getattr(pairs, name))
        held[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return replace(pairs, **held)


@pytest.fixture
def short_runs(monkeypatch):
    """Files are read five neighbouring rows at a time, and fifteen rows are shuffled."""
    monkeypatch.setattr("llmcond.heads.batches._BLOCK", 5)
    monkeypatch.setattr("llmcond.heads.batches._BLOCKS", 3)
    monkeypatch.setattr("llmcond.heads.batches._SCORED", 9)


@pytest.mark.parametrize(("n", "size"), [(50, 8), (50, 50), (50, 64), (48, 8), (2, 1)])
def test_an_epoch_has_every_row_once_in_full_batches(n, size):
    spy = spied(named(n), batch_size=size)
    assert spy.fit.record["steps_per_epoch"] == -(-n // size)
    for rows in epochs_of(spy):
        assert [len(batch) for batch in rows[:-1]] == [size] * (len(rows) - 1)
        assert sorted(flat(rows)) == list(range(n))
    first, second, third = epochs_of(spied(named(50), batch_size=8))
    assert first != second != third


@pytest.mark.parametrize("side", ["both", "first", "second"])
@pytest.mark.parametrize(("n", "size"), [(53, 8), (53, 64), (50, 8), (7, 2)])
def test_an_epoch_from_disk_has_every_row_once(tmp_path, short_runs, n, size, side):
    pairs = named(n)
    held = on_disk(pairs, tmp_path)
    if side != "both":
        held = replace(pairs, **{side: getattr(held, side)})
    spy = spied(held, held, batch_size=size)
    for rows in epochs_of(spy):
        assert sorted(flat(rows)) == list(range(n))
        assert max(len(batch) for batch in rows) <= size
    scored = flat(spy.rows(spy.scored))
    assert scored == list(range(n)) * 3


def test_rows_from_disk_are_shuffled_by_runs(tmp_path, short_runs):
    spy = spied(on_disk(named(60), tmp_path), batch_size=15)
    epochs = epochs_of(spy)
    for rows in epochs:
        # Three runs of five neighbours, in any order, and not always neighbouring runs.
        assert [len({row // 5 for row in batch}) for batch in rows] == [3] * 4
        assert all(batch != sorted(batch) for batch in rows)
    together = [frozenset(row // 5 for row in batch) for rows in epochs for batch in rows]
    assert len(set(together)) > 4


@pytest.mark.parametrize("made", ["gathered", "difference", "concatenated", "taken"])
def test_what_is_made_of_files_is_read_in_its_own_rows(tmp_path, short_runs, made):
    pairs = named(40)
    held = on_disk(pairs, tmp_path)
    order = np.random.default_rng(0).permutation(40)
    zeros = np.zeros_like(pairs.first)
    made_of = {
        "gathered": lambda side: SharedRows(side, order),
        "difference": lambda side: Difference(side, zeros),
        "concatenated": lambda side: ConcatenatedMatrix([side[:, :1], side[:, 1:]]),
        "taken": lambda side: side,
    }[made]
    held = replace(held, first=made_of(held.first), second=made_of(held.second))
    if made == "taken":
        held = held.take(order)
    expected = pairs.take(order) if made in ("gathered", "taken") else pairs
    spy = spied(held, batch_size=8, epochs=1)
    seen = torch.cat([batch.x[: len(batch.x) // 2] for batch in spy.batches])
    dense = torch.tensor(as_matrix(expected.first).read())
    assert torch.equal(seen[seen[:, 0].argsort()], dense[dense[:, 0].argsort()])


def relevant(n, seed):
    """Pairs whose rating is the cosine in three of nine directions."""
    first, second = np.random.default_rng(seed).normal(size=(2, n, 9)).astype(np.float32)
    norms = np.linalg.norm(first[:, :3], axis=1) * np.linalg.norm(second[:, :3], axis=1)
    cosine = (first[:, :3] * second[:, :3]).sum(axis=1) / norms
    return PairArrays(first, second, (1 + cosine.astype(float)) / 2)


@pytest.mark.parametrize("form", ["float32", "float16"])
def test_a_head_fitted_from_disk_is_as_good(tmp_path, short_runs, form):
    known, dev = relevant(900, 1), relevant(300, 2)
    if form == "float16":
        known = replace(known, first=known.first.astype(form), second=known.second.astype(form))
    changes = {"dim": 3, "epochs": 15, "batch_size": 60, "dropout": 0.0, "learning_rate": 0.05}
    scores = [
        dev_score(fit("linear", one, dev, **changes), dev)
        for one in (known, on_disk(known, tmp_path))
    ]
    assert min(scores) > 0.95
    assert scores[1] == pytest.approx(scores[0], abs=0.02)


@pytest.mark.parametrize("form", ["memory", "disk"])
def test_rows_keep_their_ratings_and_conditions(tmp_path, short_runs, form):
    """Of each row that is seen, all the rest is that row's as well."""
    n, seen = 37, []
    table = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    which = np.random.default_rng(1).integers(5, size=n)
    pairs = named(n, condition=SharedRows(table, which))
    pairs = replace(pairs, rating=np.arange(n) / n)
    pairs = on_disk(pairs, tmp_path) if form == "disk" else pairs

    def spy(first, second, rating, batch):
        seen.append(rating.numpy() * n)
        return (first - second).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", objective(spy))
        found = spied(pairs, batch_size=10, batches="conditions")
    assert len(seen) == len(found.batches)
    for batch, rows, rating in zip(found.batches, found.rows(), seen, strict=True):
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
    spy = spied(named(60, condition=condition), batches="conditions", batch_size=size)
    orders = []
    for rows in epochs_of(spy):
        assert [len(batch) for batch in rows[:-1]] == [size] * (len(rows) - 1)
        order = which[flat(rows)]
        assert sorted(flat(rows)) == list(range(60))
        changes = np.flatnonzero(np.diff(order)) + 1
        assert len(changes) == 8
        orders.append(tuple(order[[0, *changes]].tolist()))
    assert len(set(orders)) == 3


@st.composite
def pairs_of_rows(draw):
    """Which sentence pair each row has: one row or two adjacent ones, at least two somewhere."""
    counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=15))
    numbers = draw(st.permutations(range(len(counts) + 1)))
    place = draw(st.integers(0, len(counts)))
    return np.repeat(numbers, [*counts[:place], 2, *counts[place:]])


CONTRASTING = {"mse": 0.0, "info_nce": 1.0}


@settings(deadline=None, max_examples=30)
@given(pairs_of_rows(), st.integers(2, 9))
def test_contrastive_pairs_are_never_parted(pair, size):
    n = len(pair)
    spy = spied(named(n, pair=pair), batch_size=size, **CONTRASTING)
    for rows in epochs_of(spy):
        assert sorted(flat(rows)) == list(range(n))
        assert max(len(batch) for batch in rows) <= size
        assert_contrastive_pairs_are_whole(rows, pair)


def assert_contrastive_pairs_are_whole(rows, pair):
    """Both rows of a pair are in one batch, one behind the other as they were given."""
    for batch in rows:
        for row in batch:
            mates = np.flatnonzero(pair == pair[row])
            assert batch[batch.index(mates[0]) :][: len(mates)] == mates.tolist()


def test_contrastive_pairs_are_not_parted_by_batches_of_one_row():
    pair = np.repeat(np.arange(6), 2)
    spy = spied(named(12, pair=pair), batch_size=1, **CONTRASTING)
    for rows in epochs_of(spy):
        assert_contrastive_pairs_are_whole(rows, pair)


def test_contrastive_pairs_from_disk_are_kept_together_where_runs_hold_them_whole(
    tmp_path, short_runs, monkeypatch
):
    monkeypatch.setattr("llmcond.heads.batches._BLOCK", 4)
    pair = np.repeat(np.arange(25), 2)
    spy = spied(on_disk(named(50, pair=pair), tmp_path), batch_size=6, **CONTRASTING)
    for rows in epochs_of(spy):
        assert sorted(flat(rows)) == list(range(50))
        assert_contrastive_pairs_are_whole(rows, pair)


def test_contrastive_pairs_from_disk_are_kept_together_across_runs(tmp_path, short_runs):
    pair = np.repeat(np.arange(25), 2)
    spy = spied(on_disk(named(50, pair=pair), tmp_path), batch_size=6, **CONTRASTING)
    for rows in epochs_of(spy):
        assert_contrastive_pairs_are_whole(rows, pair)


def test_the_last_run_on_disk_may_lose_its_only_row_to_the_one_before(tmp_path, short_runs):
    """Its row belongs to a two, and it may be drawn by itself."""
    pair = np.array([0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 9])
    for seed in range(3):
        spy = spied(on_disk(named(16, pair=pair), tmp_path), seed=seed, **CONTRASTING)
        for rows in epochs_of(spy):
            assert sorted(flat(rows)) == list(range(16))
            assert_contrastive_pairs_are_whole(rows, pair)


def test_the_contrastive_pairs_of_a_batch_are_told_to_the_objective():
    pair = np.array([3, 3, 1, 0, 0, 2, 2, 5, 4, 4, 3, 3])  # the first one occurs again
    seen = []

    def spy(first, second, rating, batch):
        seen.append(batch.contrastive)
        return (first - second).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", objective(spy))
        found = spied(named(12, pair=pair), batch_size=4, **CONTRASTING)
    for rows, contrastive_pairs in zip(found.rows(), seen, strict=True):
        named_twos = {tuple(rows[place] for place in two) for two in contrastive_pairs.tolist()}
        known = [(0, 1), (3, 4), (5, 6), (8, 9), (10, 11)]
        assert named_twos == {two for two in known if two[0] in rows}


def test_contrastive_pairs_are_kept_together_whatever_batches_says():
    """Objectives that contrast go before ``batches``; without them pairs are not looked at."""
    table = np.eye(4, dtype=np.float32)
    pair = np.repeat(np.arange(20), 2)
    pairs = named(40, condition=table[np.arange(40) % 4], pair=pair)
    for rows in epochs_of(spied(pairs, batches="conditions", batch_size=6, **CONTRASTING)):
        assert_contrastive_pairs_are_whole(rows, pair)
    parted = epochs_of(spied(pairs, batch_size=6))
    assert any(len(set(pair[batch])) > 3 for rows in parted for batch in rows)


def test_rows_are_scored_without_dropout_in_their_own_order(monkeypatch):
    monkeypatch.setattr("llmcond.heads.batches._SCORED", 9)
    spy = spied(named(20), named(30, seed=1), dropout=0.5)
    assert flat(spy.rows(spy.scored)) == list(range(30)) * 3
    assert [len(batch) for batch in spy.rows(spy.scored)] == [9, 9, 9, 3] * 3


# -- weights and dropout -----------------------------------------------------------------------


def test_weights_start_uniform_and_apart_from_the_global_generator():
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        starts.append(spied(named(40, dim=400), dim=50).weights[0])
    for name, fan_in in (("weight", 400), ("other", 50)):
        assert torch.equal(starts[0][name], starts[1][name])
        values = starts[0][name].flatten() * fan_in**0.5
        assert values.abs().max() <= 1
        # Uniform: as many in each fifth.
        counts = torch.histc(values, 5, -1, 1) / len(values)
        assert torch.allclose(counts, torch.full((5,), 0.2), atol=0.1 if name == "other" else 0.02)
    other = spied(named(40, dim=400), dim=50, seed=1).weights[0]
    assert not torch.equal(other["weight"], starts[0]["weight"])


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
def test_weights_start_within_what_their_inputs_say(kind, changes, fan_in):
    """After one step so small that it moves none of them."""
    tiny = {"epochs": 1, "batch_size": 120, "learning_rate": 1e-12}
    head = fit(kind, paired(), **{**tiny, **changes})
    assert set(head.tensors) == set(fan_in)
    for name, value in head.tensors.items():
        assert np.abs(value).max() <= fan_in[name] ** -0.5 + 1e-6
        # So that a bound that is too narrow shows, wherever there are enough values to tell.
        if value.size >= 24:
            assert np.abs(value).max() > 0.8 * fan_in[name] ** -0.5
    sizes = sum(value.size for value in head.tensors.values())
    assert head.fit.record["n_parameters"] == sizes


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_is_that_of_adam_with_decoupled_decay(decay):
    """The first step of Adam is as long as the learning rate in every direction."""
    values = {"epochs": 1, "batch_size": 120, "dropout": 0.0, "learning_rate": 0.01}
    head = fit("linear", paired(), dim=4, **values, weight_decay=decay)
    start = torch.empty(4, DIM).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    start = start.numpy() / DIM**0.5
    step = head.tensors["weight"] - start * (1 - 0.01 * decay)
    np.testing.assert_allclose(np.abs(step), 0.01, rtol=1e-3)


def dropping(share, seed=0):
    """A head that drops units, as while it is trained."""
    module = Linear(recipe("linear", dim=4, dropout=share).settings, DIM)
    module.seed_dropout(seed)
    return module.train()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_dropout_drops_its_share_and_makes_up_for_it(share):
    module = dropping(share)
    values = torch.full((400, 500), 3.0)
    dropped = module.dropout(values)
    kept = dropped != 0
    assert kept.float().mean().item() == pytest.approx(1 - share, abs=0.005)
    torch.testing.assert_close(dropped[kept], (values / (1 - share))[kept], rtol=1e-3, atol=0)
    assert dropped.mean().item() == pytest.approx(3, rel=0.02)
    # No row or column is dropped as a whole, and no two times are alike.
    for dim in (0, 1):
        shares = kept.float().mean(dim=dim)
        assert shares.std() < 4 * (share * (1 - share) / 400) ** 0.5
    assert not torch.equal(module.dropout(values) != 0, kept)


def test_dropped_units_have_no_gradient_and_others_have_more():
    values = torch.ones(50, 40).requires_grad_()
    dropped = dropping(0.25).dropout(values)
    dropped.sum().backward()
    torch.testing.assert_close(values.grad, dropped.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_keeps_the_type_of_values(dtype):
    assert dropping(0.5).dropout(torch.ones(3, 2, dtype=dtype)).dtype == dtype


def test_nothing_is_dropped_outside_of_training_or_where_the_share_is_none():
    values = torch.randn(20, 30)
    assert dropping(0.5).eval().dropout(values) is values
    assert dropping(0.0).dropout(values) is values
    assert dropping(0.5, seed=None).dropout(values) is not values


def test_dropout_of_nearly_all_is_no_error():
    fit("linear", paired(), **{**SHORT, "dropout": 0.999_999}, dim=4)


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
def test_masks_are_shared_by_the_rows_of_a_condition_or_each_row_has_its_own(kind, changes, masks):
    """Equal rows under equal conditions: what differs between them is what was dropped."""
    chosen = recipe(kind, **changes, masks=masks, dropout=0.5).settings
    module, _ = seeded(lambda: FAMILIES[kind](chosen, DIM, 64), 0)
    module.seed_dropout(0)
    # Of concatenations, the sentence is dropped row by row in any case.
    x = torch.zeros(8, DIM) if kind == "concat" else torch.ones(8, DIM)
    batch = Batch(x, torch.ones(2, 64), torch.arange(8) % 2)
    output = module.train()(*batch).detach()
    distinct = {tuple(np.round(row, 4)) for row in output.tolist()}
    assert len(distinct) == (2 if masks == "shared" else 8)
    if masks == "shared":
        torch.testing.assert_close(output[:2].repeat(4, 1), output)
    plain = module.eval()(*batch)
    torch.testing.assert_close(plain[:1].expand_as(plain), plain)


@pytest.mark.parametrize("masks", ["shared", "own"])
@pytest.mark.parametrize(("kind", "changes"), MASKED)
def test_the_two_sentences_of_a_row_see_the_condition_through_masks_as_set(kind, changes, masks):
    """In a fit, of pairs whose two sentences have the same features."""
    seen = []

    class Seen(FAMILIES[kind]):
        def forward(self, x, condition, which):
            seen.append(super().forward(x * 0 if kind == "concat" else x, condition, which))
            return seen[-1]

    pairs = paired()
    pairs = replace(pairs, second=pairs.first)
    chosen = replace(recipe(kind, **{**SHORT, **changes}, masks=masks), family=Seen)
    fit_by_gradient(chosen, pairs, None, 0, quiet)
    for output in seen:
        first, second = output.detach().reshape(2, len(output) // 2, -1)
        alike = torch.isclose(first, second, rtol=1e-4, atol=1e-6).all(dim=1)
        assert alike.all() if masks == "shared" else alike.float().mean() < 0.7


# -- which epoch is kept, and what is told -----------------------------------------------------


@pytest.mark.parametrize("name", ["low rank", "concat"])
def test_heads_with_conditions_stop_when_patience_ends(name):
    (kind, changes), pairs, dev = VARIANTS[name], planted(300, 1), planted(100, 2)
    settings = {"epochs": 200, "patience": 3, "batch_size": 50, "learning_rate": 0.05}
    head = fit(kind, pairs, dev, **{**changes, **settings})
    scores = [epoch["dev_spearman"] for epoch in head.fit.record["curve"]]
    best = head.fit.record["best_epoch"]
    assert len(scores) == best + 3 < 200
    assert best == 1 + int(np.argmax(scores))
    assert dev_score(head, dev) == pytest.approx(max(scores), abs=1e-4)


def test_a_set_smaller_than_a_batch_is_noted():
    (note,) = fit("hypernet-mse", paired(), **{**SHORT, **HYPER, "batch_size": 121}).fit.notes
    assert "the 120 training rows are fewer than batch_size 121" in note
    assert "lower batch_size" in note
    assert fit("hypernet-mse", paired(), **{**SHORT, **HYPER, "batch_size": 120}).fit.notes == ()


@pytest.mark.parametrize("ratings", ["equal", "none"])
def test_a_dev_set_that_says_nothing_chooses_no_epoch(ratings):
    dev = paired(40, seed=1)
    dev = replace(dev, rating=np.full(40, 0.5)) if ratings == "equal" else dev.take(np.arange(0))
    head = fit("hypernet-mse", paired(), dev, **{**SHORT, **HYPER})
    assert head.fit.record["selected_on"] is None
    assert head.fit.record["best_epoch"] == 3
    assert "dev score is undefined" in head.fit.notes[0]


def test_loss_of_an_epoch_is_the_mean_over_rows():
    """The last batch, of four rows, counts less than the others."""
    pairs = paired(100)
    losses = []

    def summed(first, second, rating, batch):
        losses.append((len(rating), float(rating.sum())))
        return first.sum() * 0 + rating.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmcond.heads.fit.Objective", objective(summed))
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
def test_large_heads_are_fitted_in_bfloat16_where_the_cpu_has_it(
    monkeypatch, precision, native, large, expected
):
    monkeypatch.setattr("llmcond.heads.fit.native_bfloat16", lambda: native)
    monkeypatch.setattr("llmcond.heads.fit._MIN_BFLOAT16_PARAMETERS", 32 if large else 33)
    head = fit("linear", paired(), **SHORT, dim=4, precision=precision)
    assert head.fit.record["n_parameters"] == 32
    assert head.fit.record["precision"] == expected
    assert head.tensors["weight"].dtype == np.float32


@pytest.mark.parametrize("kind", ["linear", "hypernet"])
def test_heads_fitted_in_bfloat16_are_as_good(kind):
    known, dev = planted(900, 1), planted(300, 2)
    changes = {key: value for key, value in LEARNING.items() if kind == "hypernet" or key != "rank"}
    scores = [
        dev_score(fit(kind, known, dev, **changes, precision=precision), dev)
        for precision in ("float32", "bfloat16")
    ]
    assert scores[0] > 0.5
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


# -- refusals ----------------------------------------------------------------------------------


def test_equal_vectors_are_refused():
    pairs = PairArrays(np.ones((9, DIM)), np.ones((9, DIM)), np.linspace(0, 1, 9), np.eye(9))
    for kind, changes in (("hypernet-mse", HYPER), ("linear", {"dim": 4})):
        with pytest.raises(UserError, match="all 18 training vectors are equal"):
            fit(kind, pairs, **{**SHORT, **changes})


@pytest.mark.parametrize("side", ["first", "second"])
def test_one_vector_that_differs_is_enough(monkeypatch, side):
    monkeypatch.setattr("llmcond.heads.fit._BLOCK", 4)
    pairs = PairArrays(np.ones((9, DIM)), np.ones((9, DIM)), np.linspace(0, 1, 9))
    getattr(pairs, side)[8, 3] = 2
    fit("linear", pairs, **SHORT, dim=4)


@pytest.mark.parametrize("weights", [{"info_nce": 1.0}, {"quadruplet": 1.0}, CONTRAST])
def test_contrasts_without_contrastive_pairs_are_refused(weights):
    changes = {**SHORT, **HYPER, **weights}
    with pytest.raises(
        UserError, match=r"no pairs were given\. Pass the sentence pair of each row"
    ):
        fit("hypernet-mse", replace(paired(), pair=None), **changes)
    with pytest.raises(
        UserError, match=r"no sentence pair has two rated rows\. Use mse.*--set info_nce=0"
    ):
        fit("hypernet-mse", replace(paired(), pair=np.arange(120)), **changes)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_rows_of_a_contrastive_pair_may_stand_anywhere(tmp_path, short_runs, place):
    pairs, changes = paired(), {**SHORT, **HYPER, **CONTRAST}
    apart = pairs.take(np.concatenate([np.arange(0, 120, 2), np.arange(1, 120, 2)]))
    if place == "disk":
        folders = tmp_path / "together", tmp_path / "apart"
        for folder in folders:
            folder.mkdir()
        pairs, apart = map(on_disk, (pairs, apart), folders)
    expected, found = fit("hypernet-mse", pairs, **changes), fit("hypernet-mse", apart, **changes)
    assert tensors(found) == tensors(expected)
    assert found.fit.record["n_contrastive_pairs"] == 60


def test_pairs_are_not_asked_for_by_other_objectives():
    changes = {**SHORT, **HYPER, "mse": 0.0, "ranking": 1.0}
    expected = fit("hypernet-mse", replace(paired(), pair=None), **changes)
    found = fit("hypernet-mse", replace(paired(), pair=np.zeros(120, dtype=int)), **changes)
    assert tensors(found) == tensors(expected)
    assert "n_contrastive_pairs" not in found.fit.record


def test_contrastive_pairs_and_ties_are_counted():
    pairs = paired()
    pair = np.concatenate([np.arange(100) // 2, np.arange(100, 120)])
    record = fit(
        "hypernet-mse", replace(pairs, pair=pair), **{**SHORT, **HYPER, **CONTRAST}
    ).fit.record
    tied = pairs.rating[:100:2] == pairs.rating[1:100:2]
    assert (record["n_contrastive_pairs"], record["n_tied_pairs"]) == (50, tied.sum())
    assert 0 < tied.sum() < 50


def test_diverging_loss_of_a_head_with_conditions_is_an_error():
    pairs = paired()
    broken = replace(pairs, condition=np.where(pairs.condition > 1, np.inf, pairs.condition))
    message = r"loss became nan in epoch 1.*learning_rate, to about 0\.0001"
    with pytest.raises(UserError, match=message):
        fit("hypernet-mse", broken, **SHORT, **HYPER)


# -- learning ----------------------------------------------------------------------------------


def planted(n, seed):
    """Twos, each under two of three conditions, which say which third of nine features counts."""
    rng = np.random.default_rng(seed)
    first, second = np.repeat(rng.normal(size=(2, -(-n // 2), 9)), 2, axis=1)[:, :n]
    # The second condition of a two is another one than the first.
    which = np.repeat(rng.integers(3, size=-(-n // 2)), 2)[:n]
    which[1::2] = (which[1::2] + rng.integers(1, 3, size=n // 2)) % 3
    counts = np.arange(9) // 3 == which[:, None]
    # A third of what counts is the same in all rows, so that a head without conditions is not lost.
    one, other = first * (counts + 0.3), second * (counts + 0.3)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    rating = (1 + (one * other).sum(axis=1) / norms) / 2
    condition = SharedRows(np.eye(3, 5, dtype=np.float32), which)
    features = first.astype(np.float32), second.astype(np.float32)
    return PairArrays(*features, rating, condition, np.arange(n) // 2)


def similarity(head, pairs):
    condition = pairs.condition if head.dim_condition else None
    return head.similarity(pairs.first, pairs.second, condition)


def dev_score(head, dev):
    return spearmanr(similarity(head, dev), dev.rating).statistic


def order_of_twos(head, pairs):
    """The share of contrastive_pairs whose similarities have the order of their ratings."""
    found = similarity(head, pairs)
    return float(((found[::2] - found[1::2]) * (pairs.rating[::2] - pairs.rating[1::2]) > 0).mean())


@pytest.fixture(scope="module")
def known():
    return planted(1_600, 1), planted(600, 2)


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
def test_contrasts_alone_learn_the_order_of_twos(known, weights):
    head = fit("hypernet-mse", *known, **LEARNING, **{"mse": 0.0, **weights})
    # Without the positive in the denominator, what is minimised is not the order itself.
    assert order_of_twos(head, known[1]) > (0.6 if "v1" in weights.values() else 0.75)
    losses = [epoch["loss"] for epoch in head.fit.record["curve"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("weights", [{"mse": 1.0}, {"cosent": 1.0}, {"ranking": 1.0}])
def test_other_objectives_learn_the_order_of_all_rows(known, weights):
    head = fit("hypernet-mse", *known, **LEARNING, **{"mse": 0.0, **weights})
    assert dev_score(head, known[1]) > 0.7  # 0.59 without conditions
    assert order_of_twos(head, known[1]) > 0.7


def test_contrasts_of_ratings_turned_around_learn_the_other_order(known):
    pairs = replace(known[0], rating=1 - known[0].rating)
    head = fit("hypernet-mse", pairs, **LEARNING, mse=0.0, info_nce=1.0)
    assert order_of_twos(head, known[1]) < 0.4


def test_progress_is_reported_after_every_step():
    reported = []
    own = recipe("linear", dim=4, **SHORT)  # 120 rows are four steps
    fit_recipe(own, paired(), paired(40, seed=1), 0, lambda *args: reported.append(args))
    assert [epochs for epochs, _, _ in reported] == [step / 4 for step in range(1, 13)]
    assert {n_epochs for _, n_epochs, _ in reported} == {3}
    scored = [epochs for epochs, _, score in reported if score is not None]
    assert scored == [1, 2, 3]
