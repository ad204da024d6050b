"""Heads compared with their equations: row by row, with explicit matrices, also in gradient."""

import copy
from dataclasses import asdict, replace
from functools import partial, reduce
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.heads import fit, make_recipe
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcond.base.errors import UserError
from llmcond.heads import PairArrays, SharedRows, load_head, save_head
from llmcond.heads.conditioned import ConditionGroups
from llmcond.heads.fitted import ConditionCache
from llmcond.heads.module import Batch
from llmcond.heads.recipes import find_family

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C = 6, 5


# -- the equations, row by row -----------------------------------------------------------------


def layer(weights, name, values):
    """Compute W v + b of one vector."""
    product = weights[name] @ values
    return product + weights[f"{name}_bias"] if f"{name}_bias" in weights else product


def generate_matrix(weights, name, values, height, width):
    """Return the matrix that a layer generates, row after row."""
    return layer(weights, name, values).view(height, width)


ACTIVATIONS = {
    "none": lambda value: value,
    "relu": lambda value: torch.where(value > 0, value, 0 * value),
    "gelu": lambda value: value * 0.5 * (1 + torch.erf(value / 2**0.5)),
    "tanh": lambda value: 2 * torch.sigmoid(2 * value) - 1,
}


def linear(weights, head_settings, h, c, drop):
    return drop(layer(weights, "weight", h))


def mlp(weights, head_settings, h, c, drop):
    for number in range(1, head_settings.depth + 1):
        h = layer(weights, f"weight{number}", h)
        if number < head_settings.depth or head_settings.last == "same":
            h = drop(ACTIVATIONS[head_settings.activation](h))
    return h


def transform_condition(weights, head_settings, c, drop):
    return layer(weights, "transform", drop(c, True)) if head_settings.transform else c


def hadamard(weights, head_settings, h, c, drop):
    return h * transform_condition(weights, head_settings, c, drop)


def concat(weights, head_settings, h, c, drop):
    c = transform_condition(weights, head_settings, c, drop)
    joined = torch.cat([drop(h), drop(c, True)])
    whole = {"w": torch.cat([weights["sentence"], weights["condition"]], dim=1)}
    if head_settings.bias:
        whole["w_bias"] = weights["bias"]
    return ACTIVATIONS[head_settings.activation](layer(whole, "w", joined))


def hypernet(weights, head_settings, h, c, drop):
    c = transform_condition(weights, head_settings, c, drop)
    rank, dim = head_settings.rank, head_settings.dim
    if rank:
        first = generate_matrix(weights, "factor1", drop(c, True), len(h), rank)
        second = generate_matrix(weights, "factor2", drop(c, True), rank, dim)
        matrix = first @ second
    else:
        matrix = generate_matrix(weights, "matrix", drop(c, True), len(h), dim)
    if head_settings.activation == "none":
        return h @ matrix
    return drop(ACTIVATIONS[head_settings.activation](h @ matrix))


def ablation(weights, head_settings, h, c, drop):
    c = transform_condition(weights, head_settings, c, drop)
    up = layer(weights, "up", drop(c, True))
    return h * layer(weights, "down", drop(up, True))


def towers(weights, head_settings, h, c, drop):
    joint, sentence = h[: -len(c)], h[-len(c) :]
    activation = ACTIVATIONS[head_settings.activation]
    hidden = drop(activation(layer(weights, "weight1", joint)))
    first = drop(activation(layer(weights, "weight2", hidden)))
    half = SimpleNamespace(**{**asdict(head_settings), "dim": head_settings.dim // 2})
    second = hypernet(weights, half, sentence, c, drop)
    return torch.cat([tower / tower.norm().clamp(min=1e-12) for tower in (first, second)])


EQUATIONS = {
    "linear": linear,
    "mlp": mlp,
    "hadamard": hadamard,
    "concat": concat,
    "hypernet": hypernet,
    "hypernet-ablation": ablation,
    "towers": towers,
}
FAMILIES = {kind: find_family(kind, "test")[1] for kind in EQUATIONS}
SETTINGS = {
    "linear": [{"dim": 3}],
    "mlp": [
        {"dim": 3, "hidden": 4},
        {"dim": 2, "hidden": 0, "depth": 3, "activation": "gelu", "last": "none"},
        {"dim": 3, "depth": 1, "activation": "tanh"},
    ],
    "hadamard": [{}],
    "concat": [{"dim": 3}, {"dim": 2, "activation": "none"}],
    "hypernet": [
        {"dim": 3, "rank": 2},
        {"dim": 2, "rank": 0},
        {"dim": 2, "rank": 2, "activation": "relu"},
    ],
    "hypernet-ablation": [{"rank": 2}],
    "towers": [{"dim": 4, "hidden": 3, "rank": 2}, {"dim": 4, "hidden": 2, "rank": 0}],
}


class Masks:
    """Dropout that records its masks, whose values all differ so that a swapped mask is noticed."""

    def __init__(self):
        self.recorded, self._random = [], torch.Generator().manual_seed(1)
        self.unread = []

    def dropout(self, values):
        uniform = torch.rand(values.shape, generator=self._random, dtype=values.dtype)
        self.recorded.append(torch.where(uniform < 0.3, 0, 2 * uniform))
        return values * self.recorded[-1]

    def of_row(self, row, condition, shared):
        """Return the dropout of one row, with the masks of the row or of its condition."""
        masks = iter(self.recorded)
        self.unread.append(masks)
        return lambda values, of_condition=False: (
            values * next(masks)[condition if of_condition and shared else row]
        )


def drop_nothing(values, of_condition=False):
    return values


def random(shape, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def create_module(kind, head_settings, dim, dim_c, generator):
    """Create a head in float64 whose parameters are all drawn at the same scale."""
    module = FAMILIES[kind](head_settings, dim, dim_c).double().eval()
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(random(value.shape, generator))
    return module


def gradients(output, weights, inputs):
    """Return gradients of a sum that weighs each output differently; 0 for unused tensors."""
    factor = torch.arange(1.0, output.numel() + 1, dtype=output.dtype).view_as(output).cos()
    variables = [*weights.values(), *inputs]
    total = (output * factor).sum()
    return torch.autograd.grad(total, variables, allow_unused=True, materialize_grads=True)


def assert_equals_equations(kind, head_settings, batch, generator, masks=None):
    """Compare in float64, so that only the order of sums may differ."""
    dims = batch.x.shape[1], batch.condition.shape[1]
    module = create_module(kind, head_settings, *dims, generator)
    if masks is not None:
        module.train().dropout = masks.dropout
    weights = dict(module.named_parameters())
    inputs = [batch.x.requires_grad_(), batch.condition.requires_grad_()]
    fast = module(*batch)
    shared = getattr(head_settings, "masks", "shared") == "shared"
    rows = []
    for row, (x, which) in enumerate(zip(batch.x, batch.which.tolist(), strict=True)):
        drop = masks.of_row(row, which, shared) if masks else drop_nothing
        rows.append(EQUATIONS[kind](weights, head_settings, x, batch.condition[which], drop))
    slow = torch.stack(rows)
    assert masks is None or all(next(unread, None) is None for unread in masks.unread)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    actual, expected = (gradients(output, weights, inputs) for output in (fast, slow))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", EQUATIONS)
def test_heads_equal_their_equations_with_and_without_dropout(kind):
    """The equations use the masks that the module drew, one for each factor as well."""
    generator = torch.Generator().manual_seed(0)
    choices = [{}]
    if FAMILIES[kind].conditioned:
        keys = "transform", "bias", "masks"
        values = product([True, False], [True, False], ["shared", "own"])
        choices = [dict(zip(keys, choice, strict=True)) for choice in values]
    for changes, choice in product(SETTINGS[kind], choices):
        head_settings = make_recipe(kind, **changes, **choice).settings
        which = torch.randint(4, (9,), generator=generator)
        dim_c = 3 if kind != "hadamard" or choice["transform"] else 4
        dim = 4 + 3 * (kind == "towers")
        batch = Batch(random((9, dim), generator), random((5, dim_c), generator), which)
        for masks in (None, Masks()):
            assert_equals_equations(kind, head_settings, batch, generator, masks)


def test_heads_that_start_at_identity_return_their_features():
    x, condition = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    one_hot, which = torch.eye(5, 6), torch.arange(5)
    mlp_settings = {"dim": 6, "hidden": 12, "depth": 2, "last": "none"}
    cases = [
        ("linear", {"dim": 6}, condition, x),
        ("mlp", {**mlp_settings, "activation": "relu"}, condition, x),
        ("mlp", {**mlp_settings, "activation": "gelu", "hidden": 13}, condition, x),
        ("hadamard", {}, condition, x),
        ("hypernet", {"dim": 6, "rank": 0, "bias": True}, condition, x),
        ("hypernet", {"dim": 6, "rank": 6, "bias": True}, condition, x),
        ("hypernet", {"dim": 4, "rank": 0, "bias": False, "transform": False}, one_hot, x[:, :4]),
    ]
    for kind, changes, features, expected in cases:
        module = FAMILIES[kind](make_recipe(kind, **changes).settings, 6, 6).eval()
        module.start_at_identity()
        torch.testing.assert_close(module(x, features, which), expected, rtol=1e-4, atol=1e-5)


# -- rows times the matrices of their conditions -----------------------------------------------


def multiply_by_condition(x, which, factors):
    """Multiply each row by the matrices of its condition, left to right."""
    groups = ConditionGroups(which, len(factors[0]))
    rows = groups.pad(x)
    for factor in factors:
        rows = groups.multiply(rows, factor.index_select(0, groups.order), torch.bmm)
    return groups.restore(rows)


def multiply_by_rows(x, which, factors):
    """Multiply each row by the explicit matrix of its condition."""
    rows = []
    for row, condition in zip(x, which.tolist(), strict=True):
        rows.append(reduce(torch.matmul, [factor[condition] for factor in factors], row))
    return torch.stack(rows)


@settings(deadline=None, max_examples=50)
@given(
    which=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    empty=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
@example(which=[0], empty=0, sizes=[1, 1])
@example(which=[30, *range(60), *[30] * 400], empty=1, sizes=[2, 1, 3])
def test_rows_are_multiplied_by_matrices_of_their_conditions(which, empty, sizes):
    generator = torch.Generator().manual_seed(0)
    count, which = max(which) + 1 + empty, torch.tensor(which)
    x = random((len(which), sizes[0]), generator).requires_grad_()
    factors = [random((count, *pair), generator).requires_grad_() for pair in pairwise(sizes)]
    fast, slow = multiply_by_condition(x, which, factors), multiply_by_rows(x, which, factors)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    actual, expected = (gradients(output, {}, [x, *factors]) for output in (fast, slow))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_bfloat16_products_are_close_and_returned_in_weight_dtype():
    generator = torch.Generator().manual_seed(0)
    x, condition = random((50, 40), generator).bfloat16(), random((4, 30), generator).float()
    batch = Batch(x, condition, torch.randint(4, (50,), generator=generator))
    for kind, (changes, *_) in SETTINGS.items():
        values = {**changes, **({"activation": "none"} if kind == "mlp" else {})}
        head_settings = make_recipe(kind, **values).settings
        module = create_module(kind, head_settings, 40, 30, generator).float()
        exact = module(*batch)
        module.multiply_in_bfloat16(True)
        approximate = module(*batch)
        assert approximate.dtype == torch.float32
        assert not torch.equal(approximate, exact)
        error = (approximate - exact).square().mean() / exact.square().mean()
        assert error.sqrt() < 0.02


# -- fitted heads ------------------------------------------------------------------------------


def make_pairs(n=60, u=5, dim=DIM, dim_c=DIM_C, seed=0):
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, dim)).astype(np.float32)
    table = rng.normal(size=(u, dim_c)).astype(np.float32)
    rating = rng.choice([0, 0.25, 0.5, 0.75, 1], size=n)
    return PairArrays(first, second, rating, SharedRows(table, rng.integers(u, size=n)))


SHORT = {"epochs": 2, "batch_size": 16}
SEPARATE_MASKS = {"dim": 3, "rank": 2, "transform": True, "masks": "own"}
VARIANTS = {
    "hadamard": ("hadamard", {}, DIM),
    "concat": ("concat", {"dim": 3}, 3),
    "full": ("hypernet-full-mse", {"dim": 3, "transform": True, "bias": True}, 3),
    "low rank": ("hypernet-mse", {"dim": 3, "rank": 2}, 3),
    "own masks": ("hypernet-mse", SEPARATE_MASKS, 3),
    "relu": ("hypernet-mse", {"dim": 3, "rank": 2, "activation": "relu"}, 3),
    "ablation": ("hypernet-ablation", {"rank": 2}, DIM),
    "towers": ("towers", {"dim": 4, "hidden": 5, "rank": 2}, 4),
}


@pytest.fixture(scope="module")
def heads():
    pairs = make_pairs()
    variants = VARIANTS.items()
    return {name: fit(kind, pairs, **SHORT, **changes) for name, (kind, changes, _) in variants}


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_equals_training_network_without_dropout(heads, tmp_path, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    condition = pairs.condition[np.arange(40)]
    module = copy.deepcopy(head.module).train()
    module.settings = replace(head.settings, dropout=0.0)
    expected = module(torch.tensor(pairs.first), torch.tensor(condition), torch.arange(40)).numpy()
    for form in (pairs.condition, condition, condition.astype(np.float64)):
        actual = head.transform(pairs.first, form)
        assert (actual.dtype, actual.shape) == (np.float32, (40, VARIANTS[name][2]))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    second = head.transform(pairs.second, condition)
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(second, axis=1)
    cosine = (actual * second).sum(axis=1) / np.where(norms > 0, norms, 1)  # ReLU may give zeros
    similarity = head.similarity(pairs.first, pairs.second, condition)
    np.testing.assert_allclose(similarity, cosine, rtol=1e-4, atol=1e-6)
    save_head(head, tmp_path / "head", {})
    loaded, description = load_head(tmp_path / "head")
    np.testing.assert_array_equal(loaded.transform(pairs.first, condition), actual)
    assert (loaded.settings, loaded.dim_in, loaded.dim_condition) == (head.settings, DIM, DIM_C)
    assert loaded.fit.record == head.fit.record
    assert (description["dim_condition"], description["dim_out"]) == (DIM_C, VARIANTS[name][2])


@pytest.mark.parametrize("name", VARIANTS)
def test_row_depends_neither_on_other_rows_nor_on_form_of_features(heads, monkeypatch, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    features, condition = pairs.first.astype(np.float16), pairs.condition
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    expected = head.transform(features.astype(np.float32), condition)
    for form in (features, np.asfortranarray(features), SharedRows(features, np.arange(40))):
        np.testing.assert_array_equal(head.transform(form, condition), expected)
    order = np.arange(40)[::-1]
    close(head.transform(features[order], condition[order])[::-1], expected)
    for row in (0, 39):
        close(head.transform(features[[row]], condition[[row]]), expected[[row]])
    shared = condition[:1]
    under_first = head.transform(features, np.repeat(shared, 40, axis=0))
    for form in (shared, SharedRows(shared, np.zeros(1, int))):
        close(head.transform(features, form), under_first)
    assert head.transform(features[:0], shared).shape == (0, head.dim_out)
    monkeypatch.setattr("llmcond.heads.numpy_heads._BLOCK", 7)
    close(head.transform(features, condition), expected)
    close(head.transform(features, shared), under_first)


# -- matrices of the hypernetwork --------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "low rank", "own masks"])
def test_factors_and_norms_match_equations(heads, name):
    head = heads[name]
    shared = make_pairs(70, u=70).condition  # more than a block
    condition = shared[np.arange(70)]
    weights = {key: torch.tensor(value).double() for key, value in head.tensors.items()}
    expected_matrices = []
    for h_c in torch.tensor(condition).double():
        c = transform_condition(weights, head.settings, h_c, drop_nothing)
        generate = partial(generate_matrix, weights)
        expected_matrices.append(
            [generate("factor1", c, DIM, 2), generate("factor2", c, 2, 3)]
            if head.settings.rank
            else [generate("matrix", c, DIM, 3)]
        )
    factors = head.module.generated_matrices(condition)
    for factor, *expected in zip(factors, *expected_matrices, strict=True):
        assert factor.dtype == np.float32
        np.testing.assert_allclose(factor, np.stack(expected), rtol=1e-4, atol=1e-6)
    products = [m[0] @ m[1] if len(m) > 1 else m[0] for m in expected_matrices]
    norms = [float(matrix.square().sum().sqrt()) for matrix in products]
    for form in (condition, shared):
        np.testing.assert_allclose(head.matrix_norms(form), norms, rtol=1e-4)
    assert head.matrix_norms(condition[:0]).shape == (0,)
    # The embeddings of unit vectors are the rows of W_c.
    rows = head.transform(np.eye(DIM, dtype=np.float32), condition[:1])
    np.testing.assert_allclose(rows, products[0].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "low rank", "relu"])
def test_condition_cache_gives_same_embeddings_as_head(heads, name, monkeypatch):
    head, cache = heads[name], ConditionCache(heads[name])
    rng = np.random.default_rng(1)
    table = rng.normal(size=(90, DIM_C)).astype(np.float32)
    features = rng.normal(size=(300, DIM)).astype(np.float32)
    condition = table[rng.integers(90, size=300)]
    expected = head.transform(features, condition)
    generate, generated = head.module.generated_matrices, []

    def count_generated(vectors):
        generated.append(len(vectors))
        return generate(vectors)

    for _ in range(2):  # the head computes blocks of 64 conditions, and the cache each condition
        with monkeypatch.context() as patch:
            patch.setattr(head.module, "generated_matrices", count_generated)
            actual = cache.transform(features, condition)
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    n_conditions = len(np.unique(condition, axis=0))
    assert sum(generated) == n_conditions
    with monkeypatch.context() as patch:
        patch.setattr(head.module, "generated_matrices", count_generated)
        shared = SharedRows(condition[:1], np.zeros(300, dtype=np.int64))
        embeddings = cache.transform(features, shared)
    np.testing.assert_allclose(embeddings, head.transform(features, condition[:1]), atol=1e-5)
    assert sum(generated) == n_conditions
    assert cache.transform(features[:0], table[:0]).shape == (0, 3)


# -- rejected input ----------------------------------------------------------------------------


def test_missing_or_mismatched_conditions_are_rejected(heads):
    pairs, wide = make_pairs(), make_pairs(dim=DIM + 1, dim_c=DIM_C + 1)
    linear = fit("linear", pairs, **SHORT, dim=3)
    head = heads["concat"]
    cases = [
        (head, pairs.first, None, rf"got none, but this concat .* on {DIM_C} dim"),
        (head, wide.first, pairs.condition, f"features have {DIM + 1} dim.* fitted on {DIM}"),
        (head, pairs.first, wide.condition, f"got {DIM_C + 1} dim.* on {DIM_C} dim"),
        (head, pairs.first, pairs.condition[:2], "60 sentences and 2 conditions"),
        (linear, pairs.first, pairs.condition, f"got {DIM_C} dim.* linear .* on none"),
    ]
    for transformer, features, condition, message in cases:
        with pytest.raises(UserError, match=message):
            transformer.transform(features, condition)
    with pytest.raises(UserError, match=r"needs the features of each condition.*condition=\.\.\."):
        fit("concat", replace(pairs, condition=None), **SHORT, dim=3)


def test_settings_that_do_not_suit_features_are_rejected():
    pairs = make_pairs()
    for dim, max_rank in [(3, 3), (6, 6), (7, DIM)]:
        expected = rf"rank is {max_rank + 1}, but a {DIM} x {min(dim, DIM)} matrix .* {max_rank}\."
        with pytest.raises(UserError, match=expected):
            fit("hypernet-mse", pairs, **SHORT, dim=min(dim, DIM), rank=max_rank + 1)
    fit("hypernet-mse", pairs, epochs=1, batch_size=60, dim=3, rank=3)
    with pytest.raises(UserError, match=f"{DIM} dimensions and .* {DIM_C}; .*transform to true"):
        fit("hadamard", pairs, **SHORT, transform=False)
    with pytest.raises(UserError, match="needs joint features in addition to separate ones of 6"):
        fit("towers", make_pairs(dim_c=DIM), **SHORT, dim=2, hidden=3, rank=1)


def test_heads_beyond_memory_are_rejected(monkeypatch):
    """The check counts gradients and moments, too; it allocates nothing."""
    first = np.zeros((4, 4_096), dtype=np.float16)
    first[0, 0] = 1
    pairs = PairArrays(first, 0 * first, np.array([0, 1, 0.5, 1]), 0 * first)
    message = rf"{4_096**3:,} parameters\. .* needs 1,280\.0 GiB, .* free.*its dim, or its rank"
    with pytest.raises(UserError, match=message):
        fit("hypernet-full-mse", pairs, dim=4_096)
    n_parameters = DIM_C * 2 * (DIM + 3)
    monkeypatch.setattr("llmcond.heads.fit.free_memory", lambda: 20 * n_parameters - 1)
    with pytest.raises(UserError, match=f"{n_parameters:,} parameters"):
        fit("hypernet-mse", make_pairs(), **SHORT, dim=3, rank=2)
