"""Views: the features of one or several prompts that a head reads, and the keys of inputs.

The features of several prompts are concatenated. Joint features are e(s|c), with or without the
prompt's unconditional features subtracted (CASE, equation 1). Separate features are e(s) and e(c)
(Hyper-CL, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import ConcatenatedMatrix, Difference, Matrix, scale_to_unit_norm
from llmcond.base.errors import UserError
from llmcond.base.text import wordings
from llmcond.data.answers import AnswerTable
from llmcond.encoders.spec import EncoderInput
from llmcond.prompts import Prompt
from llmcond.prompts import template as templates

if TYPE_CHECKING:
    from llmcond.heads import Recipe

#: The number type that a store keeps features in.
StoreDtype = Literal["float16", "float32"]

KEY_BYTES = 16


class KeyIndex:
    """The positions of 16-byte keys: the n-th key that was added has the position n, from 0.

    Keys are digests, so their first halves hardly ever agree. If they do, a lookup is slower but
    correct. The keys lie in sorted arrays, each at least twice as long as the next, so a key is
    moved, and looked up, O(log n) times. Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        #: Arrays of three rows: the first and the second halves of keys, and their positions. The
        #: first halves ascend; equal ones are in ascending order of position.
        self._runs: list[NDArray[np.uint64]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, joined: bytes) -> None:
        """Append keys, given as concatenated bytes."""
        n_keys = len(joined) // KEY_BYTES
        if not n_keys:
            return
        positions = np.arange(self._size, self._size + n_keys, dtype=np.uint64)
        runs, size = [np.vstack([_split_keys(joined), positions])], n_keys
        while self._runs and self._runs[-1].shape[1] < 2 * size:
            runs.insert(0, self._runs.pop())
            size += runs[0].shape[1]
        merged = np.hstack(runs)
        # A stable sort keeps the order of positions, and takes linear time for sorted parts.
        self._runs.append(np.take(merged, np.argsort(merged[0], kind="stable"), axis=1))
        self._size += n_keys

    def find(self, joined: bytes) -> NDArray[np.int64]:
        """Return the first position of each of the concatenated keys; -1 for a missing key."""
        keys = _split_keys(joined)
        # With ascending keys, searchsorted walks through memory in order, which is several times
        # faster.
        order = np.argsort(keys[0])
        keys = np.take(keys, order, axis=1)
        positions = np.full(len(order), -1, dtype=np.int64)
        for run in self._runs:
            absent = np.flatnonzero(positions < 0)
            positions[absent] = _find_in_run(run, *keys[:, absent])
        result = np.empty_like(positions)
        result[order] = positions
        return result


def _find_in_run(
    run: NDArray[np.uint64], first: NDArray[np.uint64], second: NDArray[np.uint64]
) -> NDArray[np.int64]:
    positions = np.full(len(first), -1, dtype=np.int64)
    candidate = np.searchsorted(run[0], first)
    remaining = np.flatnonzero(candidate < run.shape[1])
    while len(remaining):
        remaining = remaining[run[0, candidate[remaining]] == first[remaining]]
        hit = run[1, candidate[remaining]] == second[remaining]
        positions[remaining[hit]] = run[2, candidate[remaining[hit]]]
        # A key with the same first half may follow.
        remaining = remaining[~hit]
        candidate[remaining] += 1
        remaining = remaining[candidate[remaining] < run.shape[1]]
    return positions


def _split_keys(joined: bytes) -> NDArray[np.uint64]:
    """Return the halves of concatenated keys, (2, n)."""
    return np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2).T


T = TypeVar("T")
FeaturePart = Literal["conditional", "unconditional"]
#: (prompt, part) -> (n, dim) features of n rows.
ReadFeatures = Callable[[Prompt, FeaturePart], Matrix]


@dataclass(frozen=True, slots=True)
class FeatureView:
    """The features of prompts that are the input of a head.

    Attributes:
        prompts: The prompts, whose features are concatenated.
        subtract: Whether the unconditional features are subtracted from joint features.
        features: The features of a sentence: ``joint``, ``separate``, ``both`` (concatenated), or
            ``sentence_part``: e(s), for data without conditions.
        conditioned: Whether the head also takes e(c), the features of the condition alone.
    """

    prompts: tuple[Prompt, ...]
    subtract: bool = True
    features: str = "joint"
    conditioned: bool = False

    def __post_init__(self) -> None:
        """Raise a UserError if the prompts lack the features, or the condition would be ignored."""
        if self.features == "alone":
            self._check_alone()
            return
        separate = [prompt for prompt in self.prompts if prompt.separate]
        if self.features in ("separate", "both") and len(separate) != 1:
            features = f"{len(separate)} prompts with them" if separate else "joint features only"
            raise UserError(
                f"the head takes separate features, e(s) and e(c), from one prompt, and "
                f"{self.name} has {features}. Extract such a prompt (llmcond extract --prompt "
                "separate), and fit the head on it: llmcond fit-head --prompt "
                f"{self._suggest_prompts(separate)}"
            )
        if self.features == "separate" and len(self.prompts) > 1:
            raise UserError(
                f"the head takes separate features only, but --prompt {self.name} also names joint "
                f"features. Give --prompt {separate[0].name}, or --set features=both."
            )
        if len(separate) == len(self.prompts):
            self._check_separate()
        self.condition_prompt()

    def _check_alone(self) -> None:
        if self.subtract:
            raise UserError(
                "the head takes e(s), the features of sentences without a condition, so there is "
                "nothing to subtract. Leave out --subtract."
            )
        for prompt in self.prompts:
            if prompt.sentence_part is None:
                raise UserError(
                    "the head takes e(s), the features of sentences without a condition, but the "
                    f"prompt {prompt.name} encodes every sentence with its condition. Name another "
                    "--prompt, such as separate."
                )

    def _suggest_prompts(self, separate: list[Prompt]) -> str:
        """Return a valid --prompt: one prompt with separate features, and those with joint ones."""
        names = [separate[0].name if separate else "separate"]
        if self.features == "both":
            names += [prompt.name for prompt in self.prompts if not prompt.separate]
        return "+".join(names)

    def _check_separate(self) -> None:
        """Raise a UserError if separate features are not enough, or ignore the condition."""
        start = f"the prompt {self.name} has separate features, e(s) and e(c), so "
        if not self.conditioned and not (self.subtract and self.features == "joint"):
            raise UserError(
                f"{start}without subtraction the condition would be ignored. Subtract, or choose a "
                "prompt of joint features or a head that takes separate features."
            )
        if self.conditioned and self.features != "separate":
            alone = "" if self.features == "both" else "--prompt PROMPT or "
            raise UserError(
                f"{start}the head, which takes joint features, has no input. Fit it on a prompt of "
                f"joint features: llmcond fit-head {alone}--prompt PROMPT+{self.name}"
            )

    @property
    def name(self) -> str:
        """The names of the prompts, joined by ``+``."""
        return "+".join(prompt.name for prompt in self.prompts)

    @property
    def subtracts(self) -> bool:
        """Whether anything is subtracted. Nothing is subtracted from separate features."""
        return any(subtracted for _, subtracted in self.terms())

    def sentence_features(
        self,
        read: Callable[[Prompt, FeaturePart], T],
        subtract: Callable[[T, T], T] = Difference,  # type: ignore[assignment]
        concatenate: Callable[[list[T]], T] = ConcatenatedMatrix,  # type: ignore[assignment]
        conditioned: bool = True,
    ) -> T:
        """Return the features of sentences, (n, dim), from the features of prompts.

        ``read`` returns the features of a prompt. ``subtract`` and ``concatenate`` (by columns)
        work on its type, matrices or tensors. Nothing is subtracted from sentences without a
        condition (``conditioned`` is false).
        """
        parts = []
        for prompt, subtracts in self.terms():
            features = read(prompt, "conditional")
            if subtracts and conditioned:
                features = subtract(features, read(prompt, "unconditional"))
            parts.append(features)
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def condition_features(self, read: ReadFeatures) -> Matrix | None:
        """Return the features of the conditions, (n, dim_c); None if the head takes none."""
        prompt = self.condition_prompt()
        return None if prompt is None else read(prompt, "unconditional")

    def terms(self) -> list[tuple[Prompt, bool]]:
        """Return the prompts of a sentence's features, each with whether to subtract."""
        terms = []
        for prompt in self.prompts:
            is_separate = self.features in ("separate", "alone") or (
                self.features == "both" and prompt.separate
            )
            terms.append((prompt, self.subtract and not is_separate and prompt.subtractable))
        return terms

    def condition_prompt(self) -> Prompt | None:
        """Return the prompt whose unconditional features are e(c); None if the head takes none.

        A prompt with separate features comes first, because others may put the condition into an
        instruction.
        """
        if not self.conditioned:
            return None
        for prompt in sorted(self.prompts, key=lambda prompt: not prompt.separate):
            if prompt.subtracts_condition:
                return prompt
        raise UserError(
            f"the head takes e(c), but the prompt {self.name} encodes no condition without its "
            "sentence ([unconditional] names {sentence}). Choose another prompt."
        )

    def required_parts(self) -> list[tuple[Prompt, FeaturePart]]:
        """Return every required (prompt, part) once."""
        parts: list[tuple[Prompt, FeaturePart]] = []
        for prompt, subtracts in self.terms():
            parts.append((prompt, "conditional"))
            if subtracts or prompt is self.condition_prompt():
                parts.append((prompt, "unconditional"))
        return parts

    def check_sides(self, conditioned: Sequence[bool]) -> None:
        """Raise a UserError unless both texts have a condition, for heads that take e(c)."""
        if self.conditioned and not all(conditioned):
            raise UserError(
                "the head takes the features of the condition for both texts, but in this task "
                "only one of them has a condition. Choose a head of joint features, such as linear."
            )

    def check_texts(self, columns: bool = False) -> None:
        """Raise a UserError for prompts that cannot embed a text under a given condition.

        These are controls, and prompts that read further columns, unless the texts have them
        (``columns``).
        """
        effects = {
            "left-out": "it leaves the condition out",
            "shuffled": "it replaces a row's condition by that of another row",
        }
        for prompt in self.prompts:
            if prompt.control is not None:
                raise UserError(
                    f"the prompt {prompt.name} is a control, which is only for comparisons: "
                    f"{effects[prompt.control]}. Name a --prompt that is not a control, or a "
                    "--head that was fitted on such a prompt."
                )
            if prompt.fields and not columns:
                raise UserError(
                    f"the prompt {prompt.name} reads the column {prompt.fields[0]!r}, which only "
                    "the rows of its run have. Name a --prompt that reads only the sentence and "
                    "the condition, or a --head that was fitted on such a prompt."
                )

    def inputs(self, rows: Sequence[tuple[str, str]]) -> ViewInputs:
        """Return every required input of (sentence, condition) rows, row by row.

        Raises:
            UserError: As ``check_texts``.
        """
        self.check_texts()
        return ViewInputs(rows, [getattr(prompt, part) for prompt, part in self.required_parts()])


class ViewInputs:
    """The inputs of rows under parts of templates, with repeats. They are rendered lazily."""

    def __init__(
        self, rows: Sequence[tuple[str, str]], parts: Sequence[templates.InputTemplate]
    ) -> None:
        self._rows, self._parts = rows, parts

    def __iter__(self) -> Iterator[EncoderInput]:
        for row in self._rows:
            for part in self._parts:
                yield part.render(*row)

    def __len__(self) -> int:
        return len(self._rows) * len(self._parts)


@dataclass(frozen=True, eq=False)
class WordingRows:
    """The rows that are encoded for (sentence, condition) rows.

    There is one for each wording of the condition. With answers, the sentence is replaced by its
    answer, or there is one more row for it.

    Attributes:
        rows: The m (sentence, wording) rows.
        owners: (m,) The position of the row that each belongs to.
        n: The number of rows of the request.
    """

    rows: Sequence[tuple[str, str]]
    owners: NDArray[np.int64]
    n: int

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str]], answers: AnswerTable | None = None) -> Self:
        """Return each row once for each wording, with its answer in place of the sentence."""
        worded = [
            (number, (sentence, wording))
            for number, row in enumerate(rows)
            for sentence in ([row[0]] if answers is None else answers.sentences(*row))
            for wording in wordings(row[1])
        ]
        return cls(
            [row for _, row in worded], np.array([i for i, _ in worded], np.int64), len(rows)
        )

    def mean(self, vectors: NDArray[Any], *, normalize: bool) -> NDArray[Any]:
        """Return (n, k) means, over what is read for each row, of (m, k) vectors.

        Args:
            vectors: (m, k) vectors of the rows that are encoded.
            normalize: Whether to scale them to unit norm first.
        """
        if len(self.rows) == self.n:
            return vectors
        scaled = scale_to_unit_norm(vectors) if normalize else vectors
        sums = self.sum(scaled)
        return sums / np.bincount(self.owners, minlength=self.n).astype(np.float32)[:, None]

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return (n, ...) sums, over what is read for each row, of (m, ...) values."""
        sums = np.zeros((self.n, *values.shape[1:]), values.dtype)
        np.add.at(sums, self.owners, values)
        return sums


def recipe_view(recipe: Recipe, prompts: Sequence[Prompt], subtract: bool) -> FeatureView:
    """Return the view of a recipe's head.

    Raises:
        UserError: The prompts do not have its features.
    """
    return FeatureView(tuple(prompts), subtract, recipe.features, recipe.family.conditioned)
