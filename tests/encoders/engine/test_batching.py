"""Batches under a token budget: complete, within the budget and deterministic."""

import random
from itertools import combinations, pairwise, takewhile

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmcond.encoders.engine import batching
from llmcond.encoders.engine.batching import MIN_SHARED, STEP, pack, pack_shared, plan_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
BUDGETS = st.integers(1, 1_000)


@given(LENGTHS, BUDGETS)
def test_each_input_is_in_one_batch(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_padded_batches_stay_within_budget(lengths, budget):
    for batch in plan_batches(lengths, budget):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(LENGTHS, BUDGETS)
def test_each_batch_is_full_except_the_last(lengths, budget):
    batches = plan_batches(lengths, budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > budget


@given(LENGTHS, BUDGETS)
def test_batches_are_sorted_by_descending_length(lengths, budget):
    planned = [lengths[i] for batch in plan_batches(lengths, budget) for i in batch]
    assert planned == sorted(lengths, reverse=True)


@given(LENGTHS, BUDGETS)
def test_batches_are_deterministic(lengths, budget):
    assert plan_batches(lengths, budget) == plan_batches(tuple(lengths), budget)


def test_inputs_of_equal_length_keep_their_order():
    assert plan_batches([2, 3, 2, 3, 2], 6) == [[1, 3], [0, 2, 4]]


def test_input_beyond_budget_gets_separate_batch():
    assert plan_batches([5, 50, 5], 10) == [[1], [0, 2]]


# -- packed ------------------------------------------------------------------------------------


def inputs_of(batches):
    return [index for batch in batches for index in batch.inputs]


@given(LENGTHS, BUDGETS)
def test_each_input_is_in_one_row(lengths, budget):
    assert sorted(inputs_of(pack(lengths, budget))) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_rows_stay_within_budget(lengths, budget):
    for batch in pack(lengths, budget):
        assert batch.n_tokens == sum(lengths[i] for i in batch.inputs)
        assert len(batch.inputs) == 1 or batch.n_tokens <= budget


@given(LENGTHS, BUDGETS)
def test_rows_are_sorted_by_descending_length(lengths, budget):
    packed = inputs_of(pack(lengths, budget))
    assert packed == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


@given(LENGTHS, BUDGETS)
def test_row_concatenates_its_inputs(lengths, budget):
    for batch in pack(lengths, budget):
        assert not batch.shared
        assert [segment.source for segment in batch.segments] == list(batch.inputs)
        assert batch.leaves == tuple(range(len(batch.inputs)))
        positions = [
            batch.position(leaf, token)
            for index, leaf in zip(batch.inputs, batch.leaves, strict=True)
            for token in range(lengths[index])
        ]
        assert positions == list(range(batch.n_tokens))


@given(LENGTHS, BUDGETS)
def test_rows_are_deterministic(lengths, budget):
    assert pack(lengths, budget) == pack(tuple(lengths), budget)


@given(LENGTHS, BUDGETS)
def test_row_length_is_at_most_equal_share_plus_one_input(lengths, budget):
    share = sum(lengths) / max(1, -(-sum(lengths) // budget))
    for batch in pack(lengths, budget):
        assert batch.n_tokens < share + STEP + max(lengths)


@pytest.mark.parametrize("budget", [512, 1_024, 1_536, 4_096])
def test_rows_have_similar_lengths(budget):
    """After rows filled to the budget, a short last row would leave the machine half idle."""
    for seed in range(20):
        lengths = random.Random(seed).choices(range(5, 40), k=256)
        sizes = [batch.n_tokens for batch in pack(lengths, budget)]
        # What each row has above its share is missing in the last row.
        assert min(sizes) >= max(sizes) - (40 + STEP) * len(sizes)
        assert len(sizes) <= -(-sum(lengths) // budget) + 1


def test_row_lengths_differ_by_at_most_a_step_and_an_input():
    assert [batch.n_tokens for batch in pack([10] * 128, 1_000)] == [700, 580]


def test_no_inputs_give_no_rows():
    assert pack([], 10) == []
    assert pack_shared([], 10) == []


# -- with shared prefixes ----------------------------------------------------------------------


@st.composite
def inputs_with_prefixes(draw):
    """Generate inputs over a small vocabulary, some with common prefixes, some equal."""
    tokens = st.integers(0, draw(st.integers(0, 2)))
    prefixes = draw(st.lists(st.lists(tokens, max_size=15), min_size=1, max_size=3))
    suffixes = draw(st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=1, max_size=12))
    return [draw(st.sampled_from(prefixes)) + row for row in suffixes]


@st.composite
def shared_rows(draw):
    """Generate inputs, a budget and the rows, also where sharing saves little."""
    ids, budget = draw(inputs_with_prefixes()), draw(st.integers(1, 80))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_WORTH_SHARING", draw(st.sampled_from([0.97, 1.0])))
        return ids, budget, pack_shared(ids, budget)


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
def test_each_input_is_in_one_row_with_sharing(plan):
    ids, _, batches = plan
    assert sorted(inputs_of(batches)) == list(range(len(ids)))


@given(shared_rows())
def test_position_locates_every_token(plan):
    ids, _, batches = plan
    for batch in batches:
        row = content(batch, ids)
        for index, leaf in zip(batch.inputs, batch.leaves, strict=True):
            positions = [batch.position(leaf, token) for token in range(len(ids[index]))]
            assert [row[position] for position in positions] == ids[index]
            assert positions == sorted(positions)


@given(shared_rows())
def test_path_of_an_input_covers_exactly_its_tokens(plan):
    ids, _, batches = plan
    for batch in batches:
        for index, leaf in zip(batch.inputs, batch.leaves, strict=True):
            path = [*batch.ancestors(leaf), batch.segments[leaf]]
            assert path[0].begin == 0
            assert path[0].parent == -1
            assert path[-1].end == len(ids[index])
            assert all(first.end == second.begin for first, second in pairwise(path))


@given(shared_rows())
def test_subtree_ends_with_its_last_descendant(plan):
    _, _, batches = plan
    for batch in batches:
        for index, segment in enumerate(batch.segments):
            descendants = [s for i, s in enumerate(batch.segments) if segment in batch.ancestors(i)]
            assert segment.parent < index
            assert segment.subtree_stop == max([segment.stop, *(s.stop for s in descendants)])
            # Nothing else is in between, because the row of a tree is in depth-first order.
            assert segment.subtree_stop - segment.stop == sum(s.length for s in descendants)


@given(shared_rows())
def test_rows_stay_within_budget_with_sharing(plan):
    _, budget, batches = plan
    for batch in batches:
        assert len(batch.inputs) == 1 or batch.n_tokens <= budget


@given(shared_rows())
def test_prefix_occurs_once_in_a_row(plan):
    ids, _, batches = plan
    for batch in (batch for batch in batches if batch.shared):
        for first, second in combinations(batch.segments, 2):
            if first.parent == second.parent:
                pairs = zip(
                    ids[first.source][first.begin : first.end],
                    ids[second.source][second.begin : second.end],
                    strict=False,
                )
                same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
                assert len(same) < MIN_SHARED


@given(shared_rows())
def test_sharing_never_computes_additional_tokens(plan):
    ids, _, batches = plan
    assert sum(batch.n_tokens for batch in batches) <= sum(map(len, ids))


@given(inputs_with_prefixes(), st.integers(1, 80))
def test_rows_are_deterministic_with_sharing(ids, budget):
    assert pack_shared(ids, budget) == pack_shared([tuple(row) for row in ids], budget)


@given(inputs_with_prefixes(), st.integers(1, 80), st.randoms(use_true_random=False))
def test_row_lengths_do_not_depend_on_input_order_with_sharing(ids, budget, order):
    shuffled = order.sample(ids, len(ids))
    row_lengths = [[b.n_tokens for b in pack_shared(rows, budget)] for rows in (ids, shuffled)]
    assert row_lengths[0] == row_lengths[1]


def test_repeated_input_is_computed_once():
    ids = [[7] * 10, [1, 2, 3, 4, 5], [7] * 10, [7] * 10]
    (batch,) = pack_shared(ids, 100)
    assert batch.n_tokens == 15
    assert sorted(batch.inputs) == [0, 1, 2, 3]


def test_input_that_is_a_prefix_ends_inside_the_row():
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8]]
    (batch,) = pack_shared(ids, 100)
    assert batch.n_tokens == 8
    assert [batch.segments[leaf].stop for leaf in batch.leaves] == [5, 7, 8]


@pytest.mark.parametrize("common", [MIN_SHARED, MIN_SHARED - 1])
def test_prefix_is_shared_from_minimum_length_on(common):
    ids = [list(range(8)), [*range(common), *range(20, 28 - common)]]
    assert sum(batch.n_tokens for batch in pack_shared(ids, 100)) == (
        16 - common if common >= MIN_SHARED else 16
    )


@pytest.mark.parametrize("n_inputs", [2, 60])
def test_rows_are_not_shared_if_little_is_saved(n_inputs):
    generator = random.Random(0)
    ids = [generator.choices(range(1_000), k=generator.randint(1, 50)) for _ in range(n_inputs)]
    assert pack_shared(ids, 200) == pack([len(row) for row in ids], 200)


@settings(deadline=None)
@given(inputs_with_prefixes(), st.integers(1, 80))
def test_sharing_saves_three_percent_or_is_not_used(ids, budget):
    batches, lengths = pack_shared(ids, budget), [len(row) for row in ids]
    assume(batches != pack(lengths, budget))
    assert sum(batch.n_tokens for batch in batches) <= 0.97 * sum(lengths)


@pytest.mark.parametrize("budget", [1_000_000, 1_000, 64])
def test_chain_of_thousands_of_prefixes_is_packed(budget):
    depth = 2_500
    ids = [list(range(stop)) for stop in range(1, depth + 1)]
    batches = pack_shared(ids, budget)
    assert sorted(inputs_of(batches)) == list(range(depth))
    assert all(len(b.inputs) == 1 or b.n_tokens <= budget for b in batches)
    if budget > depth:
        (batch,) = batches
        assert batch.n_tokens == depth
        assert len(batch.ancestors(depth - 1)) == depth - 1
        assert [batch.position(depth - 1, token) for token in (0, 1_234, depth - 1)] == [
            0,
            1_234,
            depth - 1,
        ]


@pytest.mark.parametrize("suffixes", [2, 8, 32])
def test_sharing_of_prefixes_is_nearly_optimal(suffixes):
    ids = [
        [prefix] * 60 + [1_000 + prefix * suffixes + suffix] * 8
        for prefix in range(30)
        for suffix in range(suffixes)
    ]
    computed = sum(batch.n_tokens for batch in pack_shared(ids, 1_024))
    ideal = suffixes * 68 / (60 + 8 * suffixes)
    assert sum(map(len, ids)) / computed >= 0.95 * ideal
