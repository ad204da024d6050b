"""A run's encoder and head as one object that follows a dialogue and ranks replies."""

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

from llmcond.arrays import Array
from llmcond.bundled import DEFAULT_RUN
from llmcond.errors import UserError, first_line
from llmcond.files import digest_bytes, digest_text, replacing
from llmcond.kinds.dialogue.examples import head_of
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.roles import FittedRoles
from llmcond.kinds.dialogue.run import DialogueRun
from llmcond.kinds.dialogue.turns import Score, State
from llmcond.prompts import Prompt
from llmcond.runs.embedding_model import choose_head, log_model
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import open_any_run

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder

#: Of the files that pools of candidates are saved in.
_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Reply:
    """A candidate as the next turn.

    Attributes:
        rank: from 1.
        score: what candidates are ordered by; larger is better, within one dialogue.
    """

    rank: int
    score: float
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {**asdict(self), "score": round(self.score, 6)}


@dataclass(frozen=True, eq=False, repr=False)
class Candidates:
    """Texts that may come next, encoded once. Make them with :meth:`DialogueModel.candidates`.

    Attributes:
        texts: (n,) in the order they were given, repeats included.
        after: (n, k) their vectors in the role after, of length 1, float32.
        before: (n, k) in the role before-2, for planning.
        model: identifies the encoder, the prompt and the head that made them.
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
        """Write them into a safetensors file.

        Raises:
            UserError: it cannot be written.
            DiskFullError: no room.
        """
        # The header of a safetensors file is small; texts are not.
        texts = np.frombuffer(json.dumps(self.texts).encode(), dtype=np.uint8)
        tensors: dict[str, NDArray[Any]] = {"after": self.after, "before": self.before}
        tensors["texts"] = texts
        about = {"format": _FORMAT, "model": self.model}
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(save_tensors(tensors, about))

    @classmethod
    def load(cls, path: str | Path) -> Candidates:
        """Read them from a file; whether a model made them is checked where it takes them.

        Raises:
            UserError: no such file, or none of candidates.
        """
        if not Path(path).is_file():
            raise UserError(f"{path} does not exist.")
        try:
            with safe_open(path, framework="numpy") as stored:
                about = stored.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise UserError(f"{path} holds no candidates that this version reads.")
                after, before, texts = (stored.get_tensor(n) for n in ("after", "before", "texts"))
                found = cls(tuple(json.loads(texts.tobytes())), after, before, about["model"])
        except (KeyError, OSError, SafetensorError, ValueError) as error:
            raise UserError(
                f"{path} holds no candidates, or was damaged ({first_line(error)}). Make them "
                "again: model.candidates(texts).save(path)"
            ) from error
        if not len(found) == len(after) == len(before):
            raise UserError(f"{path} was damaged: texts and vectors are not as many.")
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Talk:
    """A dialogue so far: an immutable value, which threads may share.

    Make one with :meth:`DialogueModel.start`.

    Attributes:
        turns: its utterances.
        state: their roles, and the vector that candidates are compared with.
    """

    model: DialogueModel
    turns: tuple[str, ...]
    state: State

    def add(self, turn: str) -> Talk:
        """Return the dialogue after one more turn, which alone is encoded.

        Raises:
            UserError: an empty turn.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        return self.model.follow(self, [turn])

    def __len__(self) -> int:
        return len(self.turns)

    def __repr__(self) -> str:
        return f"Talk({', '.join(map(repr, self.turns))})"


class DialogueModel:
    """Ranks candidates as the next turn of a dialogue. Make one with :func:`load_dialogue`.

    All methods may be called by several threads at a time.

    Attributes:
        name: the head's in the run, or ``none@PROMPT``: zero-shot.
        encoder: of utterances.
        head: that maps them to their roles; its ``score`` compares dialogues with candidates.
        fingerprint: identifies the encoder, the prompt and the head's weights.
    """

    def __init__(
        self, encoder: Encoder, prompts: Sequence[Prompt], head: FittedRoles, name: str
    ) -> None:
        self.encoder, self.head, self.name = encoder, head, name
        self._prompts = tuple(prompts)
        weights = [own.tobytes() for _, own in sorted(head.tensors.items())]
        self.fingerprint = digest_text(
            encoder.identity.fingerprint,
            *(prompt.digest for prompt in prompts),
            head.kind,
            digest_bytes(b"".join(weights), size=16).hex(),
        )

    def __repr__(self) -> str:
        """Return what it is made of, in a line."""
        return f"DialogueModel({self.encoder.name}, head {self.name}, score {self.head.score})"

    def candidates(self, texts: Sequence[str], *, show_progress: bool = False) -> Candidates:
        """Encode texts that may come next, each distinct one once; repeats are kept.

        Raises:
            UserError: an empty text, or none.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        found = list(texts) if not isinstance(texts, str) else [texts]
        if not found:
            raise UserError("there are no candidates. Give the texts that may come next.")
        vectors = self._encode(found, "candidate", show_progress)
        after, before = self.head.after(vectors), self.head.before(vectors)[1]
        return Candidates(tuple(found), after, before, self.fingerprint)

    def start(self, turns: Sequence[str] = ()) -> Talk:
        """Return a dialogue of some turns, all encoded at once.

        Raises:
            UserError: an empty turn.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        given = [turns] if isinstance(turns, str) else turns
        return self.follow(Talk(self, (), self.head.start(np.empty((0, 0)))), given)

    def follow(self, talk: Talk, turns: Sequence[str]) -> Talk:
        """Return a dialogue after some more turns; errors as of :meth:`start`."""
        state = talk.state
        for vector in self._encode(turns, "turn") if turns else ():
            state = state.add(vector)
        return replace(talk, turns=(*talk.turns, *turns), state=state)

    def score(self, talk: Talk, pool: Candidates) -> Array:
        """Return the score of each candidate as the next turn, (n,) float32.

        Raises:
            UserError: a dialogue or candidates of another model, or a dialogue without a turn.
        """
        self._check(talk, pool)
        return talk.state.scores(pool.after)

    def top(self, talk: Talk, pool: Candidates, k: int = 3) -> list[Reply]:
        """Return the k candidates that fit best as the next turn; errors as of :meth:`score`."""
        return _best(self.score(talk, pool), pool, k)

    def plan(self, talk: Talk, pool: Candidates, goal: str, k: int = 3) -> list[Reply]:
        """Return the k candidates most likely to lead to a later turn (equation 4).

        Raises:
            UserError: an empty goal, or as of :meth:`score`.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        self._check(talk, pool)
        (goal_vector,) = self.head.after(self._encode([goal], "goal"))
        return _best(talk.state.plan(pool.before, goal_vector), pool, k)

    def _check(self, talk: Talk, pool: Candidates) -> None:
        for what, theirs in (("candidates", pool.model), ("dialogue", talk.model.fingerprint)):
            if theirs != self.fingerprint:
                raise UserError(
                    f"the {what} were made by another model ({theirs}) than this one "
                    f"({self.fingerprint}): vectors of both have nothing in common. Make them anew."
                )

    def _encode(self, texts: Sequence[str], what: str, show_progress: bool = False) -> Array:
        """Return the features of texts, (n, d) float32."""
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise UserError(f"{what} {number} is {text!r}, which is not a text.")
            if not text.strip():
                raise UserError(f"{what} {number} is empty. Leave it out, or say something.")
        distinct = list(dict.fromkeys(texts))
        columns = [
            self.encoder.encode(UtteranceInputs(distinct, p), show_progress=show_progress)
            for p in self._prompts
        ]
        vectors = np.concatenate(columns, axis=1)
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(
                f"the encoder gave NaN or infinity for {distinct[bad[0]][:80]!r}; try another "
                "dtype."
            )
        place = {text: position for position, text in enumerate(distinct)}
        found: Array = vectors[[place[text] for text in texts]]
        return found


def _best(scores: Array, pool: Candidates, k: int) -> list[Reply]:
    """Return the k best, of equal scores the first ones."""
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
) -> DialogueModel:
    """Load a run of dialogues with one of its heads.

    Args:
        run: the run's folder.
        head: a fitted head's name, or its recipe's if that is fitted once; ``none``: zero-shot.
            None: the run's default, else the best on dev, or zero-shot if there is none.
        prompt: for zero-shot, the prompt; a head has its own.
        score: ``average``, ``last:2``, ``bi``, ...; None: what the head was fitted for.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: no such run, head or score, or a run of another task.
    """
    opened = open_any_run(Path(run))
    if not isinstance(opened, DialogueRun):
        raise UserError(
            f"{run} is a run of the task {opened.task.name}, which has no dialogues. Extract some: "
            "llmcond extract --task dialogue --model MODEL --run another one."
        )
    chosen = choose_head(opened, head, prompt)
    log_model(opened, chosen, head)
    if score is not None:
        Score.parse(score)  # before an encoder is loaded
    encoder = LazyEncoder(opened.resolve_encoder(device))()
    roles = head_of(chosen, encoder.dim)
    scoring = roles if score is None else roles.scoring(score)
    return DialogueModel(encoder, chosen.view.prompts, scoring, chosen.name)
