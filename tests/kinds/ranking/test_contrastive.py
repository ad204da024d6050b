"""The objective of queries and candidates, against slow transcriptions in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.kinds.ranking.contrastive import Contrast, ContrastSettings, Queue, contrastive
from llmcond.kinds.ranking.graph import KnownTriples

pytestmark = pytest.mark.usefixtures("one_thread")

N, R = 12, 3


def graph(rng, m=60):
    """A small graph, dense enough that batches are full of false negatives; with loops."""
    triples = np.stack(
        [rng.integers(N, size=m), rng.integers(R, size=m), rng.integers(N, size=m)], axis=1
    )
    both = np.concatenate([triples, triples[:, ::-1] + [0, R, 0]])
    return np.unique(both, axis=0)


def vectors(generator, *shape):
    return normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


# -- SimKGC as released: B x B, double loops, -1e4 ----------------------------------------------


def simkgc_mask(rows, columns, known):
    """triplet_mask.py, construct_mask: true where a column is a negative, or a row's own."""
    mask = np.ones((len(rows), len(columns)), dtype=bool)
    for i, (head, relation, tail) in enumerate(rows):
        for j, other in enumerate(columns):
            if i == j and columns is rows:
                continue
            equal = other[2] == tail
            mask[i, j] = not equal and (head, relation, other[2]) not in known
    return torch.from_numpy(mask)


def simkgc(queries, tails, heads, rows, known, settings, earlier=()):
    """models.py, compute_logits, and trainer.py: hr -> t over all columns, t -> hr in the batch."""
    scale = 1 / settings.temperature
    logits = queries @ tails.T - settings.margin * torch.eye(len(rows), dtype=torch.float64)
    logits = (logits * scale).masked_fill(~simkgc_mask(rows, rows, known), -1e4)
    every = logits
    for stored, candidates in earlier:
        block = queries @ candidates.T * scale * settings.queue_weight
        every = torch.cat([every, block.masked_fill(~simkgc_mask(rows, stored, known), -1e4)], 1)
    if settings.self_negatives:
        own = (queries * heads).sum(1) * scale
        loops = torch.tensor([(h, r, h) in known for h, r, _ in rows])
        every = torch.cat([every, own.masked_fill(loops, -1e4)[:, None]], 1)
    labels = torch.arange(len(rows))
    total = cross_entropy(every, labels)
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
def test_the_objective_is_that_of_simkgc_as_released(seed, changes):
    settings = build(ContrastSettings, changes, "test")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    every = graph(rng)
    known, listed = KnownTriples(every, N), {tuple(row) for row in every.tolist()}
    table, queue, earlier = vectors(generator, N, 5), Queue(settings.queue), []
    for _ in range(3):  # so that two batches are in the queue, and one was dropped or kept out
        rows = every[rng.integers(len(every), size=10)]
        head, relation, tail = rows.T
        queries = vectors(generator, 10, 5).requires_grad_()
        expected = simkgc(
            queries,
            table[tail],
            table[head],
            rows.tolist(),
            listed,
            settings,
            earlier[-settings.queue :] if settings.queue else (),
        )
        others = []
        if settings.self_negatives:
            loops = known.contains(np.stack([head, relation, head], axis=1))
            own = (queries * table[head]).sum(1, keepdim=True)
            others.append((own, torch.from_numpy(loops[:, None])))
        if len(queue):
            block = queries @ queue.vectors().T * settings.queue_weight
            mask = torch.from_numpy(known.mask(head, relation, queue.entities()))
            others.append((block, mask))
        loss = contrastive(
            queries @ table[tail].T,
            torch.arange(10),
            torch.from_numpy(known.mask(head, relation, tail)),
            settings,
            1 / settings.temperature,
            others,
        )
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(value, queries)[0] for value in (loss, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)
        queue.add(tail, table[tail])
        earlier.append((rows.tolist(), table[tail]))


# -- what SimKGC has not ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_an_entity_that_is_a_column_once_counts_once(seed):
    """Row by row and column by column, over sets of entities and of queries."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    every = graph(rng)
    listed = {tuple(row) for row in every.tolist()}
    rows = every[rng.integers(len(every), size=10)]
    head, relation, tail = rows.T
    entities, target = np.unique(np.append(tail, rng.integers(N, size=3)), return_inverse=True)
    queries, table = vectors(generator, 10, 5), vectors(generator, N, 5)
    settings, scores = ContrastSettings(temperature=0.2, margin=0.1), queries @ table.T
    expected = 0.0
    for i, (h, r, t) in enumerate(rows.tolist()):
        own = math.exp((scores[i, t].item() - 0.1) / 0.2)
        rivals = [e for e in set(entities.tolist()) - {t} if (h, r, e) not in listed]
        columns = sum(math.exp(scores[i, e].item() / 0.2) for e in rivals)
        others = [j for j in range(10) if tail[j] != t and (*rows[j, :2], t) not in listed]
        queried = sum(math.exp(scores[j, t].item() / 0.2) for j in others)
        expected -= (math.log(own / (own + columns)) + math.log(own / (own + queried))) / 10
    loss = contrastive(
        scores[:, entities],
        torch.from_numpy(target[:10]),
        torch.from_numpy(KnownTriples(every, N).mask(head, relation, entities)),
        settings,
        1 / settings.temperature,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_one_row_by_hand():
    """Its own candidate at .5, a negative at .3, one that is right as well, and its own head."""
    settings = ContrastSettings(temperature=0.5, margin=0.1, directions="query")
    loss = contrastive(
        torch.tensor([[0.3, 0.5, 0.9]]),
        torch.tensor([1]),
        torch.tensor([[False, True, True]]),
        settings,
        1 / settings.temperature,
        [(torch.tensor([[0.2]]), torch.tensor([[False]]))],
    )
    own, negative, head = math.exp(0.4 / 0.5), math.exp(0.3 / 0.5), math.exp(0.2 / 0.5)
    assert loss.item() == pytest.approx(-math.log(own / (own + negative + head)), rel=1e-6)


def test_candidates_without_a_query_count_in_one_direction():
    """Heads and random entities are further columns: more to tell apart for each query only."""
    generator = torch.Generator().manual_seed(0)
    scores = vectors(generator, 4, 6) @ vectors(generator, 9, 6).T
    target, mask = torch.arange(4), torch.zeros(4, 9, dtype=torch.bool)
    settings = ContrastSettings(self_negatives=False, margin=0.0)
    narrow = contrastive(scores[:, :4], target, mask[:, :4], settings, 20.0)
    wide = contrastive(scores, target, mask, settings, 20.0)
    rows = cross_entropy(20 * scores, target) + cross_entropy(20 * scores[:, :4].T, target)
    torch.testing.assert_close(wide, rows)
    assert wide > narrow


def test_other_relations_are_a_contrast_of_their_own():
    generator = torch.Generator().manual_seed(1)
    scores, others = vectors(generator, 3, 3), vectors(generator, 3, 2)
    left_out = torch.tensor([[False, True], [False, False], [True, True]])
    settings = ContrastSettings(margin=0.1, temperature=0.2)
    target, mask = torch.arange(3), torch.zeros(3, 3, dtype=torch.bool)
    without = contrastive(scores, target, mask, settings, 5.0)
    found = contrastive(scores, target, mask, settings, 5.0, relations=(others, left_out))
    expected = 0.0
    for i in range(3):
        own = math.exp(5 * (scores[i, i].item() - 0.1))
        rivals = [math.exp(5 * others[i, j].item()) for j in range(2) if not left_out[i, j]]
        expected += -math.log(own / (own + sum(rivals))) / 3
    assert (found - without).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("learned", [True, False])
def test_the_temperature_is_learned_where_it_is_asked_for(learned):
    """Its gradient is a number even where candidates are left out."""
    contrast = Contrast(ContrastSettings(temperature=0.1, learn_temperature=learned))
    assert contrast.scale == pytest.approx(10)
    scores = torch.tensor([[0.5, 0.1], [0.4, 0.6]], requires_grad=True)
    own = torch.tensor([[0.9], [0.9]])
    mask = torch.tensor([[True, True], [False, False]])
    loss = contrast(scores, torch.arange(2), mask, [(own, torch.tensor([[True], [False]]))])
    loss.backward()
    assert torch.isfinite(scores.grad).all()
    if learned:
        assert math.isfinite(contrast.log_scale.grad.item())
        assert contrast.log_scale.grad.item() != 0
    else:
        assert contrast.log_scale.grad is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"temperature": 0.0}, "'temperature' is 0.0: it must be above 0"),
        ({"directions": "candidate"}, "must be one of 'both' or 'query'"),
        ({"queue": -1}, "'queue' is -1: it must be at least 0"),
        ({"marign": 0.1}, "Did you mean 'margin'"),
    ],
)
def test_settings_that_make_no_sense_are_told(changes, told):
    with pytest.raises(UserError, match=told):
        build(ContrastSettings, changes, "test")
