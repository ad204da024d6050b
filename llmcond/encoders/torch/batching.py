"""Batches by a token budget: padded, packed without padding, or packed with shared prefixes.

A packed batch is one row of tokens, cut into segments. Without sharing, each segment is an input.
With sharing, the inputs form a prefix tree, and a segment is a run of tokens that several inputs
have in common. It is computed once, and the rest of these inputs follows it in the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

#: The length of packed rows is padded to a multiple of this number; see ``Runtime.step``.
STEP = 64
#: Fewest tokens beyond its parent for which a shared prefix becomes a segment.
MIN_SHARED = 4
#: Sharing prefixes pays only if it leaves at most this share of the tokens, because batches with
#: shared prefixes attend in smaller pieces.
_WORTH_SHARING = 0.97


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Tokens ``begin`` to ``end`` of an input, in a packed row.

    Attributes:
        source: Position of an input that has these tokens.
        begin: Index of the first of these tokens in the input.
        end: Index behind the last of these tokens in the input.
        start: Position of the first of these tokens in the row.
        subtree_stop: Position in the row behind the last token of all inputs that continue this
            segment.
        parent: Index of the preceding segment of the same inputs, -1 for none.
    """

    source: int
    begin: int
    end: int
    start: int
    subtree_stop: int
    parent: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    @property
    def stop(self) -> int:
        """Position in the row behind the segment's last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One packed row.

    Attributes:
        segments: The segments in the order of the row, parents before children.
        inputs: Positions of the inputs in this row.
        leaves: For each of these inputs, the index of the segment with its last token.
    """

    segments: tuple[RowSegment, ...]
    inputs: tuple[int, ...]
    leaves: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the row, without padding."""
        return self.segments[-1].stop

    @property
    def shared(self) -> bool:
        """Whether inputs share prefixes, that is, whether any segment has a parent."""
        return any(segment.parent >= 0 for segment in self.segments)

    def ancestors(self, index: int) -> list[RowSegment]:
        """Return the ancestors of a segment, outermost first."""
        ancestors = []
        while (index := self.segments[index].parent) >= 0:
            ancestors.append(self.segments[index])
        return ancestors[::-1]

    def position(self, leaf: int, token: int) -> int:
        """Return the position in the row of a token of the input that ends in segment ``leaf``."""
        segment = self.segments[leaf]
        while token < segment.begin:
            segment = self.segments[segment.parent]
        return segment.start + token - segment.begin


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group inputs of similar length into padded batches of at most ``max_tokens`` tokens.

    The tokens of a batch are its number of rows times the length of its longest row. An input
    longer than ``max_tokens`` gets a batch of its own.

    Returns:
        Positions in ``lengths``, longest first; every position once. The plan depends on the
        arguments only, so that a resumed extraction computes the same batches.
    """
    batches: list[list[int]] = []
    for index in _longest_first(lengths):
        # Inputs are sorted longest first, so the first row of a batch has its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(lengths: Sequence[int], max_tokens: int) -> list[PackedRow]:
    """Pack inputs of similar length into rows of at most ``max_tokens`` tokens, without padding.

    Rows have about the same number of tokens. Every input is in exactly one row, longest first. An
    input longer than ``max_tokens`` gets a row of its own.
    """
    total = sum(lengths)
    # Rows of equal size are better than full rows and a short last one, which leaves the machine
    # half idle.
    equal = total / max(1, -(-total // max_tokens))
    # A row may be short of its limit by up to one text. Without an allowance for that, a few tokens
    # would be left over for one more row.
    row_tokens = min(max_tokens, math.ceil((equal + max(lengths, default=0)) / STEP) * STEP)
    groups: list[list[int]] = []
    used = 0
    for index in _longest_first(lengths):
        if not groups or used + lengths[index] > row_tokens:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += lengths[index]
    return [concatenate_inputs(group, lengths) for group in groups]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def concatenate_inputs(group: Sequence[int], lengths: Sequence[int]) -> PackedRow:
    """Concatenate inputs, given by their positions in ``lengths``, to one packed row."""
    segments, start = [], 0
    for index in group:
        stop = start + lengths[index]
        segments.append(RowSegment(index, 0, lengths[index], start, stop, -1))
        start = stop
    return PackedRow(tuple(segments), tuple(group), tuple(range(len(group))))


def pack_shared(ids: Sequence[Sequence[int]], max_tokens: int) -> list[PackedRow]:
    """Pack inputs into rows in which a prefix that several inputs share appears once.

    This is exact for a causal encoder that pools its last token, because a token's vector depends
    on the tokens before it only. If little is shared, the plan is that of ``pack``.

    Shared tokens count once for ``max_tokens``. Every input is in exactly one row. A prefix whose
    inputs do not fit into one row is computed in each of their rows.
    """
    batches = list(_pack_trees(ids, max_tokens))
    lengths = [len(row) for row in ids]
    if sum(batch.n_tokens for batch in batches) > _WORTH_SHARING * sum(lengths):
        return pack(lengths, max_tokens)
    return batches


def _pack_trees(ids: Sequence[Sequence[int]], max_tokens: int) -> Iterator[PackedRow]:
    """Add inputs in the order of their tokens to a prefix tree; yield it when it is full."""
    order = sorted(range(len(ids)), key=lambda i: (list(ids[i]), i))
    common = [
        0,
        *(_common_prefix_length(ids[previous], ids[index]) for previous, index in pairwise(order)),
    ]
    tree = _PrefixTree()
    for rank, index in enumerate(order):
        length = len(ids[index])
        n_added = length - tree.attach(common[rank])
        starts_family = 2 * common[rank] < length
        if tree.n_tokens and (
            tree.n_tokens + n_added > max_tokens
            or (
                starts_family
                and 2 * tree.n_tokens >= max_tokens
                and _family_size(ids, order, common, rank) + tree.n_tokens > max_tokens
            )
        ):
            yield tree.batch()
            tree = _PrefixTree()
        tree.add(index, length, common[rank])
    if tree.n_tokens:
        yield tree.batch()


def _family_size(
    ids: Sequence[Sequence[int]], order: list[int], common: list[int], first: int
) -> int:
    """Estimate the tokens of an input and of the following inputs that share most of it.

    ``first`` is the input's index in ``order``, and ``common`` has the number of tokens that each
    input in that order shares with the previous one.
    """
    length = len(ids[order[first]])
    relatives = takewhile(lambda rank: 2 * common[rank] >= length, range(first + 1, len(order)))
    return length + sum(len(ids[order[rank]]) - common[rank] for rank in relatives)


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(slots=True, eq=False)
class _Node:
    source: int
    begin: int
    end: int
    parent: _Node | None
    inputs: list[int] = field(default_factory=list)


class _PrefixTree:
    """A prefix tree to which inputs are added in the order of their tokens."""

    def __init__(self) -> None:
        #: All nodes but the root, depth first.
        self._nodes: list[_Node] = []
        #: Nodes from the root to the end of the last input.
        self._path = [_Node(-1, 0, 0, None)]
        self.n_tokens = 0

    def attach(self, common: int) -> int:
        """Return the depth at which the next input branches off.

        ``common`` is the number of tokens that it shares with the last input. Tokens from that
        depth on are not shared.
        """
        if not self.n_tokens:
            return 0
        node = next(node for node in reversed(self._path) if node.begin < common or not node.end)
        depth = min(common, node.end)
        worth = depth == node.end or depth - node.begin >= MIN_SHARED
        return depth if worth else node.begin

    def add(self, index: int, length: int, common: int) -> None:
        """Add an input of ``length`` tokens that shares ``common`` of them with the last input."""
        depth = self.attach(common)
        while self._path[-1].begin >= depth and len(self._path) > 1:
            self._path.pop()
        if depth < self._path[-1].end:
            self._split(depth)
        if length > depth:
            self._nodes.append(_Node(index, depth, length, self._path[-1]))
            self._path.append(self._nodes[-1])
            self.n_tokens += length - depth
        self._path[-1].inputs.append(index)

    def _split(self, depth: int) -> None:
        """Split the last node of the path in two at ``depth``."""
        lower = self._path.pop()
        upper = _Node(lower.source, lower.begin, depth, lower.parent)
        lower.begin, lower.parent = depth, upper
        self._nodes.insert(self._nodes.index(lower), upper)
        self._path.append(upper)

    def batch(self) -> PackedRow:
        """Return the tree as a packed row."""
        nodes = self._nodes
        index_of: dict[_Node | None, int] = {node: index for index, node in enumerate(nodes)}
        ends = list(accumulate(node.end - node.begin for node in nodes))
        until = [*ends]
        for node in reversed(nodes):
            if node.parent in index_of:
                parent = index_of[node.parent]
                until[parent] = max(until[parent], until[index_of[node]])
        starts = [0, *ends]
        segments = tuple(
            RowSegment(node.source, node.begin, node.end, *extent, index_of.get(node.parent, -1))
            for node, extent in zip(nodes, zip(starts, until, strict=False), strict=True)
        )
        leaves = [(source, leaf) for leaf, node in enumerate(nodes) for source in node.inputs]
        return PackedRow(segments, *zip(*leaves, strict=True))
