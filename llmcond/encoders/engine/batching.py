"""Batches by a token budget: padded, packed without padding, or packed with shared prefixes.

A packed batch is one row of tokens, cut into segments. Without sharing, a segment is an input. With
sharing, inputs form a prefix tree, and a segment is a run of tokens that some inputs have in
common: it is computed once, and the inputs that go on from it follow it in the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

#: Rows are about a multiple of this long: see ``Runtime.step``.
STEP = 64
#: A prefix that is shorter beyond its parent is not worth a segment of its own.
MIN_SHARED = 4
#: Batches with shared prefixes attend in smaller pieces; for less than this it does not pay.
_WORTH_SHARING = 0.97


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``begin`` to ``end`` of an input, in a packed row.

    Attributes:
        source: position of an input that has them.
        begin, end: which of its tokens.
        start: position of the first one in the row.
        until: position behind the last token of all inputs that go on from it.
        parent: index of the segment before it, -1 for none.
    """

    source: int
    begin: int
    end: int
    start: int
    until: int
    parent: int

    @property
    def length(self) -> int:
        """Return its number of tokens."""
        return self.end - self.begin

    @property
    def stop(self) -> int:
        """Return the position behind its own last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row.

    Attributes:
        segments: in the order of the row, parents before children.
        inputs: positions of the inputs that it computes.
        leaves: for each of them, the index of the segment that its last token is in.
    """

    segments: tuple[Segment, ...]
    inputs: tuple[int, ...]
    leaves: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Return the tokens of the row."""
        return self.segments[-1].stop

    @property
    def shared(self) -> bool:
        """Return whether a segment has another before it."""
        return any(segment.parent >= 0 for segment in self.segments)

    def path(self, index: int) -> list[Segment]:
        """Return the segments before one, outermost first."""
        found = []
        while (index := self.segments[index].parent) >= 0:
            found.append(self.segments[index])
        return found[::-1]

    def position(self, leaf: int, token: int) -> int:
        """Return where in the row a token of the input with this leaf is."""
        segment = self.segments[leaf]
        while token < segment.begin:
            segment = self.segments[segment.parent]
        return segment.start + token - segment.begin


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group inputs of like length into batches of at most ``max_tokens`` tokens with padding.

    A batch takes its rows times its longest row. An input that is longer by itself gets a batch of
    its own.

    Returns:
        Positions in ``lengths``, longest first; every position once. The plan is a function of
        its arguments alone, so that a resumed extraction computes the same batches.
    """
    batches: list[list[int]] = []
    for index in _longest_first(lengths):
        # Sorted longest first, so a batch's first row is its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(lengths: Sequence[int], max_tokens: int) -> list[Batch]:
    """Pack inputs of like length into rows of at most ``max_tokens`` tokens, without padding.

    Rows have about the same number of tokens; every input is in one of them, longest first. An
    input that is longer by itself gets a row of its own.
    """
    total = sum(lengths)
    # Equal rows rather than full ones and a rest: a short row leaves the machine half idle.
    equal = total / max(1, -(-total // max_tokens))
    # A row ends up to one text short of what it may hold; without that, a crumb would be left.
    most = min(max_tokens, math.ceil((equal + max(lengths, default=0)) / STEP) * STEP)
    groups: list[list[int]] = []
    used = 0
    for index in _longest_first(lengths):
        if not groups or used + lengths[index] > most:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += lengths[index]
    return [flat(group, lengths) for group in groups]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def flat(group: Sequence[int], lengths: Sequence[int]) -> Batch:
    """Return inputs, by their positions in ``lengths``, one behind the other in a row."""
    segments, start = [], 0
    for index in group:
        stop = start + lengths[index]
        segments.append(Segment(index, 0, lengths[index], start, stop, -1))
        start = stop
    return Batch(tuple(segments), tuple(group), tuple(range(len(group))))


def pack_shared(ids: Sequence[Sequence[int]], max_tokens: int) -> list[Batch]:
    """Pack inputs into rows in which a prefix that several have in common stands once.

    Exact for a causal encoder that pools its last token: what stands before a token decides its
    vector, and nothing behind it. Where little is shared, the plan is that of :func:`pack`.

    In ``max_tokens`` of a row shared tokens count once. Every input is in one row; a prefix whose
    inputs do not fit into one is computed in each.
    """
    batches = list(_grow(ids, max_tokens))
    lengths = [len(row) for row in ids]
    if sum(batch.n_tokens for batch in batches) > _WORTH_SHARING * sum(lengths):
        return pack(lengths, max_tokens)
    return batches


def _grow(ids: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Batch]:
    order = sorted(range(len(ids)), key=lambda i: (list(ids[i]), i))
    common = [0, *(_common(ids[before], ids[index]) for before, index in pairwise(order))]
    tree = _Tree()
    for at, index in enumerate(order):
        length = len(ids[index])
        more = length - tree.attach(common[at])
        begins = 2 * common[at] < length
        if tree.n_tokens and (
            tree.n_tokens + more > max_tokens
            or (
                begins
                and 2 * tree.n_tokens >= max_tokens
                and _family(ids, order, common, at) + tree.n_tokens > max_tokens
            )
        ):
            yield tree.batch()
            tree = _Tree()
        tree.add(index, length, common[at])
    if tree.n_tokens:
        yield tree.batch()


def _family(ids: Sequence[Sequence[int]], order: list[int], common: list[int], at: int) -> int:
    """Return about how many tokens an input and those that share most of it take together."""
    first = len(ids[order[at]])
    alike = takewhile(lambda place: 2 * common[place] >= first, range(at + 1, len(order)))
    return first + sum(len(ids[order[place]]) - common[place] for place in alike)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(slots=True, eq=False)
class _Node:
    source: int
    begin: int
    end: int
    parent: _Node | None
    inputs: list[int] = field(default_factory=list)


class _Tree:
    """A prefix tree that grows by inputs in the order of their tokens."""

    def __init__(self) -> None:
        #: Depth first, without the root.
        self._nodes: list[_Node] = []
        #: From the root to where the last input ends.
        self._path = [_Node(-1, 0, 0, None)]
        self.n_tokens = 0

    def attach(self, common: int) -> int:
        """Return the depth from which an input needs its own, by what is common with the last."""
        if not self.n_tokens:
            return 0
        node = next(node for node in reversed(self._path) if node.begin < common or not node.end)
        inside = min(common, node.end)
        worth = inside == node.end or inside - node.begin >= MIN_SHARED
        return inside if worth else node.begin

    def add(self, index: int, length: int, common: int) -> None:
        """Add an input of ``length`` tokens; see :meth:`attach`."""
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
        lower = self._path.pop()
        upper = _Node(lower.source, lower.begin, depth, lower.parent)
        lower.begin, lower.parent = depth, upper
        self._nodes.insert(self._nodes.index(lower), upper)
        self._path.append(upper)

    def batch(self) -> Batch:
        """Return the tree as a packed row."""
        nodes = self._nodes
        place: dict[_Node | None, int] = {node: at for at, node in enumerate(nodes)}
        ends = list(accumulate(node.end - node.begin for node in nodes))
        until = [*ends]
        for node in reversed(nodes):
            if node.parent in place:
                parent = place[node.parent]
                until[parent] = max(until[parent], until[place[node]])
        starts = [0, *ends]
        segments = tuple(
            Segment(node.source, node.begin, node.end, *row, place.get(node.parent, -1))
            for node, row in zip(nodes, zip(starts, until, strict=False), strict=True)
        )
        leaves = [(index, at) for at, node in enumerate(nodes) for index in node.inputs]
        return Batch(segments, *zip(*leaves, strict=True))
