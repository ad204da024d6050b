"""Reproduce tables 2 and 4 of Hyper-CL (ACL 2024), on knowledge graphs, next to the paper's.

    python scripts/reproduce_graphs.py --encoders minilm --data WN18RR FB15K_237 --out graphs.md

The encoder is not trained. Each graph and encoder has a run folder with its features and heads. An
interrupted command resumes from them. Table 4 has the time, cache and memory of a whole graph.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cache_costs import TABLE_4, Workload, cost_section
from common import Options
from reproduce import (
    Encoder,
    Figures,
    Measure,
    Paper,
    Row,
    Section,
    Work,
    parse_table,
    printed_figures,
    run_paper,
    slug,
)

from llmcond.kinds.ranking.graph import Graph, read_graph
from llmcond.runs.open import open_any_run

# -- the paper ---------------------------------------------------------------------------------

#: Numbers of train and test triples -> name of the graph.
GRAPHS = {(86_835, 3_134): "WN18RR", (272_115, 20_466): "FB15k-237"}
#: Graph, system: MRR and Hits@1, 3 and 10, times 100, by Hyper-CL's table 2. Other papers' figures
#: in it (StAR, MTL-KGC, SimKGC) are of trained bi-encoders and cross-encoders.
TABLE_2 = parse_table(
    """
    WN18RR hadamard 16.4 0.4 24.3 48.1
    WN18RR concat 33.5 22.6 38.2 55.0
    WN18RR hypernet 54.8 42.7 62.6 77.0
    WN18RR hypernet-full 61.6 50.6 69.0 81.0
    WN18RR StAR 40.1 24.3 49.1 70.9
    WN18RR SimKGC 66.6 58.7 71.7 80.0
    FB15k-237 hadamard 15.3 9.2 16.2 27.4
    FB15k-237 concat 27.1 19.3 29.2 43.0
    FB15k-237 hypernet 30.5 21.9 33.1 47.9
    FB15k-237 hypernet-full 31.8 23.1 34.4 49.6
    FB15k-237 StAR 29.6 20.5 32.2 48.2
    FB15k-237 SimKGC 33.6 24.9 36.2 51.1
    """,
    4,
)
#: Head, name of the row, and the key of the paper's row.
HEADS = (
    ("hadamard-paper", "Hadamard product, as in the paper", "hadamard"),
    ("hadamard", "Hadamard product with a layer on e(r)", "hadamard"),
    ("concat-paper", "concatenation, as in the paper", "concat"),
    ("concat", "concatenation with GELU", "concat"),
    ("hypernet", "hyper64-cl", "hypernet"),
    ("hypernet-full", "hyper-cl", "hypernet-full"),
)
MEASURES = tuple(map(Measure.of, ("mrr", "hits@1", "hits@3", "hits@10")))


class GraphWork(Work):
    """The command on one graph or several."""

    def __init__(self, paper: Paper, options: Any) -> None:
        super().__init__(paper, options)
        graphs = {source: read_graph(source) for source in options.data}
        self.graphs = {source: name_graph(graph, source) for source, graph in graphs.items()}
        for source, graph in self.graphs.items():
            for name in dict.fromkeys(options.encoders):
                run = options.folder / f"{slug(name)}-{slug(graph)}"
                self.add_encoder(Encoder(name, run, source=source), task="kgc", data=source)

    def by_graph(self) -> dict[str, list[Encoder]]:
        """Return the encoders of each graph, by its source."""
        return {
            source: [encoder for encoder in self.encoders if encoder.source == source]
            for source in self.graphs
        }

    def score(self, encoder: Encoder, head: str, **changes: str) -> Figures:
        """Return the figures of a head over seeds, or why there are none."""
        key = f"{head}-neighbours" if "neighbours" in changes else head

        def compute() -> Figures:
            names = self.fit_heads(encoder, key, head, changes) if head != "none" else ["none"]
            split = "test" if "test" in open_any_run(encoder.run).splits else "dev"
            options: dict[str, Any] = {"exclude_head": True} if head == "none" else {}
            return self.score_heads(encoder, names, split=split, **options)

        return encoder.reason or self.once((str(encoder.run), key), compute)

    def record(self) -> dict[str, Any]:
        """Return what the JSON record says about all tables."""
        return {"epochs": self.options.epochs}


def name_graph(graph: Graph, source: str) -> str:
    """Return the published name of a graph, or the name of its folder."""
    splits = graph.splits
    sizes = len(splits["train"]), len(splits.get("test", ()))
    return GRAPHS.get(sizes, Path(source).name)


# -- table 2 -----------------------------------------------------------------------------------


def table_2(work: GraphWork) -> list[Section]:
    """Compute table 2 for each graph."""
    about = [
        "Every entity is a candidate, other known answers are left out (filtered), and ranks "
        "are realistic if scores are tied. Both directions are averaged.",
        "The paper prints fractions. All figures of this table are multiplied by 100.",
        "Intervals cover the error of head and tail entities and, with several fits, of seeds.",
        '"Neighbours" are the mean features of the entities that train links to an entity. The '
        "paper has nothing like it.",
    ]
    sections = []
    for source, encoders in work.by_graph().items():
        rows = [row for encoder in encoders for row in link_prediction(work, encoder)]
        title, labels = f"knowledge graphs, {work.graphs[source]}", ["architecture"]
        sections.append(Section("Table 2", title, about, labels, MEASURES, rows))
    return sections


def link_prediction(work: GraphWork, encoder: Encoder) -> list[Row]:
    """Return the rows of a graph and an encoder."""
    options, set_up = work.options, ["frozen encoder", "other encoder"]
    graph = work.graphs[encoder.source]
    notes = [*set_up, "not in the paper", "the head is no candidate"]
    rows = [Row(encoder.label, ["no head: e(h)"], work.score(encoder, "none"), notes)]
    for neighbours in (False, True) if options.neighbours else (False,):
        for head, label, key in HEADS:
            if head not in options.heads:
                continue
            epochs = 1 if options.quick else options.epochs
            changes = {"epochs": str(epochs), **({"neighbours": "true"} if neighbours else {})}
            figures = work.score(encoder, head, **changes)
            notes = [*set_up, f"at most {epochs} epochs"]
            notes += ["reads neighbours"] if neighbours else []
            paper, _ = printed_figures(TABLE_2, MEASURES, graph, key)
            labels = [f"{label}{', neighbours' if neighbours else ''}"]
            rows.append(Row(encoder.label, labels, figures, notes, {} if neighbours else paper))
    for name in ("StAR", "SimKGC"):
        paper, _ = printed_figures(TABLE_2, MEASURES, graph, name)
        if paper:
            reason = "not done: a bi-encoder, trained"
            rows.append(Row("BERT or RoBERTa", [name], reason, [], paper))
    return rows


def table_4(work: GraphWork) -> list[Section]:
    """Compute table 4 for each graph: time, hit rate and size of caches."""
    sections = []
    for source, encoders in work.by_graph().items():
        title = f"time, cache and memory on {work.graphs[source]}"
        workload = Workload.of_graph(read_graph(source))
        sections.append(cost_section(work, "Table 4", title, TABLE_4, workload, encoders))
    return sections


# -- the command -------------------------------------------------------------------------------


def about(work: GraphWork) -> list[str]:
    """Return the notes on all tables."""
    return [
        "The paper trains BERT-base together with the head. We freeze the encoder: vectors of "
        "entities and relations are computed once, and only the head and a linear map of "
        "candidates are fitted.",
        "The epoch is chosen by the MRR of at most 1,000 dev queries; test is only scored.",
        "The descriptions of FB15k-237 are those of StAR, one sentence, and not SimKGC's 50 words.",
    ]


def add_options(parser: Options) -> None:
    """Add the options that only this script has."""
    add, names = parser.option, [head for head, _, _ in HEADS]
    add("--data", str, "folders of the graphs", nargs="+", required=True, metavar="FOLDER")
    add("--epochs", 8, "maximum number of epochs")
    heads = f"heads, among {', '.join(names)}"
    add("--heads", names, heads, "all", choices=names, metavar="NAME")
    neighbours = "fit each head again with neighbours, which the paper does not have"
    add("--neighbours", False, neighbours)


PAPER = Paper(
    name="Hyper-CL on knowledge graphs",
    doc=__doc__,
    script="reproduce_graphs.py",
    sections={"2": table_2, "4": table_4},
    about=about,
    work=GraphWork,
    options=add_options,
    folder="runs/reproduce-graphs",
)

if __name__ == "__main__":
    sys.exit(run_paper(PAPER))
