"""Fit many heads on one store: settings, sizes and seeds; resumable, in parallel, in one table."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_text, read_json, write_json
from llmcond.heads import Recipe, fit_recipe, load_recipe
from llmcond.provenance import provenance
from llmcond.report.console import note
from llmcond.runs import Run, SavedHead, head_name, open_run
from llmcond.views import View, view_of
from llmcond.workflows.evaluate import check_scorable, predict, result_of
from llmcond.workflows.features import Features
from llmcond.workflows.fit import check_seed, prompts_for, sized

#: Of the interval around a mean over seeds.
_CONFIDENCE = 0.95


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
        settings = " ".join(f"{key}={value}" for key, value in self.varied.items())
        return f"{head_name(self.recipe.name, self.view)} {settings} seed={self.seed}"

    def digest(self, run: Run, split: str) -> str:
        """Identify everything that decides its result."""
        parts = {
            "recipe": [self.recipe.name, self.recipe.family.kind, self.dim],
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


def sweep(
    run_folder: Path,
    heads: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    *,
    prompts: Sequence[str | None] = (None,),
    subtract: bool = True,
    changes: Mapping[str, str] | None = None,
    seeds: int = 3,
    split: str | None = None,
    workers: int | None = None,
) -> list[dict[str, Any]]:
    """Fit and score heads for every combination of settings, each with several seeds.

    What was fitted before, with the same features, settings and versions, is not fitted again.

    Args:
        run_folder: a run with extracted features.
        heads: recipes.
        vary: setting (or ``dim``) -> values, as text.
        prompts: whose features, several side by side joined by ``+``; None: as in
            :func:`llmcond.workflows.fit_head`.
        subtract: whether unconditional features are subtracted.
        changes: other settings, for all fits.
        seeds: 0 to so many, less one.
        split: what is scored; None: test if the run has one, else dev, which also chose the epochs.
        workers: fits at a time, each with its share of the cores; None: one a core, at most eight.

    Returns:
        A row for each combination: mean, deviation and interval over seeds, best first.

    Raises:
        UserError: nothing to vary, settings that cannot be, or no such run.
        LlmcondError: every fit failed.
    """
    run = open_run(run_folder)
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1.")
    split = split or run.default_split()
    check_scorable(run.rows(split), run, other=False)
    points = _points(run, heads, vary, prompts, subtract, changes or {}, seeds)
    folder = run.folder / "sweep"
    # What is the same fit, as where a value is named twice, is one.
    paths = {point.digest(run, split): point for point in points}
    results = {digest: _read(folder / f"{digest}.json") for digest in paths}
    missing = [digest for digest, result in results.items() if result is None]
    note(f"{len(paths):,} fits, {len(paths) - len(missing):,} of them done before")
    failures: list[str] = []
    for digest, outcome in _fit_all(run, split, {d: paths[d] for d in missing}, workers):
        if isinstance(outcome, str):
            failures.append(f"{paths[digest].label}: {outcome}")
            note(f"failed: {failures[-1]}")
            continue
        write_json(folder / f"{digest}.json", outcome)
        results[digest] = outcome
    if failures and not any(results.values()):
        raise LlmcondError(f"every fit failed; the first one: {failures[0]}")
    done = [(paths[digest], result) for digest, result in results.items() if result is not None]
    rows = _summarise(done)
    report = {"results": rows, "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    return rows


# -- what is fitted ----------------------------------------------------------------------------


def _points(
    run: Run,
    heads: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    prompts: Sequence[str | None],
    subtract: bool,
    changes: Mapping[str, str],
    seeds: int,
) -> Iterator[Point]:
    """Yield every fit; all that can be wrong in settings is found before the first one."""
    if not heads:
        raise UserError("no head was named. Name one or more: --head mlp")
    if seeds < 1:
        raise UserError(f"the number of seeds is {seeds}; it must be at least 1.")
    check_seed(seeds - 1)
    empty = [key for key, values in vary.items() if not values]
    if empty:
        raise UserError(f"{empty[0]} is varied without a value. Give some: --vary {empty[0]}=A,B")
    if seeds == len(heads) == len(prompts) == 1 and all(len(v) == 1 for v in vary.values()):
        raise UserError(
            "there is nothing to vary. Give several values (--vary dim=64,128,256), heads, prompts "
            "or --seeds."
        )
    twice = sorted(set(vary) & set(changes))
    if twice:
        raise UserError(f"{twice[0]} is both varied and set. Give it once.")
    for head, names in itertools.product(dict.fromkeys(heads), dict.fromkeys(prompts)):
        recipe = load_recipe(head)
        recipe = recipe.with_settings(recipe.parse_changes(dict(changes), "--set"), "--set")
        for values in itertools.product(*vary.values()):
            varied = recipe.parse_changes(dict(zip(vary, values, strict=True)), "--vary")
            dim = varied.get("dim")
            changed = recipe.with_settings(varied, "--vary")
            view = view_of(changed, prompts_for(run, changed, names), subtract)
            for seed in range(seeds):
                yield Point(changed, dim, view, seed, varied)


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


# -- fitting -----------------------------------------------------------------------------------


class _Worker:
    """A run's features, and how they are fitted; one for each process."""

    def __init__(self, folder: Path, split: str) -> None:
        self._run, self._split = open_run(folder), split
        self._features = Features(self._run)

    def fit(self, point: Point) -> dict[str, Any] | str:
        """Return the result of a fit, or why there is none."""
        try:
            train = self._features.rated(point.view, "train")
            dev = self._features.rated(point.view, "dev")
            recipe = sized(point.recipe, point.dim, train.dim, quiet=True)
            head = fit_recipe(recipe, train, dev if len(dev) else None, point.seed, _quiet)
        except UserError as error:
            return str(error)
        name = head_name(recipe.name, point.view)
        saved = SavedHead(name, head, point.view, {"recipe": recipe.to_json()})
        similarity = predict(saved, self._features.pairs(point.view, self._split))
        rows = self._run.rows(self._split)
        return {
            **result_of(saved, similarity, rows, self._split),
            "recipe": recipe.to_json(),
            "fit": dict(head.fit.record),
            **provenance(),
        }


def _quiet(epoch: int, epochs: int, score: float) -> None:
    pass


_worker: _Worker | None = None


def _begin(folder: Path, split: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    global _worker  # noqa: PLW0603 - a process of a pool has no other place for it
    _worker = _Worker(folder, split)


def _fit_one(packed: tuple[str, str, dict[str, Any], int | None, Any, int]) -> Any:
    digest, head, settings, dim, view, seed = packed
    recipe = load_recipe(head).with_settings(settings, "sweep")
    return digest, _worker and _worker.fit(Point(recipe, dim, View(*view), seed, {}))


def _fit_all(
    run: Run, split: str, points: Mapping[str, Point], workers: int | None
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each fit's digest and result as it is done."""
    if not points:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(workers or min(cores or 1, 8), len(points))
    if count == 1:
        worker = _Worker(run.folder, split)
        for digest, point in points.items():
            yield digest, worker.fit(point)
        return
    threads = max(1, (cores or 1) // count)
    # Cores that two processes share make both several times slower; numbers of threads are read
    # when libraries are loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        count,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(run.folder, split, threads),
    )
    try:
        futures = [executor.submit(_fit_one, _pack(d, point)) for d, point in points.items()]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise LlmcondError(
            "a process of the sweep was ended from outside, as where memory runs out. What was "
            "fitted is kept; run the same command with fewer --workers."
        ) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _pack(digest: str, point: Point) -> Any:
    """Return a fit as plain values: families hold functions, which other processes cannot get."""
    view = point.view
    packed = (view.prompts, view.subtract, view.features, view.conditioned)
    settings = asdict(point.recipe.settings)
    return digest, point.recipe.path, settings, point.dim, packed, point.seed


# -- the table ---------------------------------------------------------------------------------


def _summarise(done: Sequence[tuple[Point, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each combination of head, prompt and settings, best mean first."""
    groups: dict[str, list[tuple[Point, Mapping[str, Any]]]] = {}
    for point, result in done:
        # Recipes of one name, from different folders, are told apart by all that they set.
        recipe = [point.recipe.path, asdict(point.recipe.settings), point.dim]
        key = json.dumps([head_name(point.recipe.name, point.view), recipe])
        groups.setdefault(key, []).append((point, result))
    rows = [_row(group) for group in groups.values()]
    return sorted(rows, key=lambda row: -(row["spearman"] if row["spearman"] is not None else -2))


def _row(group: Sequence[tuple[Point, Mapping[str, Any]]]) -> dict[str, Any]:
    point, first = group[0]
    return {
        "name": first["name"],
        "head": first["head"],
        "prompt": first["prompt"],
        "subtract": first["subtract"],
        "split": first["split"],
        "n": first["n"],
        "dim": first["dim"],
        "settings": dict(point.varied),
        **_over_seeds("spearman", [result["spearman"] for _, result in group]),
        **_over_seeds("accuracy", [result["accuracy"] for _, result in group]),
        "seeds": [result["seed"] for _, result in group],
        "best_epochs": [result["fit"].get("best_epoch") for _, result in group],
        "curves": [result["fit"].get("curve") for _, result in group],
        "steps_per_epoch": first["fit"].get("steps_per_epoch"),
    }


def _over_seeds(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, deviation and Student's interval of the mean over seeds."""
    found = [value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return {name: None, f"{name}_sd": None, f"{name}_ci": [None, None]}
    mean = statistics.fmean(found)
    if len(found) == 1:
        return {name: mean, f"{name}_sd": None, f"{name}_ci": [None, None]}
    from scipy.stats import t

    deviation = statistics.stdev(found)
    half = float(t.ppf((1 + _CONFIDENCE) / 2, len(found) - 1)) * deviation / len(found) ** 0.5
    return {name: mean, f"{name}_sd": deviation, f"{name}_ci": [mean - half, mean + half]}
