"""Objectives compared with their equations, row by row, in value and in gradient."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.base.errors import UserError
from llmcond.base.records import build
from llmcond.heads.module import Objective, RatedBatch, contrast_groups
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


def make_leaf(values, dtype=torch.float64):
    return torch.tensor(np.asarray(values), dtype=dtype).requires_grad_()


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
    loss = batch.loss(objective_settings)
    expected = batch.loss(objective_settings, loss_by_equations)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    gradients = batch.gradients(loss)
    torch.testing.assert_close(gradients, batch.gradients(expected), rtol=1e-7, atol=1e-9)


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


@settings(deadline=None, max_examples=60)
@given(batches(), SETTINGS)
def test_sum_of_objectives_equals_sum_of_equations(batch, objective_settings):
    assert_equals_equations(batch, objective_settings)


def test_default_settings_are_those_of_the_papers():
    expected = {"mse": 1.0, "temperature": 1.5, "margin": 1.0, "scale": 20.0}
    expected |= {"info_nce_form": "acl", "ties": "drop"}
    assert ObjectiveSettings(**expected) == ObjectiveSettings()
    assert_equals_equations(BATCH, ObjectiveSettings())


def test_matryoshka_is_the_mean_loss_of_truncated_embeddings():
    rating = torch.tensor([0.1, 0.9, 0.4, 0.6, 0.5])
    sides = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    cosines = torch.stack([torch.cosine_similarity(*sides[:, :, :dim]) for dim in (8, 4, 3)])
    expected = (cosines - rating).square().mean()
    for dims in [(3, 4), (8, 3, 4)]:  # the full size counts once
        loss = compute_loss(*sides, rating, ObjectiveSettings(matryoshka=dims))
        torch.testing.assert_close(loss, expected)
    with pytest.raises(UserError, match="matryoshka names 9 dimensions, but the embeddings have 8"):
        compute_loss(*sides, rating, ObjectiveSettings(matryoshka=(9, 4)))


# -- numerical edge cases ----------------------------------------------------------------------


def test_batches_with_nothing_to_compare_give_zero_loss_and_gradients():
    equal = replace(BATCH, rating=torch.full_like(BATCH.rating, 0.5))
    unpaired = replace(BATCH, pairs=torch.empty((0, 2), dtype=torch.int64))
    cases = [
        (equal, name, ties) for name in list(SINGLE_OBJECTIVES)[1:] for ties in ("drop", "gap")
    ]
    cases += [(unpaired, name, ties) for name in CONTRASTIVE for ties in TIES]
    for batch, name, ties in cases:
        loss = batch.loss(settings_of(name, ties=ties))
        assert loss == 0
        assert not any(gradient.any() for gradient in batch.gradients(loss))


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
def test_extreme_settings_do_not_overflow(dtype):
    up, down = [0.6, 0.8], [-0.6, -0.8]
    rating, pairs = torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([[0, 1]])
    for name, changes, worst, best in EXTREME:
        for second, expected in (([down, up], worst), ([up, down], best)):
            batch = Batch(make_leaf([up, up], dtype), make_leaf(second, dtype), rating, pairs)
            loss = batch.loss(settings_of(name, **changes))
            assert loss.dtype == dtype
            assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-3)
            assert all(gradient.isfinite().all() for gradient in batch.gradients(loss))


@pytest.mark.parametrize("name", SINGLE_OBJECTIVES)
def test_zero_vector_has_cosine_zero_and_finite_gradients(name):
    first, second = BATCH.first.detach().clone(), BATCH.second.detach().clone()
    zero_rows = torch.tensor([0, 5])
    orthogonal = torch.linalg.cross(second, torch.ones_like(second))
    orthogonal_first = first.index_copy(0, zero_rows, orthogonal[zero_rows])
    expected = replace(BATCH, first=orthogonal_first, second=second).loss(settings_of(name))
    first[zero_rows] = 0
    batch = replace(BATCH, first=first.requires_grad_(), second=second.requires_grad_())
    loss = batch.loss(settings_of(name))
    assert all(gradient.isfinite().all() for gradient in batch.gradients(loss))
    if name not in ("v1", "self-negatives"):  # the others use no cosines across rows
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# -- pairs --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), max_size=24))
def test_rows_of_sentence_pair_are_contrasted_in_twos(pair):
    group = contrast_groups(np.array(pair, dtype=np.int64))
    waiting, expected = {}, []
    for index, name in enumerate(pair):
        expected.append(waiting.pop(name, index))
        if expected[-1] == index:
            waiting[name] = index
    assert group.tolist() == expected


# -- settings ----------------------------------------------------------------------------------

WEIGHTS = ["mse", "info_nce", "quadruplet", "cosent", "ranking", "margin"]


def test_invalid_settings_are_rejected():
    cases = [
        *(({name: -0.5}, f"'{name}' is -0.5: .*at least 0") for name in WEIGHTS),
        *(({name: 2e6}, f"'{name}' is 2000000.0: .*at most 1,000,000") for name in WEIGHTS),
        ({"temperature": 0.0}, "'temperature' is 0.0: .*at least 1e-06"),
        ({"mse": 0.0}, "mse, cosent, ranking, info_nce, quadruplet are all 0.*set at least one"),
        ({"mse": 0.0, "objective": "a.py:b", "objective_weight": 0.0}, "are all 0"),
        ({"info_nce_form": "v2"}, "'info_nce_form' is 'v2': .*'acl', 'v1' or 'self-negatives'"),
    ]
    for values, message in cases:
        with pytest.raises(UserError, match=f"^test: .*{message}"):
            build(ObjectiveSettings, values, "test")
    for name in WEIGHTS[:-1]:  # each objective may be the only one
        assert getattr(build(ObjectiveSettings, {"mse": 0.0, name: 0.5}, "test"), name) == 0.5
