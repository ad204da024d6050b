"""Extraction of a dataset's features under prompts into a run."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from llmcond.bundled import bundled_names
from llmcond.data.datasets import DataOptions
from llmcond.display import Displayed
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.features.extract import COUNTED_FIRST, WINDOW, Extraction
from llmcond.features.keys import KeyIndex
from llmcond.features.location import resolve_store_uri
from llmcond.features.missing import MissingCount, count_missing, merge_counts
from llmcond.features.store import FeatureStore, StoreDtype
from llmcond.log import log
from llmcond.prompts import Prompt, list_fields, load_prompt
from llmcond.runs import (
    Run,
    RunExistsError,
    create_run,
    open_any_run,
    portable_model_name,
    run_exists,
)
from llmcond.runs.extraction import LazyEncoder, extract_run
from llmcond.runs.processes import check_workers, worker_processes
from llmcond.scale.extraction import make_ray_execution
from llmcond.scale.pool import RayCluster
from llmcond.tasks import AnyTask, Data, find_task
from llmcond.workflows.options.encoding import ExtractOptions
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
    record: Mapping[str, Mapping[str, Any]]

    @override
    def to_json(self) -> dict[str, Any]:
        prompts = {
            name: {
                **self.record[name],
                "n_tokens": extraction.n_tokens,
                "seconds": round(extraction.seconds, 3),
            }
            for name, extraction in self.prompts.items()
        }
        encoder_fields = {
            "encoder": self.encoder,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
        }
        return {"run": str(self.run), **encoder_fields, "prompts": prompts}


def extract(options: ExtractOptions) -> ExtractResult:
    """Extract the features of a dataset under prompts into a run, without repeating existing work.

    Raises:
        UserError: the options are invalid, or the run exists with another encoder or other data.
        LlmcondError: the encoder cannot be loaded or fails.
    """
    model, run_folder, encoder_options = options.model, Path(options.run), options.encoder_options()
    workers, cluster = options.workers, options.cluster()
    prepared = prepare_extraction(options)
    existing, resolved, prompts = prepared.existing, prepared.resolved, prepared.prompts
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    if cluster is None:
        check_workers(workers, resolved)
    created = None
    if prepared.dataset is not None:
        dtype: StoreDtype = options.store_dtype or "float16"
        if prepared.store is not None:  # raises an error before the run is created
            FeatureStore(prepared.store, resolved.identity, dtype)
        with suppress(RunExistsError):  # another process created the run meanwhile: join it
            created = create_run(
                run_folder, model, resolved, prepared.dataset, dtype, prepared.task, prepared.store
            )
        prepared.dataset = None  # frees memory, because the run reads its own copy
    run = created or existing or open_any_run(run_folder)
    if run is not created:
        check_run(run, resolved, options.data_options(), options.store_dtype, prepared.store)
        run.record_model(portable_model_name(model, resolved))
    log.info(
        f"{resolved.checkpoint.name} in {resolved.identity.dtype}"
        + ("" if resolved.identity.quantize == "none" else f" ({resolved.identity.quantize})")
        + f" on {resolved.device}, "
        f"{resolved.identity.pooling} pooling -> {run_folder}"
    )
    try:
        with ExitStack() as stack:
            if cluster is None:
                processes = worker_processes(
                    workers, model, encoder_options, resolved, run_folder, prompts
                )
                before_encoding = stack.enter_context(processes)
                encoder = LazyEncoder(resolved, before_load=before_encoding, processes=workers)
            else:
                actors = make_ray_execution(
                    cluster, portable_model_name(model, resolved), resolved, run.store()
                )
                encoder = LazyEncoder(resolved, execute=stack.enter_context(actors))
            missing = _count_missing(run, prompts)
            return _extract_prompts(run, encoder, prompts, missing)
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


def prepare_extraction(options: ExtractOptions) -> PreparedExtraction:
    """Read and check everything that an extraction needs.

    Raises:
        UserError: the options, the data or a prompt are invalid.
        LlmcondError: the hub cannot be reached.
    """
    model, encoder_options, cluster = options.model, options.encoder_options(), options.cluster()
    run_folder, data = Path(options.run), options.data_options()
    store_uri = None if options.store is None else resolve_store_uri(options.store)
    existing = open_any_run(run_folder) if run_exists(run_folder) else None
    if existing is not None and encoder_options.runtime == "auto":
        encoder_options = replace(encoder_options, runtime=existing.runtime)
    # Errors in files are reported before a model is searched for or downloaded.
    named_prompts = [load_prompt(name) for name in options.prompt]
    task = resolve_task(existing, options.task)
    dataset = None if existing else read_data(task, replace(data, extra=list_fields(named_prompts)))
    resolved = (
        resolve(model, encoder_options)
        if cluster is None
        else _resolve_for_actors(model, encoder_options, cluster)
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
    trained = (
        read_trained_prompts(folder or checkpoint.folder) if checkpoint.recorded_settings else {}
    )
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
    model: str, encoder_options: EncoderOptions, cluster: RayCluster
) -> ResolvedEncoder:
    """Resolve the encoder for actors on a cluster, even if this machine has no GPU."""
    if encoder_options.device not in ("auto", "cuda" if cluster.gpus_per_actor else "cpu"):
        raise UserError(
            f"device is {encoder_options.device!r}, but with --scale ray, actors compute on the "
            "GPUs from --gpus-per-actor, or otherwise on CPUs. Leave out --device."
        )
    if not cluster.gpus_per_actor:
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


def check_named_once(prompts: Sequence[Prompt]) -> None:
    """Raise a UserError if two prompts have the same name."""
    for name, count in Counter(prompt.name for prompt in prompts).items():
        if count > 1:
            raise UserError(
                f"the prompt {name} was given {count} times. Give it once; rename files that have "
                "the same name in different folders."
            )


def check_prompts(prompts: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]) -> None:
    """Raise a UserError unless prompts have different names and suit the encoder and the task."""
    check_named_once(prompts)
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


def _count_missing(run: Run, prompts: Sequence[Prompt]) -> Sequence[MissingCount | None]:
    """Log how many inputs to encode, and return the missing inputs of each prompt.

    An input that several prompts need counts for the first one. The list holds None for each prompt
    if there are so many inputs that they are counted while they are encoded.
    """
    store, seen = run.store(), KeyIndex()
    inputs = [run.task.inputs(run.data, prompt) for prompt in prompts]
    max_inputs = sum(map(len, inputs))
    if max_inputs > COUNTED_FIRST:
        log.info(f"up to {max_inputs:,} inputs; repeats are counted during encoding")
        return [None] * len(prompts)
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
    missing: Sequence[MissingCount | None],
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
