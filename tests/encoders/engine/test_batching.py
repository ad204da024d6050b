"""Batches under a token budget: complete, within the budget and deterministic."""

import random
from itertools import combinations, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.encoders.torch import batching
from llmcond.encoders.torch.batching import MIN_SHARED, STEP, pack, pack_shared, plan_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
BUDGETS = st.integers(1, 1_000)


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


@given(LENGTHS, BUDGETS)
def test_padded_batches_are_as_full_as_the_budget_allows(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert [index for batch in batches for index in batch] == longest_first(lengths)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= budget
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > budget


@given(LENGTHS, BUDGETS)
def test_packed_rows_concatenate_inputs_within_budget(lengths, budget):
    batches = pack(lengths, budget)
    assert [index for batch in batches for index in batch.inputs] == longest_first(lengths)
    share = sum(lengths) / max(1, -(-sum(lengths) // budget))
    for batch in batches:
        assert batch.n_tokens == sum(lengths[i] for i in batch.inputs)
        assert len(batch.inputs) == 1 or batch.n_tokens <= budget
        assert batch.n_tokens < share + STEP + max(lengths)
        assert not batch.shared
        assert [segment.source for segment in batch.segments] == list(batch.inputs)
        positions = [
            batch.position(leaf, token)
            for index, leaf in zip(batch.inputs, batch.leaves, strict=True)
            for token in range(lengths[index])
        ]
        assert positions == list(range(batch.n_tokens))


def test_rows_have_similar_lengths():
    """After rows filled to the budget, a short last row would leave the machine half idle."""
    assert [batch.n_tokens for batch in pack([10] * 128, 1_000)] == [700, 580]
    for seed in range(20):
        lengths = random.Random(seed).choices(range(5, 40), k=256)
        sizes = [batch.n_tokens for batch in pack(lengths, 1_024)]
        # What each row has above its share is missing in the last row.
        assert min(sizes) >= max(sizes) - (40 + STEP) * len(sizes)
        assert len(sizes) <= -(-sum(lengths) // 1_024) + 1


# -- with shared prefixes ----------------------------------------------------------------------


@st.composite
def shared_rows(draw):
    """Generate inputs, some with common prefixes, a budget, and the rows."""
    tokens = st.integers(0, draw(st.integers(0, 2)))
    prefixes = draw(st.lists(st.lists(tokens, max_size=15), min_size=1, max_size=3))
    suffixes = draw(st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=1, max_size=12))
    ids = [draw(st.sampled_from(prefixes)) + row for row in suffixes]
    budget = draw(st.integers(1, 80))
    with pytest.MonkeyPatch.context() as patch:
        # With 1.0, inputs share prefixes also where this saves little.
        worth = draw(st.sampled_from([batching._WORTH_SHARING, 1.0]))
        patch.setattr(batching, "_WORTH_SHARING", worth)
        batches = pack_shared(ids, budget)
        shuffled = draw(st.randoms(use_true_random=False)).sample(ids, len(ids))
        in_other_order = pack_shared(shuffled, budget)
    assert [b.n_tokens for b in in_other_order] == [b.n_tokens for b in batches]
    if batches != pack([len(row) for row in ids], budget):
        assert sum(batch.n_tokens for batch in batches) <= worth * sum(map(len, ids))
    return ids, budget, batches


def content(batch, ids):
    """Return the tokens of a row and check that every position is filled once."""
    row = [None] * batch.n_tokens
    for segment in batch.segments:
        assert segment.length > 0
        assert row[segment.start : segment.stop] == [None] * segment.length
        row[segment.start : segment.stop] = ids[segment.source][segment.begin : segment.end]
    assert None not in row
    return row


@given(shared_rows())
def test_rows_with_shared_prefixes_have_every_input_once(plan):
    ids, budget, batches = plan
    inputs = [index for batch in batches for index in batch.inputs]
    assert sorted(inputs) == list(range(len(ids)))
    for batch in batches:
        assert len(batch.inputs) == 1 or batch.n_tokens <= budget
        row = content(batch, ids)
        for index, leaf in zip(batch.inputs, batch.leaves, strict=True):
            positions = [batch.position(leaf, token) for token in range(len(ids[index]))]
            assert [row[position] for position in positions] == ids[index]
            path = [*batch.ancestors(leaf), batch.segments[leaf]]
            assert (path[0].begin, path[0].parent, path[-1].end) == (0, -1, len(ids[index]))
            assert all(first.end == second.begin for first, second in pairwise(path))


@given(shared_rows())
def test_rows_with_shared_prefixes_are_prefix_trees(plan):
    ids, _, batches = plan
    for batch in batches:
        for index, segment in enumerate(batch.segments):
            descendants = [s for i, s in enumerate(batch.segments) if segment in batch.ancestors(i)]
            assert segment.parent < index
            assert segment.subtree_stop == max([segment.stop, *(s.stop for s in descendants)])
            # Nothing else is in between, because the row of a tree is in depth-first order.
            assert segment.subtree_stop - segment.stop == sum(s.length for s in descendants)
        siblings = [pair for pair in combinations(batch.segments, 2) if batch.shared]
        for first, second in siblings:
            if first.parent == second.parent:
                rows = (ids[s.source][s.begin : s.end] for s in (first, second))
                pairs = zip(*rows, strict=False)
                same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
                assert len(same) < MIN_SHARED


def test_prefixes_and_repeated_inputs_are_computed_once():
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 5]]
    (batch,) = pack_shared(ids, 100)
    assert batch.n_tokens == 8
    stops = {
        i: batch.segments[leaf].stop for i, leaf in zip(batch.inputs, batch.leaves, strict=True)
    }
    assert stops == {0: 5, 1: 7, 2: 8, 3: 5}
    for common, n_tokens in ((MIN_SHARED, 16 - MIN_SHARED), (MIN_SHARED - 1, 16)):
        ids = [list(range(8)), [*range(common), *range(20, 28 - common)]]
        assert sum(batch.n_tokens for batch in pack_shared(ids, 100)) == n_tokens
    assert pack_shared([], 10) == pack([], 10) == []


def test_rows_are_not_shared_if_little_is_saved():
    generator = random.Random(0)
    ids = [generator.choices(range(1_000), k=generator.randint(1, 50)) for _ in range(60)]
    assert pack_shared(ids, 200) == pack([len(row) for row in ids], 200)


@pytest.mark.parametrize("budget", [1_000_000, 64])
def test_chain_of_thousands_of_prefixes_is_packed(budget):
    ids = [list(range(stop)) for stop in range(1, 2_501)]
    batches = pack_shared(ids, budget)
    assert sorted(i for batch in batches for i in batch.inputs) == list(range(2_500))
    assert all(len(b.inputs) == 1 or b.n_tokens <= budget for b in batches)
    if budget > 2_500:
        (batch,) = batches
        assert (batch.n_tokens, len(batch.ancestors(2_499))) == (2_500, 2_499)
        assert [batch.position(2_499, token) for token in (0, 1_234)] == [0, 1_234]


@settings(max_examples=10)
@given(st.integers(2, 32))
def test_sharing_of_prefixes_is_nearly_optimal(n_suffixes):
    """Families of inputs are not split between rows where this is avoidable."""
    ids = [
        [prefix] * 60 + [1_000 + prefix * n_suffixes + suffix] * 8
        for prefix in range(30)
        for suffix in range(n_suffixes)
    ]
    computed = sum(batch.n_tokens for batch in pack_shared(ids, 1_024))
    assert computed <= 30 * (60 + 8 * n_suffixes) / 0.95
