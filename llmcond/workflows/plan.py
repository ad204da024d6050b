"""The dry run of an extraction: how much there is to do, and what it takes; nothing is encoded.

Of what is missing some inputs are tokenised; the rest is reckoned from their mean.
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
from llmcond.encoders.checkpoints.weights import load_dense
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.threads import Concurrency, WorkerThreads
from llmcond.errors import UserError
from llmcond.features.extract import CHUNK, WINDOW
from llmcond.features.fragments import row_bytes
from llmcond.features.keys import KeyIndex
from llmcond.features.missing import Missing, count_missing, together
from llmcond.metrics import Estimate
from llmcond.records import RECORD, read_record
from llmcond.runs import AnyRun, create_run, open_any_run
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.kind import inputs_of
from llmcond.scale.extraction import fragments_and_commits
from llmcond.scale.pool import Cluster
from llmcond.workflows.extract import check_run, prepare
from llmcond.workflows.options.encoding import ExtractOptions

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder

#: Of the 95 % interval of a mean.
_DEVIATIONS = 1.96
#: Inputs that are encoded to measure the speed: more of them until that takes so many seconds.
_TRIALS, _TRUSTED_SECONDS = (16, 64, 256, 1_024), 0.5
#: How often each trial is run; what else the machine does only makes a run slower.
_REPEATS = 3


@dataclass(frozen=True)
class ExtractionPlan(Displayed):
    """What an extraction would do.

    Attributes:
        n_inputs, n_missing: distinct inputs of each prompt, and those that the store lacks; what
            several prompts need is counted with the first.
        tokens: of what is missing, as the encoder computes them.
        n_bytes: that will be stored.
        tokens_per_second: of one process, or actor, and where that is from (``rate_of``).
        hours: of one process, or actor, and ``wall_hours`` of all; intervals are those of the
            tokens, and the speed is taken as it is.
        cost: hours at the price that was given; None: none was.
        fragments, commits: of the store, before small ones are merged.
    """

    encoder: str
    n_inputs: Mapping[str, int]
    n_missing: Mapping[str, int]
    tokens: Estimate
    dim: int
    n_bytes: int
    tokens_per_second: float | None
    rate_of: str
    workers: int
    hours: Estimate | None
    wall_hours: Estimate | None
    cost: Estimate | None
    fragments: int
    commits: int

    def rows(self) -> list[dict[str, str]]:
        """Return it as a table."""
        rows = {f"inputs, {name}": f"{n:,}" for name, n in self.n_inputs.items()}
        rows |= {f"missing, {name}": f"{n:,}" for name, n in self.n_missing.items()}
        rows |= {
            "tokens": _told(self.tokens, ",.0f"),
            "stored": f"{self.n_bytes / 2**20:,.1f} MiB, vectors of {self.dim:,} dimensions",
        }
        if self.hours and self.wall_hours and self.tokens_per_second:
            rows["tokens/s"] = f"{self.tokens_per_second:,.0f}, {self.rate_of}"
            # Without an interval: the tokens' is not that of the speed, which is the larger one.
            rows["hours"] = f"{self.hours.value:.3g}"
            if self.workers > 1:
                rows[f"hours, {self.workers} at a time"] = f"{self.wall_hours.value:.3g}"
        if self.cost:
            rows["cost"] = f"{self.cost.value:{',.2f' if self.cost.value >= 1 else '.2g'}}"
        rows["fragments, commits"] = f"{self.fragments:,}, {self.commits:,}"
        return [{"plan": name, "": value} for name, value in rows.items()]


def _told(number: Estimate, form: str) -> str:
    if number.low == number.high:
        return f"{number.value:{form}}"
    return f"{number.value:{form}} [{number.low:{form}}, {number.high:{form}}]"


@dataclass(frozen=True)
class _Speed:
    """What is read of a way through an encoder that ``llmcond bench`` timed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    model: str
    precision: str
    inputs: str
    way: str
    n: int
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class _Bench:
    """What is read of what it printed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    machine: dict[str, Any]
    speeds: list[_Speed]


def plan(asked: ExtractOptions) -> ExtractionPlan:
    """Return what :func:`llmcond.workflows.extract.extract` would do with the same options.

    Without a record of ``llmcond bench`` some inputs are encoded here, to see how fast that is.

    Raises:
        UserError: as ``extract``, or the record has no such encoder.
    """
    model, cluster, price = asked.model, asked.cluster(), asked.price
    prepared = prepare(asked)
    resolved = prepared.resolved
    with tempfile.TemporaryDirectory() as scratch:
        if prepared.dataset is not None:
            dtype, folder = asked.store_dtype or "float16", Path(scratch) / "run"
            made = (prepared.dataset, dtype, prepared.task, prepared.store)
            run: AnyRun = create_run(folder, model, resolved, *made)
        else:
            run = prepared.existing or open_any_run(Path(asked.run))
            check_run(run, resolved, asked.data_options(), asked.store_dtype, prepared.store)
        features, seen = run.store(), KeyIndex()
        lacking = {
            prompt.name: count_missing(
                features, inputs_of(run.task, run.data, prompt), WINDOW, seen
            )
            for prompt in prepared.prompts
        }
        missing = together(list(lacking.values()))
        tokens, dim = _tokens(resolved, missing), _dim(resolved)
        rate: float | None
        if asked.bench is not None and missing.n_missing:
            length = tokens.value / missing.n_missing
            rate, rate_of = _recorded_rate(model, resolved, length, Path(asked.bench))
        else:
            rate, rate_of = _tried_rate(resolved, missing, tokens.value, cluster)
    hours = tokens.times(1 / rate / 3600) if rate else None
    count = _at_a_time(cluster, asked.workers, resolved.device)
    if cluster is not None:
        seconds = 3600 * hours.value / count if hours else 0.0
        fragments, commits = fragments_and_commits(missing.n_missing, seconds, cluster, count)
    else:
        threads = Concurrency.of(resolved).threads
        fragments = commits = math.ceil(missing.n_missing / (CHUNK // threads))
    return ExtractionPlan(
        encoder=run.encoder_name,
        n_inputs={name: own.n_inputs for name, own in lacking.items()},
        n_missing={name: own.n_missing for name, own in lacking.items()},
        tokens=tokens,
        dim=dim,
        n_bytes=round(missing.n_missing * row_bytes(dim, features.dtype)),
        tokens_per_second=rate,
        rate_of=rate_of,
        workers=count,
        hours=hours,
        wall_hours=hours and hours.times(1 / count),
        cost=hours.times(price) if hours and price is not None else None,
        fragments=fragments,
        commits=commits,
    )


def _tokens(resolved: ResolvedEncoder, missing: Missing) -> Estimate:
    """Return how many tokens the encoder computes of what is missing."""
    counts = _counts(resolved, missing.sample)
    total, n = missing.n_missing, len(counts)
    if not n:
        return Estimate(0, 0, 0)
    value = float(counts.sum()) * total / n
    error = float(counts.std(ddof=1)) * math.sqrt((1 - n / total) / n) if n > 1 else 0.0
    half = _DEVIATIONS * error * total
    return Estimate(value, value - half, value + half)


def _counts(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> np.ndarray[Any, Any]:
    member = resolved.each_member()[0]
    config = load_config(member.checkpoint, member.identity.attention)
    loaded = load_tokenizer(member.checkpoint, config)
    tokenizer = InputTokenizer(loaded, member.identity, member.checkpoint.name)
    windows = tokenizer.windows(inputs)
    return np.array([sum(len(one.ids) for one in own) for own in windows], dtype=np.float64)


def _dim(resolved: ResolvedEncoder) -> int:
    members = resolved.each_member()
    config = load_config(members[0].checkpoint, members[0].identity.attention)
    width = int(getattr(config, "text_config", config).hidden_size)
    return len(members) * load_dense(members[0], width)[1]


def _at_a_time(cluster: Cluster | None, workers: int, device: str) -> int:
    """Return how many processes, or actors, encode as fast as one that was tried."""
    if cluster is None:
        return workers if device != "cpu" else 1  # on a CPU they share its cores
    here = cluster.address is None and not cluster.gpus_per_actor
    return cluster.actors or ((os.cpu_count() or 1) if here else 1)


def _tried_rate(
    resolved: ResolvedEncoder, missing: Missing, tokens: float, cluster: Cluster | None
) -> tuple[float | None, str]:
    """Return the tokens a second that one process, or actor, has here, and what that is."""
    import torch

    if not missing.n_missing:
        return None, "nothing is missing"
    if resolved.device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "this machine has no GPU to try the speed on. Give --bench FILE: what "
            "`llmcond bench --json` printed on a machine like those that will encode."
        )
    threads = torch.get_num_threads()
    if cluster is not None:
        torch.set_num_threads(1)  # which an actor has on a CPU
    try:
        encoder = LazyEncoder(resolved)()
        with closing(WorkerThreads(encoder.concurrency)) as workers:
            seconds = _measured_seconds(missing, partial(_encode_once, encoder, workers))
    finally:
        torch.set_num_threads(threads)
    return tokens / seconds, f"a trial on {resolved.device} of this machine"


def _encode_once(encoder: Encoder, workers: WorkerThreads, inputs: Sequence[EncoderInput]) -> float:
    """Encode inputs by all threads at once, as an extraction does; return the seconds it took."""
    count = workers.concurrency.threads
    parts = [part for part in (inputs[first::count] for first in range(count)) if part]
    began = time.monotonic()
    list(workers.map(encoder.encode_counted, parts))
    return time.monotonic() - began


def _measured_seconds(missing: Missing, encode: Callable[[Sequence[EncoderInput]], float]) -> float:
    """Return how long one process takes for what is missing, by characters, from a sample of it.

    ``encode`` returns the seconds that inputs took.
    """
    sample, seconds, tried = missing.sample, 0.0, missing.sample[:0]
    encode(sample[: _TRIALS[0]])  # the first call of a model is slower than those that follow
    for count in _TRIALS:
        tried = sample[:: math.ceil(len(sample) / count)]
        seconds = min(encode(tried) for _ in range(_REPEATS))
        if seconds >= _TRUSTED_SECONDS or len(tried) == len(sample):
            break
    return seconds * missing.n_characters / sum(item.size for item in tried)


def _recorded_rate(
    model: str, resolved: ResolvedEncoder, length: float, bench: Path
) -> tuple[float, str]:
    """Return the rate that a benchmark had for the encoder, on inputs as long as these."""
    known, identity = resolved.checkpoint.known, resolved.identity
    names = {model, resolved.checkpoint.name, *([known.name, known.repo] if known else [])}
    names.update(shape for shape, of in SHAPES.items() if of in names)
    precision = identity.dtype if identity.quantize == "none" else identity.quantize
    record = read_record(bench, _Bench, f"Make it anew: llmcond bench --model {model} --json")
    speeds = record["speeds"]
    ways = ("packed", "padded")
    fitting = [one for one in speeds if one["precision"] == precision and one["way"] in ways]
    own = [one for one in fitting if one["model"] in names]
    if not own:
        there = sorted({f"{speed['model']} in {speed['precision']}" for speed in speeds})
        raise UserError(
            f"{bench} has no speed of {resolved.checkpoint.name} in {precision}; it has "
            f"{', '.join(there) or 'none'}. Make one: llmcond bench --model {model} --json"
        )
    found = min(own, key=lambda speed: abs(math.log(speed["tokens"] / speed["n"] / length)))
    machine = record["machine"].get("gpu") or record["machine"].get("cpu")
    where = f"{machine}, {found['inputs']}, {bench}"
    return float(found["tokens_per_second"]), where
