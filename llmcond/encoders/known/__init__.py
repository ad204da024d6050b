"""The encoders that are known by name: one TOML file each in this folder, listed in their order.

A file states what a model's own files do not say, say too late, or no longer say to today's
libraries; whatever it leaves out is read from the checkpoint's sentence-transformers files. Any
other encoder works by a hub name or by the path of its folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from llmcond.encoders.settings import SETTINGS, STATED

#: Every encoder is padded on the right, whatever its own code does: positions then start at the
#: first token for every architecture. With rotary positions either side gives the same vectors.
PADDING_SIDE = "right"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Python package that carries a model's weights.

    Attributes:
        folder: where the checkpoint lies, relative to the place packages are installed in.
        weights_sha256: the SHA-256 that ``model.safetensors`` must have.
    """

    name: str
    folder: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What is known of one encoder.

    Attributes:
        repo: official name on the Hugging Face hub.
        n_parameters: of the encoder, heads for other tasks left out.
        poolings: those that it may be pooled by; the first is its authors' own.
        architecture: its config.json, as far as that decides what it computes and how large it is:
            ``model_type`` and sizes. What a checkpoint of this name says itself goes before.
        package: an installed package to take the weights from, before the hub.
        settings: those of an encoder that are known, by their names; others are as the checkpoint's
            files say.
        no_float16: why it may not be computed in float16; empty where it may.
        gated: whether the hub asks for its terms to be accepted.
    """

    repo: str
    dim: int
    n_parameters: int
    licence: str
    poolings: tuple[str, ...]
    architecture: Mapping[str, Any] = field(repr=False)
    settings: Mapping[str, Any]
    alias: str = ""
    package: Package | None = None
    no_float16: str = ""
    gated: bool = False

    @property
    def name(self) -> str:
        """Return the short name where there is one, else the hub name."""
        return self.alias or self.repo

    @property
    def stated(self) -> dict[str, Any]:
        """Return all settings of :data:`STATED`, those that are not known as by default or None."""
        defaults = {name: SETTINGS[name].settled_default for name in STATED}
        return {
            name: self.settings.get(name, None if default is MISSING else default)
            for name, default in defaults.items()
        }


def read_model(path: Path) -> KnownModel:
    """Read the TOML file of one encoder.

    Raises:
        TypeError: a key is missing or unknown.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    if "package" in values:
        values["package"] = Package(**values["package"])
    settings = {name: values.pop(name) for name in STATED if name in values}
    poolings = tuple(values.pop("poolings"))
    settings["pooling"] = next(iter(poolings), None)
    return KnownModel(**values, poolings=poolings, settings=settings)


MODELS: tuple[KnownModel, ...] = tuple(
    read_model(path) for path in sorted(Path(__file__).parent.glob("*.toml"))
)


def default_prompt(instruction_format: str, pooling: str) -> str:
    """Return the bundled prompt for a frozen encoder with this instruction format, or with none.

    Routed pooling was measured for encoders that pool by the mean (docs/results.md).
    """
    routed = pooling == "mean" and not instruction_format
    return "routed" if routed else joint_prompt(instruction_format)


def joint_prompt(instruction_format: str) -> str:
    """Return the bundled prompt that lets an encoder read sentence and condition together."""
    return "cond" if instruction_format else "concat-sent-cond"


def find_model(name: str) -> KnownModel | None:
    """Return the entry with this alias or hub name, whatever its case; None where unknown."""
    wanted = name.lower()
    return next((m for m in MODELS if wanted and wanted in (m.alias, m.repo.lower())), None)


def known_names() -> list[str]:
    """Return every alias and hub name."""
    return [name for model in MODELS for name in (model.alias, model.repo) if name]
