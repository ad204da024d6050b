"""Attention over a packed row, compared with attention under a dense mask."""

import random
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from helpers.kernels import reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from llmcond.encoders.torch import attention, batching
from llmcond.encoders.torch.attention import plan_attention, plan_varlen
from llmcond.encoders.torch.batching import pack, pack_shared

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
        output = plan.attend(*states, SCALE)
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
        assert (plan.attend(*states, None) - expected).abs().max() < 1e-5


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
            output = plan.attend(*states, SCALE)
            assert output.dtype == torch.bfloat16
            # Scores, weights and sums each have 8 bits of precision.
            assert (output - expected).norm() / expected.norm() < 3 * 2**-8


@pytest.mark.parametrize("causal", [True, False])
def test_output_does_not_depend_on_other_texts(causal):
    """The outputs are equal to the last bit, because other texts are not among the keys."""
    batch = pack([70, 9, 9, 8, 3, 1], 1_000)[0]
    query, key, value = random_states(batch)
    for plan in make_plans(batch, causal):
        before = plan.attend(query, key, value, SCALE)
        for segment in batch.segments:
            tokens = slice(segment.start, segment.stop)
            factors = torch.full((batch.n_tokens, 1), 1e4)
            factors[tokens] = 1
            after = plan.attend(query, key * factors, value * factors, SCALE)
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
    plan.attend(*states, SCALE)
    assert max(n_queries for n_queries, _ in sizes) <= attention.BRANCH_TOKENS
    assert max(n_keys for _, n_keys in sizes) <= longest + attention.BRANCH_TOKENS
    if name == "one prefix, many branches":  # they share calls
        assert len(plan.blocks) <= 1 + -(-500 // attention.BRANCH_TOKENS)

    plan_varlen(batch, True, CPU, count_keys).attend(*states, SCALE)
    limit = max(attention._MAX_GATHERED * batch.n_tokens, longest)
    assert max(key_counts) <= limit
    # No two successive calls would fit into one.
    assert all(first + second > limit - longest for first, second in pairwise(key_counts))


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": 1.0}, {"position_bias": 1.0}])
def test_packed_attention_rejects_unsupported_options(option):
    batch = pack([5, 3], 8)[0]
    states = [x[None] for x in random_states(batch)]
    plan = plan_attention(batch, True, CPU, torch.float32)
    with pytest.raises(NotImplementedError, match=f"does not support {next(iter(option))}"):
        attention._compute_attention(None, *states, None, packed=plan, **option)
