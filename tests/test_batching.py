"""Batches by a token budget: complete, within the budget, and always the same."""

from hypothesis import given
from hypothesis import strategies as st

from llmcond.encoders.batching import plan_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
BUDGETS = st.integers(1, 1_000)


@given(LENGTHS, BUDGETS)
def test_every_position_is_in_one_batch(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_padded_batches_keep_the_budget(lengths, budget):
    for batch in plan_batches(lengths, budget):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(LENGTHS, BUDGETS)
def test_batches_are_filled_before_the_next_begins(lengths, budget):
    batches = plan_batches(lengths, budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > budget


@given(LENGTHS, BUDGETS)
def test_batches_go_from_long_to_short(lengths, budget):
    planned = [lengths[i] for batch in plan_batches(lengths, budget) for i in batch]
    assert planned == sorted(lengths, reverse=True)


@given(LENGTHS, BUDGETS)
def test_the_same_lengths_give_the_same_batches(lengths, budget):
    assert plan_batches(lengths, budget) == plan_batches(tuple(lengths), budget)


def test_inputs_of_equal_length_keep_their_order():
    assert plan_batches([2, 3, 2, 3, 2], 6) == [[1, 3], [0, 2, 4]]


def test_input_beyond_the_budget_gets_a_batch_of_its_own():
    assert plan_batches([5, 50, 5], 10) == [[1], [0, 2]]
