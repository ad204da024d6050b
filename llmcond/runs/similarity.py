"""The interface of models that compare texts under a condition, and explanations by tokens."""

from __future__ import annotations

import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import EqualByValue, as_list
from llmcond.base.errors import UserError
from llmcond.base.output import Displayed, log
from llmcond.base.text import as_condition, check_text, condition_json, wordings
from llmcond.encoders.checkpoint import Checkpoint

if TYPE_CHECKING:
    from llmcond.data.rows import Rows
    from llmcond.encoders.encoder import Encoder, TokenWeights
    from llmcond.encoders.tokenizing import Token
    from llmcond.prompts import Prompt

#: Numbers of texts, and of characters at the beginning of each, that are looked at.
_MAX_TEXTS, _MAX_CHARACTERS = 1_000, 1_000
#: Share of texts in other languages from which they are reported.
_MIN_SHARE = 0.1
_LATIN = re.compile(r"[A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ]")
_LETTER = re.compile(r"[^\W\d_]")
#: Addresses, code and markup, whose words are of no language.
_NO_WORDS = re.compile(r"https?://\S+|\S+@\S+|`[^`]*`|<[^<>]*>|[#@/\\$]\S+|\b\w*[_=(){};]\S*")
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class FrequentWords:
    """Frequent words, which distinguish languages, and which say little about a text.

    Attributes:
        english: frequent English words.
        foreign: frequent words of other languages that are not English.
        greetings: words of greetings and closing formulas.
        phrases: such formulas of several words, or of scripts without spaces between words.
    """

    english: frozenset[str]
    foreign: frozenset[str]
    greetings: frozenset[str]
    phrases: tuple[str, ...]


@cache
def read_frequent_words() -> FrequentWords:
    """Read the frequent words (languages.toml)."""
    record = tomllib.loads(Path(__file__).with_name("languages.toml").read_text("utf-8"))
    formulas = record["formulas"]
    return FrequentWords(
        frozenset(record["english"].split()),
        frozenset(" ".join(record["other"].values()).split()),
        frozenset(formulas["greetings"].split()),
        tuple(formulas["phrases"]),
    )


def seems_foreign(text: str) -> bool:
    """Return whether a text seems to be in another language than English.

    Most letters of such a text are in another script, or it has at least two words that are
    frequent in other languages or have letters that English lacks, and more of them than frequent
    English words. A capitalised word with such letters does not count, as it may be a name.
    """
    text = _NO_WORDS.sub(" ", text[:_MAX_CHARACTERS])
    latin = len(_LATIN.findall(text))
    if len(_LETTER.findall(text)) > max(2 * latin, 1):
        return True
    frequent, n_foreign, n_english = read_frequent_words(), 0, 0
    for word in _WORD.findall(text):
        is_accented = word.islower() and not word.isascii()
        n_foreign += is_accented or word.lower() in frequent.foreign
        n_english += word.lower() in frequent.english
    return n_foreign > max(1, n_english)


def count_foreign_texts(texts: Sequence[str]) -> tuple[int, int]:
    """Return how many texts seem foreign, of how many that were looked at.

    The number is 0 if fewer than a tenth of them seem to be, because single texts may be mistaken.
    """
    looked_at = texts[:: -(-len(texts) // _MAX_TEXTS) or 1]
    n = sum(map(seems_foreign, looked_at))
    return (n if n >= _MIN_SHARE * len(looked_at) else 0), len(looked_at)


def report_foreign_texts(texts: Sequence[str], checkpoint: Checkpoint) -> None:
    """Log how many texts seem not to be in English, if the encoder was trained on English only.

    Nothing is logged if the languages of the encoder are unknown.
    """
    base = checkpoint.base or checkpoint
    is_english = base.known.english_only if base.known else _has_english_card(base.folder)
    n, n_looked_at = count_foreign_texts(texts) if is_english else (0, 0)
    if not n:
        return
    texts_seem = "text seems" if n_looked_at == 1 else "texts seem"
    sampled = "sampled " if n_looked_at < len(texts) else ""
    log.info(
        f"{n:,} of {n_looked_at:,} {sampled}{texts_seem} not to be in English, which "
        f"{PurePath(base.name).name} was trained on, so expect little of their vectors. Use a "
        "multilingual encoder, such as BAAI/bge-m3"
    )


def _has_english_card(folder: Path) -> bool:
    """Return whether English is the only language that the model card of a checkpoint names."""
    try:
        card = (folder / "README.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = re.match(r"---\n(.*?\n)---", card, re.DOTALL)
    if header is None:
        return False
    listed = re.search(r"^language:\s*(\[[^\]]*\]|(?:- *\S+\s)+|\S+)", header[1], re.MULTILINE)
    return listed is not None and set(re.findall("[a-z]+", listed[1])) == {"en"}


Vectors = NDArray[np.float32]


class SimilarityModel(ABC):
    """A model that compares sentences under conditions."""

    __slots__ = ()

    @overload
    def similarity(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, sentences1: str, sentences2: str, conditions: str, *, show_progress: bool = False
    ) -> float: ...

    @overload
    def similarity(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors: ...

    def similarity(
        self,
        sentences1: str | Iterable[str],
        sentences2: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors | float:
        """Compute the similarity of two sentences under the condition of each row.

        The similarity is the cosine of their embeddings, unless the head compares embeddings in
        another way. A cross-encoder predicts the rating, which is mostly between 0 and 1.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or a single text.
            sentences2: n other texts, or a single text.
            conditions: n conditions, one for each row, or one condition for all rows.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n,) float32. A float if the sentences are single texts.

        Raises:
            UserError: The lengths differ, a sentence or condition is empty, or one argument is a
                text and the other a list of texts.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if isinstance(sentences1, str) != isinstance(sentences2, str):
            raise UserError(
                "one of sentences1 and sentences2 is a text and the other a list. Give two texts, "
                "or two lists."
            )
        if isinstance(sentences1, str) and isinstance(sentences2, str):
            return float(
                self.similarity([sentences1], [sentences2], as_condition_list(conditions))[0]
            )
        texts1, texts2 = as_list(sentences1, "sentences1"), as_list(sentences2, "sentences2")
        if len(texts1) != len(texts2):
            raise UserError(
                f"sentences1 has {len(texts1)} texts and sentences2 has {len(texts2)}. Give two "
                "lists of the same length."
            )
        if not isinstance(conditions, str):
            conditions = as_list(conditions, "conditions")
        rows1, rows2 = (pair_with_conditions(texts, conditions) for texts in (texts1, texts2))
        return self._compute_similarity(rows1, rows2, show_progress)

    #: The name in sentence-transformers, whose ``similarity`` returns a matrix.
    similarity_pairwise = similarity

    def similarity_matrix(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        condition: str,
        *,
        show_progress: bool = False,
    ) -> Vectors:
        """Compute the similarity of each sentence to each other sentence under a condition.

        The similarities are those of ``similarity``. An embedder encodes n + m sentences; a
        cross-encoder reads n * m pairs.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
            sentences2: m other texts.
            condition: The condition.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n, m) float32.

        Raises:
            UserError: A sentence or the condition is empty, or there are several conditions.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if not isinstance(condition, str):
            raise UserError(
                "condition is not a text. All entries of the matrix have the same condition; call "
                "similarity_matrix once for each."
            )
        texts1, texts2 = (
            [texts] if isinstance(texts, str) else texts for texts in (sentences1, sentences2)
        )
        first, second = (pair_with_conditions(texts, condition) for texts in (texts1, texts2))
        return self._compute_matrix(first, second, show_progress)

    def _compute_matrix(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n, m), of n (sentence, condition) rows to m other ones."""
        repeated = [row for row in first for _ in second]
        values = self._compute_similarity(repeated, [*second] * len(first), show_progress)
        return values.reshape(len(first), len(second))

    def predict(self, rows: Rows) -> Vectors:
        """Predict the similarity of rows, with a progress bar on standard error.

        Args:
            rows: n rows of a dataset. Their conditions are read as in training: one with ``|`` is a
                single text, and not several wordings.

        Returns:
            The predicted similarities, (n,) float32.

        Raises:
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        first = list(zip(rows.sentence1, rows.condition, strict=True))
        second = list(zip(rows.sentence2, rows.condition, strict=True))
        return self._compute_similarity(first, second, show_progress=True)

    @abstractmethod
    def _compute_similarity(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n,), of n (sentence, condition) rows and n other ones."""


def as_condition_list(conditions: str | Iterable[str]) -> Sequence[str]:
    """Return the condition of a single sentence as a list.

    Raises:
        UserError: It is not a text.
    """
    if isinstance(conditions, str) or not isinstance(conditions, Iterable):
        return [as_condition(conditions)]
    raise UserError(
        "the sentence is a text and the condition a list. Give two texts, or two lists."
    )


def as_conditions(conditions: str | Iterable[str]) -> list[str]:
    """Return one condition, or several, as a list.

    Raises:
        UserError: There are none, or one is empty or not a text.
    """
    listed = [conditions] if isinstance(conditions, str) else as_list(conditions, "conditions")
    if not listed:
        raise UserError("there are no conditions; give at least one.")
    names = [f"condition {number} of {len(listed)}" for number in range(1, len(listed) + 1)]
    return [as_condition(*pair) for pair in zip(listed, names, strict=True)]


def pair_with_conditions(
    sentences: Iterable[str], conditions: str | Iterable[str]
) -> list[tuple[str, str]]:
    """Return (sentence, condition) rows, with the conditions in their normal form.

    A single condition applies to all sentences.

    Raises:
        UserError: The lengths differ, or an item is empty or not a text.
    """
    texts = as_list(sentences, "sentences")
    n = len(texts)
    texts = [
        check_text(text, f"sentence {i} of {n}", "Give a text.") for i, text in enumerate(texts, 1)
    ]
    if isinstance(conditions, str):
        return list(zip(texts, [as_condition(conditions)] * n, strict=True))
    row_conditions = as_list(conditions, "conditions")
    if len(row_conditions) != n:
        raise UserError(
            f"there are {n} sentences and {len(row_conditions)} conditions. Give one condition for "
            "each sentence, or one condition for all."
        )
    return list(zip(texts, as_conditions(row_conditions) if n else [], strict=True))


Method = Literal["pooling-weights", "router-weights", "exact", "leave-one-out"]
Values = NDArray[np.float64]

#: The name of the subtracted condition vector among tokens.
SUBTRACTED = "minus the condition"
#: The largest distance between an encoder's vector and a multiple of the pooled one, as a share of
#: its norm, that rounding explains.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class ConditionExplanation(EqualByValue):
    """The values of a sentence's tokens under one condition.

    Attributes:
        condition: The condition.
        tokens: The n tokens. Each has ``text``, ``start``, ``end`` and ``special``.
        values: The weights, or contributions, of the tokens, (n,). With a router inside the
            encoder, the mean over the layers.
        layers: With a router inside the encoder, the weights in each routed layer, by the layer's
            number, counted from 1.
        similarity: The similarity to the other sentence, if there is one.
        condition_term: With the method ``exact``, the contribution of the condition's vector, which
            is subtracted; None if nothing is subtracted.
        to_tokens: With the method ``exact``, the m tokens of the other sentence.
        pairs: With the method ``exact``, the contribution of each pair of tokens, (n, m). If a
            vector is subtracted, a last row and a last column have its contributions.

    Examples:
        >>> import llmcond
        >>> explanation = llmcond.load_embedder().explain("A dog runs.", "the animal")
        >>> explained = explanation.conditions[0]
        >>> explained.tokens[explained.values.argmax()].text
        'dog'
    """

    condition: str
    tokens: Sequence[Token]
    values: Values
    layers: Mapping[int, Values] = field(default_factory=dict)
    similarity: float | None = None
    condition_term: float | None = None
    to_tokens: Sequence[Token] = ()
    pairs: Values | None = None

    def to_json(self, quantity: str) -> dict[str, Any]:
        """Return the explanation as JSON, with the values under the name of their quantity."""
        values = condition_json(self.condition)
        for name in ("similarity", "condition_term"):
            if (value := getattr(self, name)) is not None:
                values[name] = _rounded(value)
        if self.layers:
            values["layers"] = list(self.layers)
        values["tokens"] = [
            {
                **_token_json(token),
                quantity: _rounded(value),
                **({"by_layer": list(map(_rounded, by_layer))} if by_layer else {}),
            }
            for token, value, *by_layer in zip(
                self.tokens, self.values, *self.layers.values(), strict=True
            )
        ]
        if self.pairs is not None:
            values["to_tokens"] = list(map(_token_json, self.to_tokens))
            values["pairs"] = [list(map(_rounded, row)) for row in self.pairs]
        return values


@dataclass(frozen=True)
class Explanation(Displayed):
    """The weight, or the contribution, of each token of a sentence under each condition.

    Attributes:
        sentence: The sentence.
        to: The sentence whose similarity is explained; None: the embedding is explained.
        method: ``pooling-weights``, ``router-weights``, ``exact`` or ``leave-one-out``.
        conditions: The explanation under each condition.
        about: Description of the run, encoder and head.

    Examples:
        >>> import llmcond
        >>> explanation = llmcond.load_embedder().explain("A dog runs.", "the animal")
        >>> explanation.method
        'leave-one-out'
        >>> [token.text for token in explanation.conditions[0].tokens]
        ['a', 'dog', 'runs', '.']
    """

    sentence: str
    to: str | None
    method: Method
    conditions: Sequence[ConditionExplanation]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantity(self) -> str:
        """What the values are: ``weight`` or ``contribution``."""
        return "weight" if self.method.endswith("weights") else "contribution"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each condition, layer and token.

        In the mean over layers, ``layer`` is ``mean``. The subtracted condition has a row without a
        position in the sentence.
        """
        return [row for explained in self.conditions for row in self._rows(explained)]

    def _rows(self, explained: ConditionExplanation) -> Iterator[dict[str, Any]]:
        series: dict[str, Values] = {str(n): values for n, values in explained.layers.items()}
        series["mean" if series else ""] = explained.values
        cells = [
            (layer, _token_json(token), value)
            for layer, values in series.items()
            for token, value in zip(explained.tokens, values, strict=True)
        ]
        if explained.condition_term is not None:
            subtracted = {"token": SUBTRACTED, "start": None, "end": None, "special": True}
            cells.append(("", subtracted, explained.condition_term))
        for layer, token, value in cells:
            about = {"condition": str(explained.condition), "layer": layer}
            yield {**about, **token, self.quantity: _rounded(value)}

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "to": self.to,
            "method": self.method,
            "explanations": [explained.to_json(self.quantity) for explained in self.conditions],
            **self.about,
        }


def explain_embedding(
    model: Any, is_mapped: bool, sentence: str, conditions: Sequence[str], to: str | None
) -> Explanation:
    """Explain an embedding or, if there is a second sentence, a similarity.

    ``Embedder.explain`` describes the errors.

    Args:
        model: The embedder.
        is_mapped: Whether a head or a guide maps the features.
        sentence: The sentence.
        conditions: The conditions.
        to: The second sentence, if there is one.
    """
    encoder, view = model.encoder, model.view
    rows = pair_with_conditions([sentence] * len(conditions), conditions)
    # The prompt whose tokens a router weights.
    prompts = [prompt for prompt, _ in view.terms() if prompt.conditional.router is not None]
    reads_one = all(wordings(condition) == (condition,) for _, condition in rows)
    prompt = prompts[0] if prompts and reads_one else None
    if to is None and prompt is not None:
        return _explain_by_weights(encoder, prompt, rows)
    # An embedding is the vector of one routed prompt, minus another one at most.
    is_plain = not is_mapped and not encoder.engine.routes_inside and len(view.terms()) == 1
    if to is not None and prompt is not None and is_plain:
        rows_to = pair_with_conditions([to] * len(conditions), conditions)
        similarities = model.similarity([sentence] * len(rows), [to] * len(rows), conditions)
        pairs = [
            _decompose(encoder, prompt, view.subtracts, row, row_to, float(similarity))
            for row, row_to, similarity in zip(rows, rows_to, similarities, strict=True)
        ]
        explained = [each for each in pairs if each is not None]
        if len(explained) == len(conditions):
            return Explanation(sentence, to, "exact", explained)
    return leave_one_out(model, sentence, conditions, to)


def _explain_by_weights(
    encoder: Encoder, prompt: Prompt, rows: Sequence[tuple[str, str]]
) -> Explanation:
    explained = []
    for row in rows:
        weighted = encoder.token_weights(prompt.conditional.render(*row))
        weights = weighted.weights.astype(np.float64)
        layers = dict(zip(weighted.layers, weights, strict=False))
        explained.append(
            ConditionExplanation(row[1], weighted.tokens, weights.mean(axis=0), layers)
        )
    method: Method = "router-weights" if explained[0].layers else "pooling-weights"
    return Explanation(rows[0][0], None, method, explained)


# -- exact contributions -----------------------------------------------------------------------


def _decompose(
    encoder: Encoder,
    prompt: Prompt,
    subtracts: bool,
    row: tuple[str, str],
    row_to: tuple[str, str],
    similarity: float,
) -> ConditionExplanation | None:
    """Split the cosine of two embeddings into contributions; None if a dense layer is between."""
    first, second = (
        encoder.token_weights(prompt.conditional.render(*each)) for each in (row, row_to)
    )
    parts, parts_to = _scaled_parts(first), _scaled_parts(second)
    if parts is None or parts_to is None:
        return None
    if subtracts:
        unconditional = prompt.unconditional.render(*row), prompt.unconditional.render(*row_to)
        vectors = -encoder.encode(unconditional).astype(np.float64)
        parts, parts_to = np.vstack([parts, vectors[:1]]), np.vstack([parts_to, vectors[1:]])
    norms = [np.linalg.norm(every.sum(axis=0)) for every in (parts, parts_to)]
    pairs: Values = parts @ parts_to.T / max(float(np.prod(norms)), np.finfo(np.float64).tiny)
    values = pairs.sum(axis=1)
    n = len(first.tokens)
    return ConditionExplanation(
        row[1],
        first.tokens,
        values[:n],
        similarity=similarity,
        condition_term=float(values[n]) if subtracts else None,
        to_tokens=second.tokens,
        pairs=pairs,
    )


def _scaled_parts(weighted: TokenWeights) -> Values | None:
    """Return the part of an input's vector that each token adds, (n, dim); the sum is the vector.

    None if the vector is not a multiple of the pooled states.
    """
    if weighted.states is None or weighted.states.shape[1] != len(weighted.vector):
        return None
    parts: Values = weighted.weights[0, :, None].astype(np.float64) * weighted.states
    pooled, vector = parts.sum(axis=0), weighted.vector.astype(np.float64)
    scale = float(vector @ pooled / (pooled @ pooled))
    if np.linalg.norm(vector - scale * pooled) > _TOLERANCE * np.linalg.norm(vector):
        return None
    return scale * parts


# -- leave-one-out -----------------------------------------------------------------------------


def leave_one_out(
    model: Any, sentence: str, conditions: Sequence[str], to: str | None
) -> Explanation:
    """Explain a similarity by encoding the sentence again without each token.

    The contribution of a token is the similarity to ``to`` with the token minus that without it.
    If ``to`` is None, the embedding of the whole sentence takes its place. ``model`` is an embedder
    or a cross-encoder.

    Raises:
        UserError: The tokenizer does not report positions, the sentence has fewer than two tokens
            or more than the encoder reads, or a text is empty.
    """
    reference, encoder = sentence if to is None else to, model.encoder
    pair_with_conditions([sentence, reference], conditions[0])
    tokens = [token for token in encoder.tokenize(sentence) if not token.special]
    tokens = [token for token in tokens if token.start is not None]
    texts = [sentence, *(_without(sentence, token) for token in tokens)]
    if not tokens:
        raise UserError(
            f"the tokenizer of {encoder.name} does not report the characters of its tokens, so "
            "none can be left out. Use an encoder with a fast tokenizer."
        )
    # Some characters at the end, such as that which selects the look of an emoji, have no token.
    rest = sentence[tokens[-1].end :]
    if rest.strip() and any(not token.special for token in encoder.tokenize(rest)):
        raise UserError(
            f"the sentence has more than the {encoder.identity.max_length} tokens that "
            f"{encoder.name} reads at a time. Shorten it."
        )
    if not all(text.strip() for text in texts):
        raise UserError(
            f"{sentence!r} has only one token, so nothing would remain without it. Give a longer "
            "sentence."
        )
    firsts = texts * len(conditions)
    row_conditions = [condition for condition in conditions for _ in texts]
    compared = model.similarity(firsts, [reference] * len(firsts), row_conditions)
    by_condition = np.asarray(compared, dtype=np.float64).reshape(len(conditions), -1)
    explained = [
        ConditionExplanation(
            condition,
            tokens,
            similarities[0] - similarities[1:],
            similarity=None if to is None else float(similarities[0]),
        )
        for condition, similarities in zip(conditions, by_condition, strict=True)
    ]
    return Explanation(sentence, to, "leave-one-out", explained)


def _without(sentence: str, token: Token) -> str:
    """Return a sentence without the characters of a token, and without a redundant space."""
    before, after = sentence[: token.start], sentence[token.end :]
    if before[-1:].isspace() or not before:
        after = after.lstrip() if after[:1].isspace() else after
    return before + after


# -- output ------------------------------------------------------------------------------------


def _token_json(token: Token) -> dict[str, Any]:
    return {
        "token": token.text,
        "start": token.start,
        "end": token.end,
        "special": token.special,
    }


def _rounded(value: float) -> float:
    return round(float(value), 6)
