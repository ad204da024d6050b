"""Attention over a packed row, compared with attention under a dense mask."""

import random
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.kernels import reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from llmcond.encoders.engine import attention, batching
from llmcond.encoders.engine.attention import plan_attention, plan_varlen, varlen_kernels
from llmcond.encoders.engine.batching import pack, pack_shared

# Networks this small finish before a second thread would have started.
pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SCALE = 0.3


def visible(batch, causal):
    """Return a (tokens, tokens) mask: True where the token of a row sees that of a column."""
    seen = torch.zeros(batch.n_tokens, batch.n_tokens, dtype=torch.bool)
    for index, segment in enumerate(batch.segments):
        for ancestor in [*batch.ancestors(index), segment]:
            seen[segment.start : segment.stop, ancestor.start : ancestor.stop] = True
    return seen.tril() if causal else seen


def reference(batch, causal, query, key, value, scale=SCALE):
    groups = len(query) // len(key)
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    scores = scores.masked_fill(~visible(batch, causal), float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(0, 1)


def random_states(batch, heads=(4, 4), width=8, dtype=torch.float32, seed=0):
    """Return random queries, keys and values in the memory layout of a network's projections."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads[0], heads[1], heads[1])
    return [
        torch.randn(1, batch.n_tokens, n, width, generator=generator).to(dtype).transpose(1, 2)[0]
        for n in sizes
    ]


def make_plans(batch, causal, dtype=torch.float32):
    """Return the row's attention plans by the name of their implementation."""
    return {
        "blocks": plan_attention(batch, causal, CPU, dtype),
        "varlen": plan_varlen(batch, causal, CPU, reference_attention),
    }


def check_plans(batch, causal, heads=(4, 4), width=8):
    states = random_states(batch, heads, width)
    expected = reference(batch, causal, *states)
    for name, plan in make_plans(batch, causal).items():
        output = plan.attend(*states, SCALE)
        assert output.shape == (batch.n_tokens, heads[0], width)
        assert (output - expected).abs().max() < 1e-5, name


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


@st.composite
def prefix_trees(draw):
    tokens = st.integers(0, draw(st.sampled_from([1, 3])))
    prefixes = draw(st.lists(st.lists(tokens, max_size=80), min_size=1, max_size=3))
    longest = draw(st.sampled_from([3, 12, 40]))
    suffixes = draw(
        st.lists(st.lists(tokens, min_size=1, max_size=longest), min_size=2, max_size=9)
    )
    return [draw(st.sampled_from(prefixes)) + row for row in suffixes]


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


@contextmanager
def patched_constants(constants):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(attention, name, value)
        yield


# -- against the reference ---------------------------------------------------------------------


@settings(deadline=None, max_examples=250)
@given(LENGTHS, st.sampled_from([20, 200, 1_000]), st.booleans(), HEADS, WIDTHS, CONSTANTS)
def test_texts_attend_to_themselves_only(lengths, budget, causal, heads, width, constants):
    with patched_constants(constants):
        for batch in pack(lengths, budget):
            check_plans(batch, causal, heads, width)


@settings(deadline=None, max_examples=250)
@given(prefix_trees(), st.sampled_from([60, 1_000]), HEADS, WIDTHS, CONSTANTS)
def test_branches_attend_to_their_path_only(ids, budget, heads, width, constants):
    with patched_constants(constants):
        for batch in pack_tree(ids, budget):
            check_plans(batch, True, heads, width)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("n_texts", [1, 2])
def test_attention_is_correct_for_texts_of_any_length(causal, heads, n_texts):
    for length in [*range(1, 20), 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 300]:
        check_plans(pack([length] * n_texts, 1_000)[0], causal, heads)


def test_attention_is_correct_for_branches_longer_than_a_block():
    generator = random.Random(0)
    prefix = generator.choices(range(50), k=250)
    middles = [prefix[:cut] + generator.choices(range(50), k=210) for cut in (250, 250, 100)]
    ids = [middle + generator.choices(range(50), k=n) for middle in middles for n in (1, 30, 200)]
    (batch,) = pack_tree([*ids, prefix, *middles])
    assert batch.n_tokens > 3 * attention.BRANCH_TOKENS
    check_plans(batch, True)
    check_plans(batch, True, heads=(4, 2))


def test_attention_is_correct_for_chain_of_prefixes():
    (batch,) = pack_tree([list(range(stop)) for stop in range(1, 300)])
    assert len(batch.segments) == 299
    check_plans(batch, True)


def test_default_scale_depends_on_head_width():
    batch = pack([5, 3, 70], 100)[0]
    states = random_states(batch, width=16)
    expected = reference(batch, False, *states, scale=0.25)
    for plan in make_plans(batch, False).values():
        assert (plan.attend(*states, None) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_is_close_to_float32(causal, heads):
    ids = [[7] * 40 + [at] * at for at in range(1, 30)]
    batches = [
        *pack([*range(60, 70), *range(1, 20), 3, 3], 100_000),
        *(pack_tree(ids) if causal else []),
    ]
    for batch in batches:
        states = random_states(batch, heads, dtype=torch.bfloat16)
        expected = reference(batch, causal, *states)
        for plan in make_plans(batch, causal, torch.bfloat16).values():
            output = plan.attend(*states, SCALE)
            assert output.dtype == torch.bfloat16
            error = (output - expected).norm() / expected.norm()
            # Scores, weights and sums each have 8 bits of precision.
            assert error < 3 * 2**-8


def test_output_does_not_depend_on_other_texts():
    """The outputs are equal to the last bit, because other texts are not among the keys."""
    batch = pack([70, 9, 9, 8, 3, 1], 1_000)[0]
    query, key, value = random_states(batch)
    for causal in (True, False):
        for name, plan in make_plans(batch, causal).items():
            before = plan.attend(query, key, value, SCALE)
            for segment in batch.segments:
                tokens = slice(segment.start, segment.stop)
                factors = torch.full((batch.n_tokens, 1), 1e4)
                factors[tokens] = 1
                after = plan.attend(query, key * factors, value * factors, SCALE)
                assert torch.equal(after[tokens], before[tokens]), name


# -- memory ------------------------------------------------------------------------------------


def difficult_trees():
    generator = random.Random(0)
    prefix = [0] * 2_000
    binary = [[0] * 4]
    for _ in range(7):
        binary = [row + [1 + kind] * 6 for row in binary for kind in (0, 1)]
    return {
        "one prefix, many branches": [[*prefix, at] for at in range(1, 501)],
        "branches longer than a piece": [prefix + [at] * 300 for at in range(1, 6)],
        "prefix in prefix": [prefix[:n] + [n] * 3 for n in range(0, 2_000, 40)],
        "chain": [[0] * n for n in range(1, 400)],
        "binary tree": binary,
        "random": [generator.choices(range(2), k=generator.randint(1, 300)) for _ in range(60)],
    }


@pytest.fixture(params=difficult_trees())
def difficult_ids(request):
    return difficult_trees()[request.param]


def test_block_gathers_keys_of_one_path_and_few_branches(difficult_ids, monkeypatch):
    sizes = []

    def record_sizes(query, key, value, **options):
        # A text without a path is not gathered, and has no mask if it is longer than ``SHORT``.
        if options["attn_mask"] is not None:
            assert options["attn_mask"].numel() <= attention.BRANCH_TOKENS * key.shape[2]
            sizes.append((query.shape[2], len(key) * key.shape[2]))
        return scaled_dot_product_attention(query, key, value, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record_sizes)
    monkeypatch.setattr(attention, "SHORT", 0)
    (batch,) = pack_tree(difficult_ids)
    plan_attention(batch, True, CPU, torch.float32).attend(
        *random_states(batch, heads=(1, 1)), SCALE
    )
    longest = max(map(len, difficult_ids))
    assert sizes
    for n_queries, n_keys in sizes:
        assert n_queries <= attention.BRANCH_TOKENS
        assert n_keys <= longest + attention.BRANCH_TOKENS


def test_small_branches_share_blocks():
    """Each block is one call, so many branches of one token must share calls."""
    (batch,) = pack_tree(difficult_trees()["one prefix, many branches"])
    blocks = plan_attention(batch, True, CPU, torch.float32).blocks
    assert len(blocks) <= 1 + -(-500 // attention.BRANCH_TOKENS)


def test_gathered_keys_of_a_kernel_call_are_limited(difficult_ids):
    (batch,) = pack_tree(difficult_ids)
    limit = max(attention._MAX_GATHERED * batch.n_tokens, *map(len, difficult_ids))
    key_counts = []

    def count_keys(query, key, value, *ends, **options):
        key_counts.append(len(key))
        return query

    plan = plan_varlen(batch, True, CPU, count_keys)
    output = plan.attend(*random_states(batch, heads=(1, 1)), SCALE)
    assert len(output) == batch.n_tokens
    assert max(key_counts) <= limit
    gathered = sum(
        segment.length + sum(ancestor.length for ancestor in batch.ancestors(index))
        for index, segment in enumerate(batch.segments)
    )
    assert sum(key_counts) == gathered
    # No two successive calls would fit into one.
    assert all(
        first + second > limit - max(map(len, difficult_ids))
        for first, second in pairwise(key_counts)
    )


# -- in transformers ---------------------------------------------------------------------------


def test_attention_without_plan_matches_transformers():
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)
    states = [x[None] for x in random_states(pack([9], 9)[0])]
    mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.eye(9).bool(), float("-inf"))
    output = attention._compute_attention(module, *states, mask, scaling=SCALE)[0]
    expected = attention.sdpa_attention_forward(module, *states, mask, scaling=SCALE)[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": 1.0}, {"position_bias": 1.0}])
def test_packed_attention_rejects_unsupported_options(option):
    batch = pack([5, 3], 8)[0]
    states = [x[None] for x in random_states(batch)]
    plan = plan_attention(batch, True, CPU, torch.float32)
    with pytest.raises(NotImplementedError, match=f"does not support {next(iter(option))}"):
        attention._compute_attention(None, *states, None, packed=plan, **option)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_has_no_varlen_kernel(dtype):
    assert varlen_kernels(CPU, dtype) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_kernels_match_reference(causal):
    device = torch.device("cuda")
    kernels = varlen_kernels(device, torch.bfloat16)
    if not kernels:
        pytest.skip("this GPU has no kernel for uneven lengths")
    ids = [[7] * 90 + [at] * at for at in range(1, 60)]
    batches = [*pack([*range(1, 150)], 100_000), *(pack_tree(ids) if causal else [])]
    for batch in batches:
        states = random_states(batch, heads=(4, 2), width=64, dtype=torch.bfloat16)
        expected = reference(batch, causal, *states)
        states = [x.to(device) for x in states]
        for plan in (
            plan_attention(batch, causal, device, torch.bfloat16),
            *(plan_varlen(batch, causal, device, kernel_of_gpu) for kernel_of_gpu in kernels),
        ):
            output = plan.attend(*states, SCALE).cpu()
            assert (output - expected).norm() / expected.norm() < 3 * 2**-8


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_router_changes_attention_output_before_projection(tiny_checkpoint, kind):
    from transformers import AutoModel

    network = AutoModel.from_pretrained(tiny_checkpoint(kind)).eval()
    network.set_attn_implementation(attention.NAME)
    ids = torch.arange(6, 14)[None]
    layers = []

    class Router:
        factor = 1.0

        def attend(self, call):
            layers.append((call.module.layer_idx, tuple(call.attend().shape)))
            return self.factor * call.attend()

    plain = network(input_ids=ids).last_hidden_state
    router = Router()
    assert torch.equal(network(input_ids=ids, router=router).last_hidden_state, plain)
    assert layers == [(0, (1, 8, 4, 8)), (1, (1, 8, 4, 8))]
    router.factor = 0.0
    assert not torch.allclose(network(input_ids=ids, router=router).last_hidden_state, plain)
