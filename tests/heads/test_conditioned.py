"""Heads compared with their equations: row by row, with explicit matrices, also in gradient."""

import copy
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.heads import fit, make_recipe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from llmcond.errors import UserError
from llmcond.heads import (
    ConcatenatedMatrix,
    Difference,
    PairArrays,
    SharedRows,
    conditioned,
    load_head,
    save_head,
)
from llmcond.heads.conditioned import ConditionGroups
from llmcond.heads.module import Batch
from llmcond.heads.recipes import find_family

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C = 6, 5
CONDITIONED = ["hadamard", "concat", "hypernet", "hypernet-ablation", "towers"]
FAMILIES = {kind: find_family(kind, "test")[1] for kind in ["linear", "mlp", *CONDITIONED]}
SIZES = {
    "linear": {"dim": 3},
    "mlp": {"dim": 3, "hidden": 4},
    "hadamard": {},
    "concat": {"dim": 3},
    "hypernet": {"dim": 3, "rank": 2},
    "hypernet-ablation": {"rank": 2},
    "towers": {"dim": 4, "hidden": 5, "rank": 2},
}


# -- the equations, row by row -----------------------------------------------------------------


def dot(row, values):
    """Sum the products term by term."""
    return sum(row[i] * values[i] for i in range(len(values)))


def layer(weights, name, values, bias="_bias"):
    """Compute W v + b, output by output."""
    rows = torch.stack([dot(row, values) for row in weights[name]])
    return rows + weights[name + bias] if name + bias in weights else rows


def form_matrix(weights, name, values, height, width):
    """Compute the matrix that a layer generates, entry by entry."""
    entries = layer(weights, name, values)
    assert len(entries) == height * width
    rows = [torch.stack([entries[i * width + j] for j in range(width)]) for i in range(height)]
    return torch.stack(rows)


def multiply(h, matrix):
    """Compute h^T W, output by output."""
    return torch.stack([dot(h, matrix[:, j]) for j in range(matrix.shape[1])])


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
    if head_settings.rank:
        first = form_matrix(weights, "factor1", drop(c, True), len(h), head_settings.rank)
        second = form_matrix(
            weights, "factor2", drop(c, True), head_settings.rank, head_settings.dim
        )
        matrix = first @ second
    else:
        matrix = form_matrix(weights, "matrix", drop(c, True), len(h), head_settings.dim)
    if head_settings.activation == "none":
        return multiply(h, matrix)
    return drop(ACTIVATIONS[head_settings.activation](multiply(h, matrix)))


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


class Masks:
    """Dropout that records its masks, whose values all differ so that a swapped mask is noticed."""

    def __init__(self, seed):
        self.recorded, self._random = [], torch.Generator().manual_seed(seed)

    def dropout(self, values):
        uniform = torch.rand(values.shape, generator=self._random, dtype=values.dtype)
        self.recorded.append(torch.where(uniform < 0.3, 0, 2 * uniform))
        return values * self.recorded[-1]

    def of_row(self, row, condition, shared):
        """Return the dropout of one row, with the masks of the row or of its condition."""
        masks = iter(self.recorded)
        return lambda values, of_condition=False: (
            values * next(masks)[condition if of_condition and shared else row]
        )


def drop_nothing(values, of_condition=False):
    return values


def transform_by_equations(kind, weights, head_settings, batch, row_dropout):
    rows = [
        EQUATIONS[kind](
            weights, head_settings, batch.x[i], batch.condition[int(batch.which[i])], row_dropout(i)
        )
        for i in range(len(batch.x))
    ]
    return torch.stack(rows)


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

    def row_dropout(row):
        return masks.of_row(row, int(batch.which[row]), shared) if masks else drop_nothing

    slow = transform_by_equations(kind, weights, head_settings, batch, row_dropout)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    for gradient, expected in zip(
        gradients(fast, weights, inputs), gradients(slow, weights, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-8)


def draw_conditions(draw, n_rows):
    """Draw the condition of each row: any, all the same, all different, or most the same."""
    kind = draw(st.sampled_from(["any", "one", "each", "most"]))
    if kind == "one":
        return [0] * n_rows
    if kind == "each":
        return draw(st.permutations(range(n_rows)))
    if kind == "any":
        return draw(
            st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=n_rows, max_size=n_rows)
        )
    return draw(st.permutations([0] * (n_rows - n_rows // 4) + list(range(1, 1 + n_rows // 4))))


@st.composite
def batches(draw, max_rows=12):
    n_rows = draw(st.integers(1, max_rows))
    which = torch.tensor(draw_conditions(draw, n_rows))
    # There may be a condition without rows.
    count = int(which.max()) + 1 + draw(st.integers(0, 1))
    dim, dim_c = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x, c = random((n_rows, dim), generator), random((count, dim_c), generator)
    return Batch(x, c, which), generator


CHOICES = {
    "linear": st.fixed_dictionaries({"dim": st.integers(1, 4)}),
    "mlp": st.fixed_dictionaries(
        {
            "dim": st.integers(1, 4),
            "hidden": st.integers(0, 5),
            "depth": st.integers(1, 4),
            "activation": st.sampled_from(list(ACTIVATIONS)),
            "last": st.sampled_from(["same", "none"]),
        }
    ),
    "hadamard": st.just({}),
    "concat": st.fixed_dictionaries(
        {"dim": st.integers(1, 4), "activation": st.sampled_from(list(ACTIVATIONS))}
    ),
    "hypernet": st.fixed_dictionaries(
        {
            "dim": st.integers(1, 4),
            "rank": st.integers(0, 3),
            "activation": st.sampled_from(["none", *ACTIVATIONS]),
        }
    ),
    "hypernet-ablation": st.fixed_dictionaries({"rank": st.integers(1, 4)}),
    "towers": st.fixed_dictionaries(
        {
            "dim": st.sampled_from([4, 8]),
            "hidden": st.integers(1, 4),
            "rank": st.integers(0, 3),
            "activation": st.sampled_from(list(ACTIVATIONS)),
        }
    ),
}


def adapt_settings(kind, values, batch, generator):
    """Return settings that are valid for the sizes of a batch, and the batch adapted to them."""
    if values.get("rank") and kind == "hypernet":
        values = {**values, "rank": min(values["rank"], values["dim"], batch.x.shape[1])}
    if kind == "towers":
        # The sentence has as many separate features as the condition.
        size = batch.condition.shape[1]
        batch = batch._replace(x=torch.cat([batch.x, random((len(batch.x), size), generator)], 1))
        values = {**values, "rank": min(values["rank"], values["dim"] // 2, size)}
    if kind == "hadamard" and not values["transform"]:
        batch = batch._replace(
            condition=random((len(batch.condition), batch.x.shape[1]), generator)
        )
    return make_recipe(kind, **values).settings, batch


@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@given(batch_and_generator=batches(max_rows=6), data=st.data(), dropped=st.booleans())
def test_siamese_heads_equal_their_equations(kind, batch_and_generator, data, dropped):
    batch, generator = batch_and_generator
    head_settings, batch = adapt_settings(kind, data.draw(CHOICES[kind]), batch, generator)
    masks = Masks(data.draw(st.integers(0, 99))) if dropped else None
    assert_equals_equations(kind, head_settings, batch, generator, masks)


@pytest.mark.matrix
@pytest.mark.parametrize(("transform", "bias"), list(product([True, False], repeat=2)))
@pytest.mark.parametrize("kind", CONDITIONED)
@settings(deadline=None, max_examples=15)
@given(batch_and_generator=batches(), data=st.data(), masks=st.sampled_from(["shared", "own"]))
def test_heads_with_conditions_equal_their_equations(
    kind, transform, bias, batch_and_generator, data, masks
):
    batch, generator = batch_and_generator
    values = data.draw(CHOICES[kind])
    values = {**values, "transform": transform, "bias": bias, "masks": masks}
    head_settings, batch = adapt_settings(kind, values, batch, generator)
    assert_equals_equations(kind, head_settings, batch, generator)


@pytest.mark.matrix
@pytest.mark.parametrize(("transform", "masks"), list(product([True, False], ["shared", "own"])))
@pytest.mark.parametrize("kind", CONDITIONED)
@settings(deadline=None, max_examples=15)
@given(batch_and_generator=batches(max_rows=8), data=st.data(), bias=st.booleans())
def test_dropout_precedes_every_condition_layer(
    kind, transform, masks, batch_and_generator, data, bias
):
    """The equations use the masks that the module drew, one for each factor as well."""
    batch, generator = batch_and_generator
    values = data.draw(CHOICES[kind])
    values = {**values, "transform": transform, "bias": bias, "masks": masks}
    head_settings, batch = adapt_settings(kind, values, batch, generator)
    recorder = Masks(data.draw(st.integers(0, 99)))
    assert_equals_equations(kind, head_settings, batch, generator, recorder)
    counts = {"hadamard": 0, "concat": 2, "hypernet-ablation": 2}
    has_activation = values.get("activation", "none") != "none"
    n_masks = counts.get(kind, 1 + (getattr(head_settings, "rank", 0) > 0) + has_activation)
    if kind == "towers":
        n_masks += 2
    assert len(recorder.recorded) == transform + n_masks


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("masks", ["shared", "own"])
def test_hypernetwork_with_one_frequent_condition_equals_its_equation(rank, masks):
    generator = torch.Generator().manual_seed(0)
    which = torch.tensor([3] * 120 + [0, 1, 2, 4, 4])[torch.randperm(125, generator=generator)]
    batch = Batch(random((125, 3), generator), random((5, 2), generator), which)
    head_settings = make_recipe("hypernet", dim=2, rank=rank, masks=masks).settings
    assert_equals_equations("hypernet", head_settings, batch, generator)


def test_recipes_as_in_paper_have_neither_layer_nor_bias_nor_activation():
    pairs = make_pairs(dim=DIM, dim_c=DIM)
    x, condition = pairs.first, pairs.condition.read()
    product = fit("hadamard-paper", pairs, epochs=1)
    assert product.tensors == {}
    np.testing.assert_allclose(product.transform(x, condition), x * condition, rtol=1e-6)
    concat = fit("concat-paper", pairs, epochs=1, dim=3)
    assert set(concat.tensors) == {"sentence", "condition"}
    expected = x @ concat.tensors["sentence"].T + condition @ concat.tensors["condition"].T
    np.testing.assert_allclose(concat.transform(x, condition), expected, atol=1e-5)


# -- rows times the matrices of their conditions -----------------------------------------------


def multiply_by_condition(x, which, factors, product=torch.bmm):
    """Multiply each row by the matrices of its condition, left to right."""
    groups = ConditionGroups(which, len(factors[0]))
    rows = groups.pad(x)
    for factor in factors:
        rows = groups.multiply(rows, factor.index_select(0, groups.order), product)
    return groups.restore(rows)


def multiply_by_rows(x, which, factors):
    """Multiply each row by the explicit matrix of its condition."""
    rows = []
    for i in range(len(x)):
        matrix = factors[0][int(which[i])]
        for factor in factors[1:]:
            matrix = matrix @ factor[int(which[i])]
        rows.append(matrix.T @ x[i])
    return torch.stack(rows)


def assert_equals_row_products(which, count, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    which = torch.tensor(which)
    x = random((len(which), sizes[0]), generator).requires_grad_()
    factors = [random((count, *pair), generator).requires_grad_() for pair in pairwise(sizes)]
    fast, slow = multiply_by_condition(x, which, factors), multiply_by_rows(x, which, factors)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for gradient, expected in zip(
        gradients(fast, {}, [x, *factors]), gradients(slow, {}, [x, *factors]), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    m=st.integers(1, 40),
    empty=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_rows_are_multiplied_by_matrices_of_their_conditions(data, m, empty, sizes):
    which = draw_conditions(data.draw, m)
    assert_equals_row_products(which, max(which) + 1 + empty, sizes, data.draw(st.integers(0, 9)))


@settings(deadline=None, max_examples=25)
@given(n_frequent=st.integers(1, 400), n_single=st.integers(0, 60), position=st.integers(0, 60))
@example(n_frequent=400, n_single=60, position=30)
@example(n_frequent=1, n_single=0, position=0)
def test_rows_of_one_frequent_condition_equal_their_products(n_frequent, n_single, position):
    position = min(position, n_single)
    which = [position] * n_frequent + [
        condition for condition in range(n_single + 1) if condition != position
    ]
    which = np.random.default_rng(0).permutation(which).tolist()
    assert_equals_row_products(which, n_single + 1, [2, 1, 3])


@pytest.mark.parametrize(
    "counts",
    [
        [1_000] + [1] * 1_000,
        [40, 17, 16, 15, 9, 8, 7, 4, 3, 2, 1, 1, 0, 0],
        [3] * 7,
        [15] + [8] * 9,
    ],
)
def test_less_than_half_of_padded_rows_are_empty(counts):
    shapes, n = [], sum(counts)

    def product(x, matrices):
        shapes.append(x.shape)
        return torch.bmm(x, matrices)

    which = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    multiply_by_condition(torch.zeros(n, 2), which, [torch.zeros(len(counts), 2, 1)], product)
    assert sum(shape[0] for shape in shapes) == len(counts)
    assert n <= sum(shape[0] * shape[1] for shape in shapes) < 2 * n


def test_matrices_are_not_copied():
    which = torch.tensor([2] * 20 + [0] * 3 + [1] * 3 + [4])
    groups = ConditionGroups(which, 5)
    matrices = torch.zeros(5, 2, 2)
    addresses = []

    def product(x, part):
        addresses.append(part.data_ptr())
        return torch.bmm(x, part)

    groups.multiply(groups.pad(torch.zeros(27, 2)), matrices, product)
    assert groups.order.tolist() == [2, 0, 1, 4, 3]
    assert addresses == [matrices[i].data_ptr() for i in (0, 1, 3, 4)]


def test_bfloat16_products_are_close_and_returned_in_weight_dtype():
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        random((50, 40), generator).bfloat16(),
        random((4, 30), generator).float(),
        torch.randint(4, (50,), generator=generator),
    )
    for kind in FAMILIES:
        values = {**SIZES[kind], **({"activation": "none"} if kind == "mlp" else {})}
        head_settings = make_recipe(kind, **values).settings
        module = create_module(kind, head_settings, 40, 30, generator).float()
        exact = module(*batch)
        module.in_bfloat16 = True
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
VARIANTS = {
    "hadamard": ("hadamard", {}),
    "concat": ("concat", {"dim": 3}),
    "full": ("hypernet-full-mse", {"dim": 3}),
    "full, released": ("hypernet-full-mse", {"dim": 3, "transform": True, "bias": True}),
    "low rank": ("hypernet-mse", {"dim": 3, "rank": 2}),
    "low rank, own masks": (
        "hypernet-mse",
        {"dim": 3, "rank": 2, "transform": True, "masks": "own"},
    ),
    "low rank, relu": ("hypernet-mse", {"dim": 3, "rank": 2, "activation": "relu"}),
    "ablation": ("hypernet-ablation", {"rank": 2}),
    "towers": ("towers", {"dim": 4, "hidden": 5, "rank": 2}),
}


@pytest.fixture(scope="module")
def heads():
    pairs = make_pairs()
    return {
        name: fit(kind, pairs, **SHORT, **changes) for name, (kind, changes) in VARIANTS.items()
    }


def transform_in_training_mode(head, features, condition):
    """Transform in training mode, without dropout and with one matrix for each row."""
    module = copy.deepcopy(head.module).train()
    module.settings = replace(head.settings, dropout=0.0)
    x, c = torch.tensor(features), torch.tensor(condition)
    return module(x, c, torch.arange(len(x))).numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_equals_training_network_without_dropout(heads, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    condition = pairs.condition[np.arange(40)]
    expected = transform_in_training_mode(head, pairs.first, condition)
    for form in (pairs.condition, condition, condition.astype(np.float64)):
        actual = head.transform(pairs.first, form)
        assert actual.dtype == np.float32
        assert actual.shape == (40, head.dim_out)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_takes_one_condition_for_all_rows(heads, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    condition = pairs.condition[np.array([0])]
    expected = head.transform(pairs.first, np.repeat(condition, 40, axis=0))
    for form in (
        condition,
        SharedRows(condition, np.zeros(1, int)),
        SharedRows(pairs.condition[:], np.zeros(1, int)),
    ):
        np.testing.assert_allclose(head.transform(pairs.first, form), expected, rtol=1e-5)
    np.testing.assert_allclose(head.transform(pairs.first[:1], condition), expected[:1], rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_transform_in_blocks_gives_same_result(heads, monkeypatch, name, shared):
    head, pairs = heads[name], make_pairs(40, seed=3)
    condition = pairs.condition[:1] if shared else pairs.condition
    expected = head.transform(pairs.first, condition)
    monkeypatch.setattr("llmcond.heads.numpy_heads._BLOCK", 7)
    np.testing.assert_allclose(
        head.transform(pairs.first, condition), expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_row_does_not_depend_on_other_rows(heads, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    expected = head.transform(pairs.first, pairs.condition)
    reversed_order = np.arange(40)[::-1]
    reversed_output = head.transform(
        pairs.first[reversed_order.copy()], pairs.condition[reversed_order]
    )
    np.testing.assert_allclose(reversed_output[::-1], expected, rtol=1e-4, atol=1e-6)
    single_rows = [head.transform(pairs.first[[i]], pairs.condition[[i]])[0] for i in range(5)]
    np.testing.assert_allclose(single_rows, expected[:5], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_takes_features_in_any_form(heads, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    features, condition = pairs.first.astype(np.float16), pairs.condition
    expected = head.transform(features.astype(np.float32), condition)
    columns = [features[:, :2], features[:, 2:]]
    for form in (
        features,
        np.asfortranarray(features),
        SharedRows(features, np.arange(40)),
        Difference(features, np.zeros_like(features)),
        ConcatenatedMatrix(columns),
    ):
        np.testing.assert_array_equal(head.transform(form, condition), expected)
    read_only = features.astype(np.float32)
    read_only.flags.writeable = False
    np.testing.assert_array_equal(head.transform(read_only, condition), expected)


@pytest.mark.parametrize("name", ["hadamard", "low rank"])
def test_transform_takes_reversed_views_of_features(heads, name):
    head, pairs = heads[name], make_pairs(40, seed=3)
    expected = head.transform(pairs.first[::-1].copy(), pairs.condition)
    np.testing.assert_array_equal(head.transform(pairs.first[::-1], pairs.condition), expected)


@pytest.mark.parametrize("name", ["hadamard", "concat", "ablation"])
def test_transform_of_no_rows_has_no_rows(heads, name):
    head, pairs = heads[name], make_pairs(4)
    for condition in (pairs.condition[:0], pairs.condition[:1]):
        assert head.transform(pairs.first[:0], condition).shape == (0, head.dim_out)


@pytest.mark.parametrize("name", ["full", "low rank", "towers"])
def test_hypernetwork_transforms_no_rows(heads, name):
    test_transform_of_no_rows_has_no_rows(heads, name)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("masks", ["shared", "own"])
def test_hypernetwork_generates_matrices_in_blocks_at_inference(
    monkeypatch, rank, transform, masks
):
    generator = torch.Generator().manual_seed(0)
    which = torch.cat([torch.arange(23), torch.randint(23, (40,), generator=generator)])
    batch = Batch(random((63, 4), generator), random((25, 3), generator), which)
    head_settings = make_recipe(
        "hypernet", dim=3, rank=rank, transform=transform, masks=masks
    ).settings
    module = create_module("hypernet", head_settings, 4, 3, generator)
    expected = module(*batch)
    block_sizes = []

    class RecordedGroups(ConditionGroups):
        def __init__(self, which, count):
            block_sizes.append(count)
            super().__init__(which, count)

    monkeypatch.setattr(conditioned, "ConditionGroups", RecordedGroups)
    monkeypatch.setattr(conditioned, "CONDITIONS_PER_BLOCK", 7)
    with torch.no_grad():
        actual = module(*batch)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert block_sizes == [7, 7, 7, 4]


@pytest.mark.parametrize("name", VARIANTS)
def test_similarity_is_cosine_under_condition(heads, name):
    head, pairs = heads[name], make_pairs(20, seed=3)
    first, second = (head.transform(side, pairs.condition) for side in (pairs.first, pairs.second))
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    # With ReLU some embeddings are 0.
    expected = (first * second).sum(axis=1) / np.where(norms > 0, norms, 1)
    actual = head.similarity(pairs.first, pairs.second, pairs.condition)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_loaded_head_with_conditions_has_same_transform(heads, tmp_path, name):
    head, pairs = heads[name], make_pairs(20, seed=3)
    save_head(head, tmp_path / "head", {})
    loaded, description = load_head(tmp_path / "head")
    np.testing.assert_array_equal(
        loaded.transform(pairs.first, pairs.condition), head.transform(pairs.first, pairs.condition)
    )
    assert (loaded.settings, loaded.dim_in, loaded.dim_condition) == (head.settings, DIM, DIM_C)
    assert description["dim_condition"] == DIM_C
    assert description["dim_out"] == head.dim_out
    assert loaded.fit.record == head.fit.record


def test_head_without_conditions_has_condition_dimension_zero(tmp_path):
    head = fit("linear", make_pairs(), **SHORT, dim=3)
    save_head(head, tmp_path / "head", {})
    loaded, description = load_head(tmp_path / "head")
    assert loaded.dim_condition == head.dim_condition == description["dim_condition"] == 0


@pytest.mark.parametrize(
    ("name", "dim_out"), [("hadamard", DIM), ("concat", 3), ("low rank", 3), ("ablation", DIM)]
)
def test_head_has_expected_output_dimension(heads, name, dim_out):
    assert heads[name].dim_out == dim_out


def test_low_rank_hypernetwork_and_ablation_have_equal_size():
    """Table 6 of the paper compares two heads of equal size."""
    changes = {**SHORT, "rank": 2, "transform": True, "bias": False}
    hypernet_head = fit("hypernet-mse", make_pairs(dim_c=DIM), **changes, dim=DIM)
    ablation_head = fit("hypernet-ablation", make_pairs(dim_c=DIM), **changes)
    assert hypernet_head.fit.record["n_parameters"] == ablation_head.fit.record["n_parameters"]


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_missing_conditions_are_rejected(heads, name):
    with pytest.raises(UserError, match=rf"needs the features of each condition.*\(n, {DIM_C}\)"):
        heads[name].transform(make_pairs().first)
    kind, changes = VARIANTS[name]
    with pytest.raises(UserError, match=r"needs the features of each condition.*condition=\.\.\."):
        fit(kind, replace(make_pairs(), condition=None), **SHORT, **changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_features_and_conditions_of_wrong_size_are_rejected(heads, name):
    pairs = make_pairs(dim=DIM + 1, dim_c=DIM_C + 1)
    with pytest.raises(UserError, match=f"features have {DIM + 1} dim.* fitted on {DIM}"):
        heads[name].transform(pairs.first, pairs.condition)
    with pytest.raises(UserError, match=f"conditions have {DIM_C + 1} dim.* fitted on {DIM_C} dim"):
        heads[name].transform(pairs.first[:, :DIM], pairs.condition)


def test_head_without_conditions_rejects_conditions():
    pairs = make_pairs()
    head = fit("linear", pairs, **SHORT, dim=3)
    with pytest.raises(UserError, match=f"conditions have {DIM_C} dim.* linear head .* on none"):
        head.transform(pairs.first, pairs.condition)
    with pytest.raises(UserError, match="on none"):
        head.similarity(pairs.first, pairs.second, pairs.condition)


@pytest.mark.parametrize("n", [2, 9, 11])
def test_wrong_number_of_conditions_is_rejected(heads, n):
    pairs = make_pairs(20)
    with pytest.raises(UserError, match="condition"):
        heads["concat"].transform(pairs.first[:10], pairs.condition[:n])


@pytest.mark.parametrize(("dim", "rank", "max_rank"), [(3, 4, 3), (6, 7, 6), (4, 5, 4)])
def test_rank_above_dimension_is_rejected(dim, rank, max_rank):
    with pytest.raises(
        UserError, match=rf"rank is {rank}, but a {DIM} x {dim} matrix .* most {max_rank}"
    ):
        fit("hypernet-mse", make_pairs(), **SHORT, dim=dim, rank=rank)
    fit("hypernet-mse", make_pairs(), epochs=1, batch_size=60, dim=dim, rank=max_rank)


def test_hadamard_without_transform_needs_equal_sizes():
    with pytest.raises(UserError, match=f"{DIM} dimensions and .* {DIM_C}; .*transform to true"):
        fit("hadamard", make_pairs(), **SHORT, transform=False)


def test_hadamard_without_transform_is_product(tmp_path):
    pairs = make_pairs(dim_c=DIM)
    head = fit("hadamard", pairs, **SHORT, transform=False)
    save_head(head, tmp_path / "head", {})
    condition = pairs.condition[np.arange(len(pairs))]
    for fitted_or_loaded in (head, load_head(tmp_path / "head")[0]):
        np.testing.assert_allclose(
            fitted_or_loaded.transform(pairs.first, condition), pairs.first * condition
        )


@pytest.mark.parametrize("dim", [2, 6])
def test_towers_take_any_even_dimension(dim):
    head = fit("towers", make_pairs(), **SHORT, dim=dim, hidden=5, rank=1)
    assert head.dim_out == dim


def make_large_pairs():
    """Make pairs with 4,096 features, as language models have."""
    first = np.zeros((4, 4_096), dtype=np.float16)
    first[0, 0] = 1
    zeros = np.broadcast_to(np.float16(0), first.shape)
    return PairArrays(first, zeros, np.array([0, 1, 0.5, 1]), zeros)


def test_hypernetwork_beyond_memory_is_rejected_with_its_size():
    message = (
        rf"{4_096**3:,} parameters\. .* needs 1,280\.0 GiB, .* GiB are free.*its dim, or its rank"
    )
    with pytest.raises(UserError, match=message):
        fit("hypernet-full-mse", make_large_pairs(), dim=4_096)


def test_memory_check_counts_gradients_and_moments(monkeypatch):
    changes = {**SHORT, "dim": 3, "rank": 2}
    n_parameters = fit("hypernet-mse", make_pairs(), **changes).fit.record["n_parameters"]
    assert n_parameters == DIM_C * 2 * (DIM + 3)
    for free, fits in ((20 * n_parameters, True), (20 * n_parameters - 1, False)):
        monkeypatch.setattr("llmcond.heads.fit.free_memory", lambda free=free: free)
        if fits:
            fit("hypernet-mse", make_pairs(), **changes)
        else:
            with pytest.raises(UserError, match=f"{n_parameters:,} parameters"):
                fit("hypernet-mse", make_pairs(), **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "concat",
            {"features": "sentence"},
            "'features' is 'sentence': .*'separate', 'joint' or 'both'",
        ),
        ("concat", {"masks": "none"}, "'masks' is 'none': .*'shared' or 'own'"),
        ("concat", {"activation": "silu"}, "'activation' is 'silu'"),
        ("concat", {"dim": 0}, "'dim' is 0: .*at least 1"),
        ("concat", {"dim": 65_537}, "'dim' is 65537: .*at most 65,536"),
        ("concat", {"rank": 4}, "unknown key 'rank'"),
        ("concat", {"bias": 1}, "'bias' is 1"),
        ("hadamard", {"dim": 4}, "unknown key 'dim'"),
        ("hypernet", {"activation": "silu"}, "'activation' is 'silu'"),
        ("hypernet", {"rank": -1}, "'rank' is -1: .*at least 0"),
        ("hypernet", {"rank": 65_537}, "'rank' is 65537: .*at most 65,536"),
        ("hypernet-ablation", {"rank": 0}, "'rank' is 0: .*at least 1"),
        ("hypernet", {"batches": "pairs"}, "'batches' is 'pairs': .*'rows' or 'conditions'"),
        ("hypernet", {"precision": "float16"}, "'precision' is 'float16'"),
        ("hypernet", {"dropout": 1.0}, "'dropout' is 1.0: .*below 1"),
        ("mlp", {"depth": 0}, "'depth' is 0: .*at least 1"),
        ("mlp", {"depth": 17}, "'depth' is 17: .*at most 16"),
        ("mlp", {"last": "other"}, "'last' is 'other': .*'same' or 'none'"),
        ("mlp", {"activation": "sine"}, "'activation' is 'sine'"),
    ],
)
def test_invalid_settings_are_rejected(kind, changes, message):
    with pytest.raises(UserError, match=message):
        make_recipe(kind, **changes)


# -- matrices of the hypernetwork --------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "full, released", "low rank", "low rank, own masks"])
def test_factors_and_norms_match_equations(heads, name):
    head = heads[name]
    condition = make_pairs(9, u=9).condition[np.arange(9)]
    weights = {key: torch.tensor(value).double() for key, value in head.tensors.items()}
    expected_matrices = []
    for h_c in torch.tensor(condition).double():
        c = transform_condition(weights, head.settings, h_c, drop_nothing)
        generate = partial(form_matrix, weights)
        expected_matrices.append(
            [generate("factor1", c, DIM, 2), generate("factor2", c, 2, 3)]
            if head.settings.rank
            else [generate("matrix", c, DIM, 3)]
        )
    factors = head.module.generated_matrices(condition)
    assert len(factors) == len(expected_matrices[0])
    for index, factor in enumerate(factors):
        assert factor.dtype == np.float32
        expected = np.stack([matrices[index].numpy() for matrices in expected_matrices])
        np.testing.assert_allclose(factor, expected, rtol=1e-4, atol=1e-6)
    products = [m[0] @ m[1] if len(m) > 1 else m[0] for m in expected_matrices]
    norms = [float(matrix.square().sum().sqrt()) for matrix in products]
    actual = head.matrix_norms(condition)
    np.testing.assert_allclose(actual, norms, rtol=1e-4)
    # The embeddings of unit vectors are the rows of W_c.
    rows = head.transform(np.eye(DIM, dtype=np.float32), condition[:1])
    np.testing.assert_allclose(rows, products[0].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "low rank"])
def test_norms_of_many_conditions_are_computed_in_blocks(heads, name):
    head, condition = heads[name], make_pairs(150, u=150).condition
    dense = condition[np.arange(150)]
    for form in (
        dense,
        condition,
        dense.astype(np.float64),
        ConcatenatedMatrix([dense[:, :2], dense[:, 2:]]),
    ):
        norms = head.matrix_norms(form)
        one_by_one = [head.matrix_norms(dense[[i]])[0] for i in range(150)]
        np.testing.assert_allclose(norms, one_by_one, rtol=1e-5)
    assert head.matrix_norms(dense[:0]).shape == (0,)


def test_low_rank_norms_do_not_suffer_cancellation():
    """Factors whose product is 0 have the norm 0, not NaN from a negative rounding error."""
    head = fit("hypernet-mse", make_pairs(), **SHORT, dim=3, rank=2)
    tensors = dict(head.tensors)
    first = np.zeros_like(tensors["factor1"]).reshape(DIM, 2, DIM_C)
    first[:, 0] = np.random.default_rng(0).normal(size=(DIM, DIM_C))
    second = np.zeros_like(tensors["factor2"]).reshape(2, 3, DIM_C)
    second[1] = np.random.default_rng(1).normal(size=(3, DIM_C))
    tensors |= {"factor1": first.reshape(-1, DIM_C), "factor2": second.reshape(-1, DIM_C)}
    head.module.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    np.testing.assert_array_equal(head.matrix_norms(make_pairs().condition), np.zeros(60))


# -- learning ----------------------------------------------------------------------------------


def make_planted_pairs(n, seed, n_conditions=30):
    """Make pairs whose rating depends on a third of the features, which the condition selects."""
    rng = np.random.default_rng(seed)
    block = np.arange(n_conditions) % 3
    table = np.eye(6, dtype=np.float32)[block] + 0.1 * rng.normal(size=(n_conditions, 6))
    which = rng.integers(n_conditions, size=n)
    first, second = rng.normal(size=(2, n, 9)).astype(np.float32)
    counts = np.arange(9) // 3 == block[which][:, None]
    selected_first, selected_second = first * counts, second * counts
    norms = np.linalg.norm(selected_first, axis=1) * np.linalg.norm(selected_second, axis=1)
    rating = (1 + (selected_first * selected_second).sum(axis=1) / norms) / 2
    return PairArrays(
        first, second, rating.astype(float), SharedRows(table.astype(np.float32), which)
    )


def dev_score(head, dev):
    condition = dev.condition if head.dim_condition else None
    return spearmanr(head.similarity(dev.first, dev.second, condition), dev.rating).statistic


LEARNING = {"epochs": 15, "batch_size": 100, "dropout": 0.0, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def train_and_dev():
    """Training rows, and dev rows under conditions that the training rows do not have."""
    return make_planted_pairs(2_000, 1), make_planted_pairs(500, 2)


@pytest.fixture(scope="module")
def baseline_score(train_and_dev):
    return dev_score(fit("linear", *train_and_dev, **LEARNING, dim=9), train_and_dev[1])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "changes", "margin"),
    [
        ("hadamard", {}, 0.35),
        # Its one activation is all that lets the condition select features.
        ("concat", {"dim": 9, "epochs": 30, "learning_rate": 0.03}, 0.1),
        ("hypernet-mse", {"dim": 9, "rank": 4}, 0.2),
        (
            "hypernet-mse",
            {"dim": 9, "rank": 4, "batches": "rows", "masks": "own", "dropout": 0.1},
            0.2,
        ),
        ("hypernet-full-mse", {"dim": 9, "transform": True, "bias": True}, 0.3),
        ("hypernet-ablation", {"rank": 2}, 0.35),
    ],
)
def test_heads_learn_condition_dependent_ratings(
    train_and_dev, baseline_score, kind, changes, margin
):
    head = fit(kind, *train_and_dev, **{**LEARNING, **changes})
    assert baseline_score < 0.55
    assert dev_score(head, train_and_dev[1]) > baseline_score + margin
