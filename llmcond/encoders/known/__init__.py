"""The encoders that are known by name, one TOML file each, in the order of the file names.

Such a file states what the model's files do not say, what they say only after the download, or what
current libraries no longer read from them. Other settings are read from the checkpoint's
sentence-transformers files. Any other encoder works by its hub name or by the path of its folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from llmcond.encoders.settings import SETTINGS, STATED

#: Every encoder is padded on the right, whatever the model's original code does, so that positions
#: start at the first token in every architecture. With rotary positions, both sides give the same
#: vectors.
PADDING_SIDE = "right"


@dataclass(frozen=True, slots=True)
class Packaged:
    """Where Python packages contain a model's weights.

    Attributes:
        extra: extra of llmcond that installs one of the packages.
        weights_sha256: expected SHA-256 of ``model.safetensors``.
        folders: for each package, the folder of the checkpoint, relative to the folder that
            packages are installed in.
    """

    extra: str
    weights_sha256: str
    folders: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The facts about a known encoder.

    Attributes:
        repo: official name on the Hugging Face hub.
        dim: size of its vectors.
        n_parameters: number of parameters, without heads for other tasks.
        licence: licence of the weights.
        poolings: supported poolings; the first is the default, which its authors use.
        architecture: the entries of its config.json that decide its computation and its size, that
            is, ``model_type`` and sizes. The config.json of a checkpoint takes precedence.
        settings: encoder settings by name. Settings that are not in it come from the
            checkpoint's files.
        alias: short name; empty if it has none.
        packaged: the packages whose weights are used, if one is installed, instead of the hub's.
        no_float16: why it must not be computed in float16; empty if it may.
        gated: whether users must accept its terms on the hub.
        english_only: whether it was trained on English texts only, or nearly so.
    """

    repo: str
    dim: int
    n_parameters: int
    licence: str
    poolings: tuple[str, ...]
    architecture: Mapping[str, Any] = field(repr=False)
    settings: Mapping[str, Any]
    alias: str = ""
    packaged: Packaged | None = None
    no_float16: str = ""
    gated: bool = False
    english_only: bool = False

    @property
    def name(self) -> str:
        """The alias, or the hub name if there is no alias."""
        return self.alias or self.repo

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings in ``STATED``; unknown ones have their default, or None without one."""
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
    if "packaged" in values:
        values["packaged"] = Packaged(**values["packaged"])
    settings = {name: values.pop(name) for name in STATED if name in values}
    poolings = tuple(values.pop("poolings"))
    settings["pooling"] = next(iter(poolings), None)
    return KnownModel(**values, poolings=poolings, settings=settings)


MODELS: tuple[KnownModel, ...] = tuple(
    read_model(path) for path in sorted(Path(__file__).parent.glob("*.toml"))
)


def explain_no_float16(known: KnownModel | None, config: Mapping[str, Any]) -> str:
    """Return why an encoder must not be computed in float16; empty if it may.

    Activations of T5, and of Gemma from its second version on, exceed the largest float16, 65,504.
    """
    if known is not None and known.no_float16:
        return known.no_float16
    kind = str(config.get("model_type"))
    old_gemma = kind in ("gemma", "paligemma", "recurrent_gemma")
    if ("gemma" in kind and not old_gemma) or kind in ("t5", "mt5", "umt5", "longt5"):
        return f"activations of the architecture {kind} overflow; use bfloat16 or float32"
    return ""


def default_prompt(instruction_format: str, pooling: str) -> str:
    """Return the default bundled prompt of a frozen encoder.

    Routed pooling was measured only with encoders that use mean pooling (docs/results.md).
    """
    routed = pooling == "mean" and not instruction_format
    return "routed" if routed else joint_prompt(instruction_format)


def joint_prompt(instruction_format: str) -> str:
    """Return the bundled prompt with which an encoder reads sentence and condition together."""
    return "cond" if instruction_format else "concat-sent-cond"


def find_model(name: str) -> KnownModel | None:
    """Return the entry with this alias or hub name, ignoring case; None if there is none."""
    folded_name = name.lower()
    return next(
        (m for m in MODELS if folded_name and folded_name in (m.alias, m.repo.lower())), None
    )


def known_names() -> list[str]:
    """Return every alias and hub name."""
    return [name for model in MODELS for name in (model.alias, model.repo) if name]
