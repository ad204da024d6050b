"""Options of what reads texts of a user's own: embeds, groups, indexes, checks or rates them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from llmcond.data.readers import TEXT_FILES
from llmcond.errors import UserError
from llmcond.options import Amount, Positive, Seed, option
from llmcond.workflows.options.common import (
    CHECK_HELP,
    DATA,
    TEXT_HELP,
    VALUES_HELP,
    Split,
    WithColumns,
    WithConditions,
    WithEmbedder,
    WithGuide,
    WithScale,
)

_SERVER = "server"
_PROPOSE = "texts without pairs"
_Rate = Annotated[float, Gt(0), Lt(math.inf)]


def _clusters(text: str) -> int | str:
    """Return a number as one; what the others mean is for the work to say."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(WithGuide, WithEmbedder, WithScale):
    """Which rows are embedded, and where vectors are written."""

    source: Any = option(
        flag="",
        metavar="SRC",
        source=TEXT_FILES,
        help=f"{TEXT_FILES}; for --out FOLDER a folder of .parquet "
        "files, one of them, or a .lance dataset, also by URI (s3://BUCKET/PATH); from Python also "
        "a pandas or Arrow table",
    )
    out: str | Path = option(
        metavar="OUT",
        parse=str,  # a URI is no path
        help=".parquet, .csv or .npy file, or FOLDER: a folder (Parquet files) or a .lance "
        "dataset, also by URI; the same command goes on with it where it stopped",
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    sentence: str | None = option(None, metavar="COL", help="the same as --text")
    condition: str | None = option(
        None,
        metavar="COL_OR_TEXT",
        help="column of the conditions, or where there is none of that name, the condition of "
        "every row (default: the column condition)",
    )
    values: str | None = option(
        None, metavar="VALUES", help=f"{VALUES_HELP}. Every condition of the file gets them"
    )
    keep: Sequence[str] = option(
        (),
        metavar="COL",
        help="further columns to write, such as an id (of a file; default: none, or for --out "
        "FOLDER all)",
    )
    condition_text: str | None = option(
        None, metavar="TEXT", help="condition of every row, also where a column is called so"
    )
    normalize: bool = option(
        True, help="unit L2 norm, so that inner products are cosines; --no-normalize keeps norms"
    )

    def __post_init__(self) -> None:
        """Check that one column of texts is named."""
        super().__post_init__()
        if None not in (self.text, self.sentence) and self.text != self.sentence:
            raise UserError("--text and --sentence name two columns; give one of them.")

    @property
    def text_column(self) -> str | None:
        """Return the column of the texts that was named."""
        return self.text or self.sentence


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(WithGuide, WithConditions, WithEmbedder):
    """Which texts are grouped, how, and what is written."""

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        source=TEXT_FILES,
        help=f"{TEXT_FILES} (from Python also a list of texts, or a table)",
    )
    out: str | Path | None = option(
        None,
        metavar="FILE",
        help=".parquet or .csv to write each text with its clusters to (default: clusters are "
        "printed only)",
    )
    condition: Sequence[str] = option(
        (), metavar="TEXT", repeat=True, help="what texts are compared by; may be repeated"
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    keep: Sequence[str] = option((), metavar="COL", help="further columns to write, such as an id")
    clusters: int | Literal["auto"] = option(
        "auto",
        metavar="K",
        parse=_clusters,
        help="how many by K-means; auto: as many as give the highest silhouette, or as the guide "
        "has labels",
    )
    method: Literal["kmeans", "hdbscan"] = option(
        "kmeans", help="hdbscan finds how many there are, and leaves out what is in none"
    )
    min_cluster_size: Annotated[int, Ge(2)] | None = option(
        None, metavar="N", help="of hdbscan (default: one text in 100, and 5 at least)"
    )
    labels: Sequence[str] = option(
        (),
        metavar="COL",
        help="known labels, which clusters are scored against, beside those of the base encoder's "
        "vectors without a condition: a column, or one for each condition",
    )
    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page with a map of the texts, to look around in"
    )
    check: bool = option(True, help=f"{CHECK_HELP}; not with --guide")
    seed: Seed = option(0, metavar="S", help="random seed of K-means, sampling and the map")


@dataclass(frozen=True, kw_only=True)
class CheckConditionOptions(WithConditions, WithEmbedder):
    """Which conditions are checked, on which texts."""

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        source=TEXT_FILES,
        help=f"{TEXT_FILES} (from Python also a list of texts, or a table)",
    )
    condition: Sequence[str] = option(
        metavar="TEXT", repeat=True, help="condition to check; may be repeated"
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    seed: Seed = option(0, metavar="S", help="random seed of the sample of texts")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(WithConditions, WithEmbedder):
    """Which texts an index gets, and loses."""

    texts: str | None = option(None, flag="", metavar="TEXTS", source=TEXT_FILES, help=TEXT_FILES)
    out: str | Path = option(metavar="DIR", help="folder of the index")
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    id: str | None = option(
        None, metavar="COL", help="column of their ids (default: made of the texts)"
    )
    keep: Sequence[str] = option(
        (), metavar="COL", help="further columns, to filter by and to show"
    )
    condition: Sequence[str] = option(
        (),
        metavar="C",
        repeat=True,
        help="make the vectors of all texts under it now; may be repeated. That saves time where "
        "the model encodes each text together with the condition. The index records its --values",
    )
    guide: Any = option(
        None,
        metavar="SRC",
        help="a few labelled texts that searches follow from now on: a table with the columns "
        "text, label and, unless there is one --condition, condition. none: remove the guide of "
        "each --condition",
    )
    delete: Sequence[str] = option(
        (), metavar="ID", help="ids of texts to delete, or a file with one a line"
    )


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions(WithColumns):
    """What is rated, by which server, and what it may take."""

    data: Any = option(
        flag="",
        metavar="SRC",
        source=DATA,
        help=f"rows, rated or not: {DATA}; for --propose: a file of texts",
    )
    endpoint: str = option(metavar="URL", help="address, such as http://localhost:8000/v1")
    model: str = option(metavar="NAME", help="as the server calls it")
    out: str | Path = option(metavar="FILE.csv", help="rated rows, as `extract --data` reads them")
    prompt: str = option(
        "rate", metavar="NAME_OR_FILE", help="what is asked: rate, answer-then-compare, or a .toml"
    )
    samples: Positive = option(1, metavar="K", help="answers to each question, which are averaged")
    rows: Positive | None = option(
        None, metavar="N", help="so many rows only, drawn by the seed (default: all)"
    )
    split: Split | None = option(None, help="of a folder (default: train)")
    seed: Seed = option(0, metavar="S", help="another one asks everything anew")
    yes: bool = option(False, help="do not ask whether to go on, told what it will take")
    price_in: Amount | None = option(None, metavar="P", help="of a million tokens that are read")
    price_out: Amount | None = option(None, metavar="P", help="of a million that are written")
    propose: Positive | None = option(
        None,
        metavar="N",
        group=_PROPOSE,
        help="let the model pair texts and name conditions, N rows, and then rate them",
    )
    propose_prompt: str = option(
        "propose", metavar="NAME_OR_FILE", group=_PROPOSE, help="what is asked for that"
    )
    text: str | None = option(
        None,
        metavar="COL",
        group=_PROPOSE,
        needs="--propose",
        help="column of the texts in a table (default: text)",
    )
    concurrency: Positive = option(4, metavar="N", group=_SERVER, help="questions at once")
    per_minute: _Rate | None = option(
        None, metavar="N", group=_SERVER, help="requests a minute at most"
    )
    timeout: _Rate = option(
        60.0,
        metavar="S",
        group=_SERVER,
        help="seconds until a request without a complete answer is tried again",
    )
    retries: Annotated[int, Ge(0)] = option(
        6, metavar="N", group=_SERVER, help="how often, later and later or when the server says"
    )
    request: Mapping[str, str] | None = option(
        None,
        metavar="NAME=VALUE",
        group=_SERVER,
        help="further fields of requests, such as temperature=0.7 max_tokens=300",
    )
