"""Heads as their equations: row by row, with every matrix formed, in value and in gradient."""

import copy
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.heads import fit, recipe
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
from llmcond.heads.conditioned import Hypernet, multiply_by_condition
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
    """The sum of products, term by term."""
    return sum(row[i] * values[i] for i in range(len(values)))


def layer(weights, name, values, bias="_bias"):
    """W v + b, output by output."""
    rows = torch.stack([dot(row, values) for row in weights[name]])
    return rows + weights[name + bias] if name + bias in weights else rows


def formed(weights, name, values, height, width):
    """The matrix that a layer generates, entry by entry."""
    made = layer(weights, name, values)
    assert len(made) == height * width
    rows = [torch.stack([made[i * width + j] for j in range(width)]) for i in range(height)]
    return torch.stack(rows)


def times(h, matrix):
    """h^T W, output by output."""
    return torch.stack([dot(h, matrix[:, j]) for j in range(matrix.shape[1])])


ACTIVATIONS = {
    "none": lambda value: value,
    "relu": lambda value: torch.where(value > 0, value, 0 * value),
    "gelu": lambda value: value * 0.5 * (1 + torch.erf(value / 2**0.5)),
    "tanh": lambda value: 2 * torch.sigmoid(2 * value) - 1,
}


def linear(weights, chosen, h, c, drop):
    return drop(layer(weights, "weight", h))


def mlp(weights, chosen, h, c, drop):
    for number in range(1, chosen.depth + 1):
        h = layer(weights, f"weight{number}", h)
        if number < chosen.depth or chosen.last == "same":
            h = drop(ACTIVATIONS[chosen.activation](h))
    return h


def transformed(weights, chosen, c, drop):
    return layer(weights, "transform", drop(c, True)) if chosen.transform else c


def hadamard(weights, chosen, h, c, drop):
    return h * transformed(weights, chosen, c, drop)


def concat(weights, chosen, h, c, drop):
    c = transformed(weights, chosen, c, drop)
    joined = torch.cat([drop(h), drop(c, True)])
    whole = {"w": torch.cat([weights["sentence"], weights["condition"]], dim=1)}
    if chosen.bias:
        whole["w_bias"] = weights["bias"]
    return ACTIVATIONS[chosen.activation](layer(whole, "w", joined))


def hyper(weights, chosen, h, c, drop):
    c = transformed(weights, chosen, c, drop)
    if chosen.rank:
        first = formed(weights, "factor1", drop(c, True), len(h), chosen.rank)
        second = formed(weights, "factor2", drop(c, True), chosen.rank, chosen.dim)
        matrix = first @ second
    else:
        matrix = formed(weights, "matrix", drop(c, True), len(h), chosen.dim)
    if chosen.activation == "none":
        return times(h, matrix)
    return drop(ACTIVATIONS[chosen.activation](times(h, matrix)))


def ablation(weights, chosen, h, c, drop):
    c = transformed(weights, chosen, c, drop)
    up = layer(weights, "up", drop(c, True))
    return h * layer(weights, "down", drop(up, True))


def towers(weights, chosen, h, c, drop):
    joint, sentence = h[: -len(c)], h[-len(c) :]
    activation = ACTIVATIONS[chosen.activation]
    hidden = drop(activation(layer(weights, "weight1", joint)))
    first = drop(activation(layer(weights, "weight2", hidden)))
    half = SimpleNamespace(**{**asdict(chosen), "dim": chosen.dim // 2})
    second = hyper(weights, half, sentence, c, drop)
    return torch.cat([tower / tower.norm().clamp(min=1e-12) for tower in (first, second)])


WRITTEN_OUT = {
    "linear": linear,
    "mlp": mlp,
    "hadamard": hadamard,
    "concat": concat,
    "hypernet": hyper,
    "hypernet-ablation": ablation,
    "towers": towers,
}


class Masks:
    """Dropout that remembers what it dropped, by units of any size, so that places are told."""

    def __init__(self, seed):
        self.drawn, self._random = [], torch.Generator().manual_seed(seed)

    def dropout(self, values):
        drawn = torch.rand(values.shape, generator=self._random, dtype=values.dtype)
        self.drawn.append(torch.where(drawn < 0.3, 0, 2 * drawn))
        return values * self.drawn[-1]

    def of_row(self, row, condition, shared):
        """The dropout of one row: its own masks, or those of its condition."""
        masks = iter(self.drawn)
        return lambda values, of_condition=False: (
            values * next(masks)[condition if of_condition and shared else row]
        )


def no_masks(values, of_condition=False):
    return values


def slowly(kind, weights, chosen, batch, drop_of):
    rows = [
        WRITTEN_OUT[kind](
            weights, chosen, batch.x[i], batch.condition[int(batch.which[i])], drop_of(i)
        )
        for i in range(len(batch.x))
    ]
    return torch.stack(rows)


def random(shape, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn_module(kind, chosen, dim, dim_c, generator):
    """A head in float64 whose parameters are all of a size."""
    module = FAMILIES[kind](chosen, dim, dim_c).double().eval()
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(random(value.shape, generator))
    return module


def gradients(output, weights, given_):
    """Gradients of a sum that weighs each output differently; 0 for what it does not use."""
    factor = torch.arange(1.0, output.numel() + 1, dtype=output.dtype).view_as(output).cos()
    asked = [*weights.values(), *given_]
    total = (output * factor).sum()
    return torch.autograd.grad(total, asked, allow_unused=True, materialize_grads=True)


def assert_equal_to_the_equations(kind, chosen, batch, generator, masks=None):
    """In float64, so that nothing but the order of sums may differ."""
    dims = batch.x.shape[1], batch.condition.shape[1]
    module = drawn_module(kind, chosen, *dims, generator)
    if masks is not None:
        module.train().dropout = masks.dropout
    weights = dict(module.named_parameters())
    inputs = [batch.x.requires_grad_(), batch.condition.requires_grad_()]
    fast = module(*batch)
    shared = getattr(chosen, "masks", "shared") == "shared"

    def drop_of(row):
        return masks.of_row(row, int(batch.which[row]), shared) if masks else no_masks

    slow = slowly(kind, weights, chosen, batch, drop_of)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    for one, other in zip(
        gradients(fast, weights, inputs), gradients(slow, weights, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def spread(draw, m):
    """Which condition each row has: any, all the same, all different, or most the same."""
    kind = draw(st.sampled_from(["any", "one", "each", "most"]))
    if kind == "one":
        return [0] * m
    if kind == "each":
        return draw(st.permutations(range(m)))
    if kind == "any":
        return draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=m, max_size=m))
    return draw(st.permutations([0] * (m - m // 4) + list(range(1, 1 + m // 4))))


@st.composite
def batches(draw, most=12):
    m = draw(st.integers(1, most))
    which = torch.tensor(spread(draw, m))
    # A condition without rows may stand among them.
    count = int(which.max()) + 1 + draw(st.integers(0, 1))
    dim, dim_c = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x, c = random((m, dim), generator), random((count, dim_c), generator)
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


def fitting(kind, values, batch, generator):
    """The settings, made legal for the sizes of a batch; and the batch they can be applied to."""
    if values.get("rank") and kind == "hypernet":
        values = {**values, "rank": min(values["rank"], values["dim"], batch.x.shape[1])}
    if kind == "towers":
        # The sentence's own features are as many as the condition's.
        size = batch.condition.shape[1]
        batch = batch._replace(x=torch.cat([batch.x, random((len(batch.x), size), generator)], 1))
        values = {**values, "rank": min(values["rank"], values["dim"] // 2, size)}
    if kind == "hadamard" and not values["transform"]:
        batch = batch._replace(
            condition=random((len(batch.condition), batch.x.shape[1]), generator)
        )
    return recipe(kind, **values).settings, batch


@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@given(drawn=batches(most=6), data=st.data(), dropped=st.booleans())
def test_siamese_heads_are_their_equations(kind, drawn, data, dropped):
    batch, generator = drawn
    chosen, batch = fitting(kind, data.draw(CHOICES[kind]), batch, generator)
    masks = Masks(data.draw(st.integers(0, 99))) if dropped else None
    assert_equal_to_the_equations(kind, chosen, batch, generator, masks)


@pytest.mark.matrix
@pytest.mark.parametrize(("transform", "bias"), list(product([True, False], repeat=2)))
@pytest.mark.parametrize("kind", CONDITIONED)
@settings(deadline=None, max_examples=15)
@given(drawn=batches(), data=st.data(), masks=st.sampled_from(["shared", "own"]))
def test_heads_with_conditions_are_their_equations(kind, transform, bias, drawn, data, masks):
    batch, generator = drawn
    values = data.draw(CHOICES[kind])
    values = {**values, "transform": transform, "bias": bias, "masks": masks}
    chosen, batch = fitting(kind, values, batch, generator)
    assert_equal_to_the_equations(kind, chosen, batch, generator)


@pytest.mark.matrix
@pytest.mark.parametrize(("transform", "masks"), list(product([True, False], ["shared", "own"])))
@pytest.mark.parametrize("kind", CONDITIONED)
@settings(deadline=None, max_examples=15)
@given(drawn=batches(most=8), data=st.data(), bias=st.booleans())
def test_dropout_stands_before_every_layer_of_the_condition(
    kind, transform, masks, drawn, data, bias
):
    """The masks that the fast form drew, given to the equations: one for each factor as well."""
    batch, generator = drawn
    values = data.draw(CHOICES[kind])
    values = {**values, "transform": transform, "bias": bias, "masks": masks}
    chosen, batch = fitting(kind, values, batch, generator)
    seen = Masks(data.draw(st.integers(0, 99)))
    assert_equal_to_the_equations(kind, chosen, batch, generator, seen)
    before = {"hadamard": 0, "concat": 2, "hypernet-ablation": 2}
    behind = values.get("activation", "none") != "none"
    layers = before.get(kind, 1 + (getattr(chosen, "rank", 0) > 0) + behind)
    if kind == "towers":
        layers += 2
    assert len(seen.drawn) == transform + layers


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("masks", ["shared", "own"])
def test_hypernetwork_of_one_condition_with_very_many_rows_is_its_equation(rank, masks):
    generator = torch.Generator().manual_seed(0)
    which = torch.tensor([3] * 120 + [0, 1, 2, 4, 4])[torch.randperm(125, generator=generator)]
    batch = Batch(random((125, 3), generator), random((5, 2), generator), which)
    chosen = recipe("hypernet", dim=2, rank=rank, masks=masks).settings
    assert_equal_to_the_equations("hypernet", chosen, batch, generator)


# -- rows times the matrices of their conditions -----------------------------------------------


def plainly(x, which, factors):
    """Each row times the whole matrix of its condition, which is formed."""
    rows = []
    for i in range(len(x)):
        matrix = factors[0][int(which[i])]
        for factor in factors[1:]:
            matrix = matrix @ factor[int(which[i])]
        rows.append(matrix.T @ x[i])
    return torch.stack(rows)


def assert_by_condition_is_plain(which, count, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    which = torch.tensor(which)
    x = random((len(which), sizes[0]), generator).requires_grad_()
    factors = [random((count, *pair), generator).requires_grad_() for pair in pairwise(sizes)]
    fast, slow = multiply_by_condition(x, which, factors), plainly(x, which, factors)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for one, other in zip(
        gradients(fast, {}, [x, *factors]), gradients(slow, {}, [x, *factors]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    m=st.integers(1, 40),
    empty=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_rows_are_multiplied_by_the_matrices_of_their_conditions(data, m, empty, sizes):
    which = spread(data.draw, m)
    assert_by_condition_is_plain(which, max(which) + 1 + empty, sizes, data.draw(st.integers(0, 9)))


@settings(deadline=None, max_examples=25)
@given(many=st.integers(1, 400), single=st.integers(0, 60), place=st.integers(0, 60))
@example(many=400, single=60, place=30)
@example(many=1, single=0, place=0)
def test_a_condition_with_far_more_rows_than_others_is_cut_into_pieces(many, single, place):
    place = min(place, single)
    which = [place] * many + [one for one in range(single + 1) if one != place]
    which = np.random.default_rng(0).permutation(which).tolist()
    assert_by_condition_is_plain(which, single + 1, [2, 1, 3])


def test_padding_grows_with_the_rows_and_not_with_the_largest_condition():
    """Where one condition has 1,000 rows and 1,000 have one, few more are multiplied than exist."""
    seen = []

    def product(x, matrices):
        seen.append(x.shape)
        return torch.bmm(x, matrices)

    which = torch.cat([torch.zeros(1_000, dtype=torch.long), torch.arange(1, 1_001)])
    multiply_by_condition(torch.zeros(2_000, 2), which, [torch.zeros(1_001, 2, 1)], product)
    assert len(seen) == 1
    assert seen[0][0] * seen[0][1] <= 3 * 2_000


@pytest.mark.parametrize("m", [1, 7])
def test_matrices_are_not_copied_where_conditions_have_alike_many_rows(m):
    factor = torch.zeros(3, 2, 2)
    same = []

    def product(x, matrices):
        same.append(matrices.data_ptr() == factor.data_ptr())
        return torch.bmm(x, matrices)

    multiply_by_condition(torch.zeros(3 * m, 2), torch.arange(3 * m) % 3, [factor], product)
    assert same == [True]


def test_products_in_half_precision_are_near_and_come_back_in_the_type_of_the_weights():
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        random((50, 40), generator).bfloat16(),
        random((4, 30), generator).float(),
        torch.randint(4, (50,), generator=generator),
    )
    for kind in FAMILIES:
        values = {**SIZES[kind], **({"activation": "none"} if kind == "mlp" else {})}
        chosen = recipe(kind, **values).settings
        module = drawn_module(kind, chosen, 40, 30, generator).float()
        exact = module(*batch)
        module.in_bfloat16 = True
        near = module(*batch)
        assert near.dtype == torch.float32
        assert not torch.equal(near, exact)
        error = (near - exact).square().mean() / exact.square().mean()
        assert error.sqrt() < 0.02


# -- fitted heads ------------------------------------------------------------------------------


def paired(n=60, u=5, dim=DIM, dim_c=DIM_C, seed=0):
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
    pairs = paired()
    return {
        name: fit(kind, pairs, **SHORT, **changes) for name, (kind, changes) in VARIANTS.items()
    }


def trained_form(head, features, condition):
    """What the network gives in training, with nothing dropped and one matrix for each row."""
    module = copy.deepcopy(head.module).train()
    module.settings = replace(head.settings, dropout=0.0)
    x, c = torch.tensor(features), torch.tensor(condition)
    return module(x, c, torch.arange(len(x))).numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_is_the_network_of_training_without_dropout(heads, name):
    head, pairs = heads[name], paired(40, seed=3)
    condition = pairs.condition[np.arange(40)]
    expected = trained_form(head, pairs.first, condition)
    for form in (pairs.condition, condition, condition.astype(np.float64)):
        found = head.transform(pairs.first, form)
        assert found.dtype == np.float32
        assert found.shape == (40, head.dim_out)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_takes_one_condition_for_all_rows(heads, name):
    head, pairs = heads[name], paired(40, seed=3)
    one = pairs.condition[np.array([0])]
    expected = head.transform(pairs.first, np.repeat(one, 40, axis=0))
    for form in (
        one,
        SharedRows(one, np.zeros(1, int)),
        SharedRows(pairs.condition[:], np.zeros(1, int)),
    ):
        np.testing.assert_allclose(head.transform(pairs.first, form), expected, rtol=1e-5)
    np.testing.assert_allclose(head.transform(pairs.first[:1], one), expected[:1], rtol=1e-5)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_transform_cuts_long_inputs_into_blocks_of_equal_result(heads, monkeypatch, name, one):
    head, pairs = heads[name], paired(40, seed=3)
    condition = pairs.condition[:1] if one else pairs.condition
    whole = head.transform(pairs.first, condition)
    monkeypatch.setattr("llmcond.heads.numpy_heads._BLOCK", 7)
    np.testing.assert_allclose(head.transform(pairs.first, condition), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_does_not_depend_on_the_others(heads, name):
    head, pairs = heads[name], paired(40, seed=3)
    whole = head.transform(pairs.first, pairs.condition)
    backwards = np.arange(40)[::-1]
    turned = head.transform(pairs.first[backwards.copy()], pairs.condition[backwards])
    np.testing.assert_allclose(turned[::-1], whole, rtol=1e-4, atol=1e-6)
    alone = [head.transform(pairs.first[[i]], pairs.condition[[i]])[0] for i in range(5)]
    np.testing.assert_allclose(alone, whole[:5], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_transform_takes_features_in_any_form(heads, name):
    head, pairs = heads[name], paired(40, seed=3)
    features, condition = pairs.first.astype(np.float16), pairs.condition
    expected = head.transform(features.astype(np.float32), condition)
    cut = [features[:, :2], features[:, 2:]]
    for form in (
        features,
        np.asfortranarray(features),
        SharedRows(features, np.arange(40)),
        Difference(features, np.zeros_like(features)),
        ConcatenatedMatrix(cut),
    ):
        np.testing.assert_array_equal(head.transform(form, condition), expected)
    read_only = features.astype(np.float32)
    read_only.flags.writeable = False
    np.testing.assert_array_equal(head.transform(read_only, condition), expected)


@pytest.mark.parametrize("name", ["hadamard", "low rank"])
def test_transform_takes_features_that_stand_backwards_in_memory(heads, name):
    head, pairs = heads[name], paired(40, seed=3)
    expected = head.transform(pairs.first[::-1].copy(), pairs.condition)
    np.testing.assert_array_equal(head.transform(pairs.first[::-1], pairs.condition), expected)


@pytest.mark.parametrize("name", ["hadamard", "concat", "ablation"])
def test_transform_of_no_rows_has_no_rows(heads, name):
    head, pairs = heads[name], paired(4)
    for condition in (pairs.condition[:0], pairs.condition[:1]):
        assert head.transform(pairs.first[:0], condition).shape == (0, head.dim_out)


@pytest.mark.parametrize("name", ["full", "low rank", "towers"])
def test_hypernetwork_transforms_no_rows(heads, name):
    test_transform_of_no_rows_has_no_rows(heads, name)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("masks", ["shared", "own"])
def test_hypernetwork_makes_some_matrices_at_a_time_outside_of_training(
    monkeypatch, rank, transform, masks
):
    generator = torch.Generator().manual_seed(0)
    which = torch.cat([torch.arange(23), torch.randint(23, (40,), generator=generator)])
    batch = Batch(random((63, 4), generator), random((25, 3), generator), which)
    chosen = recipe("hypernet", dim=3, rank=rank, transform=transform, masks=masks).settings
    module = drawn_module("hypernet", chosen, 4, 3, generator)
    expected = module(*batch)
    made = []

    def counted(self, c):
        made.append(len(c))
        return factors(self, c)

    factors = Hypernet.factors
    monkeypatch.setattr(Hypernet, "factors", counted)
    monkeypatch.setattr(conditioned, "CONDITIONS_PER_BLOCK", 7)
    with torch.no_grad():
        found = module(*batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert made == [7, 7, 7, 4]


@pytest.mark.parametrize("name", VARIANTS)
def test_similarity_is_the_cosine_under_the_condition(heads, name):
    head, pairs = heads[name], paired(20, seed=3)
    one, other = (head.transform(side, pairs.condition) for side in (pairs.first, pairs.second))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    # With ReLU some embeddings are 0.
    expected = (one * other).sum(axis=1) / np.where(norms > 0, norms, 1)
    found = head.similarity(pairs.first, pairs.second, pairs.condition)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_head_with_conditions_is_loaded_with_the_same_transform(heads, tmp_path, name):
    head, pairs = heads[name], paired(20, seed=3)
    save_head(head, tmp_path / "head", {})
    loaded, description = load_head(tmp_path / "head")
    np.testing.assert_array_equal(
        loaded.transform(pairs.first, pairs.condition), head.transform(pairs.first, pairs.condition)
    )
    assert (loaded.settings, loaded.dim_in, loaded.dim_condition) == (head.settings, DIM, DIM_C)
    assert description["dim_condition"] == DIM_C
    assert description["dim_out"] == head.dim_out
    assert loaded.fit.record == head.fit.record


def test_head_without_conditions_says_that_it_takes_none(tmp_path):
    head = fit("linear", paired(), **SHORT, dim=3)
    save_head(head, tmp_path / "head", {})
    loaded, description = load_head(tmp_path / "head")
    assert loaded.dim_condition == head.dim_condition == description["dim_condition"] == 0


@pytest.mark.parametrize(
    ("name", "dim_out"), [("hadamard", DIM), ("concat", 3), ("low rank", 3), ("ablation", DIM)]
)
def test_embeddings_are_as_wide_as_the_head_makes_them(heads, name, dim_out):
    assert heads[name].dim_out == dim_out


def test_low_rank_hypernetwork_and_its_ablation_have_as_many_weights():
    """Table 6 of the paper: what differs is what they are used for."""
    changes = {**SHORT, "rank": 2, "transform": True, "bias": False}
    hyper = fit("hypernet-mse", paired(dim_c=DIM), **changes, dim=DIM)
    other = fit("hypernet-ablation", paired(dim_c=DIM), **changes)
    assert hyper.fit.record["n_parameters"] == other.fit.record["n_parameters"]


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_missing_conditions_are_refused(heads, name):
    with pytest.raises(UserError, match=rf"needs the features of each condition.*\(n, {DIM_C}\)"):
        heads[name].transform(paired().first)
    kind, changes = VARIANTS[name]
    with pytest.raises(UserError, match=r"needs the features of each condition.*condition=\.\.\."):
        fit(kind, replace(paired(), condition=None), **SHORT, **changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_conditions_and_features_of_another_size_are_refused(heads, name):
    pairs = paired(dim=DIM + 1, dim_c=DIM_C + 1)
    with pytest.raises(UserError, match=f"features have {DIM + 1} dim.* fitted on {DIM}"):
        heads[name].transform(pairs.first, pairs.condition)
    with pytest.raises(UserError, match=f"conditions have {DIM_C + 1} dim.* fitted on {DIM_C} dim"):
        heads[name].transform(pairs.first[:, :DIM], pairs.condition)


def test_conditions_that_are_not_wanted_are_refused():
    pairs = paired()
    head = fit("linear", pairs, **SHORT, dim=3)
    with pytest.raises(UserError, match=f"conditions have {DIM_C} dim.* linear head .* on none"):
        head.transform(pairs.first, pairs.condition)
    with pytest.raises(UserError, match="on none"):
        head.similarity(pairs.first, pairs.second, pairs.condition)


@pytest.mark.parametrize("n", [2, 9, 11])
def test_another_number_of_conditions_is_refused(heads, n):
    pairs = paired(20)
    with pytest.raises(UserError, match="condition"):
        heads["concat"].transform(pairs.first[:10], pairs.condition[:n])


@pytest.mark.parametrize(("dim", "rank", "most"), [(3, 4, 3), (6, 7, 6), (4, 5, 4)])
def test_a_rank_above_the_dimension_is_refused(dim, rank, most):
    with pytest.raises(
        UserError, match=rf"rank is {rank}, but a {DIM} x {dim} matrix .* most {most}"
    ):
        fit("hypernet-mse", paired(), **SHORT, dim=dim, rank=rank)
    fit("hypernet-mse", paired(), epochs=1, batch_size=60, dim=dim, rank=most)


def test_hadamard_without_a_transform_needs_equal_sizes():
    with pytest.raises(UserError, match=f"{DIM} dimensions and .* {DIM_C}; .*transform to true"):
        fit("hadamard", paired(), **SHORT, transform=False)


def test_hadamard_without_a_transform_is_the_product(tmp_path):
    pairs = paired(dim_c=DIM)
    head = fit("hadamard", pairs, **SHORT, transform=False)
    save_head(head, tmp_path / "head", {})
    condition = pairs.condition[np.arange(len(pairs))]
    for one in (head, load_head(tmp_path / "head")[0]):
        np.testing.assert_allclose(one.transform(pairs.first, condition), pairs.first * condition)


@pytest.mark.parametrize("dim", [2, 6])
def test_towers_share_any_even_size(dim):
    head = fit("towers", paired(), **SHORT, dim=dim, hidden=5, rank=1)
    assert head.dim_out == dim


def large():
    """4,096 features, as language models have."""
    first = np.zeros((4, 4_096), dtype=np.float16)
    first[0, 0] = 1
    zeros = np.broadcast_to(np.float16(0), first.shape)
    return PairArrays(first, zeros, np.array([0, 1, 0.5, 1]), zeros)


def test_a_hypernetwork_beyond_memory_is_refused_with_its_size():
    size = (
        rf"{4_096**3:,} parameters\. .* needs 1,280\.0 GiB, .* GiB are free.*its dim, or its rank"
    )
    with pytest.raises(UserError, match=size):
        fit("hypernet-full-mse", large(), dim=4_096)


def test_parameters_are_counted_with_their_gradients_and_moments(monkeypatch):
    changes = {**SHORT, "dim": 3, "rank": 2}
    n_parameters = fit("hypernet-mse", paired(), **changes).fit.record["n_parameters"]
    assert n_parameters == DIM_C * 2 * (DIM + 3)
    for free, fits in ((20 * n_parameters, True), (20 * n_parameters - 1, False)):
        monkeypatch.setattr("llmcond.heads.fit.free_memory", lambda free=free: free)
        if fits:
            fit("hypernet-mse", paired(), **changes)
        else:
            with pytest.raises(UserError, match=f"{n_parameters:,} parameters"):
                fit("hypernet-mse", paired(), **changes)


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
def test_bad_settings_are_refused(kind, changes, message):
    with pytest.raises(UserError, match=message):
        recipe(kind, **changes)


# -- what the hypernetwork makes ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "full, released", "low rank", "low rank, own masks"])
def test_factors_and_norms_are_those_of_the_matrices(heads, name):
    head = heads[name]
    condition = paired(9, u=9).condition[np.arange(9)]
    weights = {key: torch.tensor(value).double() for key, value in head.tensors.items()}
    made = []
    for h_c in torch.tensor(condition).double():
        c = transformed(weights, head.settings, h_c, no_masks)
        form = partial(formed, weights)
        made.append(
            [form("factor1", c, DIM, 2), form("factor2", c, 2, 3)]
            if head.settings.rank
            else [form("matrix", c, DIM, 3)]
        )
    factors = head.module.generated_matrices(condition)
    assert len(factors) == len(made[0])
    for place, factor in enumerate(factors):
        assert factor.dtype == np.float32
        expected = np.stack([one[place].numpy() for one in made])
        np.testing.assert_allclose(factor, expected, rtol=1e-4, atol=1e-6)
    whole = [one[0] @ one[1] if len(one) > 1 else one[0] for one in made]
    norms = [float(matrix.square().sum().sqrt()) for matrix in whole]
    found = head.matrix_norms(condition)
    np.testing.assert_allclose(found, norms, rtol=1e-4)
    # The embedding of unit vectors are the rows of W_c.
    rows = head.transform(np.eye(DIM, dtype=np.float32), condition[:1])
    np.testing.assert_allclose(rows, whole[0].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "low rank"])
def test_norms_of_many_conditions_are_computed_some_at_a_time(heads, name):
    head, condition = heads[name], paired(150, u=150).condition
    plain = condition[np.arange(150)]
    for form in (
        plain,
        condition,
        plain.astype(np.float64),
        ConcatenatedMatrix([plain[:, :2], plain[:, 2:]]),
    ):
        found = head.matrix_norms(form)
        one_by_one = [head.matrix_norms(plain[[i]])[0] for i in range(150)]
        np.testing.assert_allclose(found, one_by_one, rtol=1e-5)
    assert head.matrix_norms(plain[:0]).shape == (0,)


def test_norms_of_low_rank_do_not_cancel():
    """Factors whose product is 0 have the norm 0, never NaN of a negative rounding error."""
    head = fit("hypernet-mse", paired(), **SHORT, dim=3, rank=2)
    tensors = dict(head.tensors)
    first = np.zeros_like(tensors["factor1"]).reshape(DIM, 2, DIM_C)
    first[:, 0] = np.random.default_rng(0).normal(size=(DIM, DIM_C))
    second = np.zeros_like(tensors["factor2"]).reshape(2, 3, DIM_C)
    second[1] = np.random.default_rng(1).normal(size=(3, DIM_C))
    tensors |= {"factor1": first.reshape(-1, DIM_C), "factor2": second.reshape(-1, DIM_C)}
    head.module.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    np.testing.assert_array_equal(head.matrix_norms(paired().condition), np.zeros(60))


# -- learning ----------------------------------------------------------------------------------


def planted(n, seed, n_conditions=30):
    """Three of the conditions' directions each say which third of the features counts."""
    rng = np.random.default_rng(seed)
    block = np.arange(n_conditions) % 3
    table = np.eye(6, dtype=np.float32)[block] + 0.1 * rng.normal(size=(n_conditions, 6))
    which = rng.integers(n_conditions, size=n)
    first, second = rng.normal(size=(2, n, 9)).astype(np.float32)
    counts = np.arange(9) // 3 == block[which][:, None]
    one, other = first * counts, second * counts
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    rating = (1 + (one * other).sum(axis=1) / norms) / 2
    return PairArrays(
        first, second, rating.astype(float), SharedRows(table.astype(np.float32), which)
    )


def dev_score(head, dev):
    condition = dev.condition if head.dim_condition else None
    return spearmanr(head.similarity(dev.first, dev.second, condition), dev.rating).statistic


LEARNING = {"epochs": 15, "batch_size": 100, "dropout": 0.0, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def known():
    """Rows to fit on, and others to score, under conditions that were not fitted on."""
    return planted(2_000, 1), planted(500, 2)


@pytest.fixture(scope="module")
def without_conditions(known):
    return dev_score(fit("linear", *known, **LEARNING, dim=9), known[1])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "changes", "margin"),
    [
        ("hadamard", {}, 0.35),
        # Its one activation is all that lets the condition choose among features.
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
def test_heads_learn_what_depends_on_the_condition(
    known, without_conditions, kind, changes, margin
):
    head = fit(kind, *known, **{**LEARNING, **changes})
    assert without_conditions < 0.55
    assert dev_score(head, known[1]) > without_conditions + margin
