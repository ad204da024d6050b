"""Options of commands that embed, cluster, index, check or rate a user's texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.files import (
    PAGE_SUFFIXES,
    check_figure,
    check_folder,
    check_output,
    expand_home,
    file_output,
    is_folder,
    suffix,
)
from llmcond.base.options import (
    Amount,
    IndexPrecision,
    Options,
    Positive,
    PositiveNumber,
    Precision,
    Seed,
    option,
)
from llmcond.base.system import check_server_address
from llmcond.data.readers import EMBEDDING_SUFFIXES, FILES, TEXT_FILES
from llmcond.options.common import (
    DATA,
    IN_PYTHON,
    TEXT_HELP,
    VALUES_HELP,
    AnswersOption,
    ColumnOptions,
    ConditionOptions,
    EmbedderOptions,
    GuideOption,
    IgnoreOptions,
    RangesOption,
    ScaleOptions,
    Split,
    TextInputOptions,
    TruncateOption,
    condition_option,
)

#: What a score of mentions is, for helps.
MENTIONS_HELP = "score between 0 and 1 of whether a text says anything about the condition"
_SERVER = "server"
_ANSWERS = "answers to compare with"
_PROPOSE = "texts without pairs"
_Rate = Annotated[float, Gt(0), Lt(math.inf)]


def _parse_clusters(text: str) -> int | str:
    """Convert a text to an integer, unless it is ``auto``."""
    if text != "auto" and not text.isdecimal():
        raise UserError(f"--clusters is {shortened_repr(text)}; expected a number or auto.")
    return int(text) if text.isdecimal() else text


def _check_clusters(k: int | str) -> None:
    if isinstance(k, int) and k < 2:
        raise UserError(
            f"--clusters is {k}; it must be at least 2, because one would hold all texts."
        )


def ranges_path(out: Path) -> Path:
    """Return the file of the ranges of 8-bit embeddings in ``out``: ``v-ranges.npy``."""
    return out.with_name(f"{out.stem}-ranges.npy")


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(
    IgnoreOptions,
    GuideOption,
    AnswersOption,
    EmbedderOptions,
    TruncateOption,
    RangesOption,
    TextInputOptions,
    ScaleOptions,
):
    """Options of ``llmcond embed``: the rows to embed, and where to write the vectors."""

    texts: Any = option(
        flag="",
        source=TEXT_FILES,
        help=f"rows to embed: {TEXT_FILES}; with --out FOLDER also a folder of .parquet files, "
        f"or a .lance dataset, also by URI (s3://BUCKET/PATH); {IN_PYTHON}",
    )
    out: str | Path = option(
        metavar="OUT",
        parse=expanduser,  # Path would change a URI.
        help=".parquet, .csv or .npy file, or FOLDER: a folder (of Parquet files) or a .lance "
        "dataset, also by URI; if interrupted, the same command resumes a FOLDER",
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    condition: Sequence[str] = condition_option(
        "column of the conditions or, if there is no such column, one condition for every row; may "
        "be repeated, which gives one column of vectors each, embedding (CONDITION) (default: the "
        "column condition)",
        (),
        metavar="COL_OR_TEXT",
    )
    values: Sequence[str] = option(
        (),
        metavar="VALUES",
        repeat=True,
        help=f"{VALUES_HELP}. They apply to every condition of a column. With several --condition, "
        "repeat --values once for each, in the same order ('' for a condition without values)",
    )
    keep: Sequence[str] = option(
        (),
        metavar="COL",
        help="other columns of the source to write, such as an id (default: none, or all with "
        "--out FOLDER)",
    )
    condition_text: str | None = option(
        None, metavar="TEXT", help="condition of every row, even if a column has the same name"
    )
    precision: Precision = option(
        "float32",
        help="number type of the vectors: float32, int8, uint8, binary or ubinary (1 bit for each "
        "dimension)",
    )
    normalize: bool = option(
        True,
        help="scale vectors to unit L2 norm, so that inner products are cosines",
    )
    mentions: bool = option(
        False,
        help=f"also write a column mentions for each condition: the {MENTIONS_HELP}; only in a "
        ".parquet or .csv file",
    )

    def __post_init__(self) -> None:
        """Also check the output."""
        super().__post_init__()
        out = Path(self.out)
        if not self.is_streamed:
            inputs = [self.texts, self.guide, self.answers, self.ranges]
            check_output(out, EMBEDDING_SUFFIXES, inputs)
            if out.is_symlink():  # Its target is written, and the link stays.
                out = out.resolve()
                object.__setattr__(self, "out", out)
            if self.precision in ("int8", "uint8"):
                check_output(ranges_path(out), (".npy",), [self.texts])
        elif self.mentions:
            raise UserError(
                f"--mentions needs a .parquet or .csv file, and --out {self.out} is a folder. Name "
                "a file."
            )
        elif "://" not in str(self.out):
            check_folder(out)
            self._check_not_read(out)

    def _check_not_read(self, out: Path) -> None:
        """Raise a UserError if the next call would read the written files as texts."""
        if not isinstance(self.texts, str | PurePath):
            return
        source = expand_home(str(self.texts).removeprefix("file://")).resolve()
        target = out.resolve()
        if target.suffix == ".lance" or not target.is_relative_to(source):
            return
        # Files and folders that begin with these characters are not read.
        if not any(part.startswith((".", "_")) for part in target.relative_to(source).parts):
            raise UserError(
                f"--out {self.out} is in the source {self.texts}, so that the embeddings would be "
                "read as texts. Name another folder, or begin its name with _."
            )

    @property
    def is_streamed(self) -> bool:
        """Whether ``out`` names a folder or a Lance dataset, not a file.

        Raises:
            UserError: ``out`` is the URI of a file.
        """
        name, ending = str(self.out), suffix(self.out)
        if ending in EMBEDDING_SUFFIXES:
            if "://" in name:
                raise UserError(
                    f"{name} is a file in an object store, and files are written on this machine "
                    "only. Name a folder or a .lance dataset."
                )
            return False
        named_so = ending in ("", ".lance") or name.endswith("/") or "://" in name
        return named_so or is_folder(Path(name))


@dataclass(frozen=True, kw_only=True)
class TextsOptions(IgnoreOptions, EmbedderOptions, TextInputOptions):
    """Options of commands that embed a table of texts under conditions."""

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        source=TEXT_FILES,
        help=f"texts to use: {TEXT_FILES}; {IN_PYTHON}",
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(GuideOption, AnswersOption, TextsOptions):
    """Options of ``llmcond cluster``: the texts, the method, and the files to write."""

    out: str | Path | None = option(
        None,
        writes=file_output(".parquet", ".csv"),
        help=".parquet or .csv file to write each text with its clusters to (default: only print "
        "the clusters)",
    )
    condition: Sequence[str] = condition_option(
        "condition that texts are compared under, such as 'the topic'; may be repeated", ()
    )
    keep: Sequence[str] = option(
        (), metavar="COL", help="other columns of the source to write, such as an id"
    )
    clusters: int | Literal["auto"] = option(
        "auto",
        metavar="K",
        parse=_parse_clusters,
        check=_check_clusters,
        help="number of K-means clusters; auto: the number with the highest silhouette, or the "
        "number of labels of the guide",
        conflicts="--method hdbscan",
    )
    method: Literal["kmeans", "hdbscan"] = option(
        "kmeans",
        help="clustering method; hdbscan chooses the number of clusters, and leaves outliers out",
    )
    min_cluster_size: Annotated[int, Ge(2)] | None = option(
        None,
        help="with --method hdbscan: smallest cluster, in texts (default: 1 % of the texts, at "
        "least 5)",
        needs="--method hdbscan",
    )
    not_mentioned_below: Annotated[float, Gt(0), Lt(1)] | None = option(
        None,
        metavar="SCORE",
        help=f"put texts into no cluster, but into a group 'not mentioned', whose {MENTIONS_HELP} "
        "is lower, such as 0.5 (default: cluster all texts)",
        conflicts="--method hdbscan",
    )
    labels: Sequence[str] = option(
        (),
        metavar="COL",
        help="column of known labels, or one for each condition; clusters are scored against them, "
        "next to clusters of the base encoder's vectors without a condition",
    )
    report: str | Path | None = option(
        None,
        metavar="FILE.html",
        writes=file_output(*PAGE_SUFFIXES),
        help="HTML report to write, with an interactive map of the texts",
    )
    map: str | Path | None = option(
        None,
        metavar="FIGURE",
        writes=check_figure,
        help="picture of the map: .png, .svg or .pdf; its positions are written next to it, as "
        "FIGURE-data.csv",
    )
    seed: Seed = option(0, metavar="S", help="random seed of K-means, sampling and the map")


@dataclass(frozen=True, kw_only=True)
class CheckConditionOptions(TextsOptions):
    """Options of ``llmcond check-condition``: the conditions to check, and the texts."""

    condition: Sequence[str] = condition_option(
        "condition to check, or several wordings of it, such as 'the problem | the complaint'; may "
        "be repeated"
    )
    ask: bool | Callable[[str, str, str], Any] = option(
        False,
        group=_ANSWERS,
        help="show pairs of texts in the terminal, and ask whether they are the same in this "
        "respect; in Python also a function of two texts and the condition that returns True, "
        "False, or None to skip the pair",
        conflicts="--judge or --labels",
    )
    judge: str | None = option(
        None,
        metavar="URL",
        group=_ANSWERS,
        help="address of a server with OpenAI's protocol, such as http://localhost:8000/v1, whose "
        "language model answers; its ratings 4 and 5 of 5 count as the same",
        conflicts="--labels",
        check=lambda url: check_server_address(url, "--judge"),
    )
    judge_model: str | None = option(
        None,
        metavar="NAME",
        group=_ANSWERS,
        help="name of the language model on the server",
        needs="--judge",
    )
    labels: Sequence[str] = option(
        (),
        metavar="COL",
        group=_ANSWERS,
        help="column of known labels that answers, or one for each condition: two texts are the "
        "same if their labels are; all pairs of the sampled texts are used",
    )
    pairs: Annotated[int, Ge(4)] = option(
        20,
        group=_ANSWERS,
        help="number of pairs for each condition",
        needs="--ask or --judge",
    )
    out: str | Path | None = option(
        None,
        metavar="FILE.csv",
        group=_ANSWERS,
        writes=file_output(".csv"),
        help="file to write the answers to, as pairs that `extract --data` reads; the same "
        "command continues after its pairs",
        needs="--ask or --judge",
    )
    seed: Seed = option(0, metavar="S", help="random seed of the sample of texts and pairs")

    def __post_init__(self) -> None:
        """Also check that answers can be stored, and that a judge is named."""
        super().__post_init__()
        if self.judge is not None and self.judge_model is None:
            raise UserError("--judge needs --judge-model. Name the language model of the server.")
        if self.out is None and (self.ask is True or self.judge is not None):
            raise UserError(
                f"--{'judge' if self.judge else 'ask'} needs --out FILE.csv, which the answers are "
                "written to. Add it."
            )


@dataclass(frozen=True, kw_only=True)
class IndexOptions(AnswersOption, IgnoreOptions, EmbedderOptions, TruncateOption, TextInputOptions):
    """Options of ``llmcond index``: the texts to add to an index, and those to delete."""

    texts: Any = option(
        None,
        flag="",
        metavar="TEXTS",
        source=TEXT_FILES,
        help=f"texts to add: {TEXT_FILES}; {IN_PYTHON}",
    )
    out: str | Path = option(metavar="DIR", writes=check_folder, help="folder of the index")
    text: str | None = option(None, metavar="COL", needs="TEXTS or --guide", help=TEXT_HELP)
    id: str | None = option(
        None,
        metavar="COL",
        needs="TEXTS",
        help="column of unique ids (default: ids derived from the texts)",
    )
    keep: Sequence[str] = option(
        (),
        metavar="COL",
        needs="TEXTS",
        help="other columns to store, for filters and search results",
    )
    condition: Sequence[str] = condition_option(
        "condition to embed all texts under now; may be repeated. Later searches under it are "
        "faster if the model encodes each text together with the condition. The index records its "
        "--values",
        (),
    )
    guide: Any = option(
        None,
        help="table of a few labelled texts that guide all later searches: columns text and label, "
        "and also condition unless there is one --condition; none: remove the guide of each "
        "--condition",
    )
    precision: IndexPrecision | None = option(
        None,
        help="number type of the vectors under conditions, of a new index: float16, int8, uint8, "
        "binary or ubinary (default: float16)",
    )
    delete: Sequence[str] = option(
        (), metavar="ID", help="ids of texts to delete, or a file with one id per line"
    )

    def __post_init__(self) -> None:
        """Also check that the index can map vectors, before any text is encoded."""
        super().__post_init__()
        is_guided = self.guide is not None and str(self.guide) != "none"
        maps = is_guided or self.ignore or self.ignore_column
        if maps and self.precision in ("binary", "ubinary"):
            raise UserError(
                "guides and ignored conditions need vectors of more than 1 bit for each number, "
                f"and --precision is {self.precision}. Give --precision float16 or int8."
            )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Options of commands that ask a language model; subclasses declare the server's address."""

    model: str | None = option(
        None, help="name of the language model on the server (default: the server's only model)"
    )
    seed: Seed = option(
        0,
        metavar="S",
        help="random seed; with another seed the questions are sent again, except those that "
        "`answers --out` has already",
    )
    yes: bool = option(
        False, help="continue without asking for confirmation of the estimated cost and time"
    )
    price_in: Amount | None = option(None, metavar="P", help="price per million input tokens")
    price_out: Amount | None = option(None, metavar="P", help="price per million output tokens")
    budget: PositiveNumber | None = option(
        None,
        metavar="P",
        needs="--price-in or --price-out",
        help="highest cost of this call; a forecast above it is an error, and so is reaching it",
    )
    concurrency: Positive = option(4, group=_SERVER, help="number of concurrent requests")
    per_minute: _Rate | None = option(
        None, metavar="N", group=_SERVER, help="largest number of requests per minute"
    )
    timeout: _Rate = option(
        60.0,
        metavar="S",
        group=_SERVER,
        help="seconds after which a request without a complete answer is retried",
    )
    retries: Annotated[int, Ge(0)] = option(
        6,
        group=_SERVER,
        help="number of retries per request, after growing pauses or when the server says",
    )
    request: Mapping[str, str] | None = option(
        None,
        metavar="NAME=VALUE",
        group=_SERVER,
        help="other fields of each request, such as temperature=0.7 max_tokens=300",
    )


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions(ServerOptions, ColumnOptions, TextInputOptions):
    """Options of ``llmcond annotate``: the rows to rate, the server, and limits and prices."""

    data: Any = option(
        flag="",
        source=DATA,
        help=f"rows to rate, whether they have ratings or not: {DATA}; with --propose: texts, "
        "as llmcond embed reads them",
    )
    endpoint: str = option(
        metavar="URL", help="address of the server, such as http://localhost:8000/v1"
    )
    out: str | Path = option(
        metavar="FILE.csv",
        writes=file_output(".csv"),
        help="file to write the rated rows to, which `extract --data` reads",
    )
    prompt: str = option(
        "rate",
        metavar="NAME_OR_FILE",
        help="prompt that asks for a rating: rate, answer-then-compare, or a .toml file",
    )
    samples: Positive = option(
        1, metavar="K", help="number of answers per question, which are averaged"
    )
    rows: Positive | None = option(
        None, help="number of rows to rate, sampled at random (default: all)"
    )
    split: Split | None = option(
        None, help="split to rate if the data is a folder (default: train)"
    )
    propose: Positive | None = option(
        None,
        group=_PROPOSE,
        help="number of rows for which the model first proposes the sentence pair and condition, "
        "and which it then rates",
        conflicts="--columns or --rating-range or --unrated or --split or --rows",
    )
    text: str | None = option(
        None,
        metavar="COL",
        group=_PROPOSE,
        needs="--propose",
        help=TEXT_HELP,
    )


@dataclass(frozen=True, kw_only=True)
class AnswersOptions(ConditionOptions, ServerOptions, TextInputOptions):
    """Options of ``llmcond answers``: the texts, the conditions, and the server."""

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        source=TEXT_FILES,
        help=f"texts to ask about: {TEXT_FILES}; {IN_PYTHON}",
    )
    server: str = option(
        metavar="URL", help="address of the server, such as http://localhost:8000/v1"
    )
    condition: Sequence[str] = condition_option(
        "condition to answer for each text, such as 'the topic'; may be repeated"
    )
    out: str | Path = option(
        "answers.csv",
        metavar="FILE",
        writes=file_output(".csv", ".jsonl", ".parquet"),
        help="table of text, condition and answer to write: .csv, .jsonl or .parquet. Answers that "
        "it has already are not asked again, and may have been edited",
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    examples: Any = option(
        None,
        source=FILES,
        help="table of right answers, with the columns text, condition and answer (empty: not "
        "mentioned); the first 8 of each condition are shown to the model",
    )
    presence: bool = option(
        True,
        help="ask first whether a text mentions the condition (otherwise the answer decides)",
    )
    prompt: str = option(
        "answer", metavar="NAME_OR_FILE", help="prompt that asks for an answer, or a .toml file"
    )
