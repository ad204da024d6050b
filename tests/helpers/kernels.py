"""A reference implementation of packed attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def reference_attention(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Compute ``torch.nn.attention.varlen.varlen_attn`` segment by segment."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key))
    assert enable_gqa or query.shape[1] == key.shape[1]
    parts = []
    for at in range(len(cu_seq_q) - 1):
        queries, keys = (slice(*ends[at : at + 2].tolist()) for ends in (cu_seq_q, cu_seq_k))
        n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
        assert n_queries <= max_q
        assert n_keys <= max_k
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
        if window_size != (-1, -1):
            assert window_size == (-1, 0)
            # The last query is aligned with the last key.
            seen = seen.tril(n_keys - n_queries)
        rows = (query[queries], key[keys], value[keys])
        part = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in rows),
            attn_mask=seen,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
