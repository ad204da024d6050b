"""Trials: fits of one recipe on one view of features, each known by what decides its result."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond import plugins
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.results import Result
from llmcond.features.view import View
from llmcond.files import check_writable, digest_text, read_json, write_json
from llmcond.heads import Recipe
from llmcond.heads.pairs import OnEpoch
from llmcond.heads.storage import FitRecord
from llmcond.log import log
from llmcond.metrics import Metric, choose_metrics, finite, metric_of
from llmcond.progress import EVERY_SECONDS, FitBar
from llmcond.records import RECORD, check_record
from llmcond.runs import AnyRun, Saved, dev_score, head_name, open_any_run
from llmcond.runs.examples import examples_of
from llmcond.runs.predictors import results_of
from llmcond.system import choose_device, processes, provenance

R = TypeVar("R", bound=Result)
T = TypeVar("T")

#: Of the files that trials are kept in; another one is fitted again.
_FORMAT = 2
#: Without --workers; each has features of its own in memory.
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One fit of a grid.

    Attributes:
        recipe: with its settings changed, not yet sized to the features.
        dim: size of the embeddings, if it is varied.
        varied: the settings that the grid varies, and their values here.
    """

    recipe: Recipe
    dim: int | None
    view: View
    seed: int
    varied: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name that its head has in results."""
        return head_name(self.recipe.name, self.view)

    @property
    def label(self) -> str:
        """Return its name, settings and seed, for messages."""
        settings = [f"{key}={value}" for key, value in self.varied.items()]
        return " ".join([self.name, *settings, f"seed={self.seed}"])

    def digest(self, run: AnyRun, split: str) -> str:
        """Return the digest of everything that decides its result."""
        parts = {
            "format": _FORMAT,
            "recipe": [self.recipe.name, self.recipe.kind, self.dim],
            "settings": asdict(self.recipe.settings),
            "prompts": [prompt.digest for prompt in self.view.prompts],
            "view": [self.view.subtract, self.view.features, self.view.conditioned],
            "features": [run.identity.fingerprint, run.manifest["store_dtype"]],
            "data": run.manifest["data"]["digest"],
            "split": split,
            "seed": self.seed,
            "versions": provenance()["versions"],
        }
        return digest_text(json.dumps(parts, sort_keys=True))


@dataclass(frozen=True)
class _Kept:
    """What a trial's file holds, and its metrics together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    dim: int
    fit: FitRecord
    metrics: Mapping[str, float | None]
    similarity: Sequence[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial gave.

    Attributes:
        metrics: name -> figure on the split that is scored; NaN where undefined.
        fit: what is recorded of the fit.
        dev: score on dev; None where it is undefined.
        similarity: (n,) predictions of all rows, or ranks.
    """

    metrics: Mapping[str, float]
    dim: int
    fit: Mapping[str, Any]
    dev: float | None
    similarity: NDArray[np.float32]

    @classmethod
    def read(cls, path: Path, metrics: Sequence[Metric], n: int, dev_metric: str) -> Outcome | None:
        """Return what a file holds; None where it is not there, or lacks something asked for.

        ``n`` predictions are asked for. ``dev_metric`` is that of the run. A damaged file is as
        good as none, with a warning: it is made again.
        """
        if not path.is_file():
            return None
        try:
            record = read_json(path)
            names = [metric.name for metric in metrics]
            # Without the score that chose the epoch, another metric may have chosen it.
            if not {*names, f"dev_{dev_metric}", "similarity"} <= set(record):
                return None
            figures = {name: record[name] for name in names}
            check_record({**record, "metrics": figures}, _Kept, str(path))
        except LlmcondError as error:
            log.warning(f"{error} The fit is made again.")
            return None
        figures = {name: math.nan if one is None else one for name, one in figures.items()}
        similarity = np.array(record["similarity"], dtype=np.float32)
        if len(similarity) != n:
            return None
        return cls(figures, record["dim"], record["fit"], dev_score(record, dev_metric), similarity)


def seeded_result(
    kind: type[R], fits: Sequence[tuple[Trial, Outcome]], split: str, task: str, **further: Any
) -> tuple[R, NDArray[np.float32]]:
    """Return the result, without figures, of trials that differ by their seeds alone.

    ``further`` are fields of that kind of result. The predictions are (seeds, n).
    """
    trial, first = fits[0]
    result = kind(
        name=trial.name,
        head=trial.recipe.name,
        prompts=tuple(prompt.name for prompt in trial.view.prompts),
        subtract=trial.view.subtracts,
        split=split,
        task=task,
        dim=first.dim,
        seeds=tuple(own.seed for own, _ in fits),
        fits=tuple(outcome.fit for _, outcome in fits),
        **further,
    )
    return result, np.stack([outcome.similarity for _, outcome in fits])


def sized(recipe: Recipe, dim: int | None, dim_in: int, quiet: bool = False) -> Recipe:
    """Return a recipe with the dimension asked for, or its own, at most that of the features."""
    if dim is not None:
        if recipe.dim is None:
            raise UserError(f"the head {recipe.name} keeps the features' size; leave out --dim.")
        return recipe.with_settings({"dim": dim}, "--dim")
    if recipe.dim is not None and recipe.dim > dim_in:
        if not quiet:
            log.info(
                f"{recipe.name}: dim {dim_in} instead of {recipe.dim}, the features have no more"
            )
        return recipe.with_settings({"dim": dim_in}, recipe.name)
    return recipe


@dataclass(frozen=True, slots=True)
class _Job:
    """What all trials of a command have in common; worker processes are started with it."""

    folder: Path
    split: str
    metrics: Sequence[str]
    device: str


def run_trials(
    run: AnyRun,
    split: str,
    trials: Iterable[Trial],
    folder: str,
    workers: int | None,
    metrics: Sequence[str] = (),
    device: str = "auto",
) -> tuple[dict[str, tuple[Trial, Outcome]], list[str]]:
    """Run trials, but for those that were run before; equal ones are run once.

    Outcomes are kept in ``folder`` of the run. They hold the task's ``metrics`` and further ones on
    ``split``, and the predictions of each row. ``workers`` fits run at a time; None: one a core, at
    most eight.

    Returns:
        Digest -> trial and outcome, in the order of the trials, and a line for each that failed.

    Raises:
        LlmcondError: every fit failed, or a process was ended from outside.
    """
    wanted = {trial.digest(run, split): trial for trial in trials}
    computed = choose_metrics(run.task.metrics, metrics)
    paths = {digest: run.folder / folder / f"{digest}.json" for digest in wanted}
    n = len(examples_of(run).scored(split).rated)

    def kept(digest: str) -> Outcome | None:
        return Outcome.read(paths[digest], computed, n, run.dev_metric)

    outcomes = {digest: found for digest in wanted if (found := kept(digest)) is not None}
    missing = {digest: trial for digest, trial in wanted.items() if digest not in outcomes}
    if wanted:
        log.info(f"{len(wanted):,} fits, {len(outcomes):,} of them done before")
    if missing:
        check_writable(next(iter(paths.values())))
    failures = []
    job = _Job(run.folder, split, metrics, choose_device(device))
    # Closed here and now: an interrupt would leave it, and its processes, to the traceback.
    with closing(_records(job, missing, workers)) as records:
        for done, (digest, record) in enumerate(records, start=1):
            if isinstance(record, str):
                failures.append(f"{wanted[digest].label}: {record}")
                log.info(f"failed: {failures[-1]}")
                continue
            write_json(paths[digest], record)
            outcome = kept(digest)
            assert outcome is not None  # noqa: S101 - it was written just now
            outcomes[digest] = outcome
            first, name = computed[0], f"{done:,}/{len(missing):,} {wanted[digest].label}"
            figure = first.show(outcome.metrics[first.name])
            log.info(f"{name}: {first.heading} {figure} on {split}")
    if failures and not outcomes:
        raise LlmcondError(f"every fit failed; the first one: {failures[0]}")
    return {d: (wanted[d], outcomes[d]) for d in wanted if d in outcomes}, failures


#: What a trial's file holds, or why it failed.
_Record = dict[str, Any] | str


class _Worker:
    """A run's examples, and how heads are fitted on them; one for each process."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._run = open_any_run(job.folder)
        self._metrics = choose_metrics(self._run.task.metrics, job.metrics)
        self._examples = examples_of(self._run)
        #: What epochs are chosen by, and what that is called.
        self.metric = metric_of(self._run.dev_metric)
        self.epoch_score = self._examples.epoch_score

    def fit(
        self, digest: str, trial: Trial, on_epoch: OnEpoch = lambda *_: None
    ) -> tuple[str, _Record]:
        try:
            return digest, self._fitted(trial, on_epoch)
        except UserError as error:
            return digest, str(error)
        except (RuntimeError, MemoryError) as error:  # as where memory runs out
            return digest, f"{type(error).__name__}: {error}"

    def _fitted(self, trial: Trial, on_epoch: OnEpoch) -> dict[str, Any]:
        split, examples, view = self._job.split, self._examples, trial.view
        recipe = sized(trial.recipe, trial.dim, examples.dim(view), quiet=True)
        head = examples.fit(recipe, view, trial.seed, on_epoch, self._job.device)
        saved = Saved(trial.name, head, view, {"recipe": recipe.to_json()})
        predicted = examples.predict(saved, split)
        rows, task = examples.scored(split), self._run.task.name
        (result,) = results_of([saved], [predicted], rows, split, self._metrics, 0, task)
        return {
            **result.to_json(),
            "similarity": predicted.tolist(),
            "recipe": recipe.to_json(),
            "fit": dict(head.fit.record),
            f"dev_{self._run.dev_metric}": finite(examples.on_dev(head, view)),
            **provenance(),
        }


def _records(
    job: _Job, trials: Mapping[str, Trial], workers: int | None
) -> Generator[tuple[str, _Record]]:
    """Yield the digest and the record of each trial, as it is done."""
    if not trials:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usual = 1 if job.device != "cpu" else min(cores or 1, _MOST_WORKERS)
    count = min(workers or usual, len(trials))
    if any(trial.recipe.family.__module__ == "__main__" for trial in trials.values()):
        count = 1  # other processes cannot import what a session defined
    if count == 1:
        worker = _Worker(job)
        for digest, trial in trials.items():
            with FitBar(score=worker.epoch_score, show=worker.metric.show) as bar:
                fitted = worker.fit(digest, trial, bar.on_epoch)
            yield fitted
        return
    threads = max(1, (cores or 1) // count)
    with _processes(job, count, threads) as executor:
        futures = [executor.submit(_fit_one, digest, trial) for digest, trial in trials.items()]
        try:
            for future in _completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise LlmcondError(
                "a process of the sweep was ended from outside, as where memory runs out. What "
                "was fitted is kept; run the same command with fewer --workers."
            ) from error


def _completed(futures: Sequence[Future[T]], seconds: float = EVERY_SECONDS) -> Iterator[Future[T]]:
    """Yield futures as they are done; log how many are where none was for so many seconds."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, seconds, FIRST_COMPLETED)
        if not done:
            n_done = len(futures) - len(waiting)
            log.info(f"fitting: {n_done:,} of {len(futures):,} fits are done")
        yield from done


@contextmanager
def _processes(job: _Job, count: int, threads: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that fit; they end with the block, whatever they are at then."""
    context = processes("llmcond.heads")
    held, end = context.Pipe(duplex=False)
    # Cores that two processes share make both several times slower; numbers of threads are read
    # when libraries are loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        count, context, initializer=_begin, initargs=(job, plugins.loaded(), threads, held)
    )
    try:
        yield executor
        executor.shutdown()
    finally:
        end.close()
        executor.shutdown(wait=False, cancel_futures=True)
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


_worker: _Worker | None = None


def _begin(job: _Job, code: Sequence[str], threads: int, held: Connection) -> None:
    import torch

    # Ctrl-C is for the process that the others belong to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()
    torch.set_num_threads(threads)
    global _worker  # noqa: PLW0603 - a process of a pool has no other place for it
    for name in code:
        plugins.load(name)
    _worker = _Worker(job)


def _end_with(held: Connection) -> None:
    """End this process when the other end of a pipe is closed, as by the death of its owner."""
    held.poll(None)
    os._exit(1)


def _fit_one(digest: str, trial: Trial) -> tuple[str, _Record]:
    assert _worker is not None  # noqa: S101 - the pool's initializer made it
    return _worker.fit(digest, trial)
