"""Extract the features of a data set under prompts into a run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmcond.config import bundled_names
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.data.rows import leaked_pairs
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.features.extract import CHUNK, WINDOW
from llmcond.features.keys import KeyIndex
from llmcond.features.missing import Missing, count_missing, together
from llmcond.features.store import StoreDtype
from llmcond.log import log
from llmcond.progress import duration
from llmcond.prompts import Prompt, load_prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.runs import Run, RunExistsError, create_run, open_run, run_exists, where_model
from llmcond.runs.extraction import LazyEncoder, extract_rows, extraction_record
from llmcond.runs.processes import WorkerProcesses, check_workers


def extract(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    data: DataOptions,
    prompts: Sequence[str] = (),
    store_dtype: StoreDtype | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Extract the features of a data set under prompts into a run; what is there is not redone.

    Args:
        model: alias, hub name or folder.
        options: how the encoder computes.
        run_folder: made if it is not there.
        data: the rows; must be the run's own if it exists.
        prompts: names or files; none is the one that suits the encoder.
        store_dtype: type that vectors are stored in; None: the run's, or float16 for a new run.
        workers: processes that share the work, one a GPU; on a CPU they share its cores.

    Returns:
        What was done, for each prompt.

    Raises:
        UserError: wrong input, or a run of another encoder or other data.
        LlmcondError: the hub cannot be reached, or the encoder fails.
    """
    existing = open_run(run_folder) if run_exists(run_folder) else None
    # All that can be wrong in files is found before a model is looked for, or downloaded.
    named = [load_prompt(name) for name in prompts]
    dataset = None if existing else read_and_tell(data)
    resolved = resolve(model, options)
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    chosen = named or [load_prompt(resolved.default_prompt)]
    check_prompts(chosen, resolved)
    check_workers(workers, resolved)
    created = None
    if dataset is not None:
        with suppress(RunExistsError):  # another process made it meanwhile: join it
            created = create_run(run_folder, model, resolved, dataset, store_dtype or "float16")
    run = created or existing or open_run(run_folder)
    if run is not created:
        _check_run(run, resolved, data, store_dtype)
        run.record_model(where_model(model, resolved))
    log.info(
        f"{resolved.checkpoint.name} in {resolved.identity.dtype}"
        + ("" if resolved.identity.quantize == "none" else f" ({resolved.identity.quantize})")
        + f" on {resolved.device}, "
        f"{resolved.identity.pooling} pooling -> {run_folder}"
    )
    try:
        with WorkerProcesses(workers, model, options, resolved, run_folder, chosen) as processes:
            encoder = LazyEncoder(resolved, before=processes.start)
            missing = _log_plan(run, encoder, chosen, workers)
            return _extract_prompts(run, encoder, chosen, missing)
    except LlmcondError:
        if created is not None and not len(created.store()):
            # Nothing came of it, and what is left would bind the folder to this encoder.
            shutil.rmtree(run_folder, ignore_errors=True)
        raise


def read_and_tell(data: DataOptions) -> Dataset:
    """Read a data set and tell what was decided and what is odd about it."""
    dataset = data.read()
    for text in dataset.notes:
        log.info(text)
    for name, rows in dataset.splits.items():
        unrated = int((~rows.rated).sum())
        if unrated:
            log.info(f"{name}: {unrated:,} of {len(rows):,} rows are unrated and not used")
        leaked = leaked_pairs(rows, dataset.splits["train"]) if name != "train" else 0
        if leaked:
            log.warning(f"{leaked:,} sentence pairs of {name} are in train too")
    return dataset


def check_named_once(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts of one name.

    Raises:
        UserError: naming the prompt.
    """
    names = [prompt.name for prompt in prompts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"the prompt {name} was given {names.count(name)} times. Give it once; files of "
                "the same name in different folders must be renamed."
            )


def check_prompts(prompts: Sequence[Prompt], resolved: ResolvedEncoder) -> None:
    """Refuse prompts of one name, and those whose inputs an encoder cannot take.

    Raises:
        UserError: naming the prompt, and those that go with the encoder.
    """
    check_named_once(prompts)
    for prompt in prompts:
        obstacle = prompt.obstacle(resolved.identity)
        if obstacle:
            others = [
                name
                for name in bundled_names("prompts")
                if not load_prompt(name).obstacle(resolved.identity)
            ]
            raise UserError(
                f"the prompt {prompt.name} does not go with {resolved.checkpoint.name}: "
                f"{obstacle}. Prompts that do: {', '.join(others)}."
            )


def _check_run(
    run: Run, resolved: ResolvedEncoder, data: DataOptions, store_dtype: StoreDtype | None
) -> None:
    """Refuse a run of another encoder, another storage type or other data."""
    run.check_encoder(resolved)
    if store_dtype not in (None, run.manifest["store_dtype"]):
        raise UserError(
            f"{run.folder} stores features as {run.manifest['store_dtype']}, not {store_dtype}. "
            "Use another --run."
        )
    recorded = run.manifest["data"]
    read_by = (run.columns, run.scale, recorded["split_seed"])
    if data.source is None:
        asked = data.like(*read_by)
        if (asked.columns, asked.scale, asked.split_seed) != read_by:
            raise UserError(
                f"{run.folder} holds the data {recorded['source']}, read in another way than asked "
                "for. Name the --data too, and another --run."
            )
        return
    digest = data.like(*read_by).read().digest
    if digest != recorded["digest"]:
        raise UserError(
            f"{run.folder} holds the data {recorded['source']} (digest {recorded['digest']}), and "
            f"{data.source} has other rows or ratings (digest {digest}). Use another --run."
        )


def _log_plan(
    run: Run, encoder: LazyEncoder, prompts: Sequence[Prompt], workers: int
) -> list[Missing]:
    """Log how much is to be encoded, and where it is much, about how long that takes.

    Returns:
        What each prompt lacks once those before it are extracted.
    """
    splits, store, seen = [run.rows(name) for name in run.splits], run.store(), KeyIndex()
    by_prompt = [
        count_missing(store, SplitInputs(splits, prompt), WINDOW, seen) for prompt in prompts
    ]
    missing = together(by_prompt)
    if not missing.n_missing:
        log.info(f"all {missing.n_inputs:,} inputs are there; nothing is encoded")
        return by_prompt
    plan = f"to encode: {missing.n_missing:,} of {missing.n_inputs:,} inputs"
    if missing.n_missing > CHUNK:
        seconds = missing.seconds(encoder().encode_counted) / workers
        plan += f", in about {duration(seconds)}"
    log.info(plan)
    return by_prompt


def _extract_prompts(
    run: Run, encoder: LazyEncoder, prompts: Sequence[Prompt], missing: Sequence[Missing]
) -> dict[str, Any]:
    done: dict[str, Any] = {}
    resolved = encoder.resolved
    for prompt, lacking in zip(prompts, missing, strict=True):
        splits = [run.rows(name) for name in run.splits]
        extraction = extract_rows(run.store(), encoder, prompt, splits, lacking)
        before = run.manifest["prompts"].get(prompt.name)
        if before and before["prompt"]["digest"] != prompt.digest:
            log.info(f"the prompt {prompt.name} has changed; fit its heads again")
        record = extraction_record(extraction, resolved)
        run.record_prompt(prompt, record)
        done[prompt.name] = {
            **record,
            "n_tokens": extraction.n_tokens,
            "seconds": round(extraction.seconds, 3),
        }
    return {
        "run": str(run.folder),
        "encoder": run.encoder_name,
        "fingerprint": run.identity.fingerprint,
        "dtype": resolved.identity.dtype,
        "prompts": done,
    }
