"""The fits of a sweep: each one identified by what decides its result, and many in processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llmcond.errors import LlmcondError, UserError
from llmcond.features.view import View
from llmcond.files import digest_text
from llmcond.heads import Recipe, fit_recipe, load_recipe
from llmcond.runs import Run, SavedHead, head_name, open_run
from llmcond.runs.features import Features
from llmcond.runs.predictors import predict
from llmcond.runs.provenance import provenance
from llmcond.workflows.evaluate import result_of
from llmcond.workflows.fit import sized

#: Without --workers; each has features of its own in memory.
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """One fit of a sweep.

    Attributes:
        recipe: with its settings changed, not yet sized to the features.
        dim: size of the embeddings, if it is varied.
        view: which features it takes.
        seed: of everything random.
        varied: the settings that the sweep varies, and their values here.
    """

    recipe: Recipe
    dim: int | None
    view: View
    seed: int
    varied: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Return what tells it from others, for messages."""
        settings = [f"{key}={value}" for key, value in self.varied.items()]
        name = head_name(self.recipe.name, self.view)
        return " ".join([name, *settings, f"seed={self.seed}"])

    def digest(self, run: Run, split: str) -> str:
        """Identify everything that decides its result."""
        parts = {
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


#: What a fit gave, or why it failed.
Outcome = dict[str, Any] | str


class _Worker:
    """A run's features, and how they are fitted; one for each process."""

    def __init__(self, folder: Path, split: str, predictions: bool) -> None:
        self._run, self._split, self._predictions = open_run(folder), split, predictions
        self._features = Features(self._run)

    def fit(self, point: Point) -> Outcome:
        try:
            return self._fitted(point)
        except UserError as error:
            return str(error)
        except (RuntimeError, MemoryError) as error:  # as where memory runs out
            return f"{type(error).__name__}: {error}"

    def _fitted(self, point: Point) -> dict[str, Any]:
        train = self._features.rated(point.view, "train")
        dev = self._features.rated(point.view, "dev")
        recipe = sized(point.recipe, point.dim, train.dim, quiet=True)
        head = fit_recipe(recipe, train, dev if len(dev) else None, point.seed, _quiet)
        name = head_name(recipe.name, point.view)
        saved = SavedHead(name, head, point.view, {"recipe": recipe.to_json()})
        similarity = predict(saved, self._features.pairs(point.view, self._split))
        rows = self._run.rows(self._split)
        return {
            # The interval that a sweep shows is over seeds.
            **result_of(saved, similarity, rows, self._split, resamples=0),
            **({"similarity": similarity.tolist()} if self._predictions else {}),
            "recipe": recipe.to_json(),
            "fit": dict(head.fit.record),
            **provenance(),
        }


def _quiet(epoch: int, epochs: int, score: float) -> None:
    pass


def fit_all(
    run: Run,
    split: str,
    points: Mapping[str, Point],
    workers: int | None,
    predictions: bool = False,
) -> Generator[tuple[str, Outcome]]:
    """Yield each fit's digest and what it gave, as it is done.

    Args:
        run: whose features.
        split: what is scored.
        points: digest -> fit.
        workers: fits at a time; None: one a core, at most eight.
        predictions: whether the predicted similarity of each row, unrated ones included, is part
            of what a fit gives.

    Raises:
        LlmcondError: a process was ended from outside.
    """
    if not points:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(workers or min(cores or 1, _MOST_WORKERS), len(points))
    if count == 1:
        worker = _Worker(run.folder, split, predictions)
        for digest, point in points.items():
            yield digest, worker.fit(point)
        return
    threads = max(1, (cores or 1) // count)
    with _processes((run.folder, split, predictions), count, threads) as executor:
        futures = [executor.submit(_fit_one, _pack(d, point)) for d, point in points.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise LlmcondError(
                "a process of the sweep was ended from outside, as where memory runs out. What "
                "was fitted is kept; run the same command with fewer --workers."
            ) from error


# -- processes ---------------------------------------------------------------------------------


@contextmanager
def _processes(
    work: tuple[Path, str, bool], count: int, threads: int
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that fit; they end with the block, whatever they are at then."""
    context = multiprocessing.get_context("spawn")
    held, end = context.Pipe(duplex=False)
    # Cores that two processes share make both several times slower; numbers of threads are read
    # when libraries are loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        count, context, initializer=_begin, initargs=(work, threads, held)
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


def _begin(work: tuple[Path, str, bool], threads: int, held: Connection) -> None:
    import torch

    # Ctrl-C is for the process that the others belong to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()
    torch.set_num_threads(threads)
    global _worker  # noqa: PLW0603 - a process of a pool has no other place for it
    _worker = _Worker(*work)


def _end_with(held: Connection) -> None:
    """End this process when the other end of a pipe is closed, as by the death of its owner."""
    held.poll(None)
    os._exit(1)


def _fit_one(packed: tuple[str, str, dict[str, Any], int | None, Any, int]) -> Any:
    digest, head, settings, dim, view, seed = packed
    recipe = load_recipe(head).with_settings(settings, "sweep")
    return digest, _worker and _worker.fit(Point(recipe, dim, View(*view), seed, {}))


def _pack(digest: str, point: Point) -> Any:
    """Return a fit as plain values: families hold functions, which other processes cannot get."""
    view = point.view
    packed = (view.prompts, view.subtract, view.features, view.conditioned)
    settings = asdict(point.recipe.settings)
    return digest, point.recipe.path, settings, point.dim, packed, point.seed
