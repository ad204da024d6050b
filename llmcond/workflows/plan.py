"""The dry run of an extraction: the missing inputs, and the time and cost of encoding them.

A sample of the missing inputs is tokenised, and the total is estimated from its mean.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmcond.benchmark.shapes import SHAPES
from llmcond.display import Displayed
from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.encoder import Concurrency, WorkerThreads
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.loading.loading import load_config, load_dense, load_tokenizer
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.features.extract import CHUNK, WINDOW
from llmcond.features.fragments import row_bytes
from llmcond.features.keys import KeyIndex
from llmcond.features.missing import MissingCount, count_missing, merge_counts
from llmcond.metrics import Estimate
from llmcond.progress import format_duration
from llmcond.records import RECORD, read_record
from llmcond.runs import Run, create_run, open_any_run
from llmcond.runs.extraction import LazyEncoder
from llmcond.scale.extraction import estimate_commits
from llmcond.scale.pool import RayCluster
from llmcond.workflows.extract import check_run, prepare_extraction
from llmcond.workflows.options.encoding import ExtractOptions

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder

#: Half the width of the 95 % interval of a mean, in standard errors.
_DEVIATIONS = 1.96
#: Numbers of inputs to measure the speed with. The next number is tried until encoding takes this
#: many seconds.
_TRIALS, _TRUSTED_SECONDS = (16, 64, 256, 1_024), 0.5
#: Repetitions of each trial. The fastest one counts, because other processes only slow it down.
_REPEATS = 3


@dataclass(frozen=True)
class ExtractionPlan(Displayed):
    """An estimate of the work, time and cost of an extraction.

    Attributes:
        encoder: the name of the encoder.
        n_inputs: the number of distinct inputs of each prompt. An input that several prompts need
            counts for the first one.
        n_missing: the number of inputs of each prompt that the store lacks.
        tokens: the tokens of the missing inputs, as the encoder computes them.
        dim: the size of a vector.
        n_bytes: the bytes that will be stored.
        tokens_per_second: the speed of one process or actor; None if nothing is missing.
        rate_of: the source of ``tokens_per_second``.
        loading_seconds: the seconds in which each process or actor loads the encoder; None if it
            was not measured.
        workers: the number of processes or actors that encode at the same time.
        hours: the hours of all processes or actors together, with loading if it was measured. The
            interval is that of the tokens, with the speed as a constant.
        wall_hours: the hours until all processes or actors are finished.
        cost: the cost of the hours at the given price; None if no price was given.
        fragments: the number of the store's new fragments, before small ones are merged.
        commits: the number of commits to the store.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> plan = llmcond.extract(model="minilm", run="demo", data=rows, plan=True)
        >>> plan.n_missing, plan.dim
        ({'routed': 42}, 384)
    """

    encoder: str
    n_inputs: Mapping[str, int]
    n_missing: Mapping[str, int]
    tokens: Estimate
    dim: int
    n_bytes: int
    tokens_per_second: float | None
    rate_of: str
    loading_seconds: float | None
    workers: int
    hours: Estimate | None
    wall_hours: Estimate | None
    cost: Estimate | None
    fragments: int
    commits: int

    def rows(self) -> list[dict[str, str]]:
        """Return the plan as the rows of a table.

        Returns:
            One dictionary for each row: ``plan`` is the row's name, and the key ``""`` its text.
        """
        rows = {f"inputs, {name}": f"{n:,}" for name, n in self.n_inputs.items()}
        rows |= {f"missing, {name}": f"{n:,}" for name, n in self.n_missing.items()}
        rows |= {
            "tokens": _format_estimate(self.tokens, ",.0f"),
            "stored": f"{self.n_bytes / 2**20:,.1f} MiB, vectors of {self.dim:,} dimensions",
        }
        if self.hours and self.wall_hours and self.tokens_per_second:
            rows["tokens/s"] = f"{self.tokens_per_second:,.0f}, {self.rate_of}"
            # No interval is shown, because the error of the speed is larger than the tokens'.
            if self.loading_seconds is not None:
                rows["loading"] = format_duration(self.loading_seconds)
            rows["time"] = format_duration(3600 * self.hours.value)
            if self.workers > 1:
                wall_time = format_duration(3600 * self.wall_hours.value)
                rows[f"time, {self.workers} at a time"] = wall_time
        if self.cost:
            rows["cost"] = f"{self.cost.value:{',.2f' if self.cost.value >= 1 else '.2g'}}"
        return [{"plan": name, "": value} for name, value in rows.items()]


def _format_estimate(estimate: Estimate, spec: str) -> str:
    if estimate.low == estimate.high:
        return f"{estimate.value:{spec}}"
    return f"{estimate.value:{spec}} [{estimate.low:{spec}}, {estimate.high:{spec}}]"


@dataclass(frozen=True)
class _Speed:
    """The fields that are read from a speed measured by ``llmcond bench``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    model: str
    precision: str
    inputs: str
    way: str
    n: int
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class _BenchRecord:
    """The fields that are read from the output of ``llmcond bench --json``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    machine: dict[str, Any]
    speeds: list[_Speed]


def plan(options: ExtractOptions) -> ExtractionPlan:
    """Return what ``llmcond.workflows.extract.extract`` would do with the same options.

    Without a record of ``llmcond bench``, some inputs are encoded to measure the speed.

    Raises:
        UserError: as ``extract``, or the record has no speed of the encoder.
    """
    model, cluster, price = options.model, options.cluster(), options.price
    prepared = prepare_extraction(options)
    resolved = prepared.resolved
    with tempfile.TemporaryDirectory() as scratch:
        if prepared.dataset is not None:
            dtype, folder = options.store_dtype or "float16", Path(scratch) / "run"
            run_inputs = (prepared.dataset, dtype, prepared.task, prepared.store)
            run: Run = create_run(folder, model, resolved, *run_inputs)
        else:
            run = prepared.existing or open_any_run(Path(options.run))
            check_run(run, resolved, options.data_options(), options.store_dtype, prepared.store)
        features, seen = run.store(), KeyIndex()
        missing_by_prompt = {
            prompt.name: count_missing(features, run.task.inputs(run.data, prompt), WINDOW, seen)
            for prompt in prepared.prompts
        }
        missing = merge_counts(list(missing_by_prompt.values()))
        tokens, dim = _estimate_tokens(resolved, missing), _read_dim(resolved)
        rate: float | None
        loading: float | None = None
        if options.bench is not None and missing.n_missing:
            length = tokens.value / missing.n_missing
            rate, rate_of = _read_rate(model, resolved, length, Path(options.bench))
        else:
            rate, rate_of, loading = _measure_rate(resolved, missing, tokens.value, cluster)
    count = _count_parallel(cluster, options.workers, resolved.device)
    encoding = tokens.times(1 / rate / 3600) if rate else None
    hours = encoding and _add(encoding, count * (loading or 0) / 3600)
    if cluster is not None:
        seconds = 3600 * encoding.value / count if encoding else 0.0
        fragments, commits = estimate_commits(missing.n_missing, seconds, cluster, count)
    else:
        threads = Concurrency.for_encoder(resolved).threads
        fragments = commits = math.ceil(missing.n_missing / (CHUNK // threads))
    return ExtractionPlan(
        encoder=run.encoder_name,
        n_inputs={
            name: prompt_missing.n_inputs for name, prompt_missing in missing_by_prompt.items()
        },
        n_missing={
            name: prompt_missing.n_missing for name, prompt_missing in missing_by_prompt.items()
        },
        tokens=tokens,
        dim=dim,
        n_bytes=round(missing.n_missing * row_bytes(dim, features.dtype)),
        tokens_per_second=rate,
        rate_of=rate_of,
        loading_seconds=loading,
        workers=count,
        hours=hours,
        wall_hours=hours and hours.times(1 / count),
        cost=hours.times(price) if hours and price is not None else None,
        fragments=fragments,
        commits=commits,
    )


def _add(estimate: Estimate, amount: float) -> Estimate:
    return Estimate(estimate.value + amount, estimate.low + amount, estimate.high + amount)


def _estimate_tokens(resolved: ResolvedEncoder, missing: MissingCount) -> Estimate:
    """Estimate how many tokens the encoder computes for the missing inputs."""
    counts = _count_tokens(resolved, missing.sample)
    total, n = missing.n_missing, len(counts)
    if not n:
        return Estimate(0, 0, 0)
    value = float(counts.sum()) * total / n
    error = float(counts.std(ddof=1)) * math.sqrt((1 - n / total) / n) if n > 1 else 0.0
    half = _DEVIATIONS * error * total
    return Estimate(value, value - half, value + half)


def _count_tokens(
    resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]
) -> np.ndarray[Any, Any]:
    member = resolved.list_members()[0]
    config = load_config(member.checkpoint, member.identity.attention)
    loaded = load_tokenizer(member.checkpoint, config)
    tokenizer = InputTokenizer(loaded, member.identity, member.checkpoint.name)
    windows = tokenizer.windows(inputs)
    return np.array(
        [sum(len(window.ids) for window in window_ids) for window_ids in windows], dtype=np.float64
    )


def _read_dim(resolved: ResolvedEncoder) -> int:
    members = resolved.list_members()
    config = load_config(members[0].checkpoint, members[0].identity.attention)
    width = int(getattr(config, "text_config", config).hidden_size)
    return len(members) * load_dense(members[0], width)[1]


def _count_parallel(cluster: RayCluster | None, workers: int, device: str) -> int:
    """Return how many processes or actors each encode at the speed of the one that was measured."""
    if cluster is None:
        return workers if device != "cpu" else 1  # on a CPU, processes share its cores
    is_local = cluster.address is None and not cluster.gpus_per_actor
    return cluster.actors or ((os.cpu_count() or 1) if is_local else 1)


def _measure_rate(
    resolved: ResolvedEncoder, missing: MissingCount, tokens: float, cluster: RayCluster | None
) -> tuple[float | None, str, float | None]:
    """Measure one process or actor.

    Returns:
        The tokens per second and their description, and the seconds of loading the encoder.
    """
    import torch

    if not missing.n_missing:
        return None, "nothing is missing", None
    if resolved.device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "this machine has no GPU to measure the speed on. Give --bench FILE, the output of "
            "`llmcond bench --json` on a machine like those that will encode."
        )
    threads = torch.get_num_threads()
    if cluster is not None:
        torch.set_num_threads(1)  # an actor has one thread on a CPU
    try:
        began = time.monotonic()
        encoder = LazyEncoder(resolved)()
        loading = time.monotonic() - began
        with closing(WorkerThreads(encoder.concurrency)) as workers:
            seconds = _estimate_seconds(missing, partial(_encode_once, encoder, workers))
    finally:
        torch.set_num_threads(threads)
    return tokens / seconds, f"a trial on {resolved.device} of this machine", loading


def _encode_once(encoder: Encoder, workers: WorkerThreads, inputs: Sequence[EncoderInput]) -> float:
    """Encode inputs with all threads, as an extraction does, and return the seconds it took."""
    count = workers.concurrency.threads
    parts = [part for part in (inputs[first::count] for first in range(count)) if part]
    began = time.monotonic()
    list(workers.map(encoder.encode_with_counts, parts))
    return time.monotonic() - began


def _estimate_seconds(
    missing: MissingCount, encode: Callable[[Sequence[EncoderInput]], float]
) -> float:
    """Estimate the seconds that one process takes for the missing inputs, from a sample of them.

    The time is taken to be proportional to the number of characters. ``encode`` encodes inputs and
    returns the seconds that it took.
    """
    sample, seconds, trial = missing.sample, 0.0, missing.sample[:0]
    encode(sample[: _TRIALS[0]])  # a model's first call is slower than the following ones
    for count in _TRIALS:
        trial = sample[:: math.ceil(len(sample) / count)]
        seconds = min(encode(trial) for _ in range(_REPEATS))
        if seconds >= _TRUSTED_SECONDS or len(trial) == len(sample):
            break
    return seconds * missing.n_characters / sum(item.size for item in trial)


def _read_rate(
    model: str, resolved: ResolvedEncoder, length: float, bench: Path
) -> tuple[float, str]:
    """Return the encoder's speed in a benchmark, on the inputs whose length is closest to this."""
    known, identity = resolved.checkpoint.known, resolved.identity
    names = {model, resolved.checkpoint.name, *([known.name, known.repo] if known else [])}
    names.update(shape for shape, model_name in SHAPES.items() if model_name in names)
    precision = identity.dtype if identity.quantize == "none" else identity.quantize
    record = read_record(
        bench, _BenchRecord, f"Write it again: llmcond bench --model {model} --json"
    )
    speeds = record.speeds
    batch_ways = ("packed", "padded")
    usable_speeds = [
        speed for speed in speeds if speed.precision == precision and speed.way in batch_ways
    ]
    model_speeds = [speed for speed in usable_speeds if speed.model in names]
    if not model_speeds:
        available = sorted({f"{speed.model} in {speed.precision}" for speed in speeds})
        raise UserError(
            f"{bench} has no speed of {resolved.checkpoint.name} in {precision}; it has "
            f"{', '.join(available) or 'none'}. Measure one: llmcond bench --model {model} --json"
        )
    closest = min(model_speeds, key=lambda speed: abs(math.log(speed.tokens / speed.n / length)))
    machine = record.machine.get("gpu") or record.machine.get("cpu")
    return closest.tokens_per_second, f"{machine}, {closest.inputs}, {bench}"
