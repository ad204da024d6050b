"""Knowledge graphs: triples of head, relation and tail, with the texts that are encoded.

A graph of R relations is asked 2R: relation r + R is r read from its tail, so that every triple
(h, r, t) is two queries, (h, r, ?) and (t, r + R, ?). Entities and relations are numbers from here
on; what a user calls them is in :class:`Texts`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import SPLITS, Problems
from llmcond.data.readers import source_name
from llmcond.errors import UserError, first_line, listed
from llmcond.files import digest_bytes, digest_text, replacing
from llmcond.log import log
from llmcond.tasks.base import OTHERS

Triples = NDArray[np.int32]
Numbers = NDArray[np.integer[Any]]
Positions = NDArray[np.int64]

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: File names of a split, without their suffix.
_SPLIT_FILES = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
#: Tables of names, perhaps with descriptions: our own format, KG-BERT's, StAR's, SimKGC's. What
#: one lacks is taken from those behind it.
_ENTITY_FILES = (
    "entities",
    "entity2text",
    "fb-entity2text-new",
    "wordnet-mlj12-definitions",
    "FB15k_mid2name",
)
#: Tables of descriptions alone: SimKGC's, KG-BERT's.
_DESCRIPTION_FILES = ("FB15k_mid2description", "entity2textlong")
_RELATION_FILES = ("relations", "relation2text")
_SUFFIXES = (".tsv", ".txt")
_EXPECTED = (
    "Expected a folder with train, valid (or dev) and test (.tsv or .txt: head, relation, tail), "
    "and entities and relations (.tsv or .txt: id, text or name and description)."
)
#: What parts name and description in a table that has them in one column, as StAR and KG-BERT do.
_SEPARATORS = (" -- ", ", ")
#: SimKGC's limit for the descriptions of FB15k-237, in words.
_DESCRIPTION_WORDS = 50


@dataclass(frozen=True)
class Texts:
    """What entities or relations are called, and the texts that are encoded, by their number.

    Attributes:
        ids: as in the files, distinct.
        names: for people.
        texts: what is encoded; for an entity its name and description.
        inverse: of relations, what is encoded for the other direction; empty for entities.
    """

    ids: Sequence[str]
    names: Sequence[str]
    texts: Sequence[str]
    inverse: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Graph:
    """A knowledge graph in splits.

    Attributes:
        source: what the user named, or ``sample``.
        entities, relations: their texts. Entities are those of any split, all of them candidates.
        splits: (n, 3) int32 head, relation and tail by ``train``, ``dev`` and ``test``; ``test``
            may be missing.
        notes: what is odd about it, in sentences for the user.
    """

    source: str
    entities: Texts
    relations: Texts
    splits: Mapping[str, Triples]
    notes: tuple[str, ...] = ()

    @property
    def n_entities(self) -> int:
        """Return the number of entities."""
        return len(self.entities)

    @property
    def n_relations(self) -> int:
        """Return the number R of relations, each of which has two directions."""
        return len(self.relations)

    @cached_property
    def digest(self) -> str:
        """Identify texts, triples and splits, whatever files they came from."""
        tables = [
            [list(own) for own in (kind.ids, kind.names, kind.texts, kind.inverse)]
            for kind in (self.entities, self.relations)
        ]
        splits = [
            f"{name}:{digest_bytes(own.astype('<i4').tobytes(), size=16).hex()}"
            for name, own in self.splits.items()
        ]
        return digest_text(json.dumps(tables), *splits)

    def queries(self, split: str) -> Triples:
        """Return (2n, 3) the queries of a split with their answers.

        The first n are its triples (h, r, t), the others (t, r + R, h) in the same order.

        Raises:
            UserError: the graph has no such split.
        """
        if split not in self.splits:
            has = ", ".join(self.splits)
            raise UserError(f"{self.source} has no {split} triples; it has {has}.")
        return both_directions(self.splits[split], self.n_relations)

    def to_json(self) -> dict[str, Any]:
        """Return the record that manifests keep: source, digest and counts."""
        return {
            "source": self.source,
            "digest": self.digest,
            "entities": self.n_entities,
            "relations": self.n_relations,
            "rows": {name: len(own) for name, own in self.splits.items()},
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> None:
        """Write the graph as three Parquet files, each complete or absent."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        about = {"digest": self.digest, "source": self.source, "notes": list(self.notes)}
        names = np.repeat(list(self.splits), [len(own) for own in self.splits.values()])
        flat = np.concatenate([own.T for own in self.splits.values()], axis=1)
        tables = {
            "entities": _columns(self.entities),
            "relations": {**_columns(self.relations), "inverse": list(self.relations.inverse)},
            "triples": {
                "split": names.tolist(),
                **dict(zip(("head", "relation", "tail"), flat, strict=True)),
            },
        }
        for name, columns in tables.items():
            table = pa.table(columns).replace_schema_metadata({"llmcond": json.dumps(about)})
            with replacing(folder / f"{name}.parquet") as path:
                # Absolute: in a relative one with a colon Arrow sees the name of a file system.
                pq.write_table(table, path.absolute())

    @classmethod
    def load(cls, folder: Path) -> Graph:
        """Return the graph that :meth:`save` wrote.

        Raises:
            UserError: a file is missing or damaged, or they are not of one graph.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            tables = {
                name: pq.read_table((folder / f"{name}.parquet").absolute())
                for name in ("entities", "relations", "triples")
            }
            about = json.loads(tables["triples"].schema.metadata[b"llmcond"])
            triples = tables["triples"]
            flat = np.stack(
                [triples[key].to_numpy() for key in ("head", "relation", "tail")], axis=1
            )
            split = np.array(triples["split"].to_pylist())
            graph = cls(
                about["source"],
                _texts(tables["entities"]),
                _texts(tables["relations"]),
                {
                    name: np.ascontiguousarray(flat[split == name], dtype=np.int32)
                    for name in dict.fromkeys(split.tolist())
                },
                tuple(about["notes"]),
            )
            intact = graph.digest == about["digest"]
        except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise UserError(
                f"the graph in {folder} cannot be read: {first_line(error)}. Extract into a new "
                "--run."
            ) from error
        if not intact:
            raise UserError(
                f"the files of the graph in {folder} are not as they were written: its digest is "
                "another one. Extract into a new --run."
            )
        return graph


def both_directions(triples: Numbers, n_relations: int) -> Triples:
    """Return (2n, 3) triples (n, 3) and then, in the same order, each read from its tail."""
    inverse = triples[:, ::-1] + np.array([0, n_relations, 0])
    return np.concatenate([triples, inverse]).astype(np.int32)


def adjacency(triples: Numbers, n_entities: int) -> csr_array:
    """Return (n, n) float32, 1 where a triple links two entities, either way; none has itself."""
    from scipy.sparse import csr_array

    n, (head, _, tail) = n_entities, np.asarray(triples, dtype=np.int64).T
    keys = np.concatenate([head * n + tail, tail * n + head])
    keys = np.unique(keys[np.tile(head != tail, 2)])
    return csr_array((np.ones(len(keys), dtype=np.float32), (keys // n, keys % n)), shape=(n, n))


class Known:
    """The known tails of each (head, relation), relations in both directions: what is filtered.

    Args:
        source: a graph, of which all splits count in both directions; or (m, 3) queries with their
            answers, taken as they are.
        n_entities: of the graph; needed with queries.
    """

    def __init__(self, source: Graph | Numbers, n_entities: int | None = None) -> None:
        if isinstance(source, Graph):
            n_entities = source.n_entities
            source = np.concatenate([source.queries(split) for split in source.splits])
        if n_entities is None:
            raise TypeError("n_entities is needed with triples")
        self.n_entities = n_entities
        # One sorted number for each: relation, head and tail as digits. The tails of one head and
        # relation are neighbours, so that no table of offsets is needed.
        self._codes = np.unique(self._code(source[:, 0], source[:, 1], source[:, 2]))

    def _code(self, head: Numbers, relation: Numbers, tail: Numbers) -> Positions:
        wide = np.asarray(relation, dtype=np.int64) * self.n_entities + head
        return np.asarray(wide * self.n_entities + tail)

    def __len__(self) -> int:
        """Return how many distinct triples are known."""
        return len(self._codes)

    def gather(self, head: Numbers, relation: Numbers) -> tuple[Positions, Positions]:
        """Return the known tails of m queries, flat.

        Args:
            head: (m,) entities.
            relation: (m,) their relations, r or r + R.

        Returns:
            (k,) the query, 0 to m - 1 in rising order, and (k,) a tail of it, rising within it.
        """
        first = self._code(head, relation, np.zeros(1, dtype=np.int64))
        begin = np.searchsorted(self._codes, first)
        count = np.searchsorted(self._codes, first + self.n_entities) - begin
        row = np.repeat(np.arange(len(count)), count)
        within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        return row, self._codes[begin[row] + within] % self.n_entities

    def mask(self, head: Numbers, relation: Numbers, columns: Numbers) -> NDArray[np.bool_]:
        """Return (m, c) whether each of c entities is a known tail of each of m queries.

        Columns may hold an entity more than once, as the tails of a batch do.
        """
        distinct, which = np.unique(columns, return_inverse=True)
        row, tail = self.gather(head, relation)
        place = np.minimum(np.searchsorted(distinct, tail), len(distinct) - 1)
        there = distinct[place] == tail
        found = np.zeros((len(head), len(distinct)), dtype=bool)
        found[row[there], place[there]] = True
        return found[:, which.reshape(-1)]

    def contains(self, triples: Numbers) -> NDArray[np.bool_]:
        """Return (m,) whether each of (m, 3) triples is known."""
        code = self._code(triples[:, 0], triples[:, 1], triples[:, 2])
        place = np.searchsorted(self._codes, code)
        found = np.zeros(len(code), dtype=bool)
        inside = place < len(self._codes)
        found[inside] = self._codes[place[inside]] == code[inside]
        return found


# -- reading -----------------------------------------------------------------------------------


def sample_folder() -> Path:
    """Return the folder of the bundled sample, a graph of our own making."""
    return Path(__file__).resolve().parents[2] / "data" / "sample_graph"


def read_graph(source: str | Path | None = None) -> Graph:
    """Read a folder of triples and of texts; None is the bundled sample.

    Triples are ``train``, ``valid`` (or ``dev``) and ``test``, tables are ``entities`` (id, text or
    name and description) and ``relations`` (id, text, text of the other direction), all
    tab-separated, without a header, in UTF-8. The files of KG-BERT and StAR (``entity2text``,
    ``entity2textlong``, ``fb-entity2text-new``, ``relation2text``) and of SimKGC
    (``wordnet-mlj12-definitions``, ``FB15k_mid2name``, ``FB15k_mid2description``) are read as they
    are published. Where a folder has several, each gives the names and descriptions that those
    before it lack; a note says which file was used for what, and which were not used. An entity
    with a description is encoded as "name: description", as in SimKGC. A relation without a text is
    told by its id, one without a text of the other direction has "inverse " before its own.

    Only entities of triples are candidates; others of the table are left out, and told of.

    Raises:
        UserError: no such folder or file, an empty file, a line of wrong columns, an id listed
            twice, a triple of an entity or relation that the tables lack.
    """
    folder = Path(source) if source is not None else sample_folder()
    name = source_name(source, str(source))
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{name} {found}. {_EXPECTED}")
    files = {
        split: _find(folder, names, required=split != "test")
        for split, names in _SPLIT_FILES.items()
    }
    lines = {split: _triples(path) for split, path in files.items() if path is not None}
    used = dict.fromkeys(key for own in lines.values() for h, _, t in own for key in (h, t))
    asked = dict.fromkeys(r for own in lines.values() for _, r, _ in own)
    notes: list[str] = []
    roles = {path.name: "triples" for path in files.values() if path is not None}
    entities = _read_entities(folder, used, notes, roles)
    relations = _read_relations(folder, roles)
    if source is not None:
        notes.insert(0, _files_note(folder, roles))
    _check_known(lines, files, 0, entities, "entities")
    _check_known(lines, files, 1, relations, "relations")

    if entities is None:
        notes.append("no table of entities: they are told by their ids")
        entities = {key: (key, key) for key in used}
    if relations is None:
        relations = {key: (relation_text(key), "") for key in asked}
    if len(entities) > len(used):
        left_out = len(entities) - len(used)
        notes.append(f"entities of the table in no triple, left out: {left_out:,}")
    graph = _numbered(
        name,
        {key: texts for key, texts in entities.items() if key in used},
        {key: texts for key, texts in relations.items() if key in asked},
        lines,
    )
    for split, triples in graph.splits.items():
        if len(triples) < len(lines[split]):
            many = len(lines[split]) - len(triples)
            notes.append(f"{split} triples that are there before, counted once: {many:,}")
    return replace(graph, notes=(*notes, *_oddities(graph)))


def with_others(graph: Graph, source: Any, split: str | None = None) -> tuple[Graph, str]:
    """Return a graph with a further split, :data:`OTHERS`, of triples from elsewhere.

    Args:
        graph: whose entities and relations they are of, named by their ids.
        source: a file of triples, all of which count; or a folder of them, see :func:`read_graph`.
        split: of a folder; None: test, or dev where it has none.

    Returns:
        It, and what results call the split: the one asked for, or of a file test.

    Raises:
        UserError: no such file, or a triple of an entity or relation that the graph lacks.
    """
    folder = Path(source)
    path: Path | None = folder
    chosen: list[str] = []
    if folder.is_dir():
        found = {name: _find(folder, names) for name, names in _SPLIT_FILES.items()}
        chosen = [split] if split else ["test", "dev"]
        split = next((name for name in chosen if found[name]), None)
        path = found[split] if split else None
    if path is None or not path.is_file() or path.suffix not in _SUFFIXES:
        lacks = f"has no {' or '.join(chosen)} file" if folder.is_dir() else "is no file of triples"
        raise UserError(
            f"{source} {lacks}. Expected head, relation, tail a line, by tabs, as .tsv or .txt; or "
            "a folder with such files of train, valid (or dev) and test."
        )
    lines = {OTHERS: _triples(path)}
    for column, kind in enumerate((graph.entities, graph.relations)):
        known = dict.fromkeys(kind.ids)
        what = "relations" if column else "entities"
        _check_known(lines, {OTHERS: path}, column, known, what, "the run's graph")
    entities, relations = _numbers(graph.entities.ids), _numbers(graph.relations.ids)
    triples = _distinct(lines[OTHERS], entities, relations)
    twice = len(lines[OTHERS]) - len(triples)
    if twice:
        log.info(f"{path.name}: triples that are there before, counted once: {twice:,}")
    leaked = int(Known(graph.splits["train"], graph.n_entities).contains(triples).sum())
    if leaked:
        log.warning(f"{leaked:,} of {len(triples):,} triples of {path.name} are in the run's train")
    split = split or "test"
    log.info(f"scoring all {len(triples):,} triples of {path.name}, as {split}")
    return replace(graph, splits={**graph.splits, OTHERS: triples}), split


def _numbered(
    name: str,
    entities: Mapping[str, tuple[str, str]],
    relations: Mapping[str, tuple[str, str]],
    lines: Mapping[str, Sequence[tuple[str, ...]]],
) -> Graph:
    """Return a graph of names and texts, of texts of both directions, and of distinct triples."""
    found = [split for split in SPLITS if split in lines]
    to_entity, to_relation = _numbers(entities), _numbers(relations)
    splits = {split: _distinct(lines[split], to_entity, to_relation) for split in found}
    names, texts = (list(own) for own in zip(*entities.values(), strict=True))
    forward = [text for text, _ in relations.values()]
    backward = [inverse or f"inverse {text}" for text, inverse in relations.values()]
    return Graph(
        name,
        Texts(list(entities), names, texts),
        Texts(list(relations), forward, forward, backward),
        splits,
    )


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _distinct(
    lines: Iterable[tuple[str, ...]], entities: Mapping[str, int], relations: Mapping[str, int]
) -> Triples:
    """Return the distinct triples of some lines as numbers, each where it comes first."""
    numbers = ((entities[h], relations[r], entities[t]) for h, r, t in lines)
    return np.array(list(dict.fromkeys(numbers)), dtype=np.int32)


def relation_text(key: str) -> str:
    """Return a relation's text from its id: words, and of a path (Freebase) the last part first.

    SimKGC's ``_normalize_fb15k237_relation``, without the space that it leaves at the end.
    """
    parts: list[str] = []
    for part in key.replace("./", "/").replace("_", " ").strip().split("/"):
        if part not in parts[-3:]:
            parts.append(part)
    return " ".join(parts[::-1]).strip()


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of these names that a folder has, in their order."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _files_note(folder: Path, roles: Mapping[str, str]) -> str:
    """Return a line that says what each file was used for, and which files were not used."""
    by_role: dict[str, list[str]] = {}
    for name, role in roles.items():
        by_role.setdefault(role, []).append(name)
    read = "; ".join(f"{role} from {', '.join(names)}" for role, names in by_role.items())
    visible = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    others = sorted(name for name in visible if name not in roles)
    return f"{read}; not used: {listed(others, 5)}" if others else read


def _find(folder: Path, names: Sequence[str], required: bool = False) -> Path | None:
    """Return the one file of these names."""
    found = _files(folder, names)
    if len(found) > 1:
        several = ", ".join(path.name for path in found)
        raise UserError(f"{folder} has several files of one split: {several}. Keep one.")
    if not found and required:
        raise UserError(f"{folder} has no {' or '.join(names)} file. {_EXPECTED}")
    return found[0] if found else None


def _fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not blank.

    Nothing is a quotation mark here: published tables have single ones.
    """
    try:
        # Not splitlines: it takes characters for ends of lines that descriptions may hold.
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                yield number, [own.strip() for own in line.split("\t")]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path.name} is not UTF-8: byte 0x{error.object[error.start]:02x} cannot be read. "
            f"Convert it first, for example: iconv -f ISO-8859-1 -t UTF-8 {path.name}"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def _triples(path: Path) -> list[tuple[str, ...]]:
    found, problems = [], Problems(path.name)
    for number, own in _fields(path):
        if len(own) != 3:
            expected = "expected head, relation and tail, separated by tabs"
            problems.add(number, f"{len(own)} columns; {expected}")
        elif not all(own):
            problems.add(number, "an id is empty; expected head, relation, tail")
        found.append(tuple(own))
    problems.raise_if_any()
    if not found:
        raise UserError(f"{path.name} is empty: it has no triples.")
    return found


def _table(path: Path, most: int) -> dict[str, list[str]]:
    """Return the further columns of a table, up to ``most``, by the id in its first one."""
    found: dict[str, list[str]] = {}
    problems = Problems(path.name)
    for number, (key, *own) in _fields(path):
        if not key:
            problems.add(number, "the id is empty")
        elif len(own) > most:
            expected = f"expected {most + 1} at most, separated by tabs"
            problems.add(number, f"{len(own) + 1} columns; {expected}")
        elif found.setdefault(key, own) != own:
            problems.add(number, f"{key} is there before, with another text; keep one")
    problems.raise_if_any()
    if not found:
        raise UserError(f"{path.name} is empty: it has no rows.")
    return found


def _read_entities(
    folder: Path, used: Mapping[str, None], notes: list[str], roles: dict[str, str]
) -> dict[str, tuple[str, str]] | None:
    """Return the name and the text of each entity of the tables, by its id; None without one.

    Note how many of those in ``used`` lack one, and for what each table was read.
    """
    rows: dict[str, tuple[str, str]] = {}
    paths = _files(folder, (*_ENTITY_FILES, *_DESCRIPTION_FILES))
    for path in paths:
        gives = set()
        for key, (name, description) in _entity_rows(path).items():
            name_before, description_before = rows.get(key, ("", ""))
            gives |= {"names"} if name and not name_before else set()
            gives |= {"descriptions"} if description and not description_before else set()
            rows[key] = name_before or name, description_before or description
        if gives:
            roles[path.name] = f"{' and '.join(sorted(gives, reverse=True))} of entities"
    if not paths:
        return None
    present = [own for key, own in rows.items() if key in used]
    nameless = sum(not (name or description) for name, description in present)
    if nameless:
        notes.append(f"entities without a text, told by their ids: {nameless:,}")
    bare = sum(not description for _, description in present)
    if bare and bare < len(present):
        notes.append(f"entities without a description, told by their names: {bare:,}")
    return {
        key: (name or key, _with_description(name, description) or key)
        for key, (name, description) in rows.items()
    }


def _entity_rows(path: Path) -> dict[str, tuple[str, str]]:
    """Return the name and the description of each entity of one table, each perhaps empty."""
    table = _table(path, most=1 if path.stem in _DESCRIPTION_FILES else 2)
    filled = {key: own or [""] for key, own in table.items()}
    if path.stem in _DESCRIPTION_FILES:
        first = slice(_DESCRIPTION_WORDS)
        return {key: ("", " ".join(text.split()[first])) for key, (text,) in filled.items()}
    if path.stem == "FB15k_mid2name":
        return {key: (name.replace("_", " ").strip(), "") for key, (name, *_) in filled.items()}
    if path.stem == "wordnet-mlj12-definitions":
        # __family_alcidae_NN_1: the part of speech and the sense are no words of the name.
        return {
            key: (" ".join(word.strip("_").split("_")[:-2]), " ".join(rest))
            for key, (word, *rest) in filled.items()
        }
    separator = _separator(table)
    split = {
        key: list(own[0].partition(separator)[::2]) if separator and len(own) == 1 else own
        for key, own in filled.items()
    }
    return {key: (name, " ".join(rest)) for key, (name, *rest) in split.items()}


def _separator(table: Mapping[str, Sequence[str]]) -> str | None:
    """Return what parts name and description where nearly every text has them in one column."""
    texts = [own[0] for own in table.values() if len(own) == 1]
    for separator in _SEPARATORS:
        if texts and sum(separator in text for text in texts) >= 0.95 * len(table):
            return separator
    return None


def _with_description(name: str, description: str) -> str:
    """Return what is encoded of an entity (SimKGC's ``_concat_name_desc``)."""
    rest = description.removeprefix(name).strip()
    return f"{name}: {rest}" if name and rest else name or rest


def _read_relations(folder: Path, roles: dict[str, str]) -> dict[str, tuple[str, str]] | None:
    """Return the texts of both directions of each relation, the second maybe empty; or None.

    Note for what each table was read.
    """
    rows: dict[str, tuple[str, str]] = {}
    paths = _files(folder, _RELATION_FILES)
    for path in paths:
        for key, own in _table(path, most=2).items():
            text, inverse = (*own, "", "")[:2]
            text_before, inverse_before = rows.get(key, ("", ""))
            if (text and not text_before) or (inverse and not inverse_before):
                roles[path.name] = "texts of relations"
            rows[key] = text_before or text, inverse_before or inverse
    if not paths:
        return None
    return {key: (text or relation_text(key), inverse) for key, (text, inverse) in rows.items()}


def _check_known(
    lines: Mapping[str, Sequence[tuple[str, ...]]],
    files: Mapping[str, Path | None],
    column: int,
    table: Mapping[str, object] | None,
    kind: str,
    holder: str = "",
) -> None:
    """Raise a UserError that lists ids of triples which a table lacks, or another ``holder``."""
    if table is None:
        return
    for split, own in lines.items():
        path = files[split]
        at = (1,) if column else (0, 2)
        lacking = dict.fromkeys(row[i] for row in own for i in at if row[i] not in table)
        if lacking and path is not None:
            rows = sum(any(row[i] in lacking for i in at) for row in own)
            first = next(n for n, row in _fields(path) if any(row[i] in lacking for i in at))
            remedy = "Extract them into a new --run" if holder else "Add them to the table"
            raise UserError(
                f"{path.name} has {kind} that {holder or f'the table of {kind}'} lacks, "
                f"{len(lacking):,} in all: {listed(list(lacking), 5)} (triples: {rows:,}, the "
                f"first in row {first}). {remedy}, or remove the triples."
            )


def _oddities(graph: Graph) -> Iterator[str]:
    """Yield what a reader of figures on this graph has to know, counted."""
    for kind, texts in (("entities", graph.entities.texts), ("relations", graph.relations.texts)):
        shared = sum(count for count in Counter(texts).values() if count > 1)
        if shared:
            yield f"{kind} that share their text with another one: {shared:,}"
    for split in graph.splits:
        if split != "train":
            total = f"of {len(graph.splits[split]):,}"
            for many, what in _leaks(graph, split):
                if many:
                    yield f"{split} triples {what}: {many:,} {total}"


def _leaks(graph: Graph, split: str) -> Iterator[tuple[int, str]]:
    """Yield how many triples of a split training gives away, or tells nothing of."""
    own, train, n = graph.splits[split], graph.splits["train"], graph.n_entities
    for earlier in SPLITS[: SPLITS.index(split)]:
        if earlier in graph.splits:
            leaked = Known(graph.splits[earlier], n).contains(own)
            yield int(leaked.sum()), f"in {earlier} too"
    known = Known(train, n)
    back = known.contains(own[:, ::-1])
    yield int(back.sum()), "whose reversed edge is in train"
    pairs = np.array([1, 0, 1])
    linked = Known(both_directions(train, graph.n_relations) * pairs, n).contains(own * pairs)
    yield int((linked & ~back & ~known.contains(own)).sum()), "that another relation links in train"
    unseen = ~np.isin(own, train[:, [0, 2]]) & np.array([True, False, True])
    many = len(np.unique(own[unseen]))
    yield int(unseen.any(axis=1).sum()), f"of the {many:,} entities that train lacks"
    new = np.setdiff1d(own[:, 1], train[:, 1])
    names = listed([graph.relations.ids[i] for i in new], 5)
    yield int(np.isin(own[:, 1], new).sum()), f"of relations that train lacks ({names})"


# -- tables in a run's folder ------------------------------------------------------------------


def _columns(texts: Texts) -> dict[str, list[str]]:
    return {"id": list(texts.ids), "name": list(texts.names), "text": list(texts.texts)}


def _texts(table: Any) -> Texts:
    ids, names, texts = (table[name].to_pylist() for name in ("id", "name", "text"))
    inverse = table["inverse"].to_pylist() if "inverse" in table.column_names else ()
    return Texts(ids, names, texts, inverse)
