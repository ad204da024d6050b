"""Building an index of a file's texts, and adding texts to it or deleting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from llmcond.base.errors import UserError
from llmcond.base.files import is_folder, path_exists
from llmcond.base.options import IndexPrecision
from llmcond.base.output import Displayed
from llmcond.base.text import distinct_conditions, ignored_by, without_ignored
from llmcond.data.datasets import read_collection, read_text_file
from llmcond.data.formats import ReadOptions
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.heads.guide import Guide, Guides
from llmcond.options.texts import IndexOptions
from llmcond.runs.embedder import guides_json
from llmcond.search import Index
from llmcond.search.table import (
    IndexRows,
    TextTable,
    check_column_names,
    check_row_ids,
    digest_ids,
    infer_types,
)

#: The value of ``--guide`` that removes the guide of a condition.
NO_GUIDE = "none"
#: The column of the texts in an index of their answers.
ORIGINAL = "original"


@dataclass(frozen=True)
class IndexResult(Displayed):
    """The state of an index after a change, and the counts of changed texts.

    Attributes:
        out: the folder of the index.
        texts: the number of texts in the index.
        added: the number of texts added.
        replaced: the number of texts replaced.
        unchanged: the number of given texts that the index had already.
        deleted: the number of texts deleted.
        conditions: the conditions that the index has vectors for.
        guides: the guide of each condition that has one.
        precision: the number type of the vectors under conditions.
        truncate_dim: the number of leading dimensions that they keep; None: all.
    """

    out: Path
    texts: int
    added: int
    replaced: int
    unchanged: int
    deleted: int
    conditions: Sequence[str]
    guides: Mapping[Any, Guide] = field(default_factory=Guides, metadata={"json": ""})
    precision: IndexPrecision = "float16"
    truncate_dim: int | None = None

    @override
    def to_json(self) -> dict[str, Any]:
        return super().to_json() | guides_json(self.guides)


def index_texts(options: IndexOptions) -> IndexResult:
    """Build an index of a file's texts, or change one: delete texts first, and then add others.

    Raises:
        UserError: the texts, ids or columns are invalid, or as ``Index.build``.
        DiskFullError: the disk is full; the same command continues from there.
    """
    texts, out, keep, id_column = options.texts, Path(options.out), options.keep, options.id
    check_column_names(dict.fromkeys(keep))
    model_options: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("head", "prompt", "device", "truncate_dim", "precision")
    }
    if options.run is not None or options.model is not None:
        model_options["run"] = options.resolve_folder()
    conditions = options.conditions()
    read = options.read_options()
    labelled = _read_guide(options, conditions)
    guide_conditions = [one.condition for one in labelled if one.condition is not None]
    conditions = distinct_conditions([*conditions, *guide_conditions])
    deleted, ids = 0, list(options.delete)
    if len(ids) == 1 and path_exists(Path(ids[0])) and not is_folder(Path(ids[0])):
        ids = read_text_file(
            Path(ids[0]), "ids", "id", ReadOptions(read.encoding, skip_empty=read.skip_empty)
        )
    plain = [without_ignored(condition) for condition in conditions]
    added: dict[str, Any] = {}
    if texts is not None:
        keep = list(dict.fromkeys([*keep, *options.ignore_column]))
        if options.answers is None and ORIGINAL in TextTable(out).columns and ORIGINAL not in keep:
            raise UserError(
                f"{out} has a column {ORIGINAL!r}, as indexes of answers have. Give --answers, or "
                f"--keep {ORIGINAL} if the texts have this column."
            )
        other_columns = [*keep, *([id_column] if id_column else [])]
        collection = read_collection(texts, options.text, list(dict.fromkeys(other_columns)), read)
        columns: Mapping[str, Any] = {name: collection.columns[name] for name in keep}
        if not collection.has_types:
            columns = infer_types(columns, TextTable(out).schema())
        indexed, row_ids = collection.texts, collection.columns[id_column] if id_column else None
        if row_ids is not None:
            check_row_ids(row_ids, indexed, collection.numbers)
        if options.answers is not None:
            indexed, row_ids = (
                _read_answers(options, plain, indexed),
                row_ids or digest_ids(indexed),
            )
            columns = {**columns, ORIGINAL: collection.texts}
        added = {"texts": indexed, "ids": row_ids, "columns": columns}
    if ids:
        if added:
            # Nothing is deleted if texts, ids or columns are invalid.
            IndexRows.validate(**added).plan_update(TextTable(out))
        deleted = Index.build(out, **model_options).delete(ids)
    index = Index.build(out, **added, conditions=plain, **model_options)
    _fit_maps(index, options, conditions, labelled)
    written = index.written
    counts = (written.added, written.replaced, written.unchanged)
    form = index.precision, index.truncate_dim
    return IndexResult(out, len(index), *counts, deleted, index.conditions, index.guides, *form)


def _read_answers(
    options: IndexOptions, conditions: Sequence[str], texts: Sequence[str]
) -> list[str]:
    """Return the answers of texts, which are indexed in place of them.

    Raises:
        UserError: a text has no answer, there is not one condition, or a column has the name of
            that of the original texts.
    """
    if len(conditions) != 1 or options.answers_as != "answer" or ORIGINAL in options.keep:
        raise UserError(
            "an index holds the answers to one condition, and their texts in the column "
            f"{ORIGINAL!r}. Give --answers with one --condition, without --answers-as both, and "
            f"leave {ORIGINAL!r} out of --keep."
        )
    answers = options.read_answers()
    assert answers is not None  # noqa: S101 - the caller has checked it
    answers.check((text, conditions[0]) for text in texts)
    return [answers.get(text, conditions[0]) for text in texts]


def _fit_maps(
    index: Index,
    options: IndexOptions,
    conditions: Sequence[str],
    labelled: Sequence[LabelledTexts],
) -> None:
    """Find what conditions ignore, and fit or remove their guides."""
    for condition in conditions:
        if _removes_guide(options.guide):
            index.unguide(condition)
        if options.ignore_column or ignored_by(condition):
            index.ignore(condition, options.ignore_column, options.ignore_directions)
    for guide_texts in labelled:
        index.add_guide(guide_texts)


def _removes_guide(guide_option: Any) -> bool:
    # The type is checked first, because `==` on a table compares each cell.
    return isinstance(guide_option, str) and guide_option == NO_GUIDE


def _read_guide(options: IndexOptions, conditions: Sequence[str]) -> list[LabelledTexts]:
    """Read the labelled texts of a guide for each of its conditions; empty without a guide."""
    guide = options.guide
    if _removes_guide(guide) and not conditions:
        raise UserError("--guide none removes the guide of a condition. Name it: --condition TEXT.")
    if guide is None or _removes_guide(guide):
        return []
    read = options.read_options()
    return read_guide(guide, options.text, conditions, closed=False, read=read)
