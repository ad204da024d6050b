"""Extraction of a dataset's features under prompts into a run, and the plan of an extraction."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.metrics import Estimate
from llmcond.base.output import Displayed, format_duration, log
from llmcond.base.package import bundled_names
from llmcond.base.records import check_named_once, read_record
from llmcond.benchmark.shapes import SHAPES
from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.encoder import Concurrency, WorkerThreads
from llmcond.encoders.resolve import is_server
from llmcond.encoders.server import BATCH, CHARACTERS_PER_TOKEN, probe
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.tokenizing import InputTokenizer
from llmcond.features.extract import (
    WINDOW,
    Extraction,
    MissingCount,
    count_missing,
    merge_counts,
    part_size,
)
from llmcond.features.pool import Workers, assign_devices
from llmcond.features.store import FeatureStore, resolve_store_uri, row_bytes
from llmcond.features.view import KeyIndex, StoreDtype
from llmcond.features.workers import SharedExecution, estimate_commits
from llmcond.options.encoding import ExtractOptions
from llmcond.prompts import Prompt, list_fields, load_prompt
from llmcond.runs import (
    Run,
    RunExistsError,
    create_run,
    open_any_run,
    portable_model_name,
    run_exists,
)
from llmcond.runs.open import LazyEncoder, extract_run
from llmcond.tasks import AnyTask, Data, find_task
from llmcond.workflows.training_record import read_trained_prompts

D = TypeVar("D", bound=Data)


@dataclass(frozen=True)
class ExtractResult(Displayed):
    """The result of an extraction.

    Attributes:
        run: the folder of the run.
        encoder: the name of the encoder.
        fingerprint: a digest of everything about the encoder that decides vectors.
        dtype: the number type that the encoder computed in.
        prompts: what was done for each prompt, by its name.
        record: what the run's manifest keeps for each prompt.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> result = llmcond.extract(model="minilm", run="demo", data=rows, prompt=["routed"])
        >>> result.prompts["routed"].n_inputs
        42
    """

    run: Path
    encoder: str
    fingerprint: str
    dtype: str
    prompts: Mapping[str, Extraction]
    record: Mapping[str, Mapping[str, Any]] = field(metadata={"json": ""})

    @override
    def to_json(self) -> dict[str, Any]:
        prompts = {}
        for name, done in self.prompts.items():
            counts = {"n_tokens": done.n_tokens, "seconds": round(done.seconds, 3)}
            prompts[name] = {**self.record[name], **counts}
        return {**super().to_json(), "prompts": prompts}


def extract(options: ExtractOptions) -> ExtractResult:
    """Extract the features of a dataset under prompts into a run, without repeating existing work.

    Raises:
        UserError: the options are invalid, or the run exists with another encoder or other data.
        LlmcondError: the encoder cannot be loaded or fails.
    """
    model, run_folder = options.model, Path(options.run)
    prepared = prepare_extraction(options)
    existing, resolved, prompts = prepared.existing, prepared.resolved, prepared.prompts
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    workers = assign_devices(options.find_workers(), resolved)
    created = None
    if existing is None:
        if prepared.store is not None:  # raises an error before the run is created
            FeatureStore(prepared.store, resolved.identity, options.store_dtype or "float16")
        with suppress(RunExistsError):  # another process created the run meanwhile: join it
            created = prepared.create_run(run_folder, options)
        prepared.dataset = None  # frees memory, because the run reads its own copy
    run = created or existing or open_any_run(run_folder)
    if run is not created:
        check_run(run, resolved, options.data_options(), options.store_dtype, prepared.store)
        run.record_model(portable_model_name(model, resolved))
    identity, encoder = resolved.identity, LazyEncoder(resolved)
    quantized = "" if identity.quantize == "none" else f" ({identity.quantize})"
    computation = f"{identity.dtype}{quantized} on {resolved.device}, {identity.pooling} pooling"
    if resolved.checkpoint.server is not None:
        computation = "the type that the server chose"
    log.info(f"{resolved.checkpoint.name} in {computation} -> {run_folder}")
    try:
        with ExitStack() as stack:
            if workers is not None:
                name = portable_model_name(model, resolved)
                execution = SharedExecution(workers, name, resolved, run.store())
                encoder.execute = stack.enter_context(execution)
            return _extract_prompts(run, encoder, prompts, _count_missing(run, prompts))
    except LlmcondError:
        with suppress(LlmcondError):  # the store itself may be what failed
            if created is not None and not len(created.store()):
                # The run is empty, and would bind the folder to this encoder and these data.
                shutil.rmtree(run_folder, ignore_errors=True)
        raise


@dataclass
class PreparedExtraction:
    """The checked inputs of an extraction, before anything is written.

    Attributes:
        existing: the run, if it exists already.
        task: the task of the run.
        dataset: the dataset of a new run; None if the run exists.
        resolved: the encoder.
        prompts: one or more different prompts.
        store: the store URI that was given; None: the run's default.
    """

    existing: Run | None
    task: AnyTask[Any]
    dataset: Data | None
    resolved: ResolvedEncoder
    prompts: Sequence[Prompt]
    store: str | None

    def create_run(self, folder: Path, options: ExtractOptions) -> Run:
        """Create the run of the dataset in a folder."""
        dtype: StoreDtype = options.store_dtype or "float16"
        inputs: Any = (self.dataset, dtype, self.task, self.store)
        return create_run(folder, options.model, self.resolved, *inputs)


def prepare_extraction(options: ExtractOptions) -> PreparedExtraction:
    """Read and check everything that an extraction needs.

    Raises:
        UserError: the options, the data or a prompt are invalid.
        LlmcondError: the hub cannot be reached.
    """
    model, run_folder, data = options.model, Path(options.run), options.data_options()
    encoder_options, workers = options.encoder_options(), options.find_workers()
    store_uri = None if options.store is None else resolve_store_uri(options.store)
    existing = open_any_run(run_folder) if run_exists(run_folder) else None
    if existing is not None and encoder_options.runtime == "auto":
        encoder_options = replace(encoder_options, runtime=existing.runtime)
    recorded = {} if existing is None else existing.manifest["encoder"]
    if is_server(model) and is_server(recorded.get("model", "")):
        # Vectors of a server are compared with those of the run, up to rounding.
        encoder_options = replace(encoder_options, revision=recorded["revision"])
    # Errors in files are reported before a model is searched for or downloaded.
    named_prompts = [load_prompt(name) for name in options.prompt]
    task = resolve_task(existing, options.task)
    dataset = None if existing else read_data(task, replace(data, extra=list_fields(named_prompts)))
    resolved = (
        resolve(model, encoder_options)
        if workers is None or workers.is_local
        else _resolve_for_actors(model, encoder_options, workers)
    )
    routes = resolved.identity.routes_inside and task.has_conditions
    default = None if routes else task.prompt
    prompts = named_prompts or [
        load_prompt(default) if default else _choose_default_prompt(resolved)
    ]
    check_prompts(prompts, resolved, task)
    check_router_used(prompts, encoder_options, task)
    return PreparedExtraction(existing, task, dataset, resolved, prompts, store_uri)


def _choose_default_prompt(resolved: ResolvedEncoder) -> Prompt:
    """Return the prompt that an encoder was trained with, or otherwise its default prompt."""
    checkpoint = resolved.checkpoint
    folder = checkpoint.members[0].parent if checkpoint.members else checkpoint.adapter
    if not checkpoint.recorded_settings:
        return load_prompt(resolved.default_prompt)
    trained = read_trained_prompts(folder or checkpoint.folder)
    available = bundled_names("prompts")
    for name, digest in trained.items():
        if name in available and (prompt := load_prompt(name)).digest == digest:
            return prompt
    if trained:
        log.info(
            f"{checkpoint.name} was not trained with the prompt {resolved.default_prompt}, which "
            f"is used by default: name the file of {' or '.join(trained)} with --prompt"
        )
    return load_prompt(resolved.default_prompt)


def _resolve_for_actors(
    model: str, encoder_options: EncoderOptions, workers: Workers
) -> ResolvedEncoder:
    """Resolve the encoder for actors on a cluster, even if this machine has no GPU."""
    if encoder_options.device not in ("auto", "cuda" if workers.gpus_each else "cpu"):
        raise UserError(
            f"device is {encoder_options.device!r}, but with --scale ray, actors compute on the "
            "GPUs from --gpus-per-actor, or otherwise on CPUs. Leave out --device."
        )
    if not workers.gpus_each:
        return resolve(model, replace(encoder_options, device="cpu"))
    import torch

    if torch.cuda.is_available():
        return resolve(model, replace(encoder_options, device="cuda"))
    if encoder_options.dtype == "auto":
        raise UserError(
            "this machine has no GPU, so the dtype cannot be chosen automatically, and vectors of "
            "different types cannot be mixed. Add --dtype: bfloat16 for compute capability 8.0 and "
            "above (A100, H100), float16 below."
        )
    return resolve(model, replace(encoder_options, runtime="torch"), device="cuda:0")


def resolve_task(run: Run | None, name: str | None) -> AnyTask[Any]:
    """Return the task of an existing run, or the named task.

    Raises:
        UserError: the run has another task than the named one.
    """
    named_task = None if name is None else find_task(name)
    if run is None:
        return named_task or find_task()
    if named_task is not None and named_task.name != run.task.name:
        raise UserError(
            f"{run.folder} is a run of the task {run.task.name}, not {named_task.name}. Use "
            "another --run, or leave out --task."
        )
    task: AnyTask[Any] = run.task
    return task


def read_data(task: AnyTask[D], data: DataOptions) -> D:
    """Read a dataset, and log its size, decisions made while reading, and oddities."""
    dataset = task.read(data)
    sample = "the bundled sample, as no --data is given"
    source = sample if data.source is None else dataset.source
    log.info(f"data: {source} ({task.count_examples(dataset)})")
    for text in dataset.notes:
        log.info(text)
    task.log_data(dataset)
    return dataset


def check_prompts(prompts: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]) -> None:
    """Raise a UserError unless prompts have different names and suit the encoder and the task."""
    check_named_once("prompt", [prompt.name for prompt in prompts])
    for prompt in prompts:
        obstacle = prompt_obstacle(prompt, resolved, task)
        if obstacle:
            raise UserError(
                f"the prompt {prompt.name} cannot be used with {resolved.checkpoint.name} and the "
                f"task {task.name}: {obstacle}. {list_usable_prompts(resolved, task)}"
            )


def check_router_used(
    prompts: Sequence[Prompt], options: EncoderOptions, task: AnyTask[Any]
) -> None:
    """Raise a UserError for a router inside the encoder that no prompt uses."""
    if options.router in (None, "none") or any(prompt.has_router for prompt in prompts):
        return
    if not task.has_conditions:
        raise UserError(
            f"--router {options.router} weights tokens by a condition, and the task {task.name} "
            "encodes utterances, which have none. Leave out --router."
        )
    several = len(prompts) > 1
    names = ", ".join(prompt.name for prompt in prompts)
    raise UserError(
        f"--router {options.router} would have no effect: the prompt{'s' * several} {names} "
        f"{'name' if several else 'names'} no router. Give --prompt routed, or leave out --router."
    )


def prompt_obstacle(prompt: Prompt, resolved: ResolvedEncoder, task: AnyTask[Any]) -> str:
    """Return why an encoder cannot encode a prompt's inputs for a task; empty if it can."""
    return task.prompt_error(prompt) or prompt.obstacle(resolved.identity)


def list_usable_prompts(resolved: ResolvedEncoder, task: AnyTask[Any]) -> str:
    """Return a sentence that names the bundled prompts for an encoder and a task."""
    bundled = [load_prompt(name) for name in bundled_names("prompts")]
    usable = [prompt.name for prompt in bundled if not prompt_obstacle(prompt, resolved, task)]
    return f"Prompts that can be used: {', '.join(usable)}."


def check_run(
    run: Run,
    resolved: ResolvedEncoder,
    data: DataOptions,
    store_dtype: StoreDtype | None,
    store: str | None,
) -> None:
    """Raise a UserError unless a run has this encoder, storage type, store URI and data."""
    run.check_encoder(resolved)
    if store_dtype not in (None, run.manifest["store_dtype"]):
        raise UserError(
            f"{run.folder} stores features as {run.manifest['store_dtype']}, not {store_dtype}. "
            "Use another --run."
        )
    if store not in (None, run.store_uri):
        raise UserError(
            f"{run.folder} stores features in {run.store_uri}, not in {store}. Use another --run, "
            "or leave out --store."
        )
    recorded_data, options = run.manifest["data"], data.with_defaults(run.data_options)
    if data.source is None:
        if options != run.data_options:
            raise UserError(
                f"{run.folder} holds the data {recorded_data['source']}, which was read with other "
                "options. Name --data as well, and another --run."
            )
        return
    new_dataset = run.task.read(options)
    if new_dataset.digest != recorded_data["digest"]:
        raise UserError(
            f"{run.folder} holds the data {recorded_data['source']} (digest "
            f"{recorded_data['digest']}), but {new_dataset.source} has other examples (digest "
            f"{new_dataset.digest}). Use another --run."
        )


#: Counting more inputs than this takes longer than a few seconds.
_MANY = 1_000_000


def _count_missing(run: Run, prompts: Sequence[Prompt]) -> Sequence[MissingCount]:
    """Log how many inputs to encode, and return the missing inputs of each prompt.

    An input that several prompts need counts for the first one.
    """
    store, seen = run.store(), KeyIndex()
    inputs = [run.task.inputs(run.data, prompt) for prompt in prompts]
    if (size := sum(map(len, inputs))) > _MANY:
        log.info(f"up to {size:,} inputs; counting those that are not stored yet")
    by_prompt = [count_missing(store, prompt_inputs, WINDOW, seen) for prompt_inputs in inputs]
    missing = merge_counts(by_prompt)
    if not missing.n_missing:
        log.info(f"all {missing.n_inputs:,} inputs are stored already; nothing is encoded")
        return by_prompt
    log.info(f"to encode: {missing.n_missing:,} of {missing.n_inputs:,} inputs")
    return by_prompt


def _extract_prompts(
    run: Run,
    encoder: LazyEncoder,
    prompts: Sequence[Prompt],
    missing: Sequence[MissingCount],
) -> ExtractResult:
    extractions, records = {}, {}
    for prompt, prompt_missing in zip(prompts, missing, strict=True):
        previous = run.manifest["prompts"].get(prompt.name)
        extractions[prompt.name], records[prompt.name] = extract_run(
            run, encoder, prompt, prompt_missing
        )
        if previous and previous["prompt"]["digest"] != prompt.digest:
            log.info(f"the prompt {prompt.name} has changed; fit its heads again")
    identity, dtype = run.identity, encoder.resolved.identity.dtype
    return ExtractResult(
        run.folder, run.encoder_name, identity.fingerprint, dtype, extractions, records
    )


# -- the plan of an extraction ------------------------------------------------------------------

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
        cost: the cost of the hours at the given price, or of a server's tokens; None if no price
            was given.
        fragments: the number of the store's new fragments, before small ones are merged.
        commits: the number of commits to the store.
        requests: the number of requests to the server of an encoder; None without a server.

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
    requests: int | None = None

    def rows(self) -> list[dict[str, str]]:
        """Return the plan as the rows of a table.

        Returns:
            One dictionary for each row: ``plan`` is the row's name, and the key ``""`` its text.
        """
        tokens = self.tokens
        interval = f" [{tokens.low:,.0f}, {tokens.high:,.0f}]"
        rows = {f"inputs, {name}": f"{n:,}" for name, n in self.n_inputs.items()}
        rows |= {f"missing, {name}": f"{n:,}" for name, n in self.n_missing.items()}
        rows |= {
            "tokens": f"{tokens.value:,.0f}{interval if tokens.low != tokens.high else ''}",
            "stored": f"{self.n_bytes / 2**20:,.1f} MiB, vectors of {self.dim:,} dimensions",
        }
        if self.requests is not None:
            rows["tokens"] = f"about {tokens.value:,.0f} (characters / {CHARACTERS_PER_TOKEN})"
            rows["requests"] = f"{self.requests:,}, of up to {BATCH} texts"
            rows["time"] = self.rate_of
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


@dataclass(frozen=True)
class _Speed:
    """The fields that are read from a speed measured by ``llmcond bench``."""

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

    machine: dict[str, Any]
    speeds: list[_Speed]


def plan(options: ExtractOptions) -> ExtractionPlan:
    """Return what ``llmcond.workflows.extract.extract`` would do with the same options.

    Without a record of ``llmcond bench``, some inputs are encoded to measure the speed.

    Raises:
        UserError: as ``extract``, or the record has no speed of the encoder.
    """
    model, workers, price = options.model, options.find_workers(), options.price
    prepared = prepare_extraction(options)
    resolved = prepared.resolved
    with tempfile.TemporaryDirectory() as scratch:
        if prepared.existing is None:
            run = prepared.create_run(Path(scratch) / "run", options)
        else:
            run = prepared.existing
            check_run(run, resolved, options.data_options(), options.store_dtype, prepared.store)
        features, seen = run.store(), KeyIndex()
        counts = {
            prompt.name: count_missing(
                features,
                run.task.inputs(run.data, prompt),
                WINDOW,
                seen,
                None if resolved.identity.routes_inside else KeyIndex(),
            )
            for prompt in prepared.prompts
        }
        missing = merge_counts(list(counts.values()))
        passes = missing.passes or missing
        server = resolved.checkpoint.server
        if options.bench is not None:
            resolved.checkpoint.check_weights("--bench")
        tokens, dim = _estimate_tokens(resolved, missing), _read_dim(resolved)
        computed = tokens
        rate: float | None = None
        rate_of, loading = "nothing is missing", None
        if server is not None:
            rate_of = "not measured, as nothing but one short text was sent to the server"
        elif missing.n_missing and options.bench is not None:
            computed = _estimate_tokens(resolved, passes)
            length = computed.value / passes.n_missing
            rate, rate_of = _read_rate(model, resolved, length, Path(options.bench))
        elif missing.n_missing:
            seconds, loading = _measure_seconds(resolved, passes, workers)
            rate, rate_of = tokens.value / seconds, f"a trial on {resolved.device} of this machine"
    # The workers that each encode at the speed of the one that was measured: on a CPU, processes
    # share its cores.
    shares_cpu = workers is None or (workers.is_local and resolved.device == "cpu")
    count = 1 if workers is None or shares_cpu else workers.count or 1
    encoding = computed.times(1 / rate / 3600) if rate else None
    shift = count * (loading or 0) / 3600
    hours = encoding and Estimate(*(hour + shift for hour in astuple(encoding)))
    # A server's price is that of its tokens.
    priced = hours if server is None else tokens.times(1e-6)
    if workers is not None:
        seconds = 3600 * encoding.value / count if encoding else 0.0
        commits = estimate_commits(missing.n_missing, seconds, workers, workers.count or count)
    else:
        threads = Concurrency.for_encoder(resolved).threads
        commits = math.ceil(missing.n_missing / part_size(missing.n_missing or 1, threads))
    return ExtractionPlan(
        encoder=run.encoder_name,
        n_inputs={name: prompt_count.n_inputs for name, prompt_count in counts.items()},
        n_missing={name: prompt_count.n_missing for name, prompt_count in counts.items()},
        tokens=tokens,
        dim=dim,
        n_bytes=round(missing.n_missing * row_bytes(dim, features.dtype)),
        tokens_per_second=rate,
        rate_of=rate_of,
        loading_seconds=loading,
        workers=count,
        hours=hours,
        wall_hours=hours and hours.times(1 / count),
        cost=priced.times(price) if priced and price is not None else None,
        fragments=commits,
        commits=commits,
        requests=None if server is None else math.ceil(missing.n_missing / BATCH),
    )


def _estimate_tokens(resolved: ResolvedEncoder, missing: MissingCount) -> Estimate:
    """Estimate how many tokens the encoder computes for the missing inputs."""
    if resolved.checkpoint.server is not None:
        value = missing.n_characters / CHARACTERS_PER_TOKEN
        return Estimate(value, value, value)
    from llmcond.encoders.loading import load_config, load_tokenizer  # import PyTorch

    member = resolved.list_members()[0]
    config = load_config(member.checkpoint, member.identity.attention)
    loaded = load_tokenizer(member.checkpoint, config)
    tokenizer = InputTokenizer(loaded, member.identity, member.checkpoint.name)
    counts = np.array(
        [
            sum(len(window.ids) for window in windows)
            for windows in tokenizer.windows(missing.sample)
        ],
        dtype=np.float64,
    )
    total, n = missing.n_missing, len(counts)
    if not n:
        return Estimate(0, 0, 0)
    value = float(counts.sum()) * total / n
    error = float(counts.std(ddof=1)) * math.sqrt((1 - n / total) / n) if n > 1 else 0.0
    half = _DEVIATIONS * error * total
    return Estimate(value, value - half, value + half)


def _read_dim(resolved: ResolvedEncoder) -> int:
    if resolved.checkpoint.server is not None:
        return len(probe(resolved.checkpoint.server))
    from llmcond.encoders.loading import load_config, load_dense, vector_width

    members = resolved.list_members()
    config = load_config(members[0].checkpoint, members[0].identity.attention)
    return len(members) * load_dense(members[0], vector_width(config))[1]


def _measure_seconds(
    resolved: ResolvedEncoder, missing: MissingCount, workers: Workers | None
) -> tuple[float, float]:
    """Return the seconds that one process or actor encodes, and those of loading the encoder."""
    import torch

    if resolved.device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "this machine has no GPU to measure the speed on. Give --bench FILE, the output of "
            "`llmcond bench --json` on a machine like those that will encode."
        )
    threads = torch.get_num_threads()
    if workers is not None and not workers.is_local:
        torch.set_num_threads(1)  # an actor has one thread on a CPU
    try:
        began = time.monotonic()
        encoder = LazyEncoder(resolved)()
        loading = time.monotonic() - began
        with closing(WorkerThreads(encoder.concurrency)) as encoding_threads:
            count = encoding_threads.concurrency.threads

            def encode(inputs: Sequence[EncoderInput]) -> float:
                """Encode with all threads, as an extraction does."""
                parts = filter(None, (inputs[first::count] for first in range(count)))
                began = time.monotonic()
                list(encoding_threads.map(encoder.encode_with_counts, list(parts)))
                return time.monotonic() - began

            return _estimate_seconds(missing, encode), loading
    finally:
        torch.set_num_threads(threads)


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
    command = f"llmcond bench --model {model} --json"
    record = read_record(bench, _BenchRecord, f"Write it again: {command}")
    speeds = [
        speed
        for speed in record.speeds
        if speed.precision == precision
        and speed.way in ("packed", "padded")
        and speed.model in names
    ]
    if not speeds:
        available = sorted({f"{speed.model} in {speed.precision}" for speed in record.speeds})
        raise UserError(
            f"{bench} has no speed of {resolved.checkpoint.name} in {precision}; it has "
            f"{', '.join(available) or 'none'}. Measure one: {command}"
        )
    closest = min(speeds, key=lambda speed: abs(math.log(speed.tokens / speed.n / length)))
    machine = record.machine.get("gpu") or record.machine.get("cpu")
    return closest.tokens_per_second, f"{machine}, {closest.inputs}, {bench}"
