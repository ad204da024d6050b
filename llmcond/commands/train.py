"""Commands that fit heads, train an encoder, and upload or export a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmcond.base.errors import UserError
from llmcond.base.files import check_new_folder
from llmcond.base.options import option
from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.options.common import ConditionOptions, EmbedderOptions, condition_option
from llmcond.options.training import (
    FitHeadOptions,
    PushOptions,
    SweepLoraOptions,
    SweepOptions,
    TrainCrossOptions,
    TrainLoraOptions,
)

if TYPE_CHECKING:
    from llmcond.integrations.export import ExportResult
    from llmcond.workflows.fit import FittedResult, SweepResult
    from llmcond.workflows.push import PushResult
    from llmcond.workflows.sweep_lora import LoraSweepResult
    from llmcond.workflows.training_record import TrainingResult


@dataclass(frozen=True, kw_only=True)
class FitHead(FitHeadOptions, Command):
    """Fit a head on the training features of a run, and save it in the run."""

    example = "llmcond fit-head --head mlp --dim 256 --set epochs=50"

    def execute(self) -> FittedResult:
        """Fit the head, and save it.

        Returns:
            A ``FittedResult``: the head's name and folder, its dimensions, the numbers of rows
            used, and its scores on dev.

        Raises:
            UserError: there is no such run, recipe or prompt, or a setting is invalid.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> head = llmcond.fit_head(head="linear", dim=64, set={"epochs": 5})
            >>> head.name, head.dim
            ('linear@routed', 64)
        """
        from llmcond.workflows.fit import fit_head

        return fit_head(self)


fit_head = as_function(FitHead)


@dataclass(frozen=True, kw_only=True)
class Sweep(SweepOptions, Command):
    """Fit heads for every combination of settings and seeds, and compare them in one table.

    Fits with the same features and settings are not repeated. If interrupted, the same command
    resumes.
    """

    example = "llmcond sweep --head mlp linear --vary dim=64,128,256 --seeds 3 --plot dim.png"
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> SweepResult:
        """Fit and score all combinations.

        Returns:
            A ``SweepResult`` with one result for each combination: its settings and the means of
            its scores over the seeds, with confidence intervals. The best comes first.

        Raises:
            UserError: there is no such run or recipe, a setting is invalid, or nothing varies.
            LlmcondError: every fit failed, or a process was killed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> swept = llmcond.sweep(
            ...     head=["linear"], vary={"dim": [8, 16]}, seeds=2, set={"epochs": 5}, workers=1
            ... )
            >>> len(swept.results)
            2
        """
        from llmcond.report.figures import write_plots
        from llmcond.workflows.fit import sweep

        several = [self.head, self.prompt, *self.varied().values()]
        if self.seeds == 1 and all(len(set(values)) <= 1 for values in several):
            raise UserError(
                "there is nothing to vary. Give several values (--vary dim=64,128,256), heads, "
                "prompts or --seeds."
            )
        swept = sweep(self)
        split = self.curve_split() or "dev"
        write_plots(swept.results, self.plot, self.plot_steps, split)
        return swept

    def show(self, result: SweepResult, form: str) -> None:
        """Print a table, and the held-out score of the choice of the best row."""
        from llmcond.base.output import print_sentences
        from llmcond.report.tables import choice_sentence, results_table

        results_table(result.results, self.run).print(form)
        if result.choice is not None:
            print_sentences([choice_sentence(result.choice)], form)


sweep = as_function(Sweep)


@dataclass(frozen=True, kw_only=True)
class TrainLora(TrainLoraOptions, Command):
    """Train the LoRA adapters, or all weights, of an encoder together with a head.

    If interrupted, the same command resumes from the last checkpoint.
    """

    example = "llmcond train-lora --model minilm --head none --run runs/tuned"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train the encoder and the head.

        Returns:
            A ``TrainingResult`` with the training record: the run's folder, the head's name, the
            numbers of steps and trained weights, and the scores.

        Raises:
            UserError: an option or the data is invalid, the run holds something else, or the loss
                became NaN.
            LlmcondError: the encoder cannot be loaded or trained.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.train_lora(model="minilm", data=rows, head="none", epochs=1)
            >>> result.run
            PosixPath('runs/default')
        """
        from llmcond.workflows.train import train_lora

        return train_lora(self)


train_lora = as_function(TrainLora)


@dataclass(frozen=True, kw_only=True)
class SweepLora(SweepLoraOptions, Command):
    """Train an encoder with every combination of settings and seeds, and keep the best on dev.

    The best encoder is saved in the folder best/ of the run. Finished trainings are not repeated.
    If interrupted, the same command resumes.
    """

    example = (
        "llmcond sweep-lora --model minilm --head none --vary learning_rate=5e-4,1e-3 rank=8,16 "
        "--run runs/search"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> LoraSweepResult:
        """Train and compare all combinations.

        Returns:
            A ``LoraSweepResult`` with one result for each combination: its settings and the means
            of its scores on dev over the seeds, with confidence intervals. The best comes first.

        Raises:
            UserError: an option or the data is invalid, there is no dev split to choose by, nothing
                varies, or the folder holds something else.
            LlmcondError: the encoder cannot be loaded, every training failed, or a process was
                killed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> swept = llmcond.sweep_lora(
            ...     model="minilm", data=rows, head="none", epochs=1, seeds=1,
            ...     vary={"learning_rate": [1e-4, 1e-3]},
            ... )
            >>> len(swept.results), swept.best.run
            (2, PosixPath('runs/default/best'))
        """
        from llmcond.report.figures import write_plots
        from llmcond.workflows.sweep_lora import sweep_lora

        swept = sweep_lora(self)
        write_plots(swept.results, self.plot, self.plot_steps)
        return swept

    def show(self, result: LoraSweepResult, form: str) -> None:
        """Print a table."""
        from llmcond.report.tables import results_table

        results_table(result.results, self.run).print(form)


sweep_lora = as_function(SweepLora)


@dataclass(frozen=True, kw_only=True)
class TrainCross(TrainCrossOptions, Command):
    """Train a cross-encoder, which reads both sentences and the condition together and rates them.

    A cross-encoder compares two texts, but has no embeddings. If interrupted, the same command
    resumes from the last checkpoint.
    """

    example = "llmcond train-cross --model minilm --run runs/cross"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train the cross-encoder.

        Returns:
            A ``TrainingResult`` with the training record: the run's folder, the numbers of steps
            and trained weights, and the scores.

        Raises:
            UserError: an option or the data is invalid, the run holds something else, or the loss
                became NaN.
            LlmcondError: the encoder cannot be loaded or trained.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.train_cross(model="minilm", data=rows, epochs=1)
            >>> result.run
            PosixPath('runs/default')
        """
        from llmcond.workflows.train import train_cross

        return train_cross(self)


train_cross = as_function(TrainCross)


@dataclass(frozen=True, kw_only=True)
class Push(PushOptions, Command):
    """Upload a run's heads, and its encoder if it was trained, to the Hugging Face hub.

    Data and features are not uploaded. A frozen encoder is recorded by its name and revision on the
    hub.
    """

    example = "llmcond push ada/my-heads --run runs/default --private"

    def execute(self) -> PushResult:
        """Upload the run.

        Returns:
            A ``PushResult``, a dictionary with the keys ``repo``, ``url``, ``commit`` and
            ``files``.

        Raises:
            UserError: the run has neither a trained encoder nor a fitted head, others could not
                load its encoder, or you may not write to the repository.
            LlmcondError: the hub cannot be reached, or has failed.

        Examples:
            >>> import llmcond
            >>> llmcond.push(repo="ada/my-heads", private=True)["url"]  # doctest: +SKIP
            'https://huggingface.co/ada/my-heads'
        """
        from llmcond.workflows.push import push_to_hub

        return push_to_hub(self)


push = as_function(Push)


@dataclass(frozen=True, kw_only=True)
class Export(ConditionOptions, EmbedderOptions, Command):
    """Save an embedder as a model of sentence-transformers.

    With one --condition, or several to choose from in each call, the model works without llmcond.
    Without --condition, it takes any condition and needs llmcond.
    """

    example = "llmcond export --out places --condition 'the place'"

    out: str | Path = option(
        metavar="DIR", writes=check_new_folder, help="new folder for the model"
    )
    format: Literal["sentence-transformers"] = option(
        "sentence-transformers", help="library that loads the model"
    )
    condition: Sequence[str] = condition_option(
        "condition of the model; may be repeated (default: any condition)", ()
    )

    def execute(self) -> ExportResult:
        """Export the embedder.

        Returns:
            An ``ExportResult``: the folder, the conditions, the modules, and the largest difference
            between the exported model's vectors and those of llmcond.

        Raises:
            UserError: ``out`` exists, or the embedder cannot be expressed in modules of
                sentence-transformers under these conditions.
            LlmcondError: the exported model gives different vectors; nothing is saved.

        Examples:
            >>> import llmcond
            >>> result = llmcond.export(out="places", condition="the place")
            >>> result.conditions, result.dim
            (['the place'], 384)
        """
        arguments = self.model_arguments()
        # A wrong name is reported before the slow imports.
        from llmcond.integrations.export import export_model

        run_folder = arguments.pop("run")
        return export_model(run_folder, Path(self.out), self.conditions(), **arguments)

    def show(self, result: ExportResult, form: str) -> None:
        """Report the modules, the result of the test load, and notes for users of the model."""
        from llmcond.base.output import log

        descriptions = {
            "fixed": f"under {', '.join(map(repr, result.conditions))}",
            "any": "under any condition, by llmcond",
        }
        conditions = descriptions.get(
            result.chosen_by,
            f"under {len(result.conditions)} conditions, chosen by {result.chosen_by}=",
        )
        log.info(
            f"{result.dim} dimensions {conditions}: {', '.join(result.modules)} -> {result.out}"
        )
        if result.difference is None:
            log.info(
                "the model was not tested, because sentence-transformers 5.4 or newer is not "
                "installed"
            )
        else:
            log.info(
                "the vectors of the model in sentence-transformers differ from llmcond's by at "
                f"most {result.difference:.1e}"
            )
        for note in result.notes:
            log.info(note)


export = as_function(Export)
