"""Settings of training an encoder, which are also options of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from llmcond.base.errors import UserError
from llmcond.base.options import option
from llmcond.heads.settings import LARGEST, Count

Share = Annotated[float, Ge(0), Lt(1)]


def default_learning_rate(rank: int) -> float:
    """Return the default learning rate of the encoder, for LoRA or (rank 0) for all weights."""
    # When all weights are trained, each needs to change less.
    return 1e-3 if rank else 5e-5


def _parse_rank(text: str) -> int:
    if text == "full":
        return 0
    if not text.isdecimal() or not int(text):
        raise UserError(f"--rank is {text!r}; expected a whole number of at least 1, or full.")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Settings of training an encoder.

    The learning rate and dropout of the head are settings of its recipe.

    Attributes:
        rank: rank r of LoRA (arXiv 2106.09685, section 4.1); 0: all weights of the encoder are
            trained.
        alpha: scale of LoRA; updates are multiplied by alpha / rank.
        target: groups or names of the projections that get adapters.
        adapter_dropout: share of the adapters' inputs dropped in training.
        encoder_dropout: whether the encoder's own dropout is used, if its config has any. Packed
            rows have no dropout of attention weights.
        learning_rate: learning rate of the encoder.
        weight_decay: decoupled weight decay of the encoder's matrices, in AdamW.
        batch_size: rated rows per step, over all processes and accumulated parts.
        epochs: maximum number of epochs.
        warmup: share of the steps in which the learning rate rises from 0, before it falls to 0.
        max_grad_norm: norm to which all gradients together are clipped; 0: no clipping, as in the
            released code of C-STS and Hyper-CL.
        gradient_accumulation_steps: number of parts in which the rows of a step are computed, one
            after the other. Objectives that compare rows compare those of one part.
        ema_decay: decay of an exponential moving average of the weights, which is then scored and
            saved; 0: the weights themselves are.
        early_stopping_patience: number of dev evaluations without a better score after which
            training stops.
        evaluations: dev evaluations per epoch.
        checkpoint_steps: maximum number of steps between two checkpoints. One is also written at
            each evaluation, and ten minutes after the last one.
        gradient_checkpointing: whether activations are recomputed in the backward pass.
    """

    rank: Annotated[int, Ge(0), Le(65_536)] = option(
        16,
        help="rank of the LoRA adapters; full: train all weights",
        metavar="R",
        parse=_parse_rank,
    )
    alpha: Annotated[float, Gt(0), Le(LARGEST)] = option(
        32.0, help="LoRA alpha: adapter outputs are scaled by A / rank", metavar="A"
    )
    target: Annotated[tuple[str, ...], MinLen(1)] = option(
        ("auto",),
        help="projections that get adapters: auto (all), attention, mlp, or names such as q_proj "
        "(default: auto)",
        metavar="NAME",
    )
    adapter_dropout: Share = option(0.0, help="dropout rate of the adapters' inputs", metavar="P")
    encoder_dropout: bool = option(
        True, help="train with the encoder's own dropout, if its config has any"
    )
    learning_rate: Annotated[float, Gt(0), Le(100)] = option(
        1e-3, help="learning rate of the encoder; with --rank full 5e-05", metavar="LR"
    )
    weight_decay: Annotated[float, Ge(0), Le(LARGEST)] = option(
        0.01, help="weight decay of the encoder's matrices", metavar="W"
    )
    batch_size: Count = option(64, help="rated rows per step")
    epochs: Count = option(4, help="maximum number of epochs")
    warmup: Share = option(
        0.06, help="share of the steps in which learning rates rise from 0", metavar="SHARE"
    )
    max_grad_norm: Annotated[float, Ge(0), Le(LARGEST)] = option(
        1.0, help="norm to which gradients are clipped; 0: no clipping", metavar="NORM"
    )
    gradient_accumulation_steps: Count = option(
        1, help="number of parts that a step is split into, to save memory"
    )
    ema_decay: Share = option(
        0.0,
        help="decay of an exponential moving average of the weights; 0: no average",
        metavar="D",
    )
    early_stopping_patience: Count = option(
        3, help="dev evaluations without a better score before training stops"
    )
    evaluations: Count = option(1, help="dev evaluations per epoch")
    checkpoint_steps: Count = option(200, help="steps between checkpoints")
    gradient_checkpointing: bool = option(
        False, help="recompute activations in the backward pass, which saves memory"
    )

    @property
    def full(self) -> bool:
        """Whether all weights of the encoder are trained."""
        return self.rank == 0


def check_folds(folds: int) -> None:
    """Raise a UserError for one fold, which would leave no rows to train on."""
    if folds == 1:
        raise UserError("--folds is 1; expected 2 or more, or 0 for none.")


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings of a last stage of training that uses dev's rows too.

    All other settings are those of the training before it. If the ratings of train come from a
    language model and those of dev from people, this stage improves the encoder more than further
    steps on train do. No data is left to select its length; cross-validation over folds of dev
    measures its gain.

    Attributes:
        then: ``dev`` to run the stage; None: no such stage.
        then_share: share of train's sentence pairs that the stage uses.
        then_weight: number of times that dev's rows are repeated per epoch.
        then_learning_rate: learning rate of the encoder; None: half of the previous one. The
            learning rate of the head is scaled by the same factor.
        then_epochs: number of epochs.
        folds: number of folds of dev, split by sentence pair; 0: none. Each fold is predicted after
            a stage on the other folds, from the same weights.
    """

    option_group: ClassVar[str] = "last stage"
    option_needs: ClassVar[str] = "--then dev"

    then: Literal["dev"] | None = option(
        None,
        help="train on dev's rows too in a last stage; dev cannot score the result",
    )
    then_share: Annotated[float, Ge(0), Le(1)] = option(
        0.15, help="share of train's sentence pairs used in this stage", metavar="SHARE"
    )
    then_weight: Count = option(
        2, help="number of times that dev's rows are repeated per epoch", metavar="W"
    )
    then_learning_rate: Annotated[float, Gt(0), Le(100)] | None = option(
        None,
        help="learning rate of the encoder (default: half of --learning-rate)",
        metavar="LR",
    )
    then_epochs: Count = option(1, help="epochs of this stage")
    folds: Annotated[int, Ge(0), Le(LARGEST)] = option(
        0,
        check=check_folds,
        help="folds of a cross-validation over dev's sentence pairs that measures the gain of this "
        "stage (default: 0, none)",
        metavar="K",
    )

    def learning_rate_scale(self, settings: TuneSettings) -> float:
        """Return the factor of learning rates, relative to the training before."""
        if self.then_learning_rate is None:
            return 0.5
        return self.then_learning_rate / settings.learning_rate


@dataclass(frozen=True, kw_only=True)
class AspectSettings:
    """Settings of training on texts with attributes in addition to rated rows.

    Such texts cover many conditions, without ratings. Each step samples groups of texts, each group
    under one condition, and adds their supervised contrastive loss: texts with the same value of
    the condition should be similar.

    Attributes:
        aspects: folder with one file NAME.json per set (see ``llmcond.data.guides``).
        aspects_weight: weight of the losses of these texts; that of the squared error of ratings
            is 1.
        aspects_texts: texts per step and process. Each part of a step has its share of them, which
            its last group may exceed.
        aspects_values: share of the groups whose condition names two to five example values.
        aspects_absent: share of the groups with one or two texts that say nothing about the
            condition, if the set has such texts; they are negatives of all others.
        aspects_twins: share of the groups whose texts form a second group, under another condition
            of the same set. A further loss compares the two similarities of each pair that agrees
            under one condition and differs under the other.
        aspects_teacher: run, or name of a bundled model, whose similarities within each group are
            learned as well; None: only the attributes are.
    """

    option_group: ClassVar[str] = "texts with attributes"
    option_needs: ClassVar[str] = "--aspects FOLDER"

    aspects: str | Path | None = option(
        None,
        help="folder of texts with attributes, one NAME.json per set: train on them too, so that "
        "more conditions work",
        metavar="FOLDER",
    )
    aspects_weight: Annotated[float, Gt(0), Le(LARGEST)] = option(
        0.25, help="weight of the losses of these texts", metavar="W"
    )
    aspects_texts: Annotated[int, Ge(4), Le(LARGEST)] = option(
        96, help="texts per step, in groups of 6 to 12 under one condition"
    )
    aspects_values: Annotated[float, Ge(0), Le(1)] = option(
        0.4,
        help="share of the groups whose condition names example values",
        metavar="SHARE",
    )
    aspects_absent: Annotated[float, Ge(0), Le(1)] = option(
        0.3,
        help="share of the groups with texts that say nothing about the condition",
        metavar="SHARE",
    )
    aspects_twins: Annotated[float, Ge(0), Le(1)] = option(
        0.5,
        help="share of the groups whose texts are also compared under a second condition",
        metavar="SHARE",
    )
    aspects_teacher: str | Path | None = option(
        None,
        help="run or bundled model whose similarities of these texts are learned as well",
        metavar="RUN",
    )


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return ``name: now, not before`` for each difference, including nested values."""
    texts = []
    for key in dict.fromkeys([*before, *now]):
        # A tuple becomes a list when it is recorded as JSON.
        old_value, new_value = (
            list(value) if isinstance(value, tuple) else value
            for value in (before.get(key), now.get(key))
        )
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            texts += [f"{key}.{text}" for text in describe_differences(old_value, new_value)]
        elif old_value != new_value:
            texts.append(f"{key}: {new_value!r}, not {old_value!r}")
    return texts
