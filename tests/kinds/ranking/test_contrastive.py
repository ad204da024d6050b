"""The contrastive objective, checked against slow transcriptions in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.kinds.ranking.graph import KnownTriples
from llmcond.kinds.ranking.heads import Contrast, ContrastSettings, Queue, contrastive

pytestmark = pytest.mark.usefixtures("one_thread")

N, R = 12, 3


def make_triples(rng, m=60):
    """Make triples with loops, dense enough that batches are full of false negatives."""
    triples = np.stack(
        [rng.integers(N, size=m), rng.integers(R, size=m), rng.integers(N, size=m)], axis=1
    )
    both = np.concatenate([triples, triples[:, ::-1] + [0, R, 0]])
    return np.unique(both, axis=0)


def random_vectors(generator, *shape):
    return normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


# -- SimKGC as released: B x B, double loops, -1e4 ----------------------------------------------


def make_simkgc_mask(rows, columns, known):
    """Follow construct_mask of triplet_mask.py: true for negatives and a row's own column."""
    mask = np.ones((len(rows), len(columns)), dtype=bool)
    for i, (head, relation, tail) in enumerate(rows):
        for j, other in enumerate(columns):
            if i == j and columns is rows:
                continue
            equal = other[2] == tail
            mask[i, j] = not equal and (head, relation, other[2]) not in known
    return torch.from_numpy(mask)


def compute_simkgc_loss(queries, tails, heads, rows, known, settings, earlier=()):
    """Follow compute_logits and trainer.py: hr -> t over all columns, t -> hr in the batch."""
    scale = 1 / settings.temperature
    logits = queries @ tails.T - settings.margin * torch.eye(len(rows), dtype=torch.float64)
    logits = (logits * scale).masked_fill(~make_simkgc_mask(rows, rows, known), -1e4)
    all_logits = logits
    for stored, candidates in earlier:
        block = queries @ candidates.T * scale * settings.queue_weight
        all_logits = torch.cat(
            [all_logits, block.masked_fill(~make_simkgc_mask(rows, stored, known), -1e4)], 1
        )
    if settings.self_negatives:
        self_scores = (queries * heads).sum(1) * scale
        loops = torch.tensor([(h, r, h) in known for h, r, _ in rows])
        all_logits = torch.cat([all_logits, self_scores.masked_fill(loops, -1e4)[:, None]], 1)
    labels = torch.arange(len(rows))
    total = cross_entropy(all_logits, labels)
    if settings.directions == "both":
        total = total + cross_entropy(logits.T, labels)
    return total


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"directions": "query"},
        {"self_negatives": False, "margin": 0.0},
        {"queue": 2, "queue_weight": 0.5, "temperature": 0.3},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_loss_matches_released_simkgc(seed, changes):
    settings = build(ContrastSettings, changes, "test")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    all_triples = make_triples(rng)
    known, triple_set = KnownTriples(all_triples, N), {tuple(row) for row in all_triples.tolist()}
    table, queue, earlier = random_vectors(generator, N, 5), Queue(settings.queue), []
    for _ in range(3):  # the last round finds two batches in the queue
        rows = all_triples[rng.integers(len(all_triples), size=10)]
        head, relation, tail = rows.T
        queries = random_vectors(generator, 10, 5).requires_grad_()
        expected = compute_simkgc_loss(
            queries,
            table[tail],
            table[head],
            rows.tolist(),
            triple_set,
            settings,
            earlier[-settings.queue :] if settings.queue else (),
        )
        extra_columns = []
        if settings.self_negatives:
            loops = known.contains(np.stack([head, relation, head], axis=1))
            self_scores = (queries * table[head]).sum(1, keepdim=True)
            extra_columns.append((self_scores, torch.from_numpy(loops[:, None])))
        if len(queue):
            block = queries @ queue.vectors().T * settings.queue_weight
            mask = torch.from_numpy(known.mask(head, relation, queue.entities()))
            extra_columns.append((block, mask))
        loss = contrastive(
            queries @ table[tail].T,
            torch.arange(10),
            torch.from_numpy(known.mask(head, relation, tail)),
            settings,
            1 / settings.temperature,
            extra_columns,
        )
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(value, queries)[0] for value in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
        queue.add(tail, table[tail])
        earlier.append((rows.tolist(), table[tail]))


# -- beyond SimKGC ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_each_distinct_entity_counts_once(seed):
    """The expected loss sums over sets of entities and of queries, row by row."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    all_triples = make_triples(rng)
    triple_set = {tuple(row) for row in all_triples.tolist()}
    rows = all_triples[rng.integers(len(all_triples), size=10)]
    head, relation, tail = rows.T
    entities, target = np.unique(np.append(tail, rng.integers(N, size=3)), return_inverse=True)
    queries, table = random_vectors(generator, 10, 5), random_vectors(generator, N, 5)
    settings, scores = ContrastSettings(temperature=0.2, margin=0.1), queries @ table.T
    expected = 0.0
    for i, (h, r, t) in enumerate(rows.tolist()):
        positive = math.exp((scores[i, t].item() - 0.1) / 0.2)
        negatives = [e for e in set(entities.tolist()) - {t} if (h, r, e) not in triple_set]
        negative_sum = sum(math.exp(scores[i, e].item() / 0.2) for e in negatives)
        other_queries = [
            j for j in range(10) if tail[j] != t and (*rows[j, :2], t) not in triple_set
        ]
        query_sum = sum(math.exp(scores[j, t].item() / 0.2) for j in other_queries)
        expected -= (
            math.log(positive / (positive + negative_sum))
            + math.log(positive / (positive + query_sum))
        ) / 10
    loss = contrastive(
        scores[:, entities],
        torch.from_numpy(target[:10]),
        torch.from_numpy(KnownTriples(all_triples, N).mask(head, relation, entities)),
        settings,
        1 / settings.temperature,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_loss_of_one_row_matches_hand_calculation():
    """The answer scores .5, a negative .3, another correct tail .9, and the head entity .2."""
    settings = ContrastSettings(temperature=0.5, margin=0.1, directions="query")
    loss = contrastive(
        torch.tensor([[0.3, 0.5, 0.9]]),
        torch.tensor([1]),
        torch.tensor([[False, True, True]]),
        settings,
        1 / settings.temperature,
        [(torch.tensor([[0.2]]), torch.tensor([[False]]))],
    )
    positive, negative, head = math.exp(0.4 / 0.5), math.exp(0.3 / 0.5), math.exp(0.2 / 0.5)
    assert loss.item() == pytest.approx(
        -math.log(positive / (positive + negative + head)), rel=1e-6
    )


def test_candidates_without_query_count_in_one_direction():
    """Head entities and random entities are extra columns, which only queries are compared with."""
    generator = torch.Generator().manual_seed(0)
    scores = random_vectors(generator, 4, 6) @ random_vectors(generator, 9, 6).T
    target, mask = torch.arange(4), torch.zeros(4, 9, dtype=torch.bool)
    settings = ContrastSettings(self_negatives=False, margin=0.0)
    narrow = contrastive(scores[:, :4], target, mask[:, :4], settings, 20.0)
    wide = contrastive(scores, target, mask, settings, 20.0)
    expected = cross_entropy(20 * scores, target) + cross_entropy(20 * scores[:, :4].T, target)
    torch.testing.assert_close(wide, expected)
    assert wide > narrow


def test_other_relations_form_separate_contrast():
    generator = torch.Generator().manual_seed(1)
    scores, relation_scores = random_vectors(generator, 3, 3), random_vectors(generator, 3, 2)
    left_out = torch.tensor([[False, True], [False, False], [True, True]])
    settings = ContrastSettings(margin=0.1, temperature=0.2)
    target, mask = torch.arange(3), torch.zeros(3, 3, dtype=torch.bool)
    without_relations = contrastive(scores, target, mask, settings, 5.0)
    with_relations = contrastive(
        scores, target, mask, settings, 5.0, relations=(relation_scores, left_out)
    )
    expected = 0.0
    for i in range(3):
        positive = math.exp(5 * (scores[i, i].item() - 0.1))
        negatives = [
            math.exp(5 * relation_scores[i, j].item()) for j in range(2) if not left_out[i, j]
        ]
        expected += -math.log(positive / (positive + sum(negatives))) / 3
    assert (with_relations - without_relations).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("learned", [True, False])
def test_temperature_is_learned_if_requested(learned):
    """The gradient is finite even if candidates are left out."""
    contrast = Contrast(ContrastSettings(temperature=0.1, learn_temperature=learned))
    assert contrast.scale == pytest.approx(10)
    scores = torch.tensor([[0.5, 0.1], [0.4, 0.6]], requires_grad=True)
    self_scores = torch.tensor([[0.9], [0.9]])
    mask = torch.tensor([[True, True], [False, False]])
    loss = contrast(scores, torch.arange(2), mask, [(self_scores, torch.tensor([[True], [False]]))])
    loss.backward()
    assert torch.isfinite(scores.grad).all()
    if learned:
        assert math.isfinite(contrast.log_scale.grad.item())
        assert contrast.log_scale.grad.item() != 0
    else:
        assert contrast.log_scale.grad is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "'temperature' is 0.0: it must be above 0"),
        ({"directions": "candidate"}, "must be one of 'both' or 'query'"),
        ({"queue": -1}, "'queue' is -1: it must be at least 0"),
        ({"marign": 0.1}, "Did you mean 'margin'"),
    ],
)
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        build(ContrastSettings, changes, "test")
