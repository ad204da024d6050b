"""Extract the features of a data set under prompts into a run."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llmcond.bundled import bundled_names
from llmcond.data.datasets import DataOptions
from llmcond.display import Displayed
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.features.extract import COUNTED_FIRST, WINDOW, Extraction
from llmcond.features.keys import KeyIndex
from llmcond.features.location import recorded
from llmcond.features.missing import Missing, count_missing, together
from llmcond.features.store import FeatureStore, StoreDtype
from llmcond.log import log
from llmcond.prompts import Prompt, fields_of, load_prompt
from llmcond.runs import AnyRun, RunExistsError, create_run, open_any_run, run_exists, where_model
from llmcond.runs.extraction import LazyEncoder, extract_own
from llmcond.runs.kind import find_kind, inputs_of
from llmcond.runs.processes import check_workers, worker_processes
from llmcond.scale.extraction import ray_execution
from llmcond.scale.pool import Cluster
from llmcond.tasks import AnyTask, Data, find_task
from llmcond.workflows.account import trained_prompts
from llmcond.workflows.options.encoding import ExtractOptions

D = TypeVar("D", bound=Data)


@dataclass(frozen=True)
class ExtractResult(Displayed):
    """What :func:`extract` did.

    Attributes:
        fingerprint: identifies everything of the encoder that decides vectors.
        dtype: that it computed in.
        prompts: what was done for each prompt, and ``record`` what the manifest keeps of that.
    """

    run: Path
    encoder: str
    fingerprint: str
    dtype: str
    prompts: Mapping[str, Extraction]
    record: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        done = {
            name: {
                **self.record[name],
                "n_tokens": extraction.n_tokens,
                "seconds": round(extraction.seconds, 3),
            }
            for name, extraction in self.prompts.items()
        }
        about = {"encoder": self.encoder, "fingerprint": self.fingerprint, "dtype": self.dtype}
        return {"run": str(self.run), **about, "prompts": done}


def extract(asked: ExtractOptions) -> ExtractResult:
    """Extract the features of a data set under prompts into a run; what is there is not redone.

    The data that ``asked`` names must be the run's own if it exists.
    """
    model, run_folder, options = asked.model, Path(asked.run), asked.encoder_options()
    workers, cluster = asked.workers, asked.cluster()
    prepared = prepare(asked)
    existing, resolved, chosen = prepared.existing, prepared.resolved, prepared.prompts
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    if cluster is None:
        check_workers(workers, resolved)
    created = None
    if prepared.dataset is not None:
        dtype: StoreDtype = asked.store_dtype or "float16"
        if prepared.store is not None:  # whether it can be read, before there is a run
            FeatureStore(prepared.store, resolved.identity, dtype)
        with suppress(RunExistsError):  # another process made it meanwhile: join it
            created = create_run(
                run_folder, model, resolved, prepared.dataset, dtype, prepared.task, prepared.store
            )
        prepared.dataset = None  # the run reads its own
    run = created or existing or open_any_run(run_folder)
    if run is not created:
        check_run(run, resolved, asked.data_options(), asked.store_dtype, prepared.store)
        run.record_model(where_model(model, resolved))
    log.info(
        f"{resolved.checkpoint.name} in {resolved.identity.dtype}"
        + ("" if resolved.identity.quantize == "none" else f" ({resolved.identity.quantize})")
        + f" on {resolved.device}, "
        f"{resolved.identity.pooling} pooling -> {run_folder}"
    )
    try:
        with ExitStack() as stack:
            if cluster is None:
                processes = worker_processes(workers, model, options, resolved, run_folder, chosen)
                before = stack.enter_context(processes)
                encoder = LazyEncoder(resolved, before=before, processes=workers)
            else:
                actors = ray_execution(cluster, where_model(model, resolved), resolved, run.store())
                encoder = LazyEncoder(resolved, execute=stack.enter_context(actors))
            missing = _log_plan(run, chosen)
            return _extract_prompts(run, encoder, chosen, missing)
    except LlmcondError:
        with suppress(LlmcondError):  # the store's, which perhaps is what failed
            if created is not None and not len(created.store()):
                # Nothing came of it, and what is left would bind the folder to this encoder.
                shutil.rmtree(run_folder, ignore_errors=True)
        raise


@dataclass
class Prepared:
    """What an extraction works with, checked; nothing was written.

    Attributes:
        existing: the run, if there is one.
        dataset: that a new run will hold.
        prompts: at least one, and different.
        store: where features are to be; None: where the run has them.
    """

    existing: AnyRun | None
    task: AnyTask[Any]
    dataset: Data | None
    resolved: ResolvedEncoder
    prompts: Sequence[Prompt]
    store: str | None


def prepare(asked: ExtractOptions) -> Prepared:
    """Read and find everything that an extraction takes.

    Raises:
        UserError: something of that is wrong.
        LlmcondError: the hub cannot be reached.
    """
    model, options, cluster = asked.model, asked.encoder_options(), asked.cluster()
    run_folder, data = Path(asked.run), asked.data_options()
    place = None if asked.store is None else recorded(asked.store)
    existing = open_any_run(run_folder) if run_exists(run_folder) else None
    if existing is not None and options.runtime == "auto":
        options = replace(options, runtime=existing.runtime)
    # All that can be wrong in files is found before a model is looked for, or downloaded.
    named = [load_prompt(name) for name in asked.prompt]
    chosen = task_of(existing, asked.task)
    dataset = None if existing else read_data(chosen, replace(data, extra=fields_of(named)))
    resolved = resolve(model, options) if cluster is None else _for_actors(model, options, cluster)
    routes = resolved.identity.routes_inside and find_kind(chosen.kind).has_conditions
    default = None if routes else chosen.prompt
    taken = named or [load_prompt(default) if default else _usual_prompt(resolved)]
    check_prompts(taken, resolved, chosen)
    check_routed(taken, options, chosen)
    return Prepared(existing, chosen, dataset, resolved, taken, place)


def _usual_prompt(resolved: ResolvedEncoder) -> Prompt:
    """Return the prompt that an encoder was trained with, or else the one that suits it."""
    checkpoint = resolved.checkpoint
    folder = checkpoint.members[0].parent if checkpoint.members else checkpoint.adapter
    trained = trained_prompts(folder or checkpoint.folder) if checkpoint.stated else {}
    available = bundled_names("prompts")
    for name, digest in trained.items():
        if name in available and (prompt := load_prompt(name)).digest == digest:
            return prompt
    if trained:
        log.info(
            f"{checkpoint.name} was trained with another prompt than {resolved.default_prompt}, "
            f"which is taken: name the file of {' or '.join(trained)} by --prompt"
        )
    return load_prompt(resolved.default_prompt)


def _for_actors(model: str, options: EncoderOptions, cluster: Cluster) -> ResolvedEncoder:
    """Return the encoder that actors on a cluster have; this machine may have no GPU."""
    if options.device not in ("auto", "cuda" if cluster.gpus_per_actor else "cpu"):
        raise UserError(
            f"device is {options.device!r}, and with --scale ray actors compute on the GPUs that "
            "--gpus-per-actor gives them, else on CPUs. Leave out --device."
        )
    if not cluster.gpus_per_actor:
        return resolve(model, replace(options, device="cpu"))
    import torch

    if torch.cuda.is_available():
        return resolve(model, replace(options, device="cuda"))
    if options.dtype == "auto":
        raise UserError(
            "this machine has no GPU to choose the dtype by, and vectors of different types do not "
            "mix. Add --dtype: bfloat16 from compute capability 8.0 on (A100, H100), float16 "
            "before."
        )
    options = replace(options, device="cpu", runtime="torch")
    return replace(resolve(model, options), device="cuda:0")


def task_of(run: AnyRun | None, name: str | None) -> AnyTask[Any]:
    """Return the task of an existing run, or the one that was named; a UserError if they differ."""
    asked = None if name is None else find_task(name)
    if run is None:
        return asked or find_task()
    if asked is not None and asked.name != run.task.name:
        raise UserError(
            f"{run.folder} is a run of the task {run.task.name}, not {asked.name}. Use another "
            "--run, or leave out --task."
        )
    return run.task


def read_data(task: AnyTask[D], data: DataOptions) -> D:
    """Read a data set, and log what was decided and what is odd about it."""
    found = task.read(data)
    sample = "the bundled sample, as no --data is given"
    log.info(f"data: {sample if data.source is None else found.source} ({task.counted(found)})")
    for text in found.notes:
        log.info(text)
    find_kind(task.kind).log_data(found)
    return found


def check_named_once(prompts: Sequence[Prompt]) -> None:
    """Raise a UserError if two prompts have one name."""
    for name, count in Counter(prompt.name for prompt in prompts).items():
        if count > 1:
            raise UserError(
                f"the prompt {name} was given {count} times. Give it once; files of the same name "
                "in different folders must be renamed."
            )


def check_prompts(prompts: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]) -> None:
    """Raise a UserError unless prompts have different names, and go with an encoder and a task."""
    check_named_once(prompts)
    for prompt in prompts:
        obstacle = prompt_obstacle(prompt, resolved, task)
        if obstacle:
            raise UserError(
                f"the prompt {prompt.name} does not go with {resolved.checkpoint.name} and the "
                f"task {task.name}: {obstacle}. {usable_prompts(resolved, task)}"
            )


def check_routed(prompts: Sequence[Prompt], options: EncoderOptions, task: AnyTask[Any]) -> None:
    """Raise a UserError for a router inside the encoder that no prompt gives anything to do."""
    if options.router in (None, "none") or any(prompt.routes for prompt in prompts):
        return
    if not find_kind(task.kind).has_conditions:
        raise UserError(
            f"--router {options.router} weights tokens by a condition, and the task {task.name} "
            "encodes utterances, which have none. Leave out --router."
        )
    several = len(prompts) > 1
    names = ", ".join(prompt.name for prompt in prompts)
    raise UserError(
        f"--router {options.router} would change nothing: the prompt{'s' * several} {names} "
        f"{'name' if several else 'names'} no router. Give --prompt routed, or leave out --router."
    )


def prompt_obstacle(prompt: Prompt, resolved: ResolvedEncoder, task: AnyTask[Any]) -> str:
    """Return why an encoder cannot take a prompt's inputs of a task; empty if it can."""
    return find_kind(task.kind).obstacle(prompt) or prompt.obstacle(resolved.identity)


def usable_prompts(resolved: ResolvedEncoder, task: AnyTask[Any]) -> str:
    """Return a sentence that names the bundled prompts which go with an encoder and a task."""
    bundled = [load_prompt(name) for name in bundled_names("prompts")]
    usable = [own.name for own in bundled if not prompt_obstacle(own, resolved, task)]
    return f"Prompts that do: {', '.join(usable)}."


def check_run(
    run: AnyRun,
    resolved: ResolvedEncoder,
    data: DataOptions,
    store_dtype: StoreDtype | None,
    store: str | None,
) -> None:
    """Check that a run is of the same encoder, storage type, place of features, and data."""
    run.check_encoder(resolved)
    if store_dtype not in (None, run.manifest["store_dtype"]):
        raise UserError(
            f"{run.folder} stores features as {run.manifest['store_dtype']}, not {store_dtype}. "
            "Use another --run."
        )
    if store not in (None, run.store_root):
        raise UserError(
            f"{run.folder} stores features in {run.store_root}, not in {store}. Use another --run, "
            "or leave out --store."
        )
    known, asked = run.manifest["data"], data.like(run.read_by)
    if data.source is None:
        if asked != run.read_by:
            raise UserError(
                f"{run.folder} holds the data {known['source']}, read in another way than asked "
                "for. Name the --data too, and another --run."
            )
        return
    given = run.task.read(asked)
    if given.digest != known["digest"]:
        raise UserError(
            f"{run.folder} holds the data {known['source']} (digest {known['digest']}), and "
            f"{given.source} has other examples (digest {given.digest}). Use another --run."
        )


def _log_plan(run: AnyRun, prompts: Sequence[Prompt]) -> Sequence[Missing | None]:
    """Log how much is to be encoded; return what each prompt lacks after those before it.

    None where there are so many inputs that they are counted while they are encoded.
    """
    store, seen = run.store(), KeyIndex()
    inputs = [inputs_of(run.task, run.data, prompt) for prompt in prompts]
    most = sum(map(len, inputs))
    if most > COUNTED_FIRST:
        log.info(f"up to {most:,} inputs; repeats are counted while they are encoded")
        return [None] * len(prompts)
    by_prompt = [count_missing(store, own, WINDOW, seen) for own in inputs]
    missing = together(by_prompt)
    if not missing.n_missing:
        log.info(f"all {missing.n_inputs:,} inputs are there; nothing is encoded")
        return by_prompt
    log.info(f"to encode: {missing.n_missing:,} of {missing.n_inputs:,} inputs")
    return by_prompt


def _extract_prompts(
    run: AnyRun, encoder: LazyEncoder, prompts: Sequence[Prompt], missing: Sequence[Missing | None]
) -> ExtractResult:
    done, records = {}, {}
    for prompt, lacking in zip(prompts, missing, strict=True):
        before = run.manifest["prompts"].get(prompt.name)
        done[prompt.name], records[prompt.name] = extract_own(run, encoder, prompt, lacking)
        if before and before["prompt"]["digest"] != prompt.digest:
            log.info(f"the prompt {prompt.name} has changed; fit its heads again")
    identity, dtype = run.identity, encoder.resolved.identity.dtype
    return ExtractResult(run.folder, run.encoder_name, identity.fingerprint, dtype, done, records)
