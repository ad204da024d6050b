"""Reproduce table 2 of Hyper-CL (ACL 2024), on knowledge graphs, next to the paper's figures.

    python scripts/reproduce_graphs.py --encoders minilm --data WN18RR FB15K_237 --out graphs.md

The encoder is not trained. Each graph and encoder has a run folder with its features and heads. An
interrupted command resumes from them. ``bench_cache.py --graph`` measures table 4.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Options
from reproduce import (
    Measure,
    Row,
    Section,
    Value,
    average_figures,
    failure_reason,
    fit_once,
    page_head,
    parse_table,
    printed_figures,
    result_figures,
    run_script,
    shared_parser,
    write_page,
)

from llmcond.commands.encode import extract
from llmcond.commands.score import evaluate
from llmcond.errors import LlmcondError, UserError
from llmcond.kinds.ranking.graph import Graph, read_graph
from llmcond.log import log
from llmcond.runs.open import open_any_run
from llmcond.workflows.options.common import Split

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


@dataclass(frozen=True, slots=True)
class Task:
    """A graph, an encoder and the run of both.

    Attributes:
        encoder: name of the encoder, as given on the command line.
        graph: name of the graph.
        source: folder of the graph.
        run: folder of the run.
    """

    encoder: str
    graph: str
    source: str
    run: Path


def name_graph(graph: Graph, source: str) -> str:
    """Return the published name of a graph, or the name of its folder."""
    splits = graph.splits
    sizes = len(splits["train"]), len(splits.get("test", ()))
    return GRAPHS.get(sizes, Path(source).name)


def scored_split(run: Path) -> Split:
    """Return the split that is scored: test, or dev if there is none."""
    return "test" if "test" in open_any_run(run).splits else "dev"


# -- table 2 -----------------------------------------------------------------------------------


def table_2(options: argparse.Namespace, tasks: Sequence[Task]) -> Iterator[Section]:
    """Yield table 2 for each graph."""
    for graph in dict.fromkeys(task.graph for task in tasks):
        rows = [
            row for task in tasks if task.graph == graph for row in link_prediction(options, task)
        ]
        about = [
            "Every entity is a candidate, other known answers are left out (filtered), and ranks "
            "are realistic if scores are tied. Both directions are averaged.",
            "The paper prints fractions. All figures of this table are multiplied by 100.",
            "Intervals cover the error of head and tail entities and, with several fits, of seeds.",
            '"Neighbours" are the mean features of the entities that train links to an entity. The '
            "paper has nothing like it.",
        ]
        yield Section(
            "Table 2", f"knowledge graphs, {graph}", about, ["architecture"], MEASURES, rows
        )


def link_prediction(options: argparse.Namespace, task: Task) -> list[Row]:
    """Return the rows of a graph and an encoder."""
    rows, set_up = [], ["frozen encoder", "other encoder"]
    try:
        extract(
            task="kgc",
            model=task.encoder,
            data=task.source,
            run=task.run,
            dtype=options.dtype,
            device=options.device,
        )
        zero_shot = evaluate(
            run=task.run, head=["none"], split=scored_split(task.run), exclude_head=True
        )
        notes = [*set_up, "not in the paper", "the head is no candidate"]
        ours: Mapping[str, Value] | str = result_figures(zero_shot[0])
    except LlmcondError as error:
        log.info(f"{task.encoder}, {task.graph}: {error}")
        ours, notes = failure_reason(error), []
    rows.append(Row(task.encoder, ["no head: e(h)"], ours, notes))
    failed = ours if isinstance(ours, str) else ""
    for neighbours in (False, True) if options.neighbours else (False,):
        for head, label, key in HEADS:
            if head not in options.heads:
                continue
            epochs = 1 if options.quick else options.epochs
            changes = {"epochs": str(epochs), **({"neighbours": "true"} if neighbours else {})}
            figures = failed or score_head(options, task, head, changes)
            notes = [*set_up, f"at most {epochs} epochs"]
            if neighbours:
                notes.append("reads neighbours")
            paper = {} if neighbours else printed_figures(TABLE_2, MEASURES, task.graph, key)[0]
            suffix = ", neighbours" if neighbours else ""
            rows.append(Row(task.encoder, [f"{label}{suffix}"], figures, notes, paper))
    for name in ("StAR", "SimKGC"):
        paper = printed_figures(TABLE_2, MEASURES, task.graph, name)[0]
        if paper:
            reason = "not done: a bi-encoder, trained"
            rows.append(Row("BERT or RoBERTa", [name], reason, [], paper))
    return rows


def score_head(
    options: argparse.Namespace, task: Task, head: str, changes: Mapping[str, str]
) -> Mapping[str, Value] | str:
    """Return the figures of a head on test, as averages over seeds, or why there are none."""
    try:
        suffix = "-neighbours" if "neighbours" in changes else ""
        names = [
            fit_once(
                run=task.run,
                head=head,
                seed=seed,
                set=dict(changes),
                name=f"{head}{suffix}-seed{seed}",
                device=options.device,
            )
            for seed in range(1 if options.quick else options.seeds)
        ]
        split = scored_split(task.run)
        results = [
            result
            for result in evaluate(run=task.run, head=names, split=split)
            if result.name in names
        ]
        figures = [result_figures(result) for result in results]
    except LlmcondError as error:
        log.info(f"{task.encoder}, {task.graph}, {head}: {error}")
        return failure_reason(error)
    return average_figures(figures)


ABOUT = [
    "The paper trains BERT-base together with the head. We freeze the encoder: vectors of "
    "entities and relations are computed once, and only the head and a linear map of "
    "candidates are fitted.",
    "The epoch is chosen by the MRR of at most 1,000 dev queries; test is only scored.",
    "The descriptions of FB15k-237 are those of StAR, one sentence, and not SimKGC's 50 words.",
]

# -- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code; see ``run_script``."""
    return run_script("reproduce_graphs.py", _parser().parse_args(arguments), _reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    if options.epochs < 1:
        raise UserError(f"--epochs is {options.epochs}; it must be at least 1.")
    names = {source: name_graph(read_graph(source), source) for source in options.data}
    tasks = [
        Task(encoder, graph, source, options.folder / f"{_slug(encoder)}-{_slug(graph)}")
        for source, graph in names.items()
        for encoder in dict.fromkeys(options.encoders)
    ]
    command = _command(options, list(names))
    record = {
        "paper": "Hyper-CL on knowledge graphs",
        "command": command,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "quick": options.quick,
    }
    commands = ["reproduce_graphs.py"] * len(tasks)
    head = page_head("Hyper-CL on knowledge graphs", command, ABOUT)
    sections = write_page(options, head, table_2(options, tasks), record, commands)
    done = any(not isinstance(row.ours, str) for section in sections for row in section.rows)
    return 0 if done else 1


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name).strip("-.") or "graph"


def _command(options: argparse.Namespace, sources: Sequence[str]) -> str:
    """Return the command of the page; folders are specific to one machine and may be private."""
    texts = [
        "python scripts/reproduce_graphs.py --encoders",
        *(Path(name).name if Path(name).is_dir() else name for name in options.encoders),
        "--data",
        *(Path(source).name for source in sources),
        f"--epochs {options.epochs} --seeds {options.seeds}",
        *(["--heads", *options.heads] if len(options.heads) < len(HEADS) else []),
        *(["--neighbours"] if options.neighbours else []),
        *([f"--dtype {options.dtype}"] if options.dtype != "auto" else []),
        *(["--quick"] if options.quick else []),
    ]
    return " ".join(texts)


def _parser() -> Options:
    parser = shared_parser(__doc__ or "", "runs/reproduce-graphs")
    add, names = parser.option, [head for head, _, _ in HEADS]
    add("--data", str, "folders of the graphs", nargs="+", required=True, metavar="FOLDER")
    add("--heads", names, f"heads, among {', '.join(names)}", "all", choices=names, metavar="NAME")
    add("--neighbours", False, "fit each head again with neighbours, which the paper does not have")
    add("--epochs", 8, "maximum number of epochs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
