"""Objectives: equal to their equations written out row by row, in value and in gradient."""

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


def objective(first, second, rating, chosen, pairs=None):
    return Objective(chosen)(first, second, rating, RatedBatch(contrastive=pairs))


ONE_BY_ONE = {
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


def only(name, **changes):
    return ObjectiveSettings(**{"mse": 0.0, **ONE_BY_ONE[name], **changes})


# -- the equations, row by row ---------------------------------------------------------------


def phi(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (sum(x * x for x in a).sqrt() * sum(y * y for y in b).sqrt())


def written_out(first, second, rating, chosen, pairs):
    n = len(rating)
    cosine = [phi(first[i], second[i]) for i in range(n)]
    loss = chosen.mse * sum((cosine[i] - rating[i]) ** 2 for i in range(n)) / n
    ordered = [(i, j) for i in range(n) for j in range(n) if rating[i] > rating[j]]
    terms = [(chosen.scale * (cosine[j] - cosine[i])).exp() for i, j in ordered]
    loss = loss + chosen.cosent * (first.sum() * 0 + 1 + sum(terms)).log()
    if ordered:
        gaps = [rating[i] - rating[j] if chosen.ties == "gap" else 1.0 for i, j in ordered]
        mean_gap = sum(gaps) / len(gaps)
        weighted = [gap / mean_gap * (1 + t).log() for gap, t in zip(gaps, terms, strict=True)]
        loss = loss + chosen.ranking * sum(weighted) / len(ordered)
    return loss + contrasts_written_out(first, second, rating, chosen, pairs)


def contrasts_written_out(first, second, rating, chosen, pairs):
    """Equations over pairs, each of them first turned so that the higher rating comes first."""
    total, weights = 0.0, []
    for a, b in pairs:
        gap = abs(rating[a] - rating[b])
        if gap == 0 and chosen.ties == "drop":
            continue
        h, low = (b, a) if rating[b] > rating[a] else (a, b)
        weights.append(gap if chosen.ties == "gap" else 1.0)
        p, n = phi(first[h], second[h]), phi(first[low], second[low])
        one = chosen.info_nce * INFO_NCE[chosen.info_nce_form](
            first, second, h, low, p, n, chosen.temperature
        )
        distance = chosen.margin + (1 - p) - (1 - n)
        one = one + chosen.quadruplet * (distance if distance > 0 else 0 * distance)
        total = total + weights[-1] * one
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

    def loss(self, chosen, function=objective):
        return function(self.first, self.second, self.rating, chosen, self.pairs)

    def gradients(self, loss):
        return torch.autograd.grad(loss, [self.first, self.second])

    def to(self, dtype):
        first, second = (
            side.detach().to(dtype).requires_grad_() for side in (self.first, self.second)
        )
        return replace(self, first=first, second=second, rating=self.rating.to(dtype))


def leaves(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64).requires_grad_()


def make_batch(ratings, n_pairs, dim, seed):
    """Twos anywhere in the batch, in either order of rating, and single rows."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, len(ratings), dim))
    pairs = torch.from_numpy(rng.permutation(len(ratings))[: 2 * n_pairs].reshape(-1, 2))
    rating = torch.tensor(ratings, dtype=torch.float64)
    return Batch(leaves(first), leaves(second), rating, pairs)


@st.composite
def batches(draw):
    # Few distinct ratings, so that ties are frequent; often none differ.
    ratings = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7))
    n_pairs = draw(st.integers(0, len(ratings) // 2))
    return make_batch(ratings, n_pairs, draw(st.integers(1, 4)), draw(st.integers(0, 2**32)))


#: Four pairs, of which the second is tied, and a single row.
BATCH = make_batch([1.0, 0.25, 0.5, 0.5, 0.0, 1.0, 0.25, 0.5, 0.75], n_pairs=0, dim=3, seed=5)
BATCH = replace(BATCH, pairs=torch.tensor([[0, 1], [2, 3], [4, 5], [7, 6]]))


def assert_equals_equations(batch, chosen):
    loss, expected = batch.loss(chosen), batch.loss(chosen, written_out)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    gradients = batch.gradients(loss)
    torch.testing.assert_close(gradients, batch.gradients(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_objective_is_its_equation(name, ties):
    for chosen in (only(name, ties=ties), only(name, ties=ties, temperature=0.2, scale=3.0)):
        assert_equals_equations(BATCH, chosen)
    assert any(gradient.abs().max() > 1e-3 for gradient in BATCH.gradients(BATCH.loss(chosen)))


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
def test_a_sum_of_objectives_is_its_equations(batch, chosen):
    assert_equals_equations(batch, chosen)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_gradients_are_those_of_finite_differences(name):
    chosen = only(name, margin=0.7)

    def loss(first, second):
        return objective(first, second, BATCH.rating, chosen, BATCH.pairs)

    assert torch.autograd.gradcheck(loss, (BATCH.first, BATCH.second))


def angles(*pairs):
    """Return plane vectors of the given angles, one row a pair of first and second."""
    first, second = (
        leaves([[math.cos(angle), math.sin(angle)] for angle in side])
        for side in zip(*pairs, strict=True)
    )
    return first, second


# First at 0 and second at 0.6 under the higher rating, 0.3 and 1.5 under the lower.
P, N = math.cos(0.6), math.cos(1.2)
BY_HAND = {
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


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("higher", [0, 1])
def test_one_contrastive_pair_by_hand(name, higher):
    rows = [(0.0, 0.6), (0.3, 1.5)]
    first, second = angles(*(rows if higher == 0 else reversed(rows)))
    rating = torch.tensor([0.75, 0.25] if higher == 0 else [0.25, 0.75], dtype=torch.float64)
    loss = objective(first, second, rating, only(name), torch.tensor([[0, 1]]))
    assert loss.item() == pytest.approx(BY_HAND[name], rel=1e-12)


def test_the_default_is_the_mean_squared_error_of_the_cosine():
    batch = BATCH.to(torch.float32)
    cosine = torch.cosine_similarity(batch.first, batch.second)
    plain = (cosine - batch.rating).square().mean()
    loss = objective(batch.first, batch.second, batch.rating, ObjectiveSettings())
    assert torch.equal(loss, plain)
    assert all(map(torch.equal, batch.gradients(loss), batch.gradients(plain)))


# -- ties --------------------------------------------------------------------------------------

APART = torch.tensor([[0, 1], [4, 5], [7, 6]])


def contrast(chosen, pairs):
    return replace(BATCH, pairs=pairs).loss(chosen).item()


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_tied_contrastive_pairs_are_dropped(name):
    chosen = only(name, ties="drop")
    assert contrast(chosen, BATCH.pairs) == contrast(chosen, APART)
    assert contrast(only(name, ties="keep"), BATCH.pairs) != contrast(chosen, APART)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_the_first_row_of_a_kept_tie_counts_as_the_higher(name):
    chosen = only(name, ties="keep")
    tied = replace(BATCH, pairs=BATCH.pairs[1:2])
    lowered = replace(tied, rating=tied.rating - torch.eye(9, dtype=torch.float64)[3] / 10)
    assert tied.loss(chosen) == lowered.loss(chosen)
    turned = replace(tied, pairs=tied.pairs.flip(1))
    assert turned.loss(chosen) != tied.loss(chosen)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_contrastive_pairs_weigh_as_much_as_their_ratings_differ(name):
    alone = [contrast(only(name), two[None]) for two in APART]
    gaps = [0.75, 1.0, 0.25]
    expected = np.average(alone, weights=gaps)
    assert contrast(only(name, ties="gap"), APART) == pytest.approx(expected)
    assert contrast(only(name, ties="gap"), BATCH.pairs) == pytest.approx(expected)
    assert expected != pytest.approx(np.mean(alone), rel=1e-3)


def test_ranked_rows_weigh_as_much_as_their_ratings_differ():
    first, second = angles((0, 0.3), (0, 0.6), (0, 0.9))
    rating = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    chosen = only("ranking", scale=2.0, ties="gap")
    excess = [math.cos(low) - math.cos(high) for low, high in [(0.3, 0.6), (0.6, 0.9), (0.3, 0.9)]]
    losses = [math.log(1 + math.exp(2 * value)) for value in excess]
    expected = np.average(losses, weights=[0.25, 0.75, 1.0])
    assert objective(first, second, rating, chosen).item() == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from(CONTRASTIVE), st.sampled_from(["drop", "gap"]), st.data())
def test_neither_the_order_of_contrastive_pairs_nor_that_of_their_rows_matters(
    batch, name, ties, data
):
    chosen = only(name, ties=ties)
    turned = [two.flip(0) if data.draw(st.booleans()) else two for two in batch.pairs]
    order = data.draw(st.permutations(turned))
    other = replace(batch, pairs=torch.stack(order) if order else batch.pairs)
    torch.testing.assert_close(other.loss(chosen), batch.loss(chosen))


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_order_of_the_batch_does_not_matter(name):
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    first, second, rating = (x[order] for x in (BATCH.first, BATCH.second, BATCH.rating))
    moved = Batch(first, second, rating, order.argsort()[BATCH.pairs])
    chosen = only(name, ties="keep")
    torch.testing.assert_close(moved.loss(chosen), BATCH.loss(chosen))


# -- numbers that are hard ---------------------------------------------------------------------


def assert_nothing_to_minimise(batch, chosen):
    loss = batch.loss(chosen)
    assert loss == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in batch.gradients(loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", ["drop", "gap"])
@pytest.mark.parametrize("name", [name for name in ONE_BY_ONE if name != "mse"])
def test_equal_ratings_give_a_loss_and_gradients_of_zero(name, ties, dtype):
    batch = replace(BATCH, rating=torch.full_like(BATCH.rating, 0.5)).to(dtype)
    assert_nothing_to_minimise(batch, only(name, ties=ties))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_a_batch_without_contrastive_pairs_gives_a_loss_and_gradients_of_zero(name, ties):
    batch = replace(BATCH, pairs=torch.empty((0, 2), dtype=torch.int64))
    assert_nothing_to_minimise(batch, only(name, ties=ties))


# The loss where p is -1 and n is 1, then where p is 1 and n is -1, the first sentences being alike.
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
def test_extreme_settings_overflow_nowhere(name, changes, worst, best, dtype):
    up, down = [0.6, 0.8], [-0.6, -0.8]
    rating, pairs = torch.tensor([1.0, 0.0]), torch.tensor([[0, 1]])
    for second, expected in (([down, up], worst), ([up, down], best)):
        batch = Batch(leaves([up, up]), leaves(second), rating, pairs).to(dtype)
        loss = batch.loss(only(name, **changes))
        assert loss.dtype == dtype
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-3)
        assert all(g.isfinite().all() for g in batch.gradients(loss))


#: Rows whose first sentence is the zero vector; the last has a second one like it.
ZEROED = torch.tensor([0, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_zero_vector_has_cosine_zero_and_finite_gradients(name, dtype):
    first, second = BATCH.first.detach().clone(), BATCH.second.detach().clone()
    upright = torch.linalg.cross(second, torch.ones_like(second))
    apart = replace(BATCH, first=first.index_copy(0, ZEROED, upright[ZEROED]), second=second)
    first[ZEROED], second[ZEROED[1]] = 0, 0
    batch = replace(BATCH, first=first, second=second).to(dtype)
    loss = batch.loss(only(name))
    assert all(g.isfinite().all() for g in batch.gradients(loss))
    if name not in ("v1", "self-negatives"):  # these see no cosines but those of rows
        assert loss.item() == pytest.approx(apart.loss(only(name)).item(), rel=1e-5)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_float32_is_close_to_float64(name):
    single = BATCH.to(torch.float32)
    loss, expected = single.loss(only(name)), BATCH.loss(only(name))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_no_objective_makes_tensors_on_a_device_of_its_own(name):
    first, second, rating, pairs = (
        value.detach().to("meta")
        for value in (BATCH.first, BATCH.second, BATCH.rating, BATCH.pairs)
    )
    assert objective(first, second, rating, only(name), pairs).device.type == "meta"


# -- pairs --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=24))
def test_rows_of_a_sentence_pair_are_contrasted_two_by_two_wherever_they_stand(pair):
    group = contrast_groups(np.array(pair, dtype=np.int64))
    waiting, expected = {}, []
    for place, name in enumerate(pair):
        expected.append(waiting.pop(name, place))
        if expected[-1] == place:
            waiting[name] = place
    assert group.tolist() == expected


def test_a_pair_that_occurs_again_elsewhere_gives_another_contrastive_pair():
    pair = np.array([7, 7, 3, 5, 5, 7, 7, 5, 5])
    group = contrast_groups(pair)
    assert group.tolist() == [0, 0, 2, 3, 3, 5, 5, 7, 7]
    assert adjacent_pairs(group).tolist() == [[0, 1], [3, 4], [5, 6], [7, 8]]


def test_ties_are_counted():
    pair, rating = np.array([0, 1, 2, 1, 0, 2, 3]), np.array([0.5, 1.0, 0.25, 0.5, 0.5, 0.25, 1])
    counted = check_contrasts(pair, rating, only("acl"))
    assert counted == {"n_contrastive_pairs": 3, "n_tied_pairs": 2}
    assert check_contrasts(None, rating, only("mse")) == {}


def test_contrasts_without_contrastive_pairs_are_an_error():
    first, second, rating = BATCH.first, BATCH.second, BATCH.rating
    for name in ONE_BY_ONE:
        assert only(name).contrasts == (name in CONTRASTIVE)
        if name in CONTRASTIVE:
            with pytest.raises(ValueError, match="contrastive pairs are missing"):
                objective(first, second, rating, only(name))
        else:
            alone = objective(first, second, rating, only(name))
            assert torch.equal(alone, BATCH.loss(only(name)))


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
def test_bad_settings_are_refused(values, message):
    with pytest.raises(UserError, match=f"^test: .*{message}"):
        build(ObjectiveSettings, values, "test")


@pytest.mark.parametrize("name", [*NAMES, "margin", "temperature", "scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_settings_that_are_no_numbers_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name}. is "):
        build(ObjectiveSettings, {name: value}, "test")


@pytest.mark.parametrize("name", NAMES)
def test_any_objective_can_be_the_only_one(name):
    assert getattr(build(ObjectiveSettings, {"mse": 0.0, name: 0.5}, "test"), name) == 0.5


def test_settings_are_flat_keys_of_a_recipe_that_has_others():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class More(ObjectiveSettings):
        dim: int

    more = build(More, {"dim": 3, "info_nce": 1, "info_nce_form": "v1"}, "test")
    assert (more.dim, more.mse, more.info_nce, more.contrasts) == (3, 1.0, 1.0, True)
