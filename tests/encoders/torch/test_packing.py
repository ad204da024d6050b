"""Packed rows: batches within a budget, and attention compared with a dense mask."""

import random
from contextlib import contextmanager
from itertools import combinations, pairwise, takewhile

import pytest
import torch
from helpers.kernels import reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from llmcond.encoders.torch import attention, batching
from llmcond.encoders.torch.attention import plan_attention, plan_varlen
from llmcond.encoders.torch.batching import MIN_SHARED, STEP, pack, pack_shared, plan_batches

# Networks this small finish before a second thread would have started.
pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SCALE = 0.3


def reference(batch, causal, query, key, value, scale=SCALE):
    """Attend in float64 under a mask of (tokens, tokens), True where a token sees another."""
    seen = torch.zeros(batch.n_tokens, batch.n_tokens, dtype=torch.bool)
    for index, segment in enumerate(batch.segments):
        for ancestor in [*batch.ancestors(index), segment]:
            seen[segment.start : segment.stop, ancestor.start : ancestor.stop] = True
    seen = seen.tril() if causal else seen
    groups = len(query) // len(key)
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(0, 1)


def random_states(batch, heads=(4, 4), width=8, dtype=torch.float32):
    """Return random queries, keys and values in the memory layout of a network's projections."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads[0], heads[1], heads[1])
    return [
        torch.randn(1, batch.n_tokens, n, width, generator=generator).to(dtype).transpose(1, 2)[0]
        for n in sizes
    ]


def make_plans(batch, causal, dtype=torch.float32):
    return [
        plan_attention(batch, causal, CPU, dtype),
        plan_varlen(batch, causal, CPU, reference_attention),
    ]


def check_plans(batch, causal, heads=(4, 4), width=8):
    states = random_states(batch, heads, width)
    expected = reference(batch, causal, *states)
    for plan in make_plans(batch, causal):
        output = plan(*states, SCALE)
        assert output.shape == (batch.n_tokens, heads[0], width)
        assert (output - expected).abs().max() < 1e-5


def pack_tree(ids, budget=100_000):
    """Pack inputs into rows that share every common prefix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_WORTH_SHARING", 1.0)
        return pack_shared(ids, budget)


HEADS = st.sampled_from([(4, 4), (4, 2), (4, 1)])
WIDTHS = st.sampled_from([8, 8, 72])
LENGTHS = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.lists(st.integers(1, 90), min_size=1, max_size=10),
)
#: The default values, or small ones, which make short rows take every code path.
CONSTANTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "BRANCH_TOKENS": st.sampled_from([1, 3, 10]),
            "SHORT": st.sampled_from([4, 64]),
            "_CALL_COST": st.sampled_from([0, 5, 64]),
            "_MAX_GATHERED": st.sampled_from([1, 2]),
            "_MAX_WIDENING": st.sampled_from([1, 9]),
        }
    ),
)


@st.composite
def prefix_trees(draw):
    tokens = st.integers(0, draw(st.sampled_from([1, 3])))
    prefixes = draw(st.lists(st.lists(tokens, max_size=80), min_size=1, max_size=3))
    suffix = st.lists(tokens, min_size=1, max_size=draw(st.sampled_from([3, 12, 40])))
    suffixes = draw(st.lists(suffix, min_size=2, max_size=9))
    return [draw(st.sampled_from(prefixes)) + row for row in suffixes]


@contextmanager
def patched_constants(constants):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(attention, name, value)
        yield


@settings(deadline=None, max_examples=80)
@given(LENGTHS, st.sampled_from([20, 200, 1_000]), st.booleans(), HEADS, WIDTHS, CONSTANTS)
def test_texts_attend_to_themselves_only(lengths, budget, causal, heads, width, constants):
    with patched_constants(constants):
        for batch in pack(lengths, budget):
            check_plans(batch, causal, heads, width)


@settings(deadline=None, max_examples=80)
@given(prefix_trees(), st.sampled_from([60, 1_000]), HEADS, WIDTHS, CONSTANTS)
def test_branches_attend_to_their_path_only(ids, budget, heads, width, constants):
    with patched_constants(constants):
        for batch in pack_tree(ids, budget):
            check_plans(batch, True, heads, width)


def test_long_texts_branches_and_chains_attend_correctly():
    for length in (15, 16, 17, 63, 64, 65, 128, 300):
        for heads, causal in (((4, 4), True), ((4, 4), False), ((4, 2), True)):
            check_plans(pack([length] * 2, 1_000)[0], causal, heads)
    generator = random.Random(0)
    prefix = generator.choices(range(50), k=250)
    middles = [prefix[:cut] + generator.choices(range(50), k=210) for cut in (250, 250, 100)]
    ids = [middle + generator.choices(range(50), k=n) for middle in middles for n in (1, 30, 200)]
    (batch,) = pack_tree([*ids, prefix, *middles])
    assert batch.n_tokens > 3 * attention.BRANCH_TOKENS
    check_plans(batch, True, heads=(4, 2))
    (batch,) = pack_tree([list(range(stop)) for stop in range(1, 300)])
    assert len(batch.segments) == 299
    check_plans(batch, True)


def test_default_scale_depends_on_head_width():
    batch = pack([5, 3, 70], 100)[0]
    states = random_states(batch, width=16)
    expected = reference(batch, False, *states, scale=0.25)
    for plan in make_plans(batch, False):
        assert (plan(*states, None) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_is_close_to_float32(causal, heads):
    batches = pack([*range(60, 70), *range(1, 20), 3, 3], 100_000)
    batches += pack([20] * 11, 1_000)  # eight texts in 16 bit, and three in float32
    batches += pack_tree([[7] * 40 + [at] * at for at in range(1, 30)]) if causal else []
    for batch in batches:
        states = random_states(batch, heads, dtype=torch.bfloat16)
        expected = reference(batch, causal, *states)
        for plan in make_plans(batch, causal, torch.bfloat16):
            output = plan(*states, SCALE)
            assert output.dtype == torch.bfloat16
            # Scores, weights and sums each have 8 bits of precision.
            assert (output - expected).norm() / expected.norm() < 3 * 2**-8


@pytest.mark.parametrize("causal", [True, False])
def test_output_does_not_depend_on_other_texts(causal):
    """The outputs are equal to the last bit, because other texts are not among the keys."""
    batch = pack([70, 9, 9, 8, 3, 1], 1_000)[0]
    query, key, value = random_states(batch)
    for plan in make_plans(batch, causal):
        before = plan(query, key, value, SCALE)
        for segment in batch.segments:
            tokens = slice(segment.start, segment.stop)
            factors = torch.full((batch.n_tokens, 1), 1e4)
            factors[tokens] = 1
            after = plan(query, key * factors, value * factors, SCALE)
            assert torch.equal(after[tokens], before[tokens])


# -- memory ------------------------------------------------------------------------------------

PREFIX = [0] * 2_000
DIFFICULT_TREES = {
    "one prefix, many branches": [[*PREFIX, at] for at in range(1, 501)],
    "branches longer than a piece": [PREFIX + [at] * 300 for at in range(1, 6)],
    "prefix in prefix": [PREFIX[:n] + [n] * 3 for n in range(0, 2_000, 40)],
    "chain": [[0] * n for n in range(1, 400)],
}


@pytest.mark.parametrize("name", DIFFICULT_TREES)
def test_keys_of_a_call_are_limited(name, monkeypatch):
    sizes, key_counts, ids = [], [], DIFFICULT_TREES[name]
    (batch,) = pack_tree(ids)
    longest, states = max(map(len, ids)), random_states(batch, heads=(1, 1))

    def record_sizes(query, key, value, **options):
        # A text without a path is not gathered, and has no mask if it is longer than ``SHORT``.
        if options["attn_mask"] is not None:
            sizes.append((query.shape[2], len(key) * key.shape[2]))
        return scaled_dot_product_attention(query, key, value, **options)

    def count_keys(query, key, value, *ends, **options):
        key_counts.append(len(key))
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record_sizes)
    monkeypatch.setattr(attention, "SHORT", 0)
    plan = plan_attention(batch, True, CPU, torch.float32)
    plan(*states, SCALE)
    assert max(n_queries for n_queries, _ in sizes) <= attention.BRANCH_TOKENS
    assert max(n_keys for _, n_keys in sizes) <= longest + attention.BRANCH_TOKENS
    if name == "one prefix, many branches":  # they share calls
        assert len(sizes) <= 1 + -(-500 // attention.BRANCH_TOKENS)

    plan_varlen(batch, True, CPU, count_keys)(*states, SCALE)
    limit = max(attention._MAX_GATHERED * batch.n_tokens, longest)
    assert max(key_counts) <= limit
    # No two successive calls would fit into one.
    assert all(first + second > limit - longest for first, second in pairwise(key_counts))


def test_varlen_kernel_gets_states_of_one_type():
    """In training, autocast leaves rotated queries and keys in float32."""
    (batch,) = pack([5, 3], 8)
    query, key, value = random_states(batch)

    def attend(*arguments, **options):
        assert {states.dtype for states in arguments[:3]} == {torch.bfloat16}
        return reference_attention(*arguments, **options)

    output = plan_varlen(batch, True, CPU, attend)(query, key, value.bfloat16(), SCALE)
    expected = reference(batch, True, query, key, value)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": 1.0}, {"position_bias": 1.0}])
def test_packed_attention_rejects_unsupported_options(option):
    batch = pack([5, 3], 8)[0]
    states = [x[None] for x in random_states(batch)]
    plan = plan_attention(batch, True, CPU, torch.float32)
    with pytest.raises(NotImplementedError, match=f"does not support {next(iter(option))}"):
        attention._compute_attention(None, *states, None, packed=plan, **option)


# -- rows ---------------------------------------------------------------------------------------

ROW_LENGTHS = st.lists(st.integers(1, 300), max_size=60)
BUDGETS = st.integers(1, 1_000)


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


@given(ROW_LENGTHS, BUDGETS)
def test_padded_batches_are_as_full_as_the_budget_allows(lengths, budget):
    batches = plan_batches(lengths, budget)
    assert [index for batch in batches for index in batch] == longest_first(lengths)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= budget
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > budget


@given(ROW_LENGTHS, BUDGETS)
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
    generator = random.Random(0)  # these share too little
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
