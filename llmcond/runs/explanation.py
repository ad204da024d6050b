"""Explanations of an embedding, or of a similarity, by the tokens of a sentence.

There are four methods. ``pooling-weights`` and ``router-weights`` are the weights that the encoder
computes an embedding with. ``exact`` splits a cosine into a sum over tokens, which is possible
where routed pooling is followed by nothing but a scale and a subtraction. ``leave-one-out`` works
with any model: it encodes the sentence again without each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import EqualByValue
from llmcond.base.errors import UserError
from llmcond.base.output import Displayed
from llmcond.base.text import condition_json
from llmcond.runs.similarity import SimilarityModel, pair_with_conditions

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder, TokenWeights
    from llmcond.encoders.tokenizing import Token
    from llmcond.features.view import FeatureView
    from llmcond.prompts import Prompt

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
        for layer, values in series.items():
            for token, value in zip(explained.tokens, values, strict=True):
                yield {
                    "condition": str(explained.condition),
                    "layer": layer,
                    **_token_json(token),
                    self.quantity: _rounded(value),
                }
        if explained.condition_term is not None:
            yield {
                "condition": str(explained.condition),
                "layer": "",
                "token": SUBTRACTED,
                "start": None,
                "end": None,
                "special": True,
                self.quantity: _rounded(explained.condition_term),
            }

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "to": self.to,
            "method": self.method,
            "explanations": [explained.to_json(self.quantity) for explained in self.conditions],
            **self.about,
        }

    @override
    def _displayed(self) -> Mapping[str, Any]:
        values = {name: getattr(self, name) for name in ("sentence", "to", "method")}
        conditions = [explained.to_json(self.quantity) for explained in self.conditions]
        return {**values, "about": dict(self.about), "conditions": conditions}


def explain_embedding(
    model: SimilarityModel,
    encoder: Encoder,
    view: FeatureView,
    is_mapped: bool,
    sentence: str,
    conditions: Sequence[str],
    to: str | None,
) -> Explanation:
    """Explain an embedding or, if there is a second sentence, a similarity.

    ``Embedder.explain`` describes the errors.

    Args:
        model: The embedder.
        encoder: Its encoder.
        view: Its features.
        is_mapped: Whether a head or a guide maps the features.
        sentence: The sentence.
        conditions: The conditions.
        to: The second sentence, if there is one.
    """
    rows = pair_with_conditions([sentence] * len(conditions), conditions)
    prompt = _find_routed_prompt(view)
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
    return leave_one_out(model, encoder, sentence, conditions, to)


def _find_routed_prompt(view: FeatureView) -> Prompt | None:
    """Return the prompt whose tokens are weighted; None if there is no router."""
    prompts = (prompt for prompt, _ in view.terms())
    return next((prompt for prompt in prompts if prompt.conditional.router is not None), None)


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
    model: SimilarityModel,
    encoder: Encoder,
    sentence: str,
    conditions: Sequence[str],
    to: str | None,
) -> Explanation:
    """Explain a similarity by encoding the sentence again without each token.

    The contribution of a token is the similarity to ``to`` with the token minus that without it.
    If ``to`` is None, the embedding of the whole sentence takes its place.

    Raises:
        UserError: The tokenizer does not report positions, the sentence has fewer than two tokens,
            or a text is empty.
    """
    reference = sentence if to is None else to
    pair_with_conditions([sentence, reference], conditions[0])
    tokens = [token for token in encoder.tokenize(sentence) if not token.special]
    tokens = [token for token in tokens if token.start is not None]
    texts = [sentence, *(_without(sentence, token) for token in tokens)]
    if not tokens:
        raise UserError(
            f"the tokenizer of {encoder.name} does not report the characters of its tokens, so "
            "none can be left out. Use an encoder with a fast tokenizer."
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
