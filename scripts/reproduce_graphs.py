"""Reproduce tables 2 and 4 of Hyper-CL (ACL 2024), on knowledge graphs, next to the paper's.

    python scripts/reproduce_graphs.py --encoders minilm --data WN18RR FB15K_237 --out graphs.md

The encoder is not trained. Each graph and encoder has a run folder with its features and heads. An
interrupted command resumes from them. Table 4 has the time, cache and memory of a whole graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_costs import TABLE_4, Workload, cost_section
from reproduce import (
    Encoder,
    Figures,
    Measure,
    Paper,
    Row,
    Section,
    Work,
    average_figures,
    declare,
    failure_reason,
    fit_once,
    parse_table,
    printed_figures,
    result_figures,
    run_paper,
    slug,
)

from llmcond.base.errors import LlmcondError
from llmcond.base.output import log
from llmcond.commands.encode import extract
from llmcond.commands.score import evaluate
from llmcond.kinds.ranking.graph import Graph, read_graph
from llmcond.options.common import Split
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


@dataclass
class GraphEncoder(Encoder):
    """An encoder on one of the graphs.

    Attributes:
        graph: name of the graph.
        source: folder of the graph.
    """

    graph: str = ""
    source: str = ""

    def scored_split(self) -> Split:
        """Return the split that is scored: test, or dev if there is none."""
        return "test" if "test" in open_any_run(self.run).splits else "dev"


class GraphWork(Work):
    """The command on one graph or several."""

    def __init__(self, paper: Paper, options: Any) -> None:
        super().__init__(paper, options)
        graphs = {source: name_graph(read_graph(source), source) for source in options.data}
        for source, graph in graphs.items():
            for name in dict.fromkeys(options.encoders):
                run = options.folder / f"{slug(name)}-{slug(graph)}"
                self.encoders.append(GraphEncoder(name, run, graph=graph, source=source))
        for encoder in self.encoders:
            try:
                extract(
                    task="kgc",
                    model=encoder.name,
                    data=encoder.source,
                    run=encoder.run,
                    dtype=options.dtype,
                    device=options.device,
                )
            except LlmcondError as error:
                log.info(f"{encoder.name}, {encoder.graph}: {error}")
                encoder.reason = failure_reason(error)

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
    for graph in dict.fromkeys(encoder.graph for encoder in work.encoders):
        encoders = [encoder for encoder in work.encoders if encoder.graph == graph]
        rows = [row for encoder in encoders for row in link_prediction(work, encoder)]
        title, labels = f"knowledge graphs, {graph}", ["architecture"]
        sections.append(Section("Table 2", title, about, labels, MEASURES, rows))
    return sections


def link_prediction(work: GraphWork, encoder: GraphEncoder) -> list[Row]:
    """Return the rows of a graph and an encoder."""
    options, set_up = work.options, ["frozen encoder", "other encoder"]

    ours = score_none(work, encoder)
    notes = [*set_up, "not in the paper", "the head is no candidate"]
    rows = [Row(encoder.label, ["no head: e(h)"], ours, notes)]
    for neighbours in (False, True) if options.neighbours else (False,):
        for head, label, key in HEADS:
            if head not in options.heads:
                continue
            epochs = 1 if options.quick else options.epochs
            changes = {"epochs": str(epochs), **({"neighbours": "true"} if neighbours else {})}
            figures = score_head(work, encoder, head, changes)
            notes = [*set_up, f"at most {epochs} epochs"]
            notes += ["reads neighbours"] if neighbours else []
            paper, _ = printed_figures(TABLE_2, MEASURES, encoder.graph, key)
            labels = [f"{label}{', neighbours' if neighbours else ''}"]
            rows.append(Row(encoder.label, labels, figures, notes, {} if neighbours else paper))
    for name in ("StAR", "SimKGC"):
        paper, _ = printed_figures(TABLE_2, MEASURES, encoder.graph, name)
        if paper:
            reason = "not done: a bi-encoder, trained"
            rows.append(Row("BERT or RoBERTa", [name], reason, [], paper))
    return rows


def score_none(work: GraphWork, encoder: GraphEncoder) -> Figures:
    """Return the figures without a head, or why there are none."""

    def score() -> Figures:
        split = encoder.scored_split()
        results = evaluate(run=encoder.run, head=["none"], split=split, exclude_head=True)
        return result_figures(results[0])

    return encoder.reason or work.once(("none", str(encoder.run)), score)


def score_head(
    work: GraphWork, encoder: GraphEncoder, head: str, changes: dict[str, str]
) -> Figures:
    """Return the figures of a head as averages over seeds, or why there are none."""
    suffix = "-neighbours" if "neighbours" in changes else ""

    def score() -> Figures:
        names = [
            fit_once(
                run=encoder.run,
                head=head,
                seed=seed,
                set=changes,
                name=f"{head}{suffix}-seed{seed}",
                device=work.options.device,
            )
            for seed in range(work.seeds)
        ]
        results = evaluate(run=encoder.run, head=names, split=encoder.scored_split())
        return average_figures([result_figures(r) for r in results if r.name in names])

    return encoder.reason or work.once((str(encoder.run), head, suffix), score)


def table_4(work: GraphWork) -> list[Section]:
    """Compute table 4 for each graph: time, hit rate and size of caches."""
    sections = []
    for source in dict.fromkeys(encoder.source for encoder in work.encoders):
        encoders = [encoder for encoder in work.encoders if encoder.source == source]
        title = f"time, cache and memory on {encoders[0].graph}"
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


NAMES = [head for head, _, _ in HEADS]
NEIGHBOURS = "fit each head again with neighbours, which the paper does not have"
PAPER = Paper(
    name="Hyper-CL on knowledge graphs",
    doc=__doc__,
    script="reproduce_graphs.py",
    sections={"2": table_2, "4": table_4},
    about=about,
    work=GraphWork,
    options={
        "data": declare(str, "folders of the graphs", nargs="+", required=True, metavar="FOLDER"),
        "epochs": declare(8, "maximum number of epochs"),
        "heads": declare(
            NAMES, f"heads, among {', '.join(NAMES)}", "all", choices=NAMES, metavar="NAME"
        ),
        "neighbours": declare(False, NEIGHBOURS),
    },
    folder="runs/reproduce-graphs",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code."""
    return run_paper(PAPER, arguments)


if __name__ == "__main__":
    sys.exit(main())
