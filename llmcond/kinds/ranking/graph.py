"""Knowledge graphs: triples of head, relation and tail, and what is encoded for queries.

Queries of a graph with R relations use 2R: relation r + R is r from tail to head, so that every
triple (h, r, t) gives two queries, (h, r, ?) and (t, r + R, ?). Entities and relations are
represented by their indices; ``Texts`` holds their ids, names and texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError, format_list
from llmcond.base.files import digest_bytes, digest_text
from llmcond.base.output import log
from llmcond.base.text import read_text_file
from llmcond.data.datasets import SPLITS, Problems
from llmcond.data.readers import source_name
from llmcond.encoders.spec import EncoderInput
from llmcond.prompts.template import InputTemplate, Prompt, shuffle_conditions
from llmcond.tasks import OTHER_SPLIT, SplitData

Triples = NDArray[np.int32]
IndexArray = NDArray[np.integer[Any]]

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: File names of each split, without suffix.
_SPLIT_FILES = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
#: Tables of names, some with descriptions, in the formats of llmcond, KG-BERT, StAR and SimKGC. A
#: name or description that a table lacks is read from the tables after it.
_ENTITY_FILES = (
    "entities",
    "entity2text",
    "fb-entity2text-new",
    "wordnet-mlj12-definitions",
    "FB15k_mid2name",
)
#: Tables that hold only descriptions, in the formats of SimKGC and KG-BERT.
_DESCRIPTION_FILES = ("FB15k_mid2description", "entity2textlong")
_RELATION_FILES = ("relations", "relation2text")
_SUFFIXES = (".tsv", ".txt")
_EXPECTED = (
    "Expected a folder with train, valid (or dev) and test (.tsv or .txt: head, relation, tail), "
    "and entities and relations (.tsv or .txt: id, text or name and description)."
)
#: Separators of name and description in tables with both in one column (StAR's and KG-BERT's).
_SEPARATORS = (" -- ", ", ")
#: Common names of the columns of triples, between spaces, and of tables.
_TRIPLE_HEADER = (
    " head h head_id head_entity subject subject_id s source from entity1 ",
    " relation r rel relation_id predicate p property edge edge_type label relationship ",
    " tail t tail_id tail_entity object object_id o target to entity2 ",
)
_ID_NAMES = {"id", "entity", "entity_id", "relation", "relation_id", "key", "mid", "uri"}
_TEXT_NAMES = {"text", "name", "label", "description", "definition", "inverse", "inverse_text"}
#: Maximum number of words of a description: SimKGC's limit for FB15k-237.
_DESCRIPTION_WORDS = 50


@dataclass(frozen=True)
class Texts:
    """The ids, names and encoded texts of all entities, or of all relations, by their index.

    Attributes:
        ids: distinct ids, as in the files.
        names: names that are displayed.
        texts: texts that are encoded; for an entity, its name and description.
        inverse: texts that are encoded for the inverse of relations; empty for entities.
    """

    ids: Sequence[str]
    names: Sequence[str]
    texts: Sequence[str]
    inverse: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Graph(SplitData):
    """A knowledge graph in splits.

    Attributes:
        source: path that the user gave, or ``sample``.
        entities: texts of the entities of all splits, each of which is a candidate.
        relations: texts of the relations.
        splits: triples of ``train``, ``dev`` and ``test``: head, relation and tail, (n, 3) int32.
            ``test`` may be missing.
        notes: remarks on the data for the user, each a sentence.
    """

    tables = ("entities", "relations", "triples")
    unit = "triples"

    source: str
    entities: Texts
    relations: Texts
    splits: Mapping[str, Triples]
    notes: tuple[str, ...] = ()

    @property
    def n_entities(self) -> int:
        """The number of entities."""
        return len(self.entities)

    @property
    def n_relations(self) -> int:
        """The number R of relations, each of which has two directions."""
        return len(self.relations)

    @cached_property
    def digest(self) -> str:
        """A digest of texts, triples and splits, independent of the format of the files."""
        tables = [
            [list(values) for values in (kind.ids, kind.names, kind.texts, kind.inverse)]
            for kind in (self.entities, self.relations)
        ]
        splits = [
            f"{name}:{digest_bytes(values.astype('<i4').tobytes(), size=16).hex()}"
            for name, values in self.splits.items()
        ]
        return digest_text(json.dumps(tables), *splits)

    def queries(self, split: str) -> Triples:
        """Return the queries of a split with their answers, (2n, 3).

        The first n are the triples (h, r, t), the others (t, r + R, h) in the same order.

        Raises:
            UserError: The graph has no such split.
        """
        return both_directions(self.part(split), self.n_relations)

    @cached_property
    def known(self) -> KnownTriples:
        """The triples of all splits, in both directions."""
        queries = [self.queries(split) for split in self.splits]
        return KnownTriples(np.concatenate(queries), self.n_entities)

    @override
    def to_json(self) -> dict[str, Any]:
        counts = {"entities": self.n_entities, "relations": self.n_relations}
        return {**super().to_json(), **counts}

    @override
    def to_tables(self) -> Mapping[str, Mapping[str, Any]]:
        names = [name for name, triples in self.splits.items() for _ in triples]
        columns = np.concatenate([triples.T for triples in self.splits.values()], axis=1)
        return {
            "entities": _text_columns(self.entities),
            "relations": {**_text_columns(self.relations), "inverse": list(self.relations.inverse)},
            "triples": {
                "split": names,
                **dict(zip(("head", "relation", "tail"), columns, strict=True)),
            },
        }

    @override
    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], about: Mapping[str, Any]) -> Self:
        triples = tables["triples"]
        flat = np.stack([triples[key].to_numpy() for key in ("head", "relation", "tail")], axis=1)
        split = np.array(triples["split"].to_pylist())
        return cls(
            about["source"],
            _texts_from_table(tables["entities"]),
            _texts_from_table(tables["relations"]),
            {
                name: np.ascontiguousarray(flat[split == name], dtype=np.int32)
                for name in dict.fromkeys(split.tolist())
            },
            tuple(about["notes"]),
        )


def both_directions(triples: IndexArray, n_relations: int) -> Triples:
    """Return triples (n, 3) followed by their inverses in the same order, (2n, 3)."""
    inverse = triples[:, ::-1] + np.array([0, n_relations, 0])
    return np.concatenate([triples, inverse]).astype(np.int32)


def adjacency(triples: IndexArray, n_entities: int) -> csr_array:
    """Return the adjacency matrix, (n, n) float32: 1 for linked entities, without self-loops."""
    from scipy.sparse import csr_array

    n_nodes, (head, _, tail) = n_entities, np.asarray(triples, dtype=np.int64).T
    keys = np.concatenate([head * n_nodes + tail, tail * n_nodes + head])
    keys = np.unique(keys[np.tile(head != tail, 2)])
    return csr_array(
        (np.ones(len(keys), dtype=np.float32), (keys // n_nodes, keys % n_nodes)),
        shape=(n_nodes, n_nodes),
    )


class KnownTriples:
    """The known tails of each head and relation, which are left out of rankings.

    Args:
        queries: queries with their answers, (m, 3).
        n_entities: number of entities of the graph.
    """

    def __init__(self, queries: IndexArray, n_entities: int) -> None:
        self.n_entities = n_entities
        # Each triple is one number, whose digits are relation, head and tail. In ascending order,
        # the tails of a head and relation are adjacent, so no table of offsets is needed.
        self._codes = np.unique(self._encode(queries[:, 0], queries[:, 1], queries[:, 2]))

    def _encode(self, head: IndexArray, relation: IndexArray, tail: IndexArray) -> Positions:
        prefix = np.asarray(relation, dtype=np.int64) * self.n_entities + head
        return np.asarray(prefix * self.n_entities + tail)

    def gather(self, head: IndexArray, relation: IndexArray) -> tuple[Positions, Positions]:
        """Return the known tails of m queries as flat arrays.

        Args:
            head: head entities of the queries, (m,).
            relation: relations of the queries, r or r + R, (m,).

        Returns:
            The query of each tail, (k,), 0 to m - 1 in ascending order; and the tails, (k,),
            ascending within each query.
        """
        first = self._encode(head, relation, np.zeros(1, dtype=np.int64))
        begin = np.searchsorted(self._codes, first)
        count = np.searchsorted(self._codes, first + self.n_entities) - begin
        row = np.repeat(np.arange(len(count)), count)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        return row, self._codes[begin[row] + offset] % self.n_entities

    def mask(
        self, head: IndexArray, relation: IndexArray, columns: IndexArray
    ) -> NDArray[np.bool_]:
        """Return whether each of c entities is a known tail of each of m queries, (m, c).

        ``columns`` may hold an entity more than once, like the tails of a batch.
        """
        distinct, which = np.unique(columns, return_inverse=True)
        row, tail = self.gather(head, relation)
        positions = np.minimum(np.searchsorted(distinct, tail), len(distinct) - 1)
        is_column = distinct[positions] == tail
        mask = np.zeros((len(head), len(distinct)), dtype=bool)
        mask[row[is_column], positions[is_column]] = True
        return mask[:, which.reshape(-1)]

    def contains(self, triples: IndexArray) -> NDArray[np.bool_]:
        """Return whether each of the triples (m, 3) is known, (m,)."""
        code = self._encode(triples[:, 0], triples[:, 1], triples[:, 2])
        positions = np.searchsorted(self._codes, code)
        is_known = np.zeros(len(code), dtype=bool)
        in_range = positions < len(self._codes)
        is_known[in_range] = self._codes[positions[in_range]] == code[in_range]
        return is_known


# -- reading -----------------------------------------------------------------------------------


def sample_folder() -> Path:
    """Return the folder of the bundled sample graph, which was written for llmcond."""
    return Path(__file__).resolve().parents[2] / "data" / "sample_graph"


def read_graph(source: str | Path | None = None) -> Graph:
    """Read a graph from a folder of triples and texts; None reads the bundled sample.

    The triples are in the files ``train``, ``valid`` (or ``dev``) and ``test``. The texts are in
    the tables ``entities`` (id, text or name and description) and ``relations`` (id, text, text of
    the inverse). All files are tab-separated UTF-8 without a header. The published files of KG-BERT
    and StAR (``entity2text``, ``entity2textlong``, ``fb-entity2text-new``, ``relation2text``) and
    of SimKGC (``wordnet-mlj12-definitions``, ``FB15k_mid2name``, ``FB15k_mid2description``) can be
    read as well. If a folder has several tables, each supplies the names and descriptions that the
    tables before it lack. A note lists what each file was used for, and the files that were not
    used.

    An entity with a description is encoded as "name: description", as in SimKGC. The text of a
    relation without a text is derived from its id. The inverse of a relation without a text of its
    own is encoded as "inverse " and the relation's text.

    Only entities of triples are candidates. Other entities of the table are left out, and a note
    gives their number.

    Raises:
        UserError: The folder or a file does not exist, a file is empty, a line has the wrong number
            of columns, an id is listed twice with different texts, or a triple has an entity or
            relation that the tables lack.
    """
    folder = Path(source) if source is not None else sample_folder()
    name = source_name(source, str(source))
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{name} {problem}. {_EXPECTED}")
    files = {
        split: _find_file(folder, names, required=split != "test")
        for split, names in _SPLIT_FILES.items()
    }
    lines = {split: _read_triples(path) for split, path in files.items() if path is not None}
    used_entities = dict.fromkeys(
        key for rows in lines.values() for h, _, t in rows for key in (h, t)
    )
    used_relations = dict.fromkeys(r for rows in lines.values() for _, r, _ in rows)
    notes = list(_find_other_headers(lines))
    roles = {path.name: "triples" for path in files.values() if path is not None}
    entities = _read_entities(folder, used_entities, notes, roles)
    relations = _read_relations(folder, roles)
    if source is not None:
        notes.insert(0, _describe_files(folder, roles))
    _check_ids(lines, files, {"entities": entities, "relations": relations})

    if entities is None:
        notes.append("no table of entities: their ids are encoded instead of texts")
        entities = {key: (key, key) for key in used_entities}
    if relations is None:
        relations = {key: (relation_text(key), "") for key in used_relations}
    if len(entities) > len(used_entities):
        left_out = len(entities) - len(used_entities)
        notes.append(f"entities of the table in no triple, left out: {left_out:,}")
    graph = _build_graph(
        name,
        {key: texts for key, texts in entities.items() if key in used_entities},
        {key: texts for key, texts in relations.items() if key in used_relations},
        lines,
    )
    for split, triples in graph.splits.items():
        if len(triples) < len(lines[split]):
            n_duplicates = len(lines[split]) - len(triples)
            notes.append(f"duplicate {split} triples, counted once: {n_duplicates:,}")
    return replace(graph, notes=(*notes, *_describe_oddities(graph)))


def _find_other_headers(lines: Mapping[str, Sequence[tuple[str, ...]]]) -> Iterator[str]:
    """Yield a note on each first line whose ids are in no other line, as it may be a header."""
    counts = Counter(
        (key, i % 2) for rows in lines.values() for row in rows for i, key in enumerate(row)
    )
    for split, rows in lines.items():
        if len(rows) > 1 and all(counts[key, i % 2] == 1 for i, key in enumerate(rows[0])):
            yield (
                f"the first triple of {split} has ids that no other one has: {', '.join(rows[0])}; "
                "if it is a header, remove it"
            )


def add_external_split(graph: Graph, source: Any, split: str | None = None) -> tuple[Graph, str]:
    """Return a graph with an additional split, ``OTHER_SPLIT``, of triples from another source.

    Args:
        graph: graph with the entities and relations of the triples, which are named by their ids.
        source: file of triples, all of which are read, or folder of such files; see ``read_graph``.
        split: split of a folder; by default test, or dev if there is no test file.

    Returns:
        The graph, and the split's name in results: the split that was read, or test for a file.

    Raises:
        UserError: The file does not exist, or a triple has an entity or relation that the graph
            lacks.
    """
    folder = Path(source)
    path: Path | None = folder
    split_names: list[str] = []
    if folder.is_dir():
        paths = {name: _find_file(folder, names) for name, names in _SPLIT_FILES.items()}
        split_names = [split] if split else ["test", "dev"]
        split = next((name for name in split_names if paths[name]), None)
        path = paths[split] if split else None
    if path is None or not path.is_file() or path.suffix not in _SUFFIXES:
        problem = (
            f"has no {' or '.join(split_names)} file"
            if folder.is_dir()
            else "is not a file of triples"
        )
        raise UserError(
            f"{source} {problem}. Expected a .tsv or .txt file with head, relation and tail per "
            "line, separated by tabs, or a folder with such files: train, valid (or dev) and test."
        )
    lines = _read_triples(path)
    entities, relations = _index_by_name(graph.entities.ids), _index_by_name(graph.relations.ids)
    known = {"entities": entities, "relations": relations}
    _check_ids({OTHER_SPLIT: lines}, {OTHER_SPLIT: path}, known, "the run's graph")
    triples = _distinct_triples(lines, entities, relations)
    n_duplicates = len(lines) - len(triples)
    if n_duplicates:
        log.info(f"{path.name}: duplicate triples, counted once: {n_duplicates:,}")
    n_leaked = int(KnownTriples(graph.splits["train"], graph.n_entities).contains(triples).sum())
    if n_leaked:
        log.warning(
            f"{n_leaked:,} of {len(triples):,} triples of {path.name} are in the run's train split"
        )
    split = split or "test"
    log.info(f"scoring all {len(triples):,} triples of {path.name}, as {split}")
    return replace(graph, splits={**graph.splits, OTHER_SPLIT: triples}), split


def _build_graph(
    name: str,
    entities: Mapping[str, tuple[str, str]],
    relations: Mapping[str, tuple[str, str]],
    lines: Mapping[str, Sequence[tuple[str, ...]]],
) -> Graph:
    """Return a graph of entities (name, text), relations (text, inverse) and distinct triples."""
    split_names = [split for split in SPLITS if split in lines]
    to_entity, to_relation = _index_by_name(entities), _index_by_name(relations)
    splits = {
        split: _distinct_triples(lines[split], to_entity, to_relation) for split in split_names
    }
    names, texts = (list(column) for column in zip(*entities.values(), strict=True))
    forward = [text for text, _ in relations.values()]
    backward = [inverse or f"inverse {text}" for text, inverse in relations.values()]
    return Graph(
        name,
        Texts(list(entities), names, texts),
        Texts(list(relations), forward, forward, backward),
        splits,
    )


def _index_by_name(names: Iterable[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _distinct_triples(
    lines: Iterable[tuple[str, ...]], entities: Mapping[str, int], relations: Mapping[str, int]
) -> Triples:
    """Return the distinct triples of some lines as indices, in the order of first appearance."""
    numbers = ((entities[h], relations[r], entities[t]) for h, r, t in lines)
    return np.array(list(dict.fromkeys(numbers)), dtype=np.int32)


def relation_text(key: str) -> str:
    """Return a relation's text from its id: its words, and the last part of a Freebase path first.

    It is SimKGC's ``_normalize_fb15k237_relation`` without the trailing space.
    """
    parts: list[str] = []
    for part in key.replace("./", "/").replace("_", " ").strip().split("/"):
        if part not in parts[-3:]:
            parts.append(part)
    return " ".join(parts[::-1]).strip()


def _list_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the existing files of a folder with these names, in the order of the names."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _describe_files(folder: Path, roles: Mapping[str, str]) -> str:
    """Return a note on what each file was used for, and on the files that were not used."""
    by_role: dict[str, list[str]] = {}
    for name, role in roles.items():
        by_role.setdefault(role, []).append(name)
    read = "; ".join(f"{role} from {', '.join(names)}" for role, names in by_role.items())
    visible = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    others = sorted(name for name in visible if name not in roles)
    return f"{read}; not used: {format_list(others, 5)}" if others else read


def _find_file(folder: Path, names: Sequence[str], required: bool = False) -> Path | None:
    """Return the only file with one of these names; None if it is missing and not required."""
    paths = _list_files(folder, names)
    if len(paths) > 1:
        file_names = ", ".join(path.name for path in paths)
        raise UserError(f"{folder} has several files of one split: {file_names}. Keep one.")
    if not paths and required:
        raise UserError(f"{folder} has no {' or '.join(names)} file. {_EXPECTED}")
    return paths[0] if paths else None


def _read_fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not blank, except a header.

    Quotation marks have no special meaning: published tables have unpaired ones.
    """
    try:
        text = read_text_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    is_first = True
    # splitlines would also split at other characters, which descriptions may contain.
    for number, line in enumerate(text.split("\n"), 1):
        fields = [field.strip() for field in line.split("\t")]
        if is_first and _is_header(fields):
            log.info(f"{path}: the first line is a header, and left out: {', '.join(fields)}")
        elif line.strip():
            yield number, fields
        is_first = is_first and not line.strip()


def _is_header(fields: Sequence[str]) -> bool:
    """Return whether a line has common names of the columns of triples, or of a table of ids."""
    words = [re.sub("[ -]", "_", field.casefold()) for field in fields]
    is_triples = len(words) == 3 and all(
        f" {word} " in names for word, names in zip(words, _TRIPLE_HEADER, strict=True)
    )
    is_table = words[0] in _ID_NAMES and len(words) > 1 and set(words[1:]) <= _TEXT_NAMES
    return is_triples or is_table


def _read_triples(path: Path) -> list[tuple[str, ...]]:
    triples, problems = [], Problems(path.name)
    for number, fields in _read_fields(path):
        if len(fields) != 3:
            expected = "expected head, relation and tail, separated by tabs"
            problems.add(number, f"{len(fields)} columns; {expected}")
        elif not all(fields):
            problems.add(number, "an id is empty; expected head, relation, tail")
        triples.append(tuple(fields))
    problems.raise_if_any()
    if not triples:
        raise UserError(f"{path.name} is empty: it has no triples.")
    return triples


def _read_table(path: Path, most: int) -> dict[str, list[str]]:
    """Return the columns after the id, at most ``most``, of each row of a table, by its id."""
    table: dict[str, list[str]] = {}
    problems = Problems(path.name)
    for number, (key, *columns) in _read_fields(path):
        if not key:
            problems.add(number, "the id is empty")
        elif len(columns) > most:
            expected = f"expected {most + 1} at most, separated by tabs"
            problems.add(number, f"{len(columns) + 1} columns; {expected}")
        elif table.setdefault(key, columns) != columns:
            problems.add(number, f"{key} occurs before, with another text; keep one")
    problems.raise_if_any()
    if not table:
        raise UserError(f"{path.name} is empty: it has no rows.")
    return table


def _read_entities(
    folder: Path, used: Mapping[str, None], notes: list[str], roles: dict[str, str]
) -> dict[str, tuple[str, str]] | None:
    """Return the name and the text of each entity of the tables, by id; None without a table.

    Adds to ``notes`` how many of the entities in ``used`` lack a text or a description, and to
    ``roles`` what each table was used for.
    """
    rows: dict[str, tuple[str, str]] = {}
    paths = _list_files(folder, (*_ENTITY_FILES, *_DESCRIPTION_FILES))
    for path in paths:
        contributions = set()
        for key, (name, description) in _read_entity_table(path).items():
            name_before, description_before = rows.get(key, ("", ""))
            contributions |= {"names"} if name and not name_before else set()
            contributions |= {"descriptions"} if description and not description_before else set()
            rows[key] = name_before or name, description_before or description
        if contributions:
            roles[path.name] = f"{' and '.join(sorted(contributions, reverse=True))} of entities"
    if not paths:
        return None
    present = [row for key, row in rows.items() if key in used]
    nameless = sum(not (name or description) for name, description in present)
    if nameless:
        notes.append(f"entities without a text, encoded by their ids: {nameless:,}")
    bare = sum(not description for _, description in present)
    if bare and bare < len(present):
        notes.append(f"entities without a description, encoded by their names: {bare:,}")
    return {
        key: (name or key, _join_description(name, description) or key)
        for key, (name, description) in rows.items()
    }


def _read_entity_table(path: Path) -> dict[str, tuple[str, str]]:
    """Return the name and the description of each entity of a table; either may be empty."""
    table = _read_table(path, most=1 if path.stem in _DESCRIPTION_FILES else 2)
    filled = {key: columns or [""] for key, columns in table.items()}
    if path.stem in _DESCRIPTION_FILES:
        word_limit = slice(_DESCRIPTION_WORDS)
        return {key: ("", " ".join(text.split()[word_limit])) for key, (text,) in filled.items()}
    if path.stem == "FB15k_mid2name":
        return {key: (name.replace("_", " ").strip(), "") for key, (name, *_) in filled.items()}
    if path.stem == "wordnet-mlj12-definitions":
        # In __family_alcidae_NN_1, the part of speech and the sense do not belong to the name.
        return {
            key: (" ".join(word.strip("_").split("_")[:-2]), " ".join(rest))
            for key, (word, *rest) in filled.items()
        }
    # Texts in the format of this project are never divided.
    separator = None if path.stem == "entities" else _find_separator(table)
    split = {
        key: list(columns[0].partition(separator)[::2])
        if separator and len(columns) == 1
        else columns
        for key, columns in filled.items()
    }
    return {key: (name, " ".join(rest)) for key, (name, *rest) in split.items()}


def _find_separator(table: Mapping[str, Sequence[str]]) -> str | None:
    """Return the separator of name and description if nearly all texts have both in a column."""
    texts = [columns[0] for columns in table.values() if len(columns) == 1]
    for separator in _SEPARATORS:
        if texts and sum(separator in text for text in texts) >= 0.95 * len(table):
            return separator
    return None


def _join_description(name: str, description: str) -> str:
    """Return the text of an entity that is encoded (SimKGC's ``_concat_name_desc``)."""
    rest = description.removeprefix(name).strip()
    return f"{name}: {rest}" if name and rest else name or rest


def _read_relations(folder: Path, roles: dict[str, str]) -> dict[str, tuple[str, str]] | None:
    """Return the text and the inverse text (perhaps empty) of each relation; None without a table.

    Adds to ``roles`` what each table was used for.
    """
    rows: dict[str, tuple[str, str]] = {}
    paths = _list_files(folder, _RELATION_FILES)
    for path in paths:
        for key, columns in _read_table(path, most=2).items():
            text, inverse = (*columns, "", "")[:2]
            text_before, inverse_before = rows.get(key, ("", ""))
            if (text and not text_before) or (inverse and not inverse_before):
                roles[path.name] = "texts of relations"
            rows[key] = text_before or text, inverse_before or inverse
    if not paths:
        return None
    return {key: (text or relation_text(key), inverse) for key, (text, inverse) in rows.items()}


def _check_ids(
    lines: Mapping[str, Sequence[tuple[str, ...]]],
    files: Mapping[str, Path | None],
    tables: Mapping[str, Mapping[str, object] | None],
    holder: str = "",
) -> None:
    """Check that tables of entities and relations, or another ``holder``, have all ids of triples.

    Raises:
        UserError: Ids are missing; the message lists them.
    """
    for (kind, table), split in product(tables.items(), lines):
        path, columns = files[split], (1,) if kind == "relations" else (0, 2)
        missing = dict.fromkeys(
            row[i] for row in lines[split] for i in columns if table and row[i] not in table
        )
        if missing and path is not None:
            rows = [n for n, row in _read_fields(path) if any(row[i] in missing for i in columns)]
            remedy = "Extract them into a new --run" if holder else "Add them to the table"
            remedy += ", remove a header" if rows == [1] else ""
            raise UserError(
                f"{path.name} has {kind} that {holder or f'the table of {kind}'} lacks, "
                f"{len(missing):,} in all: {format_list(list(missing), 5)} (triples: "
                f"{len(rows):,}, the first in row {rows[0]}). {remedy}, or remove the triples."
            )


def _describe_oddities(graph: Graph) -> Iterator[str]:
    """Yield counts of properties of the graph that affect how its scores are read."""
    for kind, texts in (("entities", graph.entities.texts), ("relations", graph.relations.texts)):
        shared = sum(count for count in Counter(texts).values() if count > 1)
        if shared:
            yield f"{kind} that have the same text as another one: {shared:,}"
    for split in graph.splits:
        if split != "train":
            total = f"of {len(graph.splits[split]):,}"
            for n_triples, text in _count_leaks(graph, split):
                if n_triples:
                    yield f"{split} triples {text}: {n_triples:,} {total}"


def _count_leaks(graph: Graph, split: str) -> Iterator[tuple[int, str]]:
    """Yield how many triples of a split overlap with train, or have parts that train lacks."""
    triples, train, n = graph.splits[split], graph.splits["train"], graph.n_entities
    for earlier in SPLITS[: SPLITS.index(split)]:
        if earlier in graph.splits:
            leaked = KnownTriples(graph.splits[earlier], n).contains(triples)
            yield int(leaked.sum()), f"in {earlier} too"
    known = KnownTriples(train, n)
    is_reversed = known.contains(triples[:, ::-1])
    yield int(is_reversed.sum()), "whose reversed edge is in train"
    pairs = np.array([1, 0, 1])
    linked = KnownTriples(both_directions(train, graph.n_relations) * pairs, n).contains(
        triples * pairs
    )
    yield (
        int((linked & ~is_reversed & ~known.contains(triples)).sum()),
        "that another relation links in train",
    )
    unseen = ~np.isin(triples, train[:, [0, 2]]) & np.array([True, False, True])
    n_unseen = len(np.unique(triples[unseen]))
    yield int(unseen.any(axis=1).sum()), f"of the {n_unseen:,} entities that train lacks"
    new_relations = np.setdiff1d(triples[:, 1], train[:, 1])
    names = format_list([graph.relations.ids[i] for i in new_relations], 5)
    yield (
        int(np.isin(triples[:, 1], new_relations).sum()),
        f"of relations that train lacks ({names})",
    )


# -- inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryTexts:
    """The texts of queries and candidates, without duplicates as far as the task can detect them.

    Attributes:
        sentences: sentences of the queries, without their conditions.
        conditions: conditions of the queries.
        candidates: texts that are ranked. If it is the same object as ``sentences``, both are the
            same things.
        query_pairs: positions of the sentence and the condition of each distinct query, (n, 2).
        names: nouns for a sentence, a condition and a candidate in messages, such as ``entity``.
    """

    sentences: Sequence[str]
    conditions: Sequence[str]
    candidates: Sequence[str]
    query_pairs: NDArray[np.int64]
    names: tuple[str, str, str] = ("sentence", "condition", "candidate")


class QueryInputs:
    """The inputs of queries and candidates.

    Each column is rendered when it is first read, and then cached.
    """

    def __init__(self, texts: QueryTexts, prompt: Prompt) -> None:
        """Check the prompt.

        Raises:
            UserError: The template names columns of the data.
        """
        if prompt.fields:
            raise UserError(
                f"the prompt {prompt.name} names the column {prompt.fields[0]!r}, but this task "
                "only has sentences and conditions. Choose another --prompt."
            )
        self.texts, self.prompt = texts, prompt

    @cached_property
    def candidates(self) -> list[EncoderInput]:
        """The inputs of the candidates."""
        plain_part = self.prompt.plain or InputTemplate("{sentence}")
        return [plain_part.render(text, "") for text in self.texts.candidates]

    @cached_property
    def joint(self) -> list[EncoderInput]:
        """The inputs of each pair of sentence and condition of the queries.

        For separate features these are the inputs of the sentences, e(s), like ``sentences``.
        """
        texts, pairs = self.texts, self.texts.query_pairs.tolist()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in pairs]
        if self.prompt.control == "shuffled":
            conditions = [condition for _, condition in rows]
            shuffled = shuffle_conditions(conditions, rows, self.prompt, "queries")
            rows = [(sentence, c) for (sentence, _), c in zip(rows, shuffled, strict=True)]
        return [self.prompt.conditional.render(*row) for row in rows]

    @cached_property
    def sentences(self) -> list[EncoderInput]:
        """The inputs of the sentences without a condition."""
        part = self.prompt.sentence_part or self.prompt.conditional
        return [part.render(text, "") for text in self.texts.sentences]

    @cached_property
    def conditions(self) -> list[EncoderInput]:
        """The inputs of the conditions without a sentence."""
        return [self.prompt.unconditional.render("", text) for text in self.texts.conditions]

    @property
    def columns(self) -> dict[str, Sequence[EncoderInput]]:
        """The inputs that the prompt needs, by column name."""
        columns: dict[str, Sequence[EncoderInput]] = {"candidates": self.candidates}
        if not self.prompt.separate:
            columns["joint"] = self.joint
        if self.prompt.separate or not self.prompt.subtracts_condition:
            columns["sentences"] = self.sentences
        if self.prompt.subtracts_condition:
            columns["conditions"] = self.conditions
        return columns

    def __iter__(self) -> Iterator[EncoderInput]:
        for column in self.columns.values():
            yield from column

    def __len__(self) -> int:
        return sum(map(len, self.columns.values()))

    def locate(self, item: EncoderInput) -> str | None:
        """Return a description of the text that needs an input, such as ``the entity 'dog'``."""
        sentence, condition, candidate = self.texts.names
        tables = {
            "candidates": (candidate, self.texts.candidates),
            "sentences": (sentence, self.texts.sentences),
            "conditions": (condition, self.texts.conditions),
        }
        for column, inputs in self.columns.items():
            if item in inputs:
                position = inputs.index(item)
                if column == "joint":
                    return self._describe_query(self.texts.query_pairs[position].tolist())
                label, texts = tables[column]
                return f"the {label} {texts[position]!r}"
        return None

    def check_distinct(self) -> None:
        """Raise a UserError if two queries with different conditions have the same input."""
        if self.prompt.control is not None or self.prompt.separate:
            return
        texts = self.texts
        seen: dict[bytes, int] = {}
        for position, item in enumerate(self.joint):
            pairs = texts.query_pairs[[seen.setdefault(item.key, position), position]]
            first, second = (texts.conditions[condition] for _, condition in pairs.tolist())
            if first != second:
                earlier, later = map(self._describe_query, pairs.tolist())
                raise UserError(
                    f"the prompt {self.prompt.name} renders the same input for {earlier} and for "
                    f"{later}, so the encoder cannot distinguish them. Put words or punctuation "
                    "between {sentence} and {condition} in the template."
                )

    def _describe_query(self, pair: Sequence[int]) -> str:
        (sentence, condition), names, texts = pair, self.texts.names, self.texts
        return (
            f"the {names[0]} {texts.sentences[sentence]!r} under the {names[1]} "
            f"{texts.conditions[condition]!r}"
        )


# -- tables in a run's folder ------------------------------------------------------------------


def _text_columns(texts: Texts) -> dict[str, list[str]]:
    return {"id": list(texts.ids), "name": list(texts.names), "text": list(texts.texts)}


def _texts_from_table(table: Any) -> Texts:
    ids, names, texts = (table[name].to_pylist() for name in ("id", "name", "text"))
    inverse = table["inverse"].to_pylist() if "inverse" in table.column_names else ()
    return Texts(ids, names, texts, inverse)
