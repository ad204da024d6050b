"""Make an index of a file's texts, or add to it and delete from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmcond.data.candidates import has_column, read_collection, text_column, text_file
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.readers import suffix_of
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.heads.guide import Guide
from llmcond.runs.embedder import guides_json
from llmcond.search import Index
from llmcond.search.columns import infer_types
from llmcond.search.table import Table
from llmcond.workflows.options.texts import IndexOptions

#: In the place of a guide: the one that is there is removed.
NO_GUIDE = "none"


@dataclass(frozen=True)
class Indexed(Displayed):
    """What an index holds, and what became of the texts.

    Attributes:
        texts: how many it holds.
        conditions: those that it holds vectors for.
        guides: those of its conditions.
    """

    out: Path
    texts: int
    added: int
    replaced: int
    unchanged: int
    deleted: int
    conditions: Sequence[str]
    guides: Mapping[str, Guide] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        own = super().to_json()
        del own["guides"]
        return own | guides_json(self.guides)


def index_texts(options: IndexOptions) -> Indexed:
    """Make an index of a file's texts, or change one; texts are deleted before others are added.

    Raises:
        UserError: texts, ids or columns that are wrong, or as of :meth:`Index.build`.
        DiskFullError: no room; the same command goes on.
    """
    texts, text, out = options.texts, options.text, Path(options.out)
    keep, id_column, guide = options.keep, options.id, options.guide
    made_by: dict[str, Any] = {
        name: getattr(options, name) for name in ("run", "model", "head", "prompt", "device")
    }
    conditions = options.conditions()
    labelled = _read_guide(guide, text, conditions)
    of_guide = [one.condition for one in labelled if one.condition is not None]
    conditions = list(dict.fromkeys([*conditions, *of_guide]))
    deleted, ids = 0, list(options.delete)
    if len(ids) == 1 and Path(ids[0]).is_file():
        ids = text_file(Path(ids[0]), "ids", "id")
    if ids:
        deleted = Index.build(out, **made_by).delete(ids)
    if texts is None:
        index = Index.build(out, conditions=conditions, **made_by)
    else:
        others = [*keep, *([id_column] if id_column else [])]
        column = text_column(partial(has_column, texts), text)
        found = read_collection(texts, column, list(dict.fromkeys(others)))
        columns: Mapping[str, Any] = {name: found.columns[name] for name in keep}
        if suffix_of(found.file) in (".csv", ".tsv"):
            columns = infer_types(columns, Table(out).schema())
        index = Index.build(
            out,
            found.texts,
            ids=found.columns[id_column] if id_column else None,
            columns=columns,
            conditions=conditions,
            **made_by,
        )
    for own in labelled:
        index.follow(own)
    if _removes(guide):
        for condition in conditions:
            index.unguide(condition)
    done = index.written
    counts = (done.added, done.replaced, done.unchanged)
    return Indexed(out, len(index), *counts, deleted, index.conditions, index.guides)


def _removes(guide: Any) -> bool:
    return isinstance(guide, str) and guide == NO_GUIDE  # a table compares each of its cells


def _read_guide(given: Any, text: str | None, conditions: Sequence[str]) -> list[LabelledTexts]:
    """Return the labelled texts of a guide for each of its conditions; none without a guide."""
    if _removes(given) and not conditions:
        raise UserError("--guide none removes the guide of a --condition; name it.")
    if given is None or _removes(given):
        return []
    return read_guide(given, text, conditions, closed=False)
