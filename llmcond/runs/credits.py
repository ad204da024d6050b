"""The credits of a trained model: the works that it derives from, with their licences.

The file ``credits.json`` lies in the folder of the model. It travels with copies of the model, and
model cards show it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen

from llmcond.encoders.checkpoints.adapter import CREDITS
from llmcond.records import RECORD, read_record

FORMAT = 1

#: Names and addresses of licences by SPDX identifier.
LICENCES = {
    "Apache-2.0": ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    "CC-BY-3.0": ("CC BY 3.0", "https://creativecommons.org/licenses/by/3.0/"),
    "CC-BY-4.0": ("CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/"),
    "CC0-1.0": ("CC0 1.0", "https://creativecommons.org/publicdomain/zero/1.0/"),
    "MIT": ("MIT", "https://opensource.org/license/mit"),
}


@dataclass(frozen=True)
class Work:
    """A model or dataset that a model derives from.

    Attributes:
        name: its name.
        use: what it was used as.
        authors: its authors.
        licence: SPDX identifier of its licence.
        url: its address.
        origin: what is known about its sources.
        dataset: its name as a dataset on the hub; empty if it is not there.
    """

    name: str
    use: str
    authors: str
    licence: str
    url: str
    origin: str = ""
    dataset: str = ""


@dataclass(frozen=True)
class Credits:
    """The credits of a model.

    Attributes:
        licence: SPDX identifier of the licence of the model's weights.
        works: the works that it derives from.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    licence: str
    works: Annotated[Sequence[Work], MinLen(1)]

    @property
    def metadata(self) -> dict[str, Any]:
        """The licence and the datasets in a model card's metadata."""
        datasets = [work.dataset for work in self.works if work.dataset]
        return {"license": self.licence.lower(), **({"datasets": datasets} if datasets else {})}

    def to_markdown(self) -> str:
        """Return a section of a model card. No text of the credits is interpreted as Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "## Data and licences\n"
        yield f"The weights of this model are under the licence {_licence_link(self.licence)}."
        yield "They derive from the works in this table, and contain no text of the data."
        yield "If you share the model, or publish work with it, name these works and licences.\n"
        yield "| work | used as | authors | licence |\n|---|---|---|---|"
        for work in self.works:
            cells = (_link(work.name, work.url), _plain(work.use), _plain(work.authors))
            yield f"| {' | '.join(cells)} | {_licence_link(work.licence)} |"
        for work in self.works:
            if work.origin:
                yield f"\n{_plain(work.name)}: {_plain(work.origin)}"


def read_credits(folder: Path) -> Credits | None:
    """Read the credits of the model in a folder; None if it has none.

    Raises:
        UserError: the file cannot be read.
        LlmcondError: the file is damaged, or a newer version wrote it.
    """
    path = folder / CREDITS
    if not path.is_file():
        return None
    return read_record(path, Credits, "Copy it again.", newest=FORMAT)


def _licence_link(identifier: str) -> str:
    return _link(*LICENCES.get(identifier, (identifier, "")))


def _link(text: str, url: str) -> str:
    is_address = re.fullmatch(r"https://[\w./~%+-]+", url) is not None
    return f"[{_plain(text)}]({url})" if is_address else _plain(text)


def _plain(text: str) -> str:
    """Escape a text, which may come from somebody else's model, for one line of Markdown."""
    return re.sub(r"([\\`*_{}\[\]#|!~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
