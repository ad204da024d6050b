"""Clusters as one HTML file that needs nothing else: a map of the texts, and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.clustering.methods import NOISE, Vectors, sample
from llmcond.clustering.plane import places
from llmcond.clustering.result import Clustering, ClusterResult
from llmcond.clustering.scores import METRICS
from llmcond.clustering.tables import figures, headings, starts_text
from llmcond.conditions import Condition
from llmcond.log import log
from llmcond.report.format import factors_text
from llmcond.report.page.render import write_html
from llmcond.version import __version__

_FOLDER = Path(__file__).parent
#: Texts on the map: t-SNE of more takes minutes.
_DRAWN = 5_000
#: Characters of a text on the map.
_CHARACTERS = 1_000
#: Steps of the map from one side to the other.
_STEPS = 2_000


class Drawing:
    """What a page shows of clusterings of the same texts, drawn by the seed where there are many.

    Attributes:
        texts: those on the map.
        shown: the clusterings, in the order they are shown in.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._kept, self._seed = sample(len(texts), _DRAWN, seed), seed
        self.texts = [texts[i] for i in self._kept.tolist()]
        self.shown: list[Clustering] = []
        self._vectors: list[Vectors] = []

    def add(self, found: Clustering, vectors: Vectors) -> None:
        """Add a clustering of all texts, and the vectors (n, d) that it is of."""
        self.shown.append(found)
        self._vectors.append(vectors[self._kept])

    def data(self) -> dict[str, Any]:
        """Return what the page's script needs, as JSON has it."""
        maps = places(self._vectors, self._seed)
        return {
            "texts": [
                text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
                for text in self.texts
            ],
            "shown": [
                {
                    "title": one.title,
                    "places": np.rint(_STEPS * where).astype(int).ravel().tolist(),
                    "labels": one.labels[self._kept].tolist(),
                    "clusters": [[own.cluster, own.name, own.size] for own in one.clusters],
                }
                for one, where in zip(self.shown, maps, strict=True)
            ],
            "steps": _STEPS,
        }


def write_page(result: ClusterResult, drawing: Drawing, path: Path) -> None:
    """Write the page of a result."""
    scored = [(one.title, one.scores) for one in result.clusterings if one.scores is not None]
    log.info(f"drawing a map of {len(drawing.texts):,} texts")
    values: dict[str, Any] = {
        "result": result,
        "shown": drawing.shown,
        "drawn": len(drawing.texts),
        "labelled": sum(sum((one.guide or {}).values()) for one in result.clusterings),
        "noise": NOISE,
        "crossings": [_crossing(a, b) for a, b in combinations(drawing.shown, 2)],
        "scores": [(title, scores, figures(scores)) for title, scores in scored],
        "headings": headings(scored[0][1].base_name) if scored else [],
        "base": scored[0][1].base_name if scored else "",
        "starts": starts_text(result),
        "factors": factors_text(METRICS),
        "made": _made(result),
    }
    script, style = ((_FOLDER / f"clusters.{end}").read_text("utf-8") for end in ("js", "css"))
    write_html(path, _FOLDER / "clusters.html.j2", [script], style, drawing.data(), **values)


def _crossing(first: Clustering, second: Clustering) -> tuple[Clustering, Clustering, list[Any]]:
    """Return two clusterings, and how many texts each cluster of one shares with each of the other.

    Rows and columns are in the order of their clusters.
    """
    rows, columns = ([own.cluster for own in one.clusters] for one in (first, second))
    counts = np.zeros((len(rows), len(columns)), dtype=np.int64)
    # The number -1, of what is in none, is the last of each.
    np.add.at(counts, (first.labels, second.labels), 1)
    return first, second, counts.tolist()


def _made(result: ClusterResult) -> dict[str, str]:
    """Return what made the page, in words."""
    conditions = [one.condition for one in result.clusterings]
    values = {
        f"values of {one.text}": ", ".join(one.values)
        for one in conditions
        if isinstance(one, Condition) and one.values
    }
    guides = {
        f"guide of {one.title}": ", ".join(f"{name}: {n:,}" for name, n in one.guide.items())
        for one in result.clusterings
        if one.guide
    }
    return {
        "texts": f"{result.file}, {result.texts:,}, of which {result.distinct:,} differ",
        **values,
        "encoder": result.encoder,
        "prompt": result.prompt,
        "head": result.head,
        "method": result.method,
        **(guides or {"guide": "none"}),
        "seed": str(result.seed),
        "llmcond": __version__,
    }
