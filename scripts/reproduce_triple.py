"""Reproduce the tables of Triple-Encoders (ACL 2024) on frozen encoders, next to the paper's.

    python scripts/reproduce_triple.py --encoders minilm --data FOLDER --out triple-encoders.md

The script covers tables 2 to 7 and figures 6 to 8: last rows, planning, ablations, components,
similarities, costs, history lengths, turns outside the window, and contributions of turns. Data are
dialogues, such as DailyDialog; see docs/dialogue.md. Heads are saved in the run folder
of each encoder, so that the same command resumes where it was interrupted. With --generate, a
causal language model gives the candidates of table 3, as in the paper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Options
from reproduce import (
    Encoder,
    Figures,
    Measure,
    Paper,
    Row,
    Section,
    Value,
    Work,
    average_figures,
    draw_rows,
    figure_path,
    result_figures,
    run_paper,
    slug,
    to_value,
)

from llmcond.base.files import check_figure
from llmcond.base.metrics import METRICS
from llmcond.commands.score import analyse
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.loading import load_config, load_tokenizer
from llmcond.encoders.tokenizing import InputTokenizer
from llmcond.evaluation.results import Result
from llmcond.heads import load_recipe
from llmcond.kinds.dialogue.data import UtteranceInputs, read_dialogues
from llmcond.kinds.dialogue.examples import (
    DialogueExamples,
    NextQueries,
    join_turns,
    next_queries,
    rank_next,
    stack_queries,
    subset_masks,
)
from llmcond.runs import open_any_run
from llmcond.runs.examples import result_without_metrics, score_ranks

# -- the paper ---------------------------------------------------------------------------------

#: Heads: key -> recipe, changed settings, and the key of the head that the fit starts from.
HEADS: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "ccl": ("ccl", {}, ""),
    "c3l": ("c3l-released", {}, "ccl"),
    "c3l-scratch": ("c3l-released", {}, ""),
    "c3l-directional": ("c3l-released", {"directional_negatives": "true"}, "ccl"),
    "bi-positives": ("c3l-released", {"positives": "singles", "score": "bi"}, "ccl"),
    "hard-positives": ("c3l-released", {"curved": "false"}, ""),
}
AVERAGE_RANK = Measure.of("average_rank")
HITS = tuple(Measure.of(f"hits@{k}") for k in (5, 10, 25, 50))
HISTORIES = range(2, 11)

TABLE_2 = {"last:1": "20.44", "last:2": "19.75", "last:3": "23.65", "last:4": "24.26"}
#: System -> head, whether the context is used, and the printed Hits@5, 10, 25 and 50.
TABLE_3 = {
    "bi-encoder (CCL)": ("ccl", "bi", ("25.50", "34.99", "52.36", "71.73")),
    "triple encoder": ("c3l", "average", ("39.37", "48.44", "63.84", "79.17")),
    "triple encoder as bi-encoder": ("c3l", "bi", ("38.45", "46.82", "62.82", "78.63")),
}
#: Row -> head, score and printed average rank.
TABLE_4 = {
    "triple encoder, after CCL": ("c3l", "average", "21.25"),
    "triple encoder, from scratch": ("c3l-scratch", "average", "23.02"),
    "triple encoder with directional negatives, after CCL": (
        *("c3l-directional", "average", "25.68"),
    ),
    "bi positives and triple negatives, as bi-encoder, after CCL": ("bi-positives", "bi", "27.30"),
    "CCL only": ("ccl", "bi", "31.01"),
    "triple encoder with hard positives, from scratch": ("hard-positives", "average", "32.39"),
}
#: Row -> score of the triple encoder and printed average rank.
TABLE_5 = {
    "triple encoder": ("average", "21.25"),
    "triple encoder + bi-like [B2]": ("average+bi", "21.92"),
    "direct neighbours": ("neighbours", "24.88"),
    "bi-like [B1] and bi-like [B2]": ("bi:both", "25.08"),
    "mean with only [B2]": ("average:b2", "25.40"),
    "bi-like [B2]": ("bi", "25.48"),
    "mean with only [B1]": ("average:b1", "33.45"),
    "bi-like [B1]": ("bi:b1", ""),
}
#: Row -> head, score and printed similarities.
TABLE_6 = {
    ("bi-encoder", "CCL"): ("ccl", "bi", ("0.0659", "0.2190", "0.1531")),
    ("bi-encoder", "C3L ([B2])"): ("c3l", "bi", ("-0.0031", "0.1616", "0.1657")),
    ("triple encoder", "C3L ([B1] & [B2])"): ("c3l", "average", ("0.0201", "0.286", "0.2659")),
}
#: Row -> head, score and average rank in the text; the curves are only plotted.
FIGURE_6 = {
    "CCL": ("ccl", "bi", "31.01"),
    "C3L as bi-encoder": ("c3l", "bi", "25.48"),
    "C3L, average": ("c3l", "average", "21.25"),
    "C3L, last 2 rows": ("c3l", "last:2", "19.75"),
    "C3L, MaxSim": ("c3l", "maxsim", "20.16"),
    "C3L with hard positives": ("hard-positives", "average", "32.39"),
    "no head, average": ("none", "average", ""),
    "no head, all turns as one text": ("none", "joined", ""),
}
FIGURE_8 = {
    "CCL": ("ccl", "bi"),
    "C3L as bi-encoder": ("c3l", "bi"),
    "C3L, pairs": ("c3l", "average"),
}


# -- encoders and heads ------------------------------------------------------------------------


class DialogueWork(Work):
    """The command on dialogues."""

    headings = ("encoder", "computed in", "data")

    def __init__(self, paper: Paper, options: Any) -> None:
        super().__init__(paper, options)
        if options.out is not None:
            check_figure(figure_path(options.out, "figure"))
        read_dialogues(options.data)  # reports invalid data before any other work
        for name in dict.fromkeys(options.encoders):
            encoder = Encoder(name, Path(options.folder, slug(name)))
            self.add_encoder(encoder, task="dialogue", data=options.data)

    def fit(self, encoder: Encoder, key: str) -> list[str]:
        """Return the names of a head for all seeds, and fit those that the run lacks."""
        if key == "none":
            return ["none"]
        recipe, changes, start = HEADS[key]
        if self.options.quick:
            changes = {**changes, "epochs": "1"}
        starts = self.fit(encoder, start) if start else ()
        return self.fit_heads(encoder, key, recipe, changes, starts)

    def score(self, encoder: Encoder, key: str, score: str, **options: Any) -> Figures:
        """Return the figures of a head over seeds: all histories, and each history by its number.

        The intervals cover the error of dialogues and of seeds. ``options`` are those of
        ``evaluate`` for short-term planning.
        """

        def compute() -> Figures:
            names = self.fit(encoder, key)
            figures = planning_figures if options else figures_by_history
            return self.score_heads(encoder, names, figures, score=[score], **options)

        return self.once((str(encoder.run), key, score, str(options)), compute)

    def analyse(self, encoder: Encoder, key: str, score: str, what: Any, figures: Any) -> Figures:
        """Return the figures of an analysis over seeds, as a function reads them from its rows."""

        def compute() -> Figures:
            names = self.fit(encoder, key)
            rows = analyse(run=encoder.run, head=names, what=[what])[what]
            rows = [row for row in rows if row["name"] in names and row["score"] == score]
            return average_figures([figures(row) for row in rows])

        return self.once((str(encoder.run), key, score, what), compute)

    def rows(
        self,
        table: Mapping[Any, Sequence[Any]],
        figures: Callable[[Encoder, str, str], Figures] | None = None,
        keys: Sequence[str] = (AVERAGE_RANK.key,),
        notes: Sequence[str] = (),
    ) -> list[Row]:
        """Return the rows of a table.

        Args:
            table: label, or several, -> head, score and the printed figures, if there are any.
            figures: function from an encoder, a head and a score to figures; None for ``score``.
            keys: keys of the printed figures.
            notes: what else differs from the paper.
        """
        rows = []
        for encoder in self.encoders:
            for label, (key, score, *printed) in table.items():
                ours = encoder.reason or (figures or self.score)(encoder, key, score)
                head = ["frozen encoder" + ", linear maps of roles" * (key != "none")]
                other = [] if encoder.label.endswith("gte-base") else ["other encoder"]
                missing = ["not in the paper"] if key == "none" else []
                set_up = [*head, *other, *missing, *notes]
                labels = [label] if isinstance(label, str) else list(label)
                texts = [text for text in printed if text]
                paper = dict(zip(keys, texts, strict=True)) if texts else {}
                rows.append(Row(encoder.label, labels, ours, set_up, paper))
        return rows

    def describe(self, encoder: Encoder) -> list[str]:
        """Return an encoder's row in the table of encoders."""
        if encoder.reason:
            return [encoder.label, "–", encoder.reason]
        run = open_any_run(encoder.run)
        sizes = run.manifest["data"]["rows"].items()
        counts = ", ".join(f"{n:,} {split}" for split, n in sizes)
        data = f"{counts} dialogues, scored on {run.default_split()}"
        return [encoder.label, run.identity.dtype, data]

    def record(self) -> dict[str, Any]:
        """Return what the JSON record says about all tables, without texts of dialogues."""
        encoders = []
        for encoder in self.encoders:
            about: dict[str, Any] = {"name": encoder.label, "reason": encoder.reason or None}
            if not encoder.reason:
                run = open_any_run(encoder.run)
                data, about["identity"] = run.manifest["data"], run.identity.to_json()
                about["data"] = {key: data[key] for key in ("digest", "rows", "utterances")}
            encoders.append(about)
        return {"encoders": encoders}


def planning_figures(result: Result) -> dict[str, Value]:
    """Return the figures of a result with a goal."""
    return result_figures(result) if result.about.get("goal") else {}


def figures_by_history(result: Result) -> dict[str, Value]:
    """Return the figures of a result, and its average rank after each number of turns."""
    histories = result.subsets.get("by_history", {}).items()
    ranks = {name: part.metrics["average_rank"] for name, part in histories}
    return {name: to_value(value) for name, value in {**result.metrics, **ranks}.items()}


# -- tables ------------------------------------------------------------------------------------


def table_2(work: DialogueWork) -> Section:
    """Compute table 2: the last rows of the triangle of pairs."""
    table = {score: ("c3l", score, printed) for score, printed in TABLE_2.items()}
    rows = work.rows({**table, "average (all rows)": ("c3l", "average", "21.25")})
    about = [
        "Pairs count if their later utterance is one of the last l. Lower ranks are better.",
        "The triple encoder is fitted by C3L, after CCL.",
    ]
    return Section("Table 2", "last rows of pairs", about, ["rows"], [AVERAGE_RANK], rows)


def table_3(work: DialogueWork) -> Section:
    """Compute table 3: short-term planning."""
    history, generated = work.options.plan_history, work.options.generate
    name = f"samples of {Path(generated).name if generated else 'DialoGPT'}"

    def plan(encoder: Encoder, key: str, score: str, **options: Any) -> Figures:
        if not options:
            return "not done: it needs a language model (--generate)"
        return work.score(encoder, key, score, history=history, **options)

    systems = {(label, name): (*fits, *printed) for label, (*fits, printed) in TABLE_3.items()}
    options = {"generate": generated, "samples": 100} if generated else {}
    rows = work.rows(systems, partial(plan, **options), [measure.key for measure in HITS])
    for pool in ("retrieved", "same-depth"):
        systems = {(label, pool): fits[:2] for label, fits in TABLE_3.items()}
        notes = ["other candidates than the paper's"]
        rows += work.rows(systems, partial(plan, plan=pool), notes=notes)
    about = [
        f"Histories of {history} turns and goals 1 to 4 turns later. The answer is "
        "ranked among 100 other candidates, and candidates with its text do not count as wrong.",
        "Triple encoders are scored by equation 4, and bi-encoders by the candidate alone.",
        "Pools without a language model are not comparable with the paper's. `retrieved` has the "
        "utterances of other dialogues that are nearest to the context's last two turns, and "
        "`same-depth` has turns of other dialogues with the same number of turns before them.",
    ]
    return Section("Table 3", "short-term planning", about, ["system", "candidates"], HITS, rows)


def table_4(work: DialogueWork) -> Section:
    """Compute table 4: ablations of the objective."""
    about = [
        "After CCL: the fit starts from the head of CCL (`fit-head --start`), whose role before is "
        "the start of both roles of pairs.",
        "The paper does not define directional negatives of pairs. Ours are pairs of an utterance "
        "and the target, which must not predict an earlier utterance.",
        "Bi positives are single utterances in both roles before.",
    ]
    rows = work.rows(TABLE_4)
    return Section("Table 4", "ablations of the objective", about, ["head"], [AVERAGE_RANK], rows)


def table_5(work: DialogueWork) -> Section:
    """Compute table 5: components of the score."""
    rows = work.rows({label: ("c3l", *values) for label, values in TABLE_5.items()})
    about = ["One triple encoder, fitted by C3L after CCL, with the scores of `evaluate --score`."]
    return Section("Table 5", "components of the score", about, ["terms"], [AVERAGE_RANK], rows)


def table_6(work: DialogueWork) -> Section:
    """Compute table 6: mean similarities."""
    keys = ("random", "correct", "difference")
    measures = [Measure(key, key, 1, 4) for key in keys]
    table = {labels: (*fits, *printed) for labels, (*fits, printed) in TABLE_6.items()}
    rows = work.rows(table, partial(work.analyse, what="similarity", figures=_similarities), keys)
    about = [
        "Mean cosines over all queries of histories of 2 to 10 turns. The random utterances are "
        "all other candidates with another text; the paper samples them.",
    ]
    return Section("Table 6", "mean similarities", about, ["inference", "approach"], measures, rows)


def _similarities(row: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "random": Value(row["random"]),
        "correct": Value(row["correct"]),
        "difference": Value(row["difference"], *row["difference_ci"]),
    }


def table_7(work: DialogueWork) -> Section:
    """Compute table 7: the cost of a step."""
    measures = [
        Measure("texts", "texts encoded", 1, 0),
        Measure("tokens", "tokens encoded", 1, 1),
        Measure("products", "products per candidate", 1, 0),
        AVERAGE_RANK,
    ]
    table = {
        "CCL: O(1) encodings, O(|C|) cosines": ("ccl", "bi", "31.01"),
        "C3L as bi-encoder: O(1), O(|C|)": ("c3l", "bi", "25.48"),
        "C3L, pairs: O(1), O(|C| n)": ("c3l", "average", "21.25"),
        "all turns as one text, no head (ConveRT: O(n), O(|C|))": ("none", "joined", ""),
    }

    def figures(encoder: Encoder, key: str, score: str) -> Figures:
        ranks = work.score(encoder, key, score)
        if isinstance(ranks, str):
            return ranks
        newest, all_turns = encoder_tokens(work, encoder)
        tokens = all_turns if score == "joined" else newest
        return {
            "texts": Value(1.0),
            "tokens": Value(tokens),
            "products": Value(1.0),
            AVERAGE_RANK.key: ranks[AVERAGE_RANK.key],
        }

    about = [
        "The row names have the paper's complexities per step, for n turns and candidates C.",
        "Ours encode one text per step in every row: each role is a map of the same vector, and "
        "all turns are one text. The tokens are means over the queries, with special tokens.",
        "Scores that are sums over pairs are products with one vector, so that a candidate costs "
        "one product and not n.",
    ]
    rows = work.rows(table, figures)
    return Section("Table 7", "cost per step", about, ["system"], measures, rows)


def encoder_tokens(work: DialogueWork, encoder: Encoder) -> tuple[float, float]:
    """Return the mean number of tokens of the newest turn and of all turns of the queries."""
    run, options = open_any_run(encoder.run), work.options
    queries = next_queries(run.data, run.default_split())
    joined, new_texts = join_turns(queries, run.data.texts)
    texts = [*run.data.texts, *new_texts]
    resolved = resolve(encoder.name, EncoderOptions(dtype=options.dtype, device=options.device))
    member = resolved.list_members()[0]
    config = load_config(member.checkpoint, member.identity.attention)
    loaded = load_tokenizer(member.checkpoint, config)
    tokenizer = InputTokenizer(loaded, member.identity, member.checkpoint.name)
    (prompt,) = run.prompts().values()
    means = []
    for subsets in (queries, joined):
        last = np.concatenate([subset.contexts[:, -1] for subset in subsets])
        used, which = np.unique(last, return_inverse=True)
        inputs = UtteranceInputs([texts[i] for i in used], prompt)
        lengths = np.array([len(tokens.ids) for tokens in tokenizer(inputs)])
        means.append(float(lengths[which].mean()))
    return means[0], means[1]


def figure_6(work: DialogueWork) -> Section:
    """Compute figure 6: the average rank by history length."""
    measures = [AVERAGE_RANK, *(Measure(str(h), f"after {h}", 1, 1) for h in HISTORIES)]
    rows = work.rows(FIGURE_6)
    about = [
        "This is the paper's left panel, DailyDialog, which plots the average rank by history "
        "length. The text of the paper has the mean over lengths.",
        "The other panels need MDC and PersonaChat, which were not measured; `--data` takes any "
        "dialogues.",
        "ConveRT, which encodes all turns, is not available. The last row encodes all turns as one "
        "text with the same encoder, without training.",
    ]
    title = "average rank by history length"
    section = Section("Figure 6", title, about, ["system"], measures, rows)
    return draw_rows(work, section, "number of previous turns", "average rank")


def figure_7(work: DialogueWork) -> Section:
    """Compute figure 7: contexts with and without the turns outside the training window."""
    window = load_recipe(HEADS["c3l"][0], "dialogue").settings.window
    measures = [AVERAGE_RANK, *(Measure(str(h), f"after {h}", 1, 1) for h in HISTORIES)]

    def figures(encoder: Encoder, key: str, score: str) -> Figures:
        turns, _, score = score.partition(" ")
        if turns == "all":
            return work.score(encoder, key, score)
        rank = partial(rank_last_turns, work, encoder, key, score, int(turns))
        return work.once((str(encoder.run), key, turns), rank)

    table = {
        "all turns": ("c3l", "all last:2", "19.75"),
        f"only the last {window - 1} turns": ("c3l", f"{window - 1} last:2", ""),
    }
    rows = work.rows(table, figures)
    about = [
        f"The triple encoder with the last two rows, trained on windows of {window} turns. The "
        "paper plots the ranks; with all turns they are 9.58 % lower on average.",
    ]
    title = "turns outside the training window"
    section = Section("Figure 7", title, about, ["context"], measures, rows)
    return draw_rows(work, section, "number of previous turns", "average rank")


def rank_last_turns(
    work: DialogueWork, encoder: Encoder, key: str, score: str, n_turns: int
) -> Mapping[str, Value]:
    """Rank next turns by the last turns of each context only."""
    run = open_any_run(encoder.run)
    queries = next_queries(run.data, run.default_split())
    shortened: list[NextQueries] = [
        replace(subset, contexts=subset.contexts[:, -n_turns:]) for subset in queries
    ]
    examples = DialogueExamples(run)
    used = np.unique(run.data.turns_of(run.default_split()).utterances)
    figures = []
    for name in work.fit(encoder, key):
        roles = examples.roles(run.load_head(name), used).with_score(score)
        ranks = rank_next(shortened, roles.scores).resolve_ties()
        result = result_without_metrics(run.load_head(name), run.default_split())
        masks = {"by_history": subset_masks(queries)}
        metrics = [METRICS["average_rank"]]
        (result,) = score_ranks([result], [ranks], stack_queries(queries), metrics, masks)
        figures.append(figures_by_history(result))
    return average_figures(figures)


def figure_8(work: DialogueWork) -> Section:
    """Compute figure 8: how much each turn of a context contributes."""
    turns = [str(turn) for turn in range(1, 9)]
    rows = work.rows(FIGURE_8, partial(work.analyse, what="turns", figures=_differences))
    about = [
        "Contexts of 8 turns: the cosine of a turn with the answer minus its mean cosine with all "
        "other candidates of another text. In pairs, it is the mean over the pairs of the turn.",
        "The paper plots these figures and prints none.",
    ]
    measures = [Measure(turn, f"turn {turn}", 1, 3) for turn in turns]
    section = Section("Figure 8", "contribution by turn", about, ["system"], measures, rows)
    ylabel = "cosine with the answer minus other turns"
    return draw_rows(work, section, "turn of the context", ylabel)


def _differences(row: Mapping[str, Any]) -> dict[str, Value]:
    return {
        str(turn["turn"]): Value(turn["difference"], *turn["difference_ci"])
        for turn in row["turns"]
    }


# -- the command -------------------------------------------------------------------------------


def about(work: DialogueWork) -> list[str]:
    """Return the notes on all tables."""
    return [
        "The paper trains GTE-base as a whole on DailyDialog, with special tokens for the roles of "
        "utterances. We freeze the encoder and fit a linear map for each role, on each utterance's "
        "only vector.",
        "The paper alternates with an NLI objective, and marks odd and even turns with tokens. We "
        "do neither.",
        "The objectives and the target values are those of the released code (`c3l-released`). "
        "Dev chose the epochs by the average rank.",
        'Columns headed "paper" contain the figure as printed, or – if the paper has no such row.',
        f'Columns headed "ours" contain mean ± deviation over seeds ({work.seeds} per fit) '
        "[95 % interval, over dialogues and seeds].",
        "Average ranks are means over histories of 2 to 10 turns; lower is better.",
    ]


def add_options(parser: Options) -> None:
    """Add the options that only this script has."""
    add = parser.option
    add("--data", str, "file or folder of dialogues", "the bundled sample", metavar="SRC")
    generate = "causal language model that generates the candidates of table 3, such as "
    add("--generate", str, generate + "microsoft/DialoGPT-large", metavar="MODEL")
    add("--plan-history", "2,5,10", "history lengths of table 3", metavar="N,N")


PAPER = Paper(
    name="Triple-Encoders on dialogues",
    doc=__doc__,
    script="reproduce_triple.py",
    sections={
        "2": table_2,
        "3": table_3,
        "4": table_4,
        "5": table_5,
        "6": table_6,
        "7": table_7,
        "figure6": figure_6,
        "figure7": figure_7,
        "figure8": figure_8,
    },
    about=about,
    work=DialogueWork,
    options=add_options,
    folder="runs/reproduce-triple",
)

if __name__ == "__main__":
    sys.exit(run_paper(PAPER))
