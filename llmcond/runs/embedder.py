"""Models that embed new texts: an encoder, a prompt and a head, and what conditions they know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import (
    EncodeOptions,
    Matrix,
    SharedRows,
    as_list,
    check_encode_options,
    check_truncate_dim,
    clip_cosines,
    convert_embeddings,
    scale_to_unit_norm,
)
from llmcond.base.errors import LlmcondError, UserError, format_count, format_list, nearest
from llmcond.base.options import Precision, check_argument, check_run
from llmcond.base.output import log
from llmcond.base.text import as_condition, ignored_by, without_ignored
from llmcond.data.answers import AnswerTable
from llmcond.data.datasets import Collection, label_text
from llmcond.data.guides import LabelledTexts, check_labelled
from llmcond.data.readers import describe_source
from llmcond.encoders import EncoderInput, resolve_base
from llmcond.encoders.checkpoint import find_hub_source
from llmcond.encoders.spec import InputError, check_finite
from llmcond.features.view import FeaturePart, FeatureView, WordingRows
from llmcond.heads.guide import Guide, Guides, apply_guides, fit_guide, fit_ignoring
from llmcond.heads.numpy_heads import ORDERED_KINDS, ZERO_SHOT, NumpyHead
from llmcond.heads.storage import EmbeddingHead
from llmcond.prompts import Prompt
from llmcond.runs import Run, RunEmbeddingHead, RunHead, open_run
from llmcond.runs.mentions import score_mentions
from llmcond.runs.open import LazyEncoder, extract_inputs, resolve_run
from llmcond.runs.portable import save_portable_run
from llmcond.runs.run import IN_RUN_FOLDER, zero_shot_head
from llmcond.runs.similarity import (
    SimilarityModel,
    Vectors,
    as_condition_list,
    as_conditions,
    pair_with_conditions,
)

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.encoders.spec import Encoded
    from llmcond.features.pool import Workers
    from llmcond.features.store import FeatureStore
    from llmcond.heads.fitted import ConditionCache
    from llmcond.runs.similarity import Explanation

#: A condition is unfamiliar if it is further from its nearest training condition than this share
#: of the training conditions are from theirs.
_SHARE = 0.95


def find_unfamiliar_conditions(
    run: Run, embedder: Embedder, conditions: Sequence[str]
) -> dict[str, str]:
    """Return conditions that differ from the training conditions, each with the nearest of these.

    Distances are cosines of e(c), the encoder's vectors. The result is empty if the run does not
    hold these vectors and its rows (a run that was pushed does not), or if no prompt of the head
    encodes the condition alone.
    """
    prompt = next((prompt for prompt in embedder.view.prompts if prompt.subtracts_condition), None)
    has_rows = (run.folder / "rows.parquet").is_file()
    if not embedder.head.dim_in or prompt is None or not has_rows:
        return {}
    rows = run.rows("train")
    known = dict.fromkeys(rows.take(rows.rated).condition)
    new_texts = [text for text in dict.fromkeys(conditions) if text not in known]
    inputs = [prompt.unconditional.render("", text) for text in known]
    if not new_texts or len(known) < 2:
        return {}
    try:
        store = run.store()
        if store.missing(inputs):
            return {}
        known_vectors = normalise_vectors(store.lookup(inputs).read())
    except LlmcondError as error:  # similarities do not need the store, which may be out of reach
        log.debug(f"conditions are not compared with those of training: {error}")
        return {}
    cosines = known_vectors @ known_vectors.T
    np.fill_diagonal(cosines, -1)
    threshold = np.quantile(cosines.max(axis=1), 1 - _SHARE)
    vectors = embedder.encoder.encode([prompt.unconditional.render("", text) for text in new_texts])
    similarities = normalise_vectors(vectors) @ known_vectors.T
    return {
        text: list(known)[int(row.argmax())]
        for text, row in zip(new_texts, similarities, strict=True)
        if row.max() < threshold
    }


#: The number of rows whose vectors are in memory at a time.
_BLOCK = 8_192


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Embedder(SimilarityModel):
    """A model that embeds texts under conditions.

    The embedding is CASE(s, c) = g(f(c; I(s)) - f(c; I(∅))) (CASE, equation 1). Load an embedder
    with ``load_embedder``. An embedder is equal to itself only, so that it can be a key of caches.

    Attributes:
        encoder: The encoder f.
        view: The prompt I, for both terms, and whether the second term is subtracted.
        head: The head g. Zero-shot by default, where the embeddings are the features.
        name: The head's name in the run. ``none``: zero-shot.
        cache: Keeps the matrices that a hypernetwork generates from conditions between calls.
        fitted_on: The source of the data that the head was fitted on, and the number of datasets
            with texts that its encoder was trained on, if any.
        guides: For some conditions, a map that is applied to the embeddings. See ``guided``.
            Conditions are found in any case, Unicode form and spacing.
        folder: The folder of the run or model that it was loaded from, if any.
        truncate_dim: The number of leading dimensions that embeddings keep. None: all of them. See
            ``matryoshka_dims``.
        answers: Answers that the encoder reads in place of texts, or None.

    Examples:
        >>> import llmcond
        >>> embedder = llmcond.load_embedder()
        >>> vectors = embedder.encode(["A dog runs.", "A cat sleeps."], "the animal")
        >>> vectors.shape
        (2, 384)
    """

    encoder: Encoder
    view: FeatureView
    head: EmbeddingHead = ZERO_SHOT
    name: str = "none"
    cache: ConditionCache | None = None
    fitted_on: str = ""
    guides: Mapping[str | None, Guide] = field(default_factory=Guides)
    folder: Path | None = None
    truncate_dim: int | None = None
    answers: AnswerTable | None = None

    def __post_init__(self) -> None:
        """Check that embeddings can be truncated, and let guides be found in any spelling.

        Raises:
            UserError: ``truncate_dim`` is larger than the embeddings, or the head does not compare
                them by cosine.
        """
        object.__setattr__(self, "guides", Guides(self.guides))
        if self.truncate_dim is not None:
            check_truncatable(self.truncate_dim, self.head)
            check_truncate_dim(self.truncate_dim, self.head.dim_out or self.encoder.dim)

    @classmethod
    def from_pretrained(cls, name: str | Path | None = None, **options: Any) -> Embedder:
        """Load an embedder, as ``llmcond.load_embedder`` does.

        Args:
            name: A folder or name, as for ``load_embedder``.
            options: The other arguments of ``load_embedder``, such as ``head`` and ``revision``.

        Returns:
            The embedder.

        Raises:
            UserError, LlmcondError: As ``load_embedder``.

        Examples:
            >>> import llmcond
            >>> llmcond.Embedder.from_pretrained("minilm-csts").dim
            384
        """
        return load_embedder(name, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the head, and the encoder if it was trained, in a folder that can be loaded again.

        The folder has the layout of a run, without data, features and local paths. A frozen encoder
        is recorded by its name and revision. ``truncate_dim`` is an option of loading, and is not
        saved.

        Args:
            folder: A folder that is empty or does not exist.

        Raises:
            UserError: The folder is not empty, the embedder is zero-shot or guided, or its encoder
                is a local folder that was not trained by llmcond.

        Examples:
            >>> import llmcond
            >>> llmcond.load_embedder("minilm-csts").save_pretrained("copy")
            >>> llmcond.load_embedder("copy").dim
            384
        """
        save_portable_run(self._saved_run(), Path(folder), [self.name])

    def push_to_hub(
        self, repo_id: str, *, private: bool = False, revision: str | None = None, **options: Any
    ) -> str:
        """Upload the head, and the encoder if it was trained, to the Hugging Face hub.

        Args:
            repo_id: ``OWNER/NAME`` of the repository, which is created if it does not exist.
            private: Whether to make the repository private.
            revision: The branch. None: the main branch.
            options: The other arguments of ``llmcond.push``, such as ``license``.

        Returns:
            The address of the repository.

        Raises:
            UserError, LlmcondError: As ``save_pretrained`` and ``llmcond.push``.

        Examples:
            >>> import llmcond
            >>> embedder = llmcond.load_embedder("runs/default")  # doctest: +SKIP
            >>> embedder.push_to_hub("ada/my-heads")  # doctest: +SKIP
            'https://huggingface.co/ada/my-heads'
        """
        import llmcond  # the command is in a higher layer

        result = llmcond.push(
            repo=repo_id,
            run=self._saved_run(),
            head=[self.name],
            private=private,
            revision=revision,
            **options,
        )
        return str(result["url"])

    def _saved_run(self) -> Path:
        """Return the folder of the run that the embedder can be saved from."""
        if self.folder is None or self.head.dim_in == 0:
            raise UserError(
                "a zero-shot embedder has no weights to save. Its encoder and its prompt "
                f"({self.encoder.name}, {self.view.name}) are enough to load it elsewhere."
            )
        if self.guides:
            raise UserError(
                "the guides of an embedder cannot be saved. Save the embedder without them, and "
                "guide it again where it is loaded."
            )
        return self.folder

    def __repr__(self) -> str:
        """Return the encoder, prompt, head and embedding size in one line."""
        return (
            f"Embedder({self.encoder.name}, prompt {self.view.name}, head {self.name}, "
            f"{self.dim} dimensions)"
        )

    @property
    def dim(self) -> int:
        """The size of the embeddings."""
        return self.truncate_dim or self.head.dim_out or self.encoder.dim

    @property
    def matryoshka_dims(self) -> Sequence[int]:
        """The smaller sizes that embeddings can be truncated to without another model.

        These are the sizes that the head, or the encoder of a zero-shot model, was trained with
        (the setting ``matryoshka``). For PCA, whitening and random projections, it is every size,
        because their first components are those of the same projection with fewer components.
        """
        if self.head.kind in ORDERED_KINDS:
            return list(range(self.dim - 1, 0, -1))
        sizes = getattr(self.head.settings, "matryoshka", ())
        if self.head.is_identity:
            record = self.encoder.resolved.checkpoint.training_record()
            sizes = record.get("made_of", {}).get("objective", {}).get("matryoshka", ())
        return sorted((size for size in sizes if size < self.dim), reverse=True)

    @overload
    def encode(
        self,
        sentences: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        normalize: bool = True,
        show_progress: bool = False,
        truncate_dim: int | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool | None = None,
    ) -> Vectors: ...

    @overload
    def encode(
        self,
        sentences: str | Iterable[str],
        conditions: str | Iterable[str],
        **options: Unpack[EncodeOptions],
    ) -> Any: ...

    def encode(  # noqa: PLR0913 - the options of sentence-transformers
        self,
        sentences: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        normalize: bool = True,
        show_progress: bool = False,
        truncate_dim: int | None = None,
        precision: Precision = "float32",
        batch_size: int | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool | None = None,
    ) -> Any:
        """Embed sentences under conditions.

        The options from ``truncate_dim`` on have the names that they have in sentence-transformers.

        Args:
            sentences: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or a single text.
            conditions: n conditions, one for each sentence, or one condition for all sentences.
            normalize: Whether to scale embeddings to unit L2 norm, so that inner products are
                cosines. Embeddings that the head does not compare by cosine are never scaled.
                Embeddings that a guide maps are always scaled.
            show_progress: Whether to show a progress bar on standard error.
            truncate_dim: The number of leading dimensions to keep, before embeddings are scaled.
                None: that of the embedder. See ``matryoshka_dims``.
            precision: ``float32``, ``int8``, ``uint8``, ``binary`` or ``ubinary``, see
                ``quantize_embeddings``. The ranges of ``int8`` and ``uint8`` are those of these
                embeddings; to compare several calls, quantise their float32 embeddings with the
                same ranges.
            batch_size: The largest number of inputs in a forward pass. None: only the number of
                tokens is limited, as ``load_embedder`` says. A prompt that subtracts has two inputs
                per sentence.
            convert_to_numpy: Whether the result is an array. If this and ``convert_to_tensor`` are
                False, it is a list of tensors.
            convert_to_tensor: Whether the result is a PyTorch tensor on the CPU.
            show_progress_bar: Another name of ``show_progress``.
            normalize_embeddings: Another name of ``normalize``.

        Returns:
            The embeddings, (n, k) float32; (k,) for a single text. With another precision, integers
            as ``quantize_embeddings`` returns them.

        Raises:
            UserError: The lengths differ, a sentence or condition is empty, an option is invalid,
                or a single text is quantised to ``int8`` or ``uint8``.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        normalize, show_progress = check_encode_options(
            normalize=normalize,
            show_progress=show_progress,
            precision=precision,
            batch_size=batch_size,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
            show_progress_bar=show_progress_bar,
            normalize_embeddings=normalize_embeddings,
        )
        embedder = self if truncate_dim is None else replace(self, truncate_dim=truncate_dim)
        is_single = isinstance(sentences, str)
        if isinstance(sentences, str):
            sentences, conditions = [sentences], as_condition_list(conditions)
        rows = pair_with_conditions(sentences, conditions)
        vectors = embedder._encode(rows, show_progress, batch_size)
        if normalize:
            vectors = normalise_vectors(vectors, self.head)
        return convert_embeddings(
            vectors[0] if is_single else vectors,
            precision,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
        )

    def mentions(
        self, sentences: str | Iterable[str], conditions: str | Iterable[str]
    ) -> NDArray[np.float32]:
        """Score whether texts say anything about a condition, such as the price.

        The score needs no labels. It combines how near a word of the text is to the condition, and
        how much the embedding differs from that of a text that says nothing. Compare the scores of
        texts under one condition; around 0.5 many are wrong. docs/aspects.md says how good it is.

        Args:
            sentences: n texts, or a single text.
            conditions: n conditions, one for each text, or one condition for all texts.

        Returns:
            Scores between 0 (says nothing) and 1, (n,) float32; () for a single text.

        Raises:
            UserError: A text or condition is empty, the lengths differ, the head does not compare
                embeddings by cosine, or the encoder cannot weight tokens by a second text.
            LlmcondError: The encoder returned NaN, or ran out of memory.

        Examples:
            >>> import llmcond
            >>> texts = ["It costs 20 dollars.", "The screen is too dark."]
            >>> dear, dark = llmcond.load_embedder().mentions(texts, "the price")
            >>> bool(dear > dark)
            True
        """
        check_mappable(self.head)
        is_single = isinstance(sentences, str)
        if isinstance(sentences, str):
            sentences, conditions = [sentences], as_condition_list(conditions)
        rows = pair_with_conditions(sentences, conditions)
        plain = replace(self, guides={}, truncate_dim=None)
        base = _load_base(self.encoder)
        scores = score_mentions(rows, lambda rows: plain._encode(rows, False), base.encode)
        return np.asarray(scores[0] if is_single else scores)

    def explain(
        self, sentence: str, conditions: str | Iterable[str], *, to: str | None = None
    ) -> Explanation:
        """Return the weight, or the contribution, of each token of a sentence.

        Without ``to``, and with a router, these are the weights that the embedding is computed
        with: of routed pooling (the method ``pooling-weights``), or of each layer of a router
        inside the encoder (``router-weights``). If a head takes several prompts, they are those of
        the first one with a router.

        With ``to``, they are contributions to the similarity. With routed pooling and no fitted
        head, the cosine is the sum of the contributions (``exact``). For every other model, the
        contribution of a token is how much the similarity falls if the sentence is encoded without
        the token (``leave-one-out``). Without ``to`` and without a router, the similarity is that
        of the embedding to itself, so that a contribution says how far the embedding moves.

        Args:
            sentence: The sentence.
            conditions: One condition, or several.
            to: A second sentence, whose similarity to the first one is explained.

        Returns:
            The explanation, with the name of its method.

        Raises:
            UserError: A sentence or condition is empty, the sentence has only one token, or it is
                longer than the encoder reads at a time.
            LlmcondError: The encoder returned NaN, or ran out of memory.

        Examples:
            >>> import llmcond
            >>> embedder = llmcond.load_embedder()
            >>> explanation = embedder.explain("A dog runs.", "the animal", to="A cat sleeps.")
            >>> explanation.method, explanation.conditions[0].values.shape
            ('leave-one-out', (4,))
        """
        from llmcond.runs.similarity import explain_embedding

        names = as_conditions(conditions)
        is_mapped = (
            self.head.kind != "none"
            or self.truncate_dim is not None
            or self.answers is not None
            or any(name in self.guides for name in names)
        )
        explanation = explain_embedding(self, is_mapped, sentence, names, to)
        return replace(explanation, about=describe(self))

    def guided(self, texts: Iterable[str], labels: Iterable[Any], condition: str) -> Embedder:
        """Return an embedder whose embeddings under a condition are guided by labelled texts.

        A linear map, fitted in closed form, moves texts with the same label closer together.
        Embeddings keep their size, and embeddings under other conditions do not change.

        Args:
            texts: m texts; 8 to 64 are often enough.
            labels: m labels, at least two different ones.
            condition: The condition. An earlier guide for it is replaced.

        Returns:
            A new embedder with the guide; this one does not change.

        Raises:
            UserError: A text is empty or has two labels, there are fewer than two labels, or the
                head does not compare embeddings by cosine.

        Examples:
            >>> import llmcond
            >>> embedder = llmcond.load_embedder()
            >>> texts = ["Great food.", "Awful food.", "Lovely staff.", "Rude staff."]
            >>> labels = ["praise", "complaint", "praise", "complaint"]
            >>> guided = embedder.guided(texts, labels, "the sentiment")
            >>> guided.encode("A lovely evening.", "the sentiment").shape
            (384,)
        """
        return self.with_guide(check_labelled(as_condition(condition), texts, labels))

    def with_guide(self, labelled: LabelledTexts) -> Embedder:
        """Return an embedder that is guided by labelled texts, as ``guided`` does.

        Args:
            labelled: The texts, their labels and the condition.

        Returns:
            A new embedder with the guide; this one does not change.

        Raises:
            UserError: The head does not compare embeddings by cosine.
        """
        condition = labelled.condition or ""
        before = Guides(self.guides).without_labels(condition)
        guides: Mapping[str | None, Guide] = {} if before is None else {condition: before}
        vectors = replace(self, guides=guides).encode(labelled.texts, condition)
        guide = fit_checked_guide(labelled, vectors, self.head, before)
        return replace(self, guides={**self.guides, condition: guide})

    def ignoring(
        self,
        texts: Iterable[str],
        condition: str,
        columns: Mapping[str, Sequence[Any]] | None = None,
        directions: int | None = None,
    ) -> Embedder:
        """Return an embedder that ignores what a condition is to ignore.

        From a collection of texts, it finds the directions in which their embeddings vary more
        under an ignored condition than under the condition itself, and removes them from all
        embeddings under the condition. No labels are needed.

        Args:
            texts: at least 50 texts that differ in what is to be ignored. At most 4,000 of them,
                evenly spaced, are used.
            condition: a ``Condition`` with ``ignore``, or any condition with ``columns``.
            columns: known labels of the texts, by a name for each kind, that are to be ignored too
                (LEACE). A text without a label has None, NaN or ``""``.
            directions: the number of directions to remove for each ignored condition. None: those
                whose variance is at least a tenth of that of the first one.

        Returns:
            A new embedder; this one does not change. A guide that is fitted for the condition
            afterwards sees the embeddings without these directions.

        Raises:
            UserError: There are fewer than 50 distinct texts, the condition and ``columns`` name
                nothing to ignore, a column has another length or fewer than two labels, or the
                head does not compare embeddings by cosine.

        Examples:
            >>> import llmcond
            >>> texts = [f"The {a} {b}." for a in ("cat", "dog", "cow", "pig", "hen", "fox", "owl")
            ...          for b in ("sleeps", "eats", "runs", "sings", "hides", "swims", "plays")]
            >>> condition = llmcond.Condition("the activity", ignore=["the animal"])
            >>> embedder = llmcond.load_embedder().ignoring(texts + ["A cat."], condition)
            >>> embedder.encode("A dog sleeps.", condition).shape
            (384,)
        """
        condition = as_condition(condition)
        guides: dict[str | None, Guide] = {**self.guides}
        guides.pop(condition, None)
        plain = replace(self, guides={})  # The map is applied to vectors without a guide.
        guides[condition] = fit_ignoring_map(
            plain.encode, texts, condition, columns, directions, self.head
        )
        return replace(self, guides=guides)

    def _encode(
        self,
        texts: Sequence[tuple[str, str]],
        show_progress: bool,
        batch_size: int | None = None,
    ) -> Vectors:
        # All inputs are encoded in one call, so that each distinct input is encoded once.
        distinct = list(dict.fromkeys(self.view.inputs(WordingRows.of(texts, self.answers).rows)))
        vectors = self.encoder.encode(distinct, show_progress=show_progress, batch_size=batch_size)
        return self.embed_vectors(texts, distinct, vectors)

    def encode_with_counts(self, rows: Sequence[tuple[str, str]]) -> Encoded:
        """Embed (sentence, condition) rows and count their tokens, on the calling thread.

        The embeddings are not normalised; see ``normalise_vectors``. A row's token count covers all
        its inputs, and a row is truncated if any of its inputs is. Truncation is not logged.

        Args:
            rows: n (sentence, condition) rows.

        Returns:
            The embeddings, (n, k), with token counts and truncation, (n,) each.

        Raises:
            UserError: The encoder cannot encode an input, or returned NaN for it.
            LlmcondError: The encoder ran out of memory.
        """
        worded = WordingRows.of(rows, self.answers)
        inputs = list(self.view.inputs(worded.rows))
        position = {item: index for index, item in enumerate(dict.fromkeys(inputs))}
        encoded = self.encoder.encode_with_counts(distinct := list(position))
        positions = np.array([position[item] for item in inputs]).reshape(len(worded.rows), -1)
        return replace(
            encoded,
            vectors=self.embed_vectors(rows, distinct, encoded.vectors),
            n_tokens=worded.sum(encoded.n_tokens[positions].sum(axis=1)),
            truncated=worded.sum(encoded.truncated[positions].sum(axis=1)) > 0,
        )

    def embed_vectors(
        self, texts: Sequence[tuple[str, str]], distinct: Sequence[EncoderInput], vectors: Vectors
    ) -> Vectors:
        """Compute the embeddings of rows from the encoder's vectors of their inputs.

        Args:
            texts: n (sentence, condition) rows.
            distinct: The m distinct inputs of the rows.
            vectors: (m, d), the encoder's vectors of ``distinct``.

        Returns:
            The embeddings, (n, k), not normalised.

        Raises:
            InputError: A vector, or an embedding, contains NaN or infinity.
        """
        position = {item: index for index, item in enumerate(distinct)}
        worded = WordingRows.of(texts, self.answers)

        def read(prompt: Prompt, part: FeaturePart) -> Matrix:
            positions = [position[getattr(prompt, part).render(*row)] for row in worded.rows]
            return SharedRows(vectors, np.array(positions, dtype=np.int64))

        features, condition = self.view.sentence_features(read), self.view.condition_features(read)
        if self.cache is not None and condition is not None:
            embeddings = self.cache.transform(features, condition)
        else:
            embeddings = self.head.transform(features, condition)
        embeddings = embeddings[:, : self.truncate_dim]
        embeddings = worded.mean(embeddings, normalize=self.head.compares_by_cosine)
        embeddings = apply_guides(embeddings, [condition for _, condition in texts], self.guides)
        check_finite(embeddings, texts, f"the head {self.name}", "Fit the head again.")
        return embeddings

    def _compute_similarity(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        # Both sides are encoded in one call, so that each distinct input is encoded once.
        embedded = self._encode([*first, *second], show_progress)
        return self.compare(embedded[: len(first)], embedded[len(first) :])

    def _compute_matrix(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        embedded = self._encode([*first, *second], show_progress)
        rows, columns = embedded[: len(first)], embedded[len(first) :]
        if self.head.compares_by_cosine:
            return clip_cosines(scale_to_unit_norm(rows) @ scale_to_unit_norm(columns).T)
        compared = [self.compare(np.broadcast_to(row, columns.shape), columns) for row in rows]
        return np.array(compared, np.float32).reshape(len(rows), len(columns))

    def compare(self, first: Vectors, second: Vectors) -> Vectors:
        """Compare embeddings with others, row by row, as the head does.

        Args:
            first: (n, k) embeddings.
            second: (n, k) embeddings to compare with.

        Returns:
            The similarities, (n,).

        Raises:
            InputError: A similarity is NaN or infinity.
        """
        similarity = self.head.compare(first, second)
        rows = [(f"pair {number}",) for number in range(1, len(similarity) + 1)]
        check_finite(similarity[:, None], rows, f"the head {self.name}", "Fit the head again.")
        return similarity


def fit_checked_guide(
    labelled: LabelledTexts,
    vectors: Vectors,
    head: EmbeddingHead = ZERO_SHOT,
    before: Guide | None = None,
) -> Guide:
    """Fit a guide to the embeddings, (m, k), of labelled texts, which ``before`` mapped already.

    Raises:
        UserError: The head does not compare embeddings by cosine.
    """
    check_mappable(head)
    source, digest = labelled.source, labelled.digest
    return fit_guide(vectors, labelled.labels, source=source, digest=digest, before=before)


def check_mappable(head: EmbeddingHead) -> None:
    """Raise a ``UserError`` unless a head compares embeddings by cosine."""
    if not head.compares_by_cosine:
        raise UserError(
            "guides, ignored conditions and scores of mentions need embeddings that are compared "
            "by cosine, and this head compares them in another way. Choose another --head."
        )


#: The fewest distinct texts that show what to ignore, and the most that are used.
MIN_COLLECTION, MAX_COLLECTION = 50, 4_000


def fit_ignoring_map(
    encode: Callable[[Sequence[str], str], Vectors],
    texts: Iterable[str],
    condition: str,
    columns: Mapping[str, Iterable[Any]] | None = None,
    directions: int | None = None,
    head: EmbeddingHead = ZERO_SHOT,
) -> Guide:
    """Fit the map of a condition that ignores others; ``Embedder.ignoring`` has the arguments.

    Args:
        encode: returns the embeddings, (n, k), of texts under one condition.
        texts: the collection.
        condition: the condition with those that it ignores.
        columns: known labels to ignore.
        directions: the number of directions for each ignored condition.
        head: the head of the embeddings.

    Raises:
        UserError: as ``Embedder.ignoring``.
    """
    check_mappable(head)
    texts = as_list(texts, "texts")
    known = {name: as_list(v, f"the column {name!r}") for name, v in (columns or {}).items()}
    ignored = ignored_by(condition)
    if not (ignored or known):
        raise UserError(
            f"{condition!r} ignores nothing. Give Condition(..., ignore=[...]) or columns=."
        )
    for name, labels in known.items():
        if len(labels) != len(texts):
            raise UserError(
                f"the column {name!r} has {format_count(len(labels), 'label')} for "
                f"{format_count(len(texts), 'text')}. Give one label for each text."
            )
    first = {text: row for row, text in reversed(list(enumerate(texts)))}
    if len(first) < MIN_COLLECTION:
        raise UserError(
            f"there are {format_count(len(first), 'distinct text')}, and at least "
            f"{MIN_COLLECTION} are needed to find what to ignore. Give more texts of the kind that "
            "will be embedded."
        )
    rows = sorted(first.values())
    rows = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, MAX_COLLECTION).astype(int))]
    sample = [texts[row] for row in rows]
    known = {name: [label_text(labels[row]) for row in rows] for name, labels in known.items()}
    for name, labels in known.items():
        if len(set(labels) - {""}) < 2:
            raise UserError(f"the column {name!r} has fewer than 2 labels, so nothing is ignored.")
    target = without_ignored(condition)
    vectors, others = encode(sample, target), {c: encode(sample, c) for c in ignored}
    guide = fit_ignoring(vectors, others, known, directions)
    for other, under_other in others.items():
        shared = share_of_neighbours(vectors, under_other)
        if shared > ALIKE:
            log.warning(
                f"under {other!r}, {shared:.0%} of the texts' nearest neighbours are the same as "
                f"under {str(target)!r}: ignoring it may remove what you ask for"
            )
    centred = vectors - vectors.mean(axis=0)
    lost = np.linalg.qr(guide.removed())[0]
    share = ((centred @ lost) ** 2).sum() / max((centred**2).sum(), 1e-12)
    directions_text = format_count(lost.shape[1], "direction")
    log.info(
        f"{target}: {directions_text} with {share:.0%} of the variance removed, to ignore "
        f"{format_list([*ignored, *known], 3)}"
    )
    return guide


#: The share of common neighbours above which two conditions are alike.
ALIKE = 0.5


def share_of_neighbours(first: Vectors, second: Vectors, k: int = 10) -> float:
    """Return the mean share of the k nearest texts that are the same by two (n, d) vectors."""
    rows = np.unique(np.linspace(0, len(first) - 1, 1_000).astype(int))
    nearest_rows = []
    for vectors in (scale_to_unit_norm(first[rows]), scale_to_unit_norm(second[rows])):
        similarities = vectors @ vectors.T
        np.fill_diagonal(similarities, -np.inf)
        nearest_rows.append(np.argpartition(-similarities, k, axis=1)[:, :k])
    common = [len(np.intersect1d(*pair)) for pair in zip(*nearest_rows, strict=True)]
    return float(np.mean(common)) / k


def check_truncatable(truncate_dim: int | None, head: EmbeddingHead) -> None:
    """Check that the first dimensions of a head's embeddings can be compared.

    Raises:
        UserError: the head does not compare embeddings by cosine.
    """
    if truncate_dim is not None and not head.compares_by_cosine:
        raise UserError(
            f"this {head.kind} head does not compare embeddings by cosine, so the first dimensions "
            "of an embedding cannot be compared. Leave out truncate_dim."
        )


def normalise_vectors(vectors: Vectors, head: EmbeddingHead = ZERO_SHOT) -> Vectors:
    """Return embeddings, (n, k), with unit L2 norm, or unchanged if not compared by cosine.

    Embeddings of norm 0, which carry no information, stay zero.
    """
    return scale_to_unit_norm(vectors) if head.compares_by_cosine else vectors


def load_embedder(
    run: str | Path | None = None,
    head: str | None = None,
    *,
    prompt: str | None = None,
    device: str = "auto",
    max_tokens_per_batch: int | None = None,
    revision: str | None = None,
    truncate_dim: int | None = None,
) -> Embedder:
    """Load the encoder of a run, or of a bundled model, with one of its heads.

    Args:
        run: The folder of a run or of an encoder, the name of a bundled model or known encoder, or
            ``OWNER/NAME`` of a model or encoder on the Hugging Face hub. The hub is used only if
            there is no folder of that name. None: ``runs/default`` if it was created from your own
            data, otherwise the default bundled model. An encoder embeds zero-shot.
        head: The name of a fitted head, or of its recipe if only one head was fitted with it.
            ``none``: zero-shot. None: the run's default head (``llmcond heads --run RUN --default
            NAME``), otherwise the head with the best score on dev, or zero-shot if no head is
            fitted or none is better than zero-shot on dev.
        prompt: The prompt of zero-shot. A fitted head has its own prompt.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        max_tokens_per_batch: The token budget of one forward pass, which replaces a batch size.
            None: chosen for the device and its memory.
        revision: A branch, tag or commit of a model on the hub. None: the newest version.
        truncate_dim: The number of leading dimensions that embeddings keep. None: all of them.

    Returns:
        The embedder.

    Raises:
        UserError: The run, model or head does not exist, several heads match the name, the prompt
            is a control, the encoder has changed, or ``truncate_dim`` is larger than the
            embeddings.
        LlmcondError: The hub cannot be reached, or the encoder cannot be loaded.

    Examples:
        >>> import llmcond
        >>> llmcond.load_embedder()
        Embedder(minilm-conditions, prompt concat-cond-sent, head ..., 384 dimensions)
    """
    check_run(run)
    for name, value in (("head", head), ("prompt", prompt), ("revision", revision)):
        check_argument(name, value, (str, None), "a name")
    check_argument("device", device, (str,), "a device such as 'cpu'")
    numbers = {"max_tokens_per_batch": max_tokens_per_batch, "truncate_dim": truncate_dim}
    for name, number in numbers.items():
        check_argument(name, number, (Integral, None), "a whole number")
    model = EmbeddingModel.find(resolve_run(run, revision=revision), head, prompt)
    resolved = model.run.resolve_encoder(device, max_tokens_per_batch)
    return make_embedder(LazyEncoder(resolved)(), model.head, model.run.folder, truncate_dim)


def make_embedder(
    encoder: Encoder,
    saved: RunEmbeddingHead,
    folder: Path | None = None,
    truncate_dim: int | None = None,
) -> Embedder:
    """Combine an encoder and a head of its run, fitted or zero-shot, into an embedder.

    Raises:
        UserError: the embeddings cannot be truncated to ``truncate_dim``.
    """
    fitted_on = _describe_training_data(encoder, saved) if saved.is_fitted else ""
    cache = None
    if not isinstance(saved.head, NumpyHead) and saved.head.generates_matrices:
        from llmcond.heads.fitted import ConditionCache

        cache = ConditionCache(saved.head)
    return Embedder(
        encoder,
        saved.view,
        saved.head,
        saved.reference,
        cache,
        fitted_on,
        folder=folder,
        truncate_dim=truncate_dim,
    )


def _describe_training_data(encoder: Encoder, saved: RunEmbeddingHead) -> str:
    """Return the source of a fitted head's data, and how many sets of texts trained its encoder."""
    source = describe_source(saved.record["data"]["source"])
    if saved.record["encoder"]["model"] != IN_RUN_FOLDER:
        return source
    n_sets = len(
        encoder.resolved.checkpoint.training_record().get("summary", {}).get("aspects", ())
    )
    return f"{source} and texts of {format_count(n_sets, 'dataset')}" if n_sets else source


def base_encoder(encoder: Encoder) -> Encoder | None:
    """Load the base encoder of an adapter. An encoder without an adapter is its own base.

    Plain sentence embeddings, which embeddings under conditions are compared with, come from the
    base: an adapter also changes the vectors of texts without a condition, and was not trained for
    them. The result is None if all weights were trained, because their base is not recorded.

    Raises:
        LlmcondError: The base cannot be loaded.
    """
    base = resolve_base(encoder.resolved)
    if base is encoder.resolved:
        return encoder
    return None if base is None else LazyEncoder(base)()


@lru_cache(maxsize=1)
def _load_base(encoder: Encoder) -> Encoder:
    return base_encoder(encoder) or encoder


def describe(embedder: Embedder) -> dict[str, Any]:
    """Return a description of an embedder for the output of commands."""
    source = embedder.folder and find_hub_source(embedder.folder)
    return {
        **({"model": source.repo, "revision": source.commit} if source else {}),
        "encoder": embedder.encoder.name,
        "fingerprint": embedder.encoder.identity.fingerprint,
        "runtime": embedder.encoder.resolved.runtime,
        "dtype": embedder.encoder.identity.dtype,
        "prompt": embedder.view.name,
        "subtract": embedder.view.subtracts,
        "head": embedder.name,
        "fitted_on": embedder.fitted_on,
        "dim": embedder.dim,
        **guides_json(embedder.guides),
    }


def guides_json(guides: Mapping[Any, Guide]) -> dict[str, Any]:
    """Return the records of guides by condition, for the output of commands; {} if none."""
    records = {str(condition): guide.to_json() for condition, guide in guides.items()}
    return {"guides": records} if records else {}


@dataclass(frozen=True)
class EmbeddingModel:
    """A run with one of its heads, fitted or zero-shot. The encoder is not loaded yet.

    Its store lets an interrupted call continue where it stopped, and lets a second head embed the
    same texts without encoding them again.

    Attributes:
        run: The run, or the bundled model, which has the layout of a run.
        head: The head.
        device: Device of the encoder: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        truncate_dim: The number of leading dimensions that embeddings keep. None: all of them.
        guides: The guide of each condition that has one. The key None is for texts without a
            condition.
        answers: Answers that the encoder reads in place of texts, or None.
    """

    run: Run
    head: RunEmbeddingHead
    device: str = "auto"
    truncate_dim: int | None = None
    guides: Guides = field(default_factory=Guides)
    answers: AnswerTable | None = None

    @classmethod
    def find(
        cls,
        run: str | Path | None = None,
        head: str | None = None,
        prompt: str | None = None,
        *,
        model: str | None = None,
        revision: str | None = None,
        device: str = "auto",
        truncate_dim: int | None = None,
        quiet: bool = False,
    ) -> Self:
        """Find the model that a user named, and log which one it is unless ``quiet``.

        ``run``, ``model`` and ``revision`` are as for ``llmcond.runs.open.resolve_run``, ``head``
        and ``prompt`` as for ``choose_head``.

        Raises:
            UserError: The run or head does not exist, the prompt is a control, or the head does not
                compare by cosine, so that its embeddings cannot be truncated.
            LlmcondError: The hub cannot be reached.
        """
        opened = open_run(resolve_run(run, model, revision))
        saved = choose_head(opened, head, prompt)
        saved.view.check_texts()
        if not quiet:
            log_model(opened, saved, head)
        check_truncatable(truncate_dim, saved.head)
        return cls(opened, saved, device, truncate_dim)

    @property
    def view(self) -> FeatureView:
        """The features that the head takes for a text and its condition."""
        return self.head.view

    @property
    def find_arguments(self) -> dict[str, str]:
        """The arguments of ``find``, as strings, that find this model again."""
        head = self.run.head_arguments(self.head.reference, self.view)
        return {**self.run.find_arguments, **head}

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the vectors, as records of embeddings store it."""
        return {
            "encoder": self.run.identity.fingerprint,
            "prompt": {prompt.name: prompt.digest for prompt in self.view.prompts},
            "subtraction": self.view.subtract,
            "head": self.head.record["weights_sha256"],
            **({"answers": self.answers.digest} if self.answers else {}),
        }

    @cached_property
    def encoder(self) -> LazyEncoder:
        """The encoder, which is loaded at its first call."""
        return LazyEncoder(self.run.resolve_encoder(self.device))

    @cached_property
    def store(self) -> FeatureStore:
        """The store of encoded features: that of the run, if it can be written."""
        return self.run.store_for_other_texts(self.encoder.resolved.identity)

    def with_answers(self, answers: AnswerTable | None, rows: Iterable[tuple[str, str]]) -> Self:
        """Return a model that reads answers in place of texts; None: the texts.

        Raises:
            UserError: a (text, condition) row has no answer, as ``AnswerTable.check``.
        """
        if answers is not None:
            answers.check(rows)
        return replace(self, answers=answers)

    def fit_guide(self, labelled: LabelledTexts) -> Guide:
        """Fit a guide to labelled texts, and apply it to all later embeddings of their condition.

        Raises:
            UserError: As ``extract``, the head does not compare by cosine, or a text has no answer.
        """
        texts, condition = labelled.texts, labelled.condition
        if self.answers is not None and condition is not None:
            self.answers.check((text, condition) for text in texts)
        before = self.guides.without_labels(condition)
        self.guides.pop(condition, None)
        if before is not None:
            self.guides[condition] = before
        if condition is None:
            guide = fit_checked_guide(labelled, self.embed_plain(texts))
        else:
            vectors = self.embed([(text, condition) for text in texts], labelled.source)
            guide = fit_checked_guide(labelled, vectors, self.head.head, before)
        self.guides[condition] = guide
        return guide

    def fit_ignored(
        self,
        collection: Collection,
        conditions: Sequence[str],
        columns: Sequence[str] = (),
        directions: int | None = None,
    ) -> None:
        """Find what conditions ignore in texts, and remove it from all later embeddings.

        Args:
            collection: The texts, with the columns.
            conditions: The conditions; those that ignore nothing are left out without columns.
            columns: The names of columns that every condition ignores.
            directions: The number of directions for each ignored condition; None: chosen.

        Raises:
            UserError: As ``Embedder.ignoring`` and ``extract``.
        """

        def encode(texts: Sequence[str], condition: str) -> Vectors:
            return self.embed([(text, condition) for text in texts], collection.file)

        known, head = {name: collection.columns[name] for name in columns}, self.head.head
        ignoring = [condition for condition in conditions if known or ignored_by(condition)]
        for condition in ignoring:
            self.guides.pop(condition, None)
        # The maps are used together at the end, because one condition may ignore another one.
        maps = {
            one: fit_ignoring_map(encode, collection.texts, one, known, directions, head)
            for one in ignoring
        }
        self.guides.update(maps)

    def extract(
        self, rows: Sequence[tuple[str, str]], file: str, n_texts: int | None = None
    ) -> None:
        """Encode the inputs of (sentence, condition) rows that the store lacks.

        Args:
            rows: The rows: all texts under a condition, then all under the next one, if any.
            file: The name of their file, for messages.
            n_texts: The number of texts. None: one for each row.

        Raises:
            UserError: The encoder returned NaN or infinity; the message names the row.
        """
        worded = WordingRows.of(rows, self.answers)
        inputs = self.view.inputs(worded.rows)
        try:
            extract_inputs(self.store, self.encoder, self.view.name, inputs)
        except InputError as error:
            row = list(inputs).index(error.item) // len(self.view.required_parts())
            number = int(worded.owners[row]) % (n_texts or len(rows)) + 1
            raise UserError(f"row {number} of {file}: {error}") from error

    def read_blocks(
        self, rows: Sequence[tuple[str, str]], normalize: bool = True
    ) -> Iterator[Vectors]:
        """Yield the (n, k) embeddings of extracted rows, in batches."""
        for start in range(0, len(rows), _BLOCK):
            batch = rows[start : start + _BLOCK]
            worded = WordingRows.of(batch, self.answers)

            def read(prompt: Prompt, side: FeaturePart, worded: WordingRows = worded) -> Matrix:
                return self.store.lookup(
                    [getattr(prompt, side).render(*row) for row in worded.rows]
                )

            head = self.head.head
            vectors = head.transform(
                self.view.sentence_features(read), self.view.condition_features(read)
            )
            vectors = vectors[:, : check_truncate_dim(self.truncate_dim, vectors.shape[1])]
            vectors = worded.mean(vectors, normalize=head.compares_by_cosine)
            vectors = apply_guides(vectors, [condition for _, condition in batch], self.guides)
            check_finite(vectors, batch, f"the head {self.head.name}", "Fit the head again.")
            yield normalise_vectors(vectors, head) if normalize else vectors

    @contextmanager
    def shared(self, workers: Workers | None) -> Iterator[None]:
        """Let workers encode during the block."""
        if workers is None:
            yield
            return
        from llmcond.features.workers import SharedExecution

        resolved = self.encoder.resolved
        with SharedExecution(workers, self.encoder.name, resolved, self.store) as execution:
            self.encoder.execute = execution
            yield
        self.encoder.execute = None

    def embed(self, rows: Sequence[tuple[str, str]], file: str) -> Vectors:
        """Return the (n, k) embeddings of rows, with unit L2 norm.

        Raises:
            UserError: As ``extract``.
        """
        self.extract(rows, file)
        return np.concatenate(list(self.read_blocks(rows)))

    def embed_plain(self, texts: Sequence[str]) -> Vectors:
        """Return the (n, d) vectors that the encoder gives texts, without a condition or a head."""
        inputs = [EncoderInput("", text) for text in texts]
        vectors = _encode_alone(self.encoder, self.store, inputs)
        guide = self.guides.get(None)
        return vectors if guide is None else guide.transform(vectors)

    def embed_with_base(self, texts: Sequence[str]) -> tuple[str, Vectors]:
        """Return the name of the base encoder, and the (n, d) vectors that it gives texts.

        The base is the encoder that an adapter was trained on, or the encoder itself if it was not
        trained. If all its weights were trained, no base is recorded, and the trained encoder is
        used instead.
        """
        name, encoder, store = self._base
        return name, _encode_alone(encoder, store, [EncoderInput("", text) for text in texts])

    @cached_property
    def _base(self) -> tuple[str, LazyEncoder, FeatureStore]:
        """The name of the base encoder, the encoder, and its store."""
        base, store = resolve_base(self.encoder.resolved), self.store
        if base is None:
            log.info(f"no base of {self.encoder.name} is recorded, so its own vectors are used")
        if base is None or base is self.encoder.resolved:
            return self.encoder.name, self.encoder, store
        base_store = type(store)(store.root, base.identity, store.dtype)
        return base.checkpoint.name, LazyEncoder(base), base_store

    def mentions(self, rows: Sequence[tuple[str, str]], file: str) -> NDArray[np.float32]:
        """Return the (n,) scores of ``Embedder.mentions`` for (text, condition) rows.

        Raises:
            UserError: As ``extract`` and ``Embedder.mentions``.
        """
        check_mappable(self.head.head)
        _, encoder, store = self._base
        plain = replace(self, guides=Guides(), truncate_dim=None)
        vars(plain).update(encoder=self.encoder, store=self.store)  # which may be loaded already
        return score_mentions(
            rows,
            lambda rows: plain.embed(rows, file),
            lambda inputs: _encode_alone(encoder, store, inputs),
        )

    def load(self) -> Embedder:
        """Load the encoder, and return an embedder without the guides."""
        return make_embedder(self.encoder(), self.head, self.run.folder, self.truncate_dim)


def _encode_alone(
    encoder: LazyEncoder, store: FeatureStore, inputs: Sequence[EncoderInput]
) -> Vectors:
    extract_inputs(store, encoder, f"{encoder.name}, no condition", inputs)
    return normalise_vectors(store.lookup(inputs).read())


def choose_head(run: Run, name: str | None, prompt: str | None = None) -> RunHead[Any]:
    """Load the head that a name refers to.

    Args:
        run: The run of the head.
        name: The name of a fitted head, or of its recipe if only one head was fitted with it.
            ``none``: zero-shot, also as ``none@PROMPT``. None: the run's default head, or
            zero-shot if none is fitted.
        prompt: The prompt of zero-shot; None: the run's only prompt.

    Raises:
        UserError: No head or several heads match, or the head was fitted on another prompt.
    """
    reference = name
    if reference is None and (default := run.default_head()) is not None:
        reference = default[0]
    # A head that was trained as zero-shot has such a name too.
    if (reference or "").startswith("none@") and reference not in run.head_names():
        if prompt is None:
            return _find_zero_shot(run, str(reference))
        reference = "none"
    if reference is None or reference == "none":
        return zero_shot_head(run.zero_shot_view(run.prompt(prompt)))
    names = run.full_head_names([reference])
    if len(names) > 1:
        raise UserError(
            f"{run.folder} has several heads {reference!r}: {', '.join(names)}. Give the full name."
        )
    saved = run.load_applied_head(names[0])
    if prompt is not None and set(prompt.split("+")) != set(saved.view.name.split("+")):
        raise UserError(
            f"the head {saved.name} was fitted on the prompt {saved.view.name}, not {prompt}. "
            "Leave out --prompt, or choose another --head."
        )
    return saved


def _find_zero_shot(run: Run, name: str) -> RunHead[Any]:
    """Return the zero-shot head of a name such as ``none@pair-cond``.

    Raises:
        UserError: The run has no features of that prompt.
    """
    views = [view for prompt in run.prompts().values() for view in run.zero_shot_views(prompt)]
    heads = {head.name: head for head in map(zero_shot_head, views)}
    if name not in heads:
        raise UserError(f"{run.display_name} has no {name}. {nearest(name, heads)}")
    return heads[name]


def log_model(run: Run, saved: RunHead[Any], requested: str | None) -> None:
    """Log the model, the head and the prompt in one line.

    ``requested`` is the head that the user named. If it is None, the reason why this head was
    chosen is logged as well.
    """
    default = run.default_head()
    if not saved.is_fitted:
        head = "zero-shot" if default else "zero-shot (no head is fitted)"
    else:
        head = f"head {saved.name}"
    if requested is None and default is not None:
        head += f" ({default[1]})"
    source = describe_source(run.manifest["data"]["source"])
    if run.is_bundled:
        is_default = default is not None and saved.name == default[0]
        parts = [run.display_name, "" if is_default else head]
    elif run.is_encoder:
        parts = [f"encoder {run.encoder_name}, zero-shot"]
    else:
        parts = [run.display_name, f"encoder {run.encoder_name}", head]
    fitted = f"fitted on {source}" if saved.is_fitted and parts[-1] else ""
    parts += [f"prompt {saved.view.name}", fitted]
    log.info("model: %s", ", ".join(filter(None, parts)))
