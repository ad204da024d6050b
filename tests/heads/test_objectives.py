"""Objectives compared with their equations, row by row, in value and in gradient."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.heads.objectives import (
    Objective,
    RatedBatch,
    adjacent_pairs,
    check_contrasts,
    contrast_groups,
)
from llmcond.heads.settings import ObjectiveSettings

pytestmark = pytest.mark.usefixtures("one_thread")


def compute_loss(first, second, rating, objective_settings, pairs=None):
    return Objective(objective_settings)(first, second, rating, RatedBatch(contrastive=pairs))


SINGLE_OBJECTIVES = {
    "mse": {"mse": 1.0},
    "acl": {"info_nce": 1.0, "info_nce_form": "acl"},
    "v1": {"info_nce": 1.0, "info_nce_form": "v1"},
    "self-negatives": {"info_nce": 1.0, "info_nce_form": "self-negatives"},
    "quadruplet": {"quadruplet": 1.0},
    "cosent": {"cosent": 1.0},
    "ranking": {"ranking": 1.0},
}
CONTRASTIVE = ["acl", "v1", "self-negatives", "quadruplet"]
TIES = ["drop", "keep", "gap"]


def settings_of(name, **changes):
    return ObjectiveSettings(**{"mse": 0.0, **SINGLE_OBJECTIVES[name], **changes})


# -- shortened embeddings ---------------------------------------------------------------------


def test_matryoshka_is_the_mean_of_sentence_transformers_losses():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CosineSimilarityLoss,
        MatryoshkaLoss,
    )

    class Lookup(torch.nn.Module):
        def forward(self, features):
            return dict(features)

        def get_embedding_dimension(self):
            return 8

    torch.manual_seed(0)
    sides = [torch.randn(5, 8, requires_grad=True) for _ in range(2)]
    rating = torch.rand(5)
    model = SentenceTransformer(modules=[Lookup()], device="cpu")
    loss = MatryoshkaLoss(model, CosineSimilarityLoss(model), [8, 4, 3])
    expected = loss([{"sentence_embedding": side} for side in sides], rating) / 3
    computed = compute_loss(*sides, rating, ObjectiveSettings(matryoshka=(3, 4)))
    torch.testing.assert_close(computed, expected)
    gradients = [torch.autograd.grad(value, sides) for value in (computed, expected)]
    torch.testing.assert_close(*gradients)


def test_matryoshka_counts_full_size_once():
    torch.manual_seed(0)
    sides, rating = [torch.randn(5, 8) for _ in range(2)], torch.rand(5)
    losses = [
        compute_loss(*sides, rating, ObjectiveSettings(matryoshka=dims)) for dims in [(4,), (8, 4)]
    ]
    assert losses[0] == losses[1]


def test_matryoshka_size_above_that_of_embeddings_is_rejected():
    sides, rating = [torch.randn(5, 8) for _ in range(2)], torch.rand(5)
    with pytest.raises(UserError, match="matryoshka names 9 dimensions, but the embeddings have 8"):
        compute_loss(*sides, rating, ObjectiveSettings(matryoshka=(9, 4)))


# -- the equations, row by row ---------------------------------------------------------------


def phi(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (sum(x * x for x in a).sqrt() * sum(y * y for y in b).sqrt())


def loss_by_equations(first, second, rating, objective_settings, pairs):
    n = len(rating)
    cosine = [phi(first[i], second[i]) for i in range(n)]
    loss = objective_settings.mse * sum((cosine[i] - rating[i]) ** 2 for i in range(n)) / n
    ordered = [(i, j) for i in range(n) for j in range(n) if rating[i] > rating[j]]
    terms = [(objective_settings.scale * (cosine[j] - cosine[i])).exp() for i, j in ordered]
    loss = loss + objective_settings.cosent * (first.sum() * 0 + 1 + sum(terms)).log()
    if ordered:
        gaps = [
            rating[i] - rating[j] if objective_settings.ties == "gap" else 1.0 for i, j in ordered
        ]
        mean_gap = sum(gaps) / len(gaps)
        weighted = [gap / mean_gap * (1 + t).log() for gap, t in zip(gaps, terms, strict=True)]
        loss = loss + objective_settings.ranking * sum(weighted) / len(ordered)
    return loss + contrasts_by_equations(first, second, rating, objective_settings, pairs)


def contrasts_by_equations(first, second, rating, objective_settings, pairs):
    """Sum the equations over pairs, each of which is ordered so that the higher rating is first."""
    total, weights = 0.0, []
    for a, b in pairs:
        gap = abs(rating[a] - rating[b])
        if gap == 0 and objective_settings.ties == "drop":
            continue
        h, low = (b, a) if rating[b] > rating[a] else (a, b)
        weights.append(gap if objective_settings.ties == "gap" else 1.0)
        p, n = phi(first[h], second[h]), phi(first[low], second[low])
        pair_loss = objective_settings.info_nce * INFO_NCE[objective_settings.info_nce_form](
            first, second, h, low, p, n, objective_settings.temperature
        )
        distance = objective_settings.margin + (1 - p) - (1 - n)
        pair_loss = pair_loss + objective_settings.quadruplet * (
            distance if distance > 0 else 0 * distance
        )
        total = total + weights[-1] * pair_loss
    return total / sum(weights) if sum(weights) else 0.0 * first.sum()


def acl(first, second, h, low, p, n, t):
    return -((p / t).exp() / ((p / t).exp() + (n / t).exp())).log()


def v1(first, second, h, low, p, n, t):
    across = (phi(first[h], second[low]) / t).exp() + (phi(first[low], second[h]) / t).exp()
    return -((p / t).exp() / across).log()


def self_negatives(first, second, h, low, p, n, t):
    self1, self2 = 0.5 * phi(first[h], first[low]), 0.5 * phi(second[h], second[low])
    logits = torch.stack([p, n, self1, self2])[None] / t
    return torch.nn.functional.cross_entropy(logits, torch.tensor([0]))


INFO_NCE = {"acl": acl, "v1": v1, "self-negatives": self_negatives}


# -- batches ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    first: torch.Tensor
    second: torch.Tensor
    rating: torch.Tensor
    pairs: torch.Tensor

    def loss(self, objective_settings, function=compute_loss):
        return function(self.first, self.second, self.rating, objective_settings, self.pairs)

    def gradients(self, loss):
        return torch.autograd.grad(loss, [self.first, self.second])

    def to(self, dtype):
        first, second = (
            side.detach().to(dtype).requires_grad_() for side in (self.first, self.second)
        )
        return replace(self, first=first, second=second, rating=self.rating.to(dtype))


def make_leaf(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64).requires_grad_()


def make_batch(ratings, n_pairs, dim, seed):
    """Make a batch of contrastive pairs anywhere, in either order of rating, and single rows."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, len(ratings), dim))
    pairs = torch.from_numpy(rng.permutation(len(ratings))[: 2 * n_pairs].reshape(-1, 2))
    rating = torch.tensor(ratings, dtype=torch.float64)
    return Batch(make_leaf(first), make_leaf(second), rating, pairs)


@st.composite
def batches(draw):
    # There are few distinct ratings, so that ties are frequent, often in the whole batch.
    ratings = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7))
    n_pairs = draw(st.integers(0, len(ratings) // 2))
    return make_batch(ratings, n_pairs, draw(st.integers(1, 4)), draw(st.integers(0, 2**32)))


#: Four pairs, of which the second is tied, and a single row.
BATCH = make_batch([1.0, 0.25, 0.5, 0.5, 0.0, 1.0, 0.25, 0.5, 0.75], n_pairs=0, dim=3, seed=5)
BATCH = replace(BATCH, pairs=torch.tensor([[0, 1], [2, 3], [4, 5], [7, 6]]))


def assert_equals_equations(batch, objective_settings):
    loss, expected = (
        batch.loss(objective_settings),
        batch.loss(objective_settings, loss_by_equations),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    gradients = batch.gradients(loss)
    torch.testing.assert_close(gradients, batch.gradients(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_each_objective_equals_its_equation(name, ties):
    for objective_settings in (
        settings_of(name, ties=ties),
        settings_of(name, ties=ties, temperature=0.2, scale=3.0),
    ):
        assert_equals_equations(BATCH, objective_settings)
    assert any(
        gradient.abs().max() > 1e-3 for gradient in BATCH.gradients(BATCH.loss(objective_settings))
    )


WEIGHT = st.sampled_from([0.0, 0.5, 1.0, 3.0])
SETTINGS = st.builds(
    ObjectiveSettings,
    mse=st.sampled_from([0.25, 1.0]),
    info_nce=WEIGHT,
    info_nce_form=st.sampled_from(sorted(INFO_NCE)),
    quadruplet=WEIGHT,
    cosent=WEIGHT,
    ranking=WEIGHT,
    temperature=st.sampled_from([0.1, 1.5]),
    margin=st.sampled_from([0.3, 1.1]),
    scale=st.sampled_from([0.5, 20.0]),
    ties=st.sampled_from(TIES),
)


@settings(deadline=None, max_examples=150)
@given(batches(), SETTINGS)
def test_sum_of_objectives_equals_sum_of_equations(batch, objective_settings):
    assert_equals_equations(batch, objective_settings)


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_gradients_match_finite_differences(name):
    objective_settings = settings_of(name, margin=0.7)

    def loss(first, second):
        return compute_loss(first, second, BATCH.rating, objective_settings, BATCH.pairs)

    assert torch.autograd.gradcheck(loss, (BATCH.first, BATCH.second))


def vectors_at_angles(*pairs):
    """Return two-dimensional vectors with these angles, one row per pair of first and second."""
    first, second = (
        make_leaf([[math.cos(angle), math.sin(angle)] for angle in side])
        for side in zip(*pairs, strict=True)
    )
    return first, second


# The row with the higher rating has the angles 0 and 0.6, and the other row 0.3 and 1.5.
P, N = math.cos(0.6), math.cos(1.2)
EXPECTED_LOSSES = {
    "mse": ((P - 0.75) ** 2 + (N - 0.25) ** 2) / 2,
    "acl": math.log(1 + math.exp((N - P) / 1.5)),
    "v1": math.log(math.exp(math.cos(1.5) / 1.5) + math.exp(math.cos(0.3) / 1.5)) - P / 1.5,
    "self-negatives": math.log(
        math.exp(P / 1.5)
        + math.exp(N / 1.5)
        + math.exp(math.cos(0.3) / 3)
        + math.exp(math.cos(0.9) / 3)
    )
    - P / 1.5,
    "quadruplet": 1 - P + N,
    "cosent": math.log(1 + math.exp(20 * (N - P))),
    "ranking": math.log(1 + math.exp(20 * (N - P))),
}


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
@pytest.mark.parametrize("higher", [0, 1])
def test_contrastive_pair_has_loss_computed_by_hand(name, higher):
    rows = [(0.0, 0.6), (0.3, 1.5)]
    first, second = vectors_at_angles(*(rows if higher == 0 else reversed(rows)))
    rating = torch.tensor([0.75, 0.25] if higher == 0 else [0.25, 0.75], dtype=torch.float64)
    loss = compute_loss(first, second, rating, settings_of(name), torch.tensor([[0, 1]]))
    assert loss.item() == pytest.approx(EXPECTED_LOSSES[name], rel=1e-12)


def test_default_is_mean_squared_error_of_cosine():
    batch = BATCH.to(torch.float32)
    cosine = torch.cosine_similarity(batch.first, batch.second)
    expected = (cosine - batch.rating).square().mean()
    loss = compute_loss(batch.first, batch.second, batch.rating, ObjectiveSettings())
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, batch.gradients(loss), batch.gradients(expected)))


# -- ties --------------------------------------------------------------------------------------

UNTIED_PAIRS = torch.tensor([[0, 1], [4, 5], [7, 6]])


def contrast_loss(objective_settings, pairs):
    return replace(BATCH, pairs=pairs).loss(objective_settings).item()


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_tied_contrastive_pairs_are_dropped(name):
    objective_settings = settings_of(name, ties="drop")
    assert contrast_loss(objective_settings, BATCH.pairs) == contrast_loss(
        objective_settings, UNTIED_PAIRS
    )
    assert contrast_loss(settings_of(name, ties="keep"), BATCH.pairs) != contrast_loss(
        objective_settings, UNTIED_PAIRS
    )


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_first_row_of_tie_counts_as_higher(name):
    objective_settings = settings_of(name, ties="keep")
    tied = replace(BATCH, pairs=BATCH.pairs[1:2])
    lowered = replace(tied, rating=tied.rating - torch.eye(9, dtype=torch.float64)[3] / 10)
    assert tied.loss(objective_settings) == lowered.loss(objective_settings)
    flipped = replace(tied, pairs=tied.pairs.flip(1))
    assert flipped.loss(objective_settings) != tied.loss(objective_settings)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_contrastive_pairs_are_weighted_by_rating_gap(name):
    losses = [contrast_loss(settings_of(name), pair[None]) for pair in UNTIED_PAIRS]
    gaps = [0.75, 1.0, 0.25]
    expected = np.average(losses, weights=gaps)
    assert contrast_loss(settings_of(name, ties="gap"), UNTIED_PAIRS) == pytest.approx(expected)
    assert contrast_loss(settings_of(name, ties="gap"), BATCH.pairs) == pytest.approx(expected)
    assert expected != pytest.approx(np.mean(losses), rel=1e-3)


def test_ranked_rows_are_weighted_by_rating_gap():
    first, second = vectors_at_angles((0, 0.3), (0, 0.6), (0, 0.9))
    rating = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    objective_settings = settings_of("ranking", scale=2.0, ties="gap")
    excess = [math.cos(low) - math.cos(high) for low, high in [(0.3, 0.6), (0.6, 0.9), (0.3, 0.9)]]
    losses = [math.log(1 + math.exp(2 * value)) for value in excess]
    expected = np.average(losses, weights=[0.25, 0.75, 1.0])
    assert compute_loss(first, second, rating, objective_settings).item() == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from(CONTRASTIVE), st.sampled_from(["drop", "gap"]), st.data())
def test_order_of_pairs_and_their_rows_does_not_matter(batch, name, ties, data):
    objective_settings = settings_of(name, ties=ties)
    flipped = [pair.flip(0) if data.draw(st.booleans()) else pair for pair in batch.pairs]
    order = data.draw(st.permutations(flipped))
    other = replace(batch, pairs=torch.stack(order) if order else batch.pairs)
    torch.testing.assert_close(other.loss(objective_settings), batch.loss(objective_settings))


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_order_of_batch_does_not_matter(name):
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    first, second, rating = (x[order] for x in (BATCH.first, BATCH.second, BATCH.rating))
    permuted = Batch(first, second, rating, order.argsort()[BATCH.pairs])
    objective_settings = settings_of(name, ties="keep")
    torch.testing.assert_close(permuted.loss(objective_settings), BATCH.loss(objective_settings))


# -- numerical edge cases ----------------------------------------------------------------------


def assert_zero_loss_and_gradients(batch, objective_settings):
    loss = batch.loss(objective_settings)
    assert loss == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in batch.gradients(loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", ["drop", "gap"])
@pytest.mark.parametrize("name", [name for name in SINGLE_OBJECTIVES if name != "mse"])
def test_equal_ratings_give_zero_loss_and_gradients(name, ties, dtype):
    batch = replace(BATCH, rating=torch.full_like(BATCH.rating, 0.5)).to(dtype)
    assert_zero_loss_and_gradients(batch, settings_of(name, ties=ties))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_batch_without_pairs_gives_zero_loss_and_gradients(name, ties):
    batch = replace(BATCH, pairs=torch.empty((0, 2), dtype=torch.int64))
    assert_zero_loss_and_gradients(batch, settings_of(name, ties=ties))


# Losses for p = -1 and n = 1, then for p = 1 and n = -1, with equal first sentences.
EXTREME = [
    ("acl", {"temperature": 1e-6}, 2e6, 0.0),
    ("v1", {"temperature": 1e-6}, 2e6, 0.0),
    ("self-negatives", {"temperature": 1e-6}, 2e6, 0.0),
    ("quadruplet", {"margin": 1e6}, 1e6 + 2, 1e6 - 2),
    ("cosent", {"scale": 1e6}, 2e6, 0.0),
    ("ranking", {"scale": 1e6}, 2e6, 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "changes", "worst", "best"), EXTREME)
def test_extreme_settings_do_not_overflow(name, changes, worst, best, dtype):
    up, down = [0.6, 0.8], [-0.6, -0.8]
    rating, pairs = torch.tensor([1.0, 0.0]), torch.tensor([[0, 1]])
    for second, expected in (([down, up], worst), ([up, down], best)):
        batch = Batch(make_leaf([up, up]), make_leaf(second), rating, pairs).to(dtype)
        loss = batch.loss(settings_of(name, **changes))
        assert loss.dtype == dtype
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-3)
        assert all(g.isfinite().all() for g in batch.gradients(loss))


#: Rows whose first sentence is the zero vector; in the last row the second sentence is, too.
ZERO_ROWS = torch.tensor([0, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_zero_vector_has_cosine_zero_and_finite_gradients(name, dtype):
    first, second = BATCH.first.detach().clone(), BATCH.second.detach().clone()
    orthogonal = torch.linalg.cross(second, torch.ones_like(second))
    orthogonal_batch = replace(
        BATCH, first=first.index_copy(0, ZERO_ROWS, orthogonal[ZERO_ROWS]), second=second
    )
    first[ZERO_ROWS], second[ZERO_ROWS[1]] = 0, 0
    batch = replace(BATCH, first=first, second=second).to(dtype)
    loss = batch.loss(settings_of(name))
    assert all(g.isfinite().all() for g in batch.gradients(loss))
    if name not in ("v1", "self-negatives"):  # the others use no cosines across rows
        assert loss.item() == pytest.approx(
            orthogonal_batch.loss(settings_of(name)).item(), rel=1e-5
        )


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_float32_is_close_to_float64(name):
    single = BATCH.to(torch.float32)
    loss, expected = single.loss(settings_of(name)), BATCH.loss(settings_of(name))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_objectives_create_tensors_on_input_device(name):
    first, second, rating, pairs = (
        value.detach().to("meta")
        for value in (BATCH.first, BATCH.second, BATCH.rating, BATCH.pairs)
    )
    assert compute_loss(first, second, rating, settings_of(name), pairs).device.type == "meta"


# -- pairs --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=24))
def test_rows_of_sentence_pair_are_contrasted_in_twos(pair):
    group = contrast_groups(np.array(pair, dtype=np.int64))
    waiting, expected = {}, []
    for index, name in enumerate(pair):
        expected.append(waiting.pop(name, index))
        if expected[-1] == index:
            waiting[name] = index
    assert group.tolist() == expected


def test_repeated_sentence_pair_gives_another_contrastive_pair():
    pair = np.array([7, 7, 3, 5, 5, 7, 7, 5, 5])
    group = contrast_groups(pair)
    assert group.tolist() == [0, 0, 2, 3, 3, 5, 5, 7, 7]
    assert adjacent_pairs(group).tolist() == [[0, 1], [3, 4], [5, 6], [7, 8]]


def test_ties_are_counted():
    pair, rating = np.array([0, 1, 2, 1, 0, 2, 3]), np.array([0.5, 1.0, 0.25, 0.5, 0.5, 0.25, 1])
    counted = check_contrasts(pair, rating, settings_of("acl"))
    assert counted == {"n_contrastive_pairs": 3, "n_tied_pairs": 2}
    assert check_contrasts(None, rating, settings_of("mse")) == {}


def test_contrasts_without_pairs_raise_error():
    first, second, rating = BATCH.first, BATCH.second, BATCH.rating
    for name in SINGLE_OBJECTIVES:
        assert settings_of(name).contrasts == (name in CONTRASTIVE)
        if name in CONTRASTIVE:
            with pytest.raises(ValueError, match="contrastive pairs are missing"):
                compute_loss(first, second, rating, settings_of(name))
        else:
            loss = compute_loss(first, second, rating, settings_of(name))
            assert torch.equal(loss, BATCH.loss(settings_of(name)))


# -- settings ----------------------------------------------------------------------------------

NAMES = ["mse", "info_nce", "quadruplet", "cosent", "ranking"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({name: -0.5}, f"'{name}' is -0.5: .*at least 0") for name in [*NAMES, "margin"]),
        *(
            ({name: 2e6}, f"'{name}' is 2000000.0: .*at most 1,000,000")
            for name in [*NAMES, "margin"]
        ),
        ({"temperature": 0.0}, "'temperature' is 0.0: .*at least 1e-06"),
        ({"scale": 0.0}, "'scale' is 0.0: .*at least 1e-06"),
        ({"scale": -1.0}, "'scale' is -1.0:"),
        ({"temperature": 1e7}, "'temperature' is 10000000.0: .*at most 1,000,000"),
        ({"mse": 0.0}, "mse, cosent, ranking, info_nce, quadruplet are all 0.*set at least one"),
        ({"info_nce_form": "v2"}, "'info_nce_form' is 'v2': .*'acl', 'v1' or 'self-negatives'"),
        ({"ties": "skip"}, "'ties' is 'skip': .*'drop', 'keep' or 'gap'"),
        ({"tie": "drop"}, "unknown key 'tie'"),
        ({"mse": "1"}, "'mse' is '1'"),
        ({"mse": float("inf")}, "'mse' is"),
    ],
)
def test_invalid_settings_are_rejected(values, message):
    with pytest.raises(UserError, match=f"^test: .*{message}"):
        build(ObjectiveSettings, values, "test")


@pytest.mark.parametrize("name", [*NAMES, "margin", "temperature", "scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinite_settings_are_rejected(name, value):
    with pytest.raises(UserError, match=f"{name}. is "):
        build(ObjectiveSettings, {name: value}, "test")


@pytest.mark.parametrize("name", NAMES)
def test_any_objective_can_be_used_alone(name):
    assert getattr(build(ObjectiveSettings, {"mse": 0.0, name: 0.5}, "test"), name) == 0.5


def test_settings_are_flat_keys_of_recipe_with_other_settings():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class ExtendedSettings(ObjectiveSettings):
        dim: int

    extended = build(ExtendedSettings, {"dim": 3, "info_nce": 1, "info_nce_form": "v1"}, "test")
    assert (extended.dim, extended.mse, extended.info_nce, extended.contrasts) == (
        3,
        1.0,
        1.0,
        True,
    )
