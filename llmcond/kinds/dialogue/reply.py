"""Ranks replies to a dialogue, or plans towards a later turn, for ``llmcond reply``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_tensors

from llmcond.base.arrays import Array, as_list
from llmcond.base.errors import UserError, first_line
from llmcond.base.files import digest_bytes, digest_text, replace_atomically
from llmcond.base.output import Displayed, log
from llmcond.base.package import DEFAULT_RUN
from llmcond.base.text import check_text
from llmcond.data.datasets import read_candidates
from llmcond.encoders.spec import check_finite
from llmcond.kinds.dialogue.data import UtteranceInputs
from llmcond.kinds.dialogue.examples import resolve_head
from llmcond.kinds.dialogue.heads import (
    ContextScore,
    FittedRoleHead,
    plan_scores,
    turn_scores,
)
from llmcond.kinds.dialogue.task import DialogueTask
from llmcond.options.scoring import ReplyOptions
from llmcond.prompts import Prompt
from llmcond.runs.embedder import choose_head, log_model
from llmcond.runs.open import LazyEncoder, open_any_run, resolve_run

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True)
class Replies(Displayed):
    r"""The candidates that fit best, with the query that they answer.

    Attributes:
        replies: the candidates, best first.
        about: the head, the score and the query, as ``to_json`` returns them.

    Examples:
        >>> import llmcond
        >>> from pathlib import Path
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> _ = Path("candidates.txt").write_text("Yes, at noon.\nIt is red.\n")
        >>> result = llmcond.reply(
        ...     turns=["Shall we meet?"], candidates="candidates.txt", run="dialogues", k=1
        ... )
        >>> result.replies[0].text
        'Yes, at noon.'
    """

    replies: Sequence[Reply]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The query, with the replies under ``results``.
        """
        return {**self.about, "results": [reply.to_json() for reply in self.replies]}


def reply(options: ReplyOptions) -> Replies:
    """Rank candidates as the next turn, or by how well they lead to a goal.

    Raises:
        UserError: The run, head or file does not exist, a text is empty, or there are fewer than
            two candidates.
    """
    texts = read_candidates(Path(options.candidates), options.read_options())
    model = load_dialogue(
        Path(options.run),
        options.head,
        prompt=options.prompt,
        score=options.score,
        device=options.device,
    )
    dialogue, pool = model.start(options.turns), model.candidates(texts)
    if (
        options.goal is None
        and len(dialogue) == 1
        and model.head.score.kind not in ("bi", "weighted")
    ):
        log.info("a single turn has no pairs: candidates are compared with it, as by the score bi")
    if options.goal is None:
        replies = model.top(dialogue, pool, options.k)
    else:
        replies = model.plan(dialogue, pool, options.goal, options.k)
    about = {
        "head": model.name,
        "score": "plan" if options.goal is not None else str(model.head.score),
        "turns": list(options.turns),
        "goal": options.goal,
        "n_candidates": len(pool),
    }
    return Replies(replies, about)


#: Version of the file format of saved candidates.
_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Reply:
    """A candidate for the next turn, with its rank.

    Attributes:
        rank: rank of the candidate, from 1.
        score: score by which candidates are ranked; larger is better. Scores of different
            dialogues are not comparable.
        text: text of the candidate.

    Examples:
        >>> from llmcond import Reply
        >>> Reply(rank=1, score=0.26087803, text="Yes, at noon.").to_json()
        {'rank': 1, 'score': 0.260878, 'text': 'Yes, at noon.'}
    """

    rank: int
    score: float
    text: str

    def to_json(self) -> dict[str, Any]:
        """Convert the reply to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The attributes, with ``score`` rounded to 6 decimals.
        """
        return {**asdict(self), "score": round(self.score, 6)}


@dataclass(frozen=True, eq=False, repr=False)
class Candidates:
    """Encoded candidates for the next turn.

    Create them with ``DialogueModel.candidates``.

    Attributes:
        texts: texts of the candidates, in the order in which they were given, with duplicates.
        after: vectors of the candidates in the role after, (n, k) float32, of unit length.
        before: vectors in the role before-2, (n, k), for planning.
        model: fingerprint of the encoder, the prompt and the head with which they were encoded.

    Examples:
        >>> import llmcond
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> model = llmcond.load_dialogue("dialogues")
        >>> pool = model.candidates(["Yes, at noon.", "It is red."])
        >>> pool
        Candidates(2 texts, 384 dimensions)
        >>> pool.save("pool.safetensors")
        >>> len(llmcond.Candidates.load("pool.safetensors"))
        2
    """

    texts: tuple[str, ...]
    after: Array
    before: Array
    model: str

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Candidates({len(self):,} texts, {self.after.shape[1]} dimensions)"

    def save(self, path: str | Path) -> None:
        """Save the candidates to a safetensors file.

        Args:
            path: path of the file.

        Raises:
            UserError: The file cannot be written.
            DiskFullError: The disk is full.
        """
        # The texts are a tensor, because the header of a safetensors file must be small.
        texts = np.frombuffer(json.dumps(self.texts).encode(), dtype=np.uint8)
        tensors: dict[str, NDArray[Any]] = {"after": self.after, "before": self.before}
        tensors["texts"] = texts
        metadata = {"format": _FORMAT, "model": self.model}
        with replace_atomically(Path(path)) as temporary:
            temporary.write_bytes(save_tensors(tensors, metadata))

    @classmethod
    def load(cls, path: str | Path) -> Candidates:
        """Load candidates from a file.

        A ``DialogueModel`` checks that it encoded the candidates when they are passed to it.

        Args:
            path: path of the file.

        Returns:
            The candidates.

        Raises:
            UserError: The file does not exist, is damaged, or holds no candidates.
        """
        if not Path(path).is_file():
            raise UserError(f"{path} does not exist.")
        try:
            with safe_open(path, framework="numpy") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise UserError(f"{path} holds no candidates that this version can read.")
                after, before, texts = (stored.get_tensor(n) for n in ("after", "before", "texts"))
                candidates = cls(
                    tuple(json.loads(texts.tobytes())), after, before, metadata["model"]
                )
        except (KeyError, OSError, SafetensorError, ValueError) as error:
            raise UserError(
                f"{path} holds no candidates or is damaged ({first_line(error)}). Create it "
                "again: model.candidates(texts).save(path)"
            ) from error
        if not len(candidates) == len(after) == len(before):
            raise UserError(f"{path} is damaged: the numbers of texts and vectors differ.")
        return candidates


@dataclass(frozen=True, eq=False, repr=False)
class DialogueState:
    """A dialogue up to its current turn; immutable, so that threads may share it.

    Create one with ``DialogueModel.start``.

    Attributes:
        model: model that encoded the dialogue.
        turns: utterances of the dialogue.
        before: roles before-1 and before-2 of the utterances, (n, k) each.

    Examples:
        >>> import llmcond
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> model = llmcond.load_dialogue("dialogues")
        >>> dialogue = model.start(["Hello!"]).add("Shall we meet?")
        >>> dialogue.turns
        ('Hello!', 'Shall we meet?')
    """

    model: DialogueModel
    turns: tuple[str, ...]
    before: tuple[Array, Array]

    def add(self, turn: str) -> DialogueState:
        """Add a turn, which is the only text that is encoded.

        Args:
            turn: text of the turn.

        Returns:
            The dialogue with the turn; this dialogue does not change.

        Raises:
            UserError: The turn is empty.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        return self.model.add_turns(self, [turn])

    def __len__(self) -> int:
        return len(self.turns)

    def __repr__(self) -> str:
        return f"DialogueState({', '.join(map(repr, self.turns))})"


class DialogueModel:
    """Ranks candidates for the next turn of a dialogue.

    Create one with ``load_dialogue``. All methods are thread-safe.

    Attributes:
        name: name of the head in the run, or ``none@PROMPT`` for zero-shot.
        encoder: encoder of utterances.
        head: head that maps utterances to their roles; its ``score`` compares dialogues with
            candidates.
        fingerprint: identifier of the encoder, the prompts and the weights of the head.

    Examples:
        >>> import llmcond
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> model = llmcond.load_dialogue("dialogues")
        >>> model
        DialogueModel(minilm, head none@separate, score last:2)
        >>> pool = model.candidates(["Yes, at noon.", "It is red."])
        >>> dialogue = model.start(["Hello!", "Shall we meet?"])
        >>> model.top(dialogue, pool, k=1)[0].text
        'Yes, at noon.'
        >>> model.score(dialogue, pool).shape
        (2,)
        >>> [reply.rank for reply in model.plan(dialogue, pool, goal="See you then.")]
        [1, 2]
    """

    def __init__(
        self, encoder: Encoder, prompts: Sequence[Prompt], head: FittedRoleHead, name: str
    ) -> None:
        self.encoder, self.head, self.name = encoder, head, name
        self._prompts = tuple(prompts)
        weights = [tensor.tobytes() for _, tensor in sorted(head.tensors.items())]
        self.fingerprint = digest_text(
            encoder.identity.fingerprint,
            *(prompt.digest for prompt in prompts),
            head.kind,
            digest_bytes(b"".join(weights), size=16).hex(),
        )

    def __repr__(self) -> str:
        """Return the encoder, the head and the score, in one line."""
        return f"DialogueModel({self.encoder.name}, head {self.name}, score {self.head.score})"

    def candidates(self, texts: Sequence[str], *, show_progress: bool = False) -> Candidates:
        """Encode candidates for the next turn; each distinct text is encoded once.

        Args:
            texts: texts of the candidates. Duplicates remain separate candidates.
            show_progress: whether to show a progress bar.

        Returns:
            The encoded candidates, in the order of ``texts``.

        Raises:
            UserError: A text is empty, or there are no texts.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        text_list = _as_texts(texts, "the candidates")
        if not text_list:
            raise UserError("there are no candidates. Give texts that may be the next turn.")
        vectors = self._encode(text_list, "candidate", show_progress)
        after, before = self.head.after(vectors), self.head.before(vectors)[1]
        return Candidates(tuple(text_list), after, before, self.fingerprint)

    def start(self, turns: Sequence[str] = ()) -> DialogueState:
        """Start a dialogue with some turns, which are encoded together.

        Args:
            turns: texts of the first turns, in order; may be empty.

        Returns:
            The dialogue.

        Raises:
            UserError: A turn is empty.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        empty = np.empty((0, self.head.dim_in), dtype=np.float32)
        return self.add_turns(DialogueState(self, (), self.head.before(empty)), turns)

    def add_turns(self, dialogue: DialogueState, turns: Sequence[str]) -> DialogueState:
        """Add several turns to a dialogue.

        Args:
            dialogue: the dialogue.
            turns: texts of the new turns, in order.

        Returns:
            The dialogue with the new turns; ``dialogue`` does not change.

        Raises:
            UserError: A turn is empty.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        turns = _as_texts(turns, "the turns")
        if not turns:
            return dialogue
        added = self.head.before(self._encode(turns, "turn"))
        first, second = map(np.concatenate, zip(dialogue.before, added, strict=True))
        return replace(dialogue, turns=(*dialogue.turns, *turns), before=(first, second))

    def score(self, dialogue: DialogueState, pool: Candidates) -> Array:
        """Score candidates as the next turn.

        Args:
            dialogue: the dialogue.
            pool: the candidates.

        Returns:
            The score of each candidate, (n,) float32.

        Raises:
            UserError: The dialogue or the candidates were encoded by another model, the dialogue
                has no turn, or a score is not finite.
        """
        first, second = self._check_model(dialogue, pool)
        head = self.head
        scores = turn_scores(first, second, pool.after, head.score, head.weights)[0]
        return _check_scores(scores, pool)

    def top(self, dialogue: DialogueState, pool: Candidates, k: int = 3) -> list[Reply]:
        """Find the candidates that fit best as the next turn.

        Args:
            dialogue: the dialogue.
            pool: the candidates.
            k: number of candidates to return.

        Returns:
            At most ``k`` replies, best first.

        Raises:
            UserError: ``k`` is below 1, or as for ``score``.
        """
        return _select_best(self.score(dialogue, pool), pool, k)

    def plan(self, dialogue: DialogueState, pool: Candidates, goal: str, k: int = 3) -> list[Reply]:
        """Find the candidates that are most likely to lead to a later turn.

        The score is equation 4 of Triple-Encoders (ACL 2024).

        Args:
            dialogue: the dialogue.
            pool: the candidates.
            goal: text of the later turn.
            k: number of candidates to return.

        Returns:
            At most ``k`` replies, best first.

        Raises:
            UserError: The goal is empty, or as for ``top``.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        first, _ = self._check_model(dialogue, pool)
        goal_vector = self.head.after(self._encode([goal], "goal"))
        scores = _check_scores(plan_scores(first, pool.before, goal_vector)[0], pool)
        return _select_best(scores, pool, k)

    def _check_model(self, dialogue: DialogueState, pool: Candidates) -> tuple[Array, Array]:
        """Return the roles before of a dialogue, (1, n, k) each, which this model encoded."""
        for label, fingerprint in (
            ("candidates", pool.model),
            ("dialogue", dialogue.model.fingerprint),
        ):
            if fingerprint != self.fingerprint:
                raise UserError(
                    f"the vectors of the {label} come from another model ({fingerprint}) than this "
                    f"one ({self.fingerprint}) and cannot be compared. Encode the {label} again "
                    "with this model."
                )
        if not dialogue.turns:
            raise UserError("the dialogue has no turn yet. Add one first.")
        first, second = dialogue.before
        return first[None], second[None]

    def _encode(self, texts: Sequence[str], label: str, show_progress: bool = False) -> Array:
        """Return the features of texts, (n, d) float32."""
        for number, text in enumerate(texts, 1):
            check_text(text, f"{label} {number}", "Leave it out, or give a text.")
        distinct = list(dict.fromkeys(texts))
        columns = [
            self.encoder.encode(UtteranceInputs(distinct, p), show_progress=show_progress)
            for p in self._prompts
        ]
        vectors = np.concatenate(columns, axis=1)
        position_of_text = {text: position for position, text in enumerate(distinct)}
        repeated: Array = vectors[[position_of_text[text] for text in texts]]
        return repeated


def _check_scores(scores: Array, pool: Candidates) -> Array:
    """Return the scores of candidates, (n,), after checking that they are finite."""
    texts = [(text,) for text in pool.texts]
    check_finite(scores[:, None], texts, "the head", "Fit the head again.")
    return scores


def _as_texts(texts: Sequence[str], name: str) -> list[str]:
    return [texts] if isinstance(texts, str) else as_list(texts, name)


def _select_best(scores: Array, pool: Candidates, k: int) -> list[Reply]:
    """Return the k best candidates; of equal scores, the first ones."""
    if k < 1:
        raise UserError(f"k is {k}; it must be at least 1.")
    order = np.argsort(-scores, kind="stable")[:k].tolist()
    return [Reply(n, float(scores[i]), pool.texts[i]) for n, i in enumerate(order, start=1)]


def load_dialogue(
    run: str | Path = DEFAULT_RUN,
    head: str | None = None,
    *,
    prompt: str | None = None,
    score: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> DialogueModel:
    """Load a run of dialogues with one of its heads.

    Args:
        run: folder of the run, or the ``OWNER/NAME`` of one that ``llmcond push`` uploaded to the
            hub.
        head: name of a fitted head, or of its recipe if only one head was fitted by it; ``none``
            for zero-shot. By default the run's default head, else the best head on dev, or
            zero-shot if the run has no head.
        prompt: name of the prompt for zero-shot. A fitted head has its own prompt.
        score: score that compares dialogues with candidates: ``average``, ``last:L`` (such as
            ``last:2``), ``neighbours``, ``bi``, ``maxsim``, ``weighted``, ``average+bi``,
            ``average:b1``, ``average:b2``, ``bi:b1`` or ``bi:both``. By default, the score of the
            head's recipe.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        revision: branch, tag or commit of a model on the hub. None: the newest version.

    Returns:
        The model.

    Raises:
        UserError: The run, head or score does not exist, or the run is of another task.
        LlmcondError: The hub cannot be reached.

    Examples:
        >>> import llmcond
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> model = llmcond.load_dialogue("dialogues", score="average")
        >>> pool = model.candidates(["Yes, at noon.", "It is red."])
        >>> [reply.text for reply in model.top(model.start(["Shall we meet?"]), pool, k=1)]
        ['Yes, at noon.']
    """
    opened = open_any_run(resolve_run(run, revision=revision))
    if not isinstance(opened.kind, DialogueTask):
        raise UserError(
            f"{run} is a run of the task {opened.task.name}, which has no dialogues. Extract the "
            "features of dialogues into a new run: llmcond extract --task dialogue --model MODEL "
            "--run FOLDER"
        )
    predictor = choose_head(opened, head, prompt)
    log_model(opened, predictor, head)
    if score is not None:
        ContextScore.parse(score)  # Report an invalid score before the encoder is loaded.
    encoder = LazyEncoder(opened.resolve_encoder(device))()
    roles = resolve_head(predictor, encoder.dim)
    scored_roles = roles if score is None else roles.with_score(score)
    return DialogueModel(encoder, predictor.view.prompts, scored_roles, predictor.name)
