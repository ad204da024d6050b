"""How an encoder is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.options import option
from llmcond.schedules import scheduled

#: Beyond any use.
_LARGEST = 1_000_000
Count = Annotated[int, Ge(1), Le(_LARGEST)]
Share = Annotated[float, Ge(0), Lt(1)]
_STAGE: dict[str, Any] = {"group": "last stage", "needs": "--then dev"}
_ASPECTS: dict[str, Any] = {"group": "texts with attributes", "needs": "--aspects FOLDER"}

#: Settings by the names that recipes and records had before -> their names now.
_RENAMED = {
    "clip": "max_grad_norm",
    "accumulate": "gradient_accumulation_steps",
    "average": "ema_decay",
    "patience": "early_stopping_patience",
}


def usual_rate(rank: int) -> float:
    """Return the learning rate that an encoder has by default: of LoRA, or for rank 0 of it all."""
    # All weights move at once, so each has less far to go.
    return 1e-3 if rank else 5e-5


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names now; recipes and records may have older ones."""
    return {_RENAMED.get(name, name): value for name, value in settings.items()}


def _rank(text: str) -> int:
    if text == "full":
        return 0
    if not text.isdecimal() or not int(text):
        raise UserError(f"--rank is {text!r}; expected a number of at least 1, or full.")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How an encoder is trained; the head's learning rate and dropout are those of its recipe.

    Attributes:
        rank: r of LoRA (arXiv 2106.09685, section 4.1); 0: every weight of the encoder is trained.
        encoder_dropout: whether the encoder's own dropout is on, where its config has one. Packed
            rows have none on attention weights.
        weight_decay: of the encoder's matrices, decoupled, as AdamW has it.
        batch_size: rated rows a step, over all processes and accumulated parts.
        max_grad_norm: of all gradients together; 0: they are not clipped, as in the released
            code of C-STS and Hyper-CL.
        gradient_accumulation_steps: parts that a step's rows are computed in, one after the other.
            Objectives that compare rows compare those of a part.
        ema_decay: of an exponential moving average of the weights, which is what is scored and
            kept; 0: the weights themselves are.
        checkpoint_steps: steps between two checkpoints; there is one at each evaluation too.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    rank: Annotated[int, Ge(0), Le(65_536)] = option(
        16, help="of LoRA, or full: all weights", metavar="R", parse=_rank
    )
    alpha: Annotated[float, Gt(0), Le(_LARGEST)] = option(
        32.0, help="scale of the adapters is A / rank", metavar="A"
    )
    target: Annotated[tuple[str, ...], MinLen(1)] = option(
        ("auto",),
        help="projections that get adapters: auto (all), attention, mlp, or names such as q_proj",
        metavar="NAME",
    )
    adapter_dropout: Share = option(0.0, help="share of the adapters' inputs dropped", metavar="P")
    encoder_dropout: bool = option(True, help="the encoder's own dropout, where its config has one")
    learning_rate: Annotated[float, Gt(0), Le(100)] = option(
        1e-3, help="of the encoder; with --rank full 5e-05", metavar="LR"
    )
    weight_decay: Annotated[float, Ge(0), Le(_LARGEST)] = option(
        0.01, help="of the encoder's matrices", metavar="W"
    )
    batch_size: Count = option(64, help="rated rows a step", metavar="N")
    epochs: Count = option(4, help="at most", metavar="N")
    warmup: Share = option(
        0.06, help="share of the steps in which learning rates rise from 0", metavar="SHARE"
    )
    schedule: Literal["linear", "cosine", "constant"] = option(
        "linear", help="how learning rates fall then", metavar="NAME"
    )
    max_grad_norm: Annotated[float, Ge(0), Le(_LARGEST)] = option(
        1.0, help="gradients are clipped to this norm; 0: no clipping", metavar="NORM"
    )
    gradient_accumulation_steps: Count = option(
        1, help="parts that a step is computed in, to save memory", metavar="N"
    )
    ema_decay: Share = option(
        0.0, help="decay of an exponential moving average of the weights; 0: none", metavar="D"
    )
    early_stopping_patience: Count = option(
        3, help="evaluations without a better dev score before training stops", metavar="N"
    )
    evaluations: Count = option(1, help="on dev, an epoch", metavar="N")
    checkpoint_steps: Count = option(200, help="steps between checkpoints", metavar="N")
    gradient_checkpointing: bool = option(
        False, help="compute activations again instead of keeping them: less memory"
    )

    @property
    def full(self) -> bool:
        """Return whether every weight of the encoder is trained."""
        return self.rank == 0

    def rate(self, step: int, steps: int) -> float:
        """Return what learning rates are multiplied by at a step, of which there are ``steps``."""
        return scheduled(step, steps, self.warmup, self.schedule)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as records keep them."""
        return {**asdict(self), "target": list(self.target)}


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """A last stage of training, on dev's rows as well; all else is as in the training before.

    Where ratings of train were made by a language model and those of dev by people, it brings more
    than further steps on train do. Nothing is left to choose its length by: folds of dev tell.

    Attributes:
        then_learning_rate: of the encoder; None: half of what it was. The head's falls alike.
        folds: parts of dev, by sentence pair; 0: none. Each is predicted by a stage on the others,
            from the same weights.
    """

    then: Literal["dev"] | None = option(
        None,
        help="train on dev too when training has ended; dev is no score then",
        group=_STAGE["group"],
    )
    then_share: Annotated[float, Ge(0), Le(1)] = option(
        0.15, help="share of train's sentence pairs that stay in", metavar="SHARE", **_STAGE
    )
    then_weight: Count = option(
        2, help="how often dev's rows are taken in an epoch", metavar="W", **_STAGE
    )
    then_learning_rate: Annotated[float, Gt(0), Le(100)] | None = option(
        None, help="of the encoder (default: half of --learning-rate)", metavar="LR", **_STAGE
    )
    then_epochs: Count = option(1, help="of that stage", metavar="N", **_STAGE)
    folds: Annotated[int, Ge(0), Le(_LARGEST)] = option(
        0,
        help="K-fold cross-validation over the sentence pairs of dev: what the stage brings",
        metavar="K",
        **_STAGE,
    )

    def pace(self, settings: TuneSettings) -> float:
        """Return what learning rates are multiplied by, against the training before."""
        if self.then_learning_rate is None:
            return 0.5
        return self.then_learning_rate / settings.learning_rate


@dataclass(frozen=True, kw_only=True)
class AspectSettings:
    """Training on texts with attributes, beside rated rows: many conditions, no ratings.

    Each step draws groups of texts, each group under one condition, and adds their supervised
    contrastive loss: texts with the same value of the condition are to be near to each other.

    Attributes:
        aspects: a folder with one file NAME.json a set (see :mod:`llmcond.data.aspects`).
        aspects_weight: weight of the contrastive loss; that of the squared error of ratings is 1.
        aspects_texts: texts a step; the last group may exceed it.
        aspects_values: share of the groups whose condition names two to five example values.
    """

    aspects: str | Path | None = option(
        None,
        help="folder of texts with attributes, one NAME.json a set: train on them as well, so "
        "that more conditions work",
        metavar="FOLDER",
        group=_ASPECTS["group"],
    )
    aspects_weight: Annotated[float, Gt(0), Le(_LARGEST)] = option(
        0.25, help="weight of their contrastive loss", metavar="W", **_ASPECTS
    )
    aspects_texts: Annotated[int, Ge(4), Le(_LARGEST)] = option(
        96, help="texts a step, in groups of 6 to 12 under one condition", metavar="N", **_ASPECTS
    )
    aspects_temperature: Annotated[float, Ge(1e-3), Le(_LARGEST)] = option(
        0.07, help="temperature of the contrastive loss", metavar="T", **_ASPECTS
    )
    aspects_values: Annotated[float, Ge(0), Le(1)] = option(
        0.4,
        help="share of the groups whose condition names example values",
        metavar="SHARE",
        **_ASPECTS,
    )
