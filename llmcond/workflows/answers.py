"""Similarities of given sentences and answers before and after a head (CASE, tables 3 and 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcond.data.datasets import is_missing, open_collection, read_collection
from llmcond.encoders import EncoderInput
from llmcond.features.view import FeatureView
from llmcond.runs import Run, RunEmbeddingHead, RunFittedHead
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.similarity import Vectors

#: Columns of a table of questions that may be missing or empty.
_ANSWERS = ("answer1", "answer2")


@dataclass(frozen=True, slots=True)
class AnswerQuestion:
    """Two sentences under a condition, which is about both.

    Attributes:
        sentence1: The first sentence.
        sentence2: The second sentence.
        condition: The condition.
        answer1: The words of the first sentence that answer the condition; empty if not given.
        answer2: Those of the second sentence, likewise.
    """

    sentence1: str
    sentence2: str
    condition: str
    answer1: str = ""
    answer2: str = ""

    def comparisons(self) -> list[tuple[str, str]]:
        """Return the two texts of each comparison: both sentences, and each with its answer."""
        answered = [(self.sentence1, self.answer1), (self.sentence2, self.answer2)]
        return [(self.sentence1, self.sentence2), *(pair for pair in answered if pair[1])]


def read_questions(data: Any) -> list[AnswerQuestion]:
    """Read questions from a table with the columns sentence1, sentence2 and condition.

    The columns answer1 and answer2 are optional.

    Raises:
        UserError: the table cannot be read, it lacks a column, or a text is empty.
    """
    source = open_collection(data)
    answers = [name for name in _ANSWERS if source.has_column(name)]
    required = [
        read_collection(source, column).texts for column in ("sentence1", "sentence2", "condition")
    ]
    others = read_collection(source, "sentence1", answers).columns
    optional = (
        ["" if is_missing(value) else str(value) for value in others[name]]
        if name in answers
        else [""] * len(required[0])
        for name in _ANSWERS
    )
    return [AnswerQuestion(*texts) for texts in zip(*required, *optional, strict=True)]


#: Two texts, and the condition that they are compared under; None: without a condition.
_Comparison = tuple[str, str, str | None]


def compare_before_and_after(
    run: Run,
    heads: Sequence[tuple[RunEmbeddingHead, RunFittedHead]],
    questions: Sequence[AnswerQuestion],
) -> list[dict[str, Any]]:
    """Compare the texts of questions by the features that heads were fitted on, and by the heads.

    All texts are encoded with the run's encoder. An answer is encoded like a sentence, under the
    same condition. Two sentences are also compared without a condition: each is encoded as the
    prompt encodes a condition alone, f(s; I(∅)), and nothing is subtracted.

    Args:
        run: the run, which names the encoder.
        heads: zero-shot on the features of each head, and the head.
        questions: the questions.

    Returns:
        For each head its name, the name of its features, and in ``rows`` the two texts, the
        condition (None if there is none), and the similarities ``before`` and ``after``. The
        latter is None without a condition if the head takes conditions.

    Raises:
        UserError: the encoder is missing or has changed, or a prompt is a control.
    """
    encoder = LazyEncoder(run.resolve_encoder("auto"))()
    comparisons = _list_comparisons(questions)
    models = [[make_embedder(encoder, model) for model in pair] for pair in heads]
    inputs = dict.fromkeys(
        item for pair in models for model in pair for item in _list_inputs(model, comparisons)
    )
    vectors = dict(zip(inputs, encoder.encode(list(inputs)), strict=True))
    results = []
    for (features, head), pair in zip(heads, models, strict=True):
        before, after = (_compare(model, comparisons, vectors) for model in pair)
        rows = [
            {"text1": first, "text2": second, "condition": condition, "before": old, "after": new}
            for (first, second, condition), old, new in zip(comparisons, before, after, strict=True)
        ]
        results.append({"name": head.name, "before": features.name, "rows": rows})
    return results


def _list_comparisons(questions: Sequence[AnswerQuestion]) -> list[_Comparison]:
    """Return all comparisons; those without a condition come before the first of their sentences.

    The same two sentences are compared only once without a condition.
    """
    comparisons: dict[_Comparison, None] = {}
    for question in questions:
        comparisons[question.sentence1, question.sentence2, None] = None
        comparisons |= {(*texts, question.condition): None for texts in question.comparisons()}
    return list(comparisons)


def _list_inputs(model: Embedder, comparisons: Sequence[_Comparison]) -> list[EncoderInput]:
    inputs: list[EncoderInput] = []
    for *texts, condition in comparisons:
        if condition is not None:
            inputs += model.view.inputs([(text, condition) for text in texts])
        else:
            inputs += [item for text in texts for item in _inputs_alone(model.view, text)]
    return inputs


def _inputs_alone(view: FeatureView, text: str) -> list[EncoderInput]:
    """Return the inputs of a sentence without a condition, one for each prompt."""
    parts = (prompt.sentence_part or prompt.unconditional for prompt in view.prompts)
    return [part.render(text, text) for part in parts]


def _compare(
    model: Embedder, comparisons: Sequence[_Comparison], vectors: Mapping[EncoderInput, Vectors]
) -> list[float | None]:
    """Return the similarity of each comparison; None if the model needs a condition."""
    similarities: list[float | None] = []
    for *texts, condition in comparisons:
        if condition is not None:
            rows = [(text, condition) for text in texts]
            distinct = list(dict.fromkeys(model.view.inputs(rows)))
            table = np.stack([vectors[item] for item in distinct])
            embedded = model.embed_vectors(rows, distinct, table)
        elif model.view.conditioned:
            similarities.append(None)
            continue
        else:
            alone = [[vectors[item] for item in _inputs_alone(model.view, t)] for t in texts]
            embedded = model.head.transform(np.stack([np.concatenate(parts) for parts in alone]))
        similarities.append(float(model.compare(embedded[:1], embedded[1:])[0]))
    return similarities
