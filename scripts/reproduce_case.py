"""Reproduce the tables of CASE (arXiv 2503.17279) for any encoders, next to the paper's figures.

    python scripts/reproduce_case.py --encoders minilm --data FOLDER --out case.md
    python scripts/reproduce_case.py --encoders nvidia/NV-Embed-v2 --quantize 4bit --data FOLDER

The tables are 1 (zero-shot), 2 (heads), 3 and 8 (examples before and after a head), 4 and 5
(isotropy), 6 (poolings) and 7 (earlier methods), and figures 3 (training curves), 4 (sizes), 5 and
6 (histograms). With --out, figures 3, 5 and 6 are also written as SVG files, with CSV files of
their numbers.
Features and fits are stored, so that the same command resumes where it was interrupted.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from reproduce import (
    ACCURACY,
    SPEARMAN,
    Encoder,
    Figures,
    Measure,
    Paper,
    Printed,
    Row,
    Section,
    Table,
    Value,
    average_over_seeds,
    figure_path,
    parse_table,
    read_values,
    result_figures,
    run_paper,
)
from reproduce import RatedWork as Work

from llmcond.base.files import can_draw, data_path
from llmcond.commands.score import analyse
from llmcond.evaluation.results import Result
from llmcond.heads.numpy_heads import score_key
from llmcond.options.training import SweepOptions
from llmcond.report.figures import plot_steps
from llmcond.workflows.fit import sweep

# -- the paper ---------------------------------------------------------------------------------

#: The paper's prompts with an instruction and without one, and our stand-ins for the former.
INSTRUCTED, CONCATENATED, STAND_INS = (
    ("sent", "cond"),
    ("concat-sent-cond", "concat-cond-sent"),
    ("pair-sent", "pair-cond"),
)
#: Hub name -> name in the paper (appendix A).
NAMES = {
    "nvidia/NV-Embed-v2": "NV",
    "Salesforce/SFR-Embedding-Mistral": "SFR",
    "Alibaba-NLP/gte-Qwen2-7B-instruct": "GTE",
    "intfloat/multilingual-e5-large-instruct": "E5",
    "princeton-nlp/sup-simcse-roberta-large": "SimCSE_large",
    "princeton-nlp/sup-simcse-bert-base-uncased": "SimCSE_base",
}
#: Hub name -> pooling in the paper's table 1.
POOLINGS = dict(zip(NAMES, "latent mean last mean last last".split(), strict=True))

#: Encoder, pooling, prompt, whether c is subtracted: Spearman and accuracy. Table 1 is the part
#: with the poolings of ``POOLINGS``.
TABLE_6 = parse_table(
    """
    NV latent 16.98 52.24 22.07 59.89 31.32 64.91 27.02 48.02
    SFR last 11.88 46.97 -0.18 33.77 19.28 50.66 13.00 44.33
    SFR mean 19.54 57.52 11.89 43.01 20.38 52.51 18.32 46.44
    GTE last 7.16 42.48 7.16 37.20 20.40 54.08 16.58 45.12
    GTE mean 13.01 42.48 11.34 36.67 17.87 42.22 18.42 42.22
    E5 mean 11.08 42.21 3.77 33.77 12.01 42.74 6.18 37.47
    E5 last 9.28 41.69 0.49 31.13 8.90 39.84 3.05 34.56
    """,
    2,
    ("sent yes", "sent no", "cond yes", "cond no"),
) | parse_table(
    """
    SimCSE_large last 5.59 37.46 4.00 35.09 8.32 34.56 8.58 48.02
    SimCSE_base last 4.37 39.81 1.25 34.82 7.05 42.74 6.00 36.67
    """,
    2,
    [f"{prompt} {subtract}" for subtract in ("no", "yes") for prompt in CONCATENATED],
)
TABLE_1 = {
    (key[0], *key[2:]): figures
    for key, figures in TABLE_6.items()
    if key[1] == dict(zip(NAMES.values(), POOLINGS.values(), strict=True))[key[0]]
}
#: Encoder: MLP, linear, PCA, ICA; 512 dimensions.
HEADS = ("mlp", "linear", "pca", "ica")
TABLE_2 = parse_table(
    """
    NV 69.30 69.95 32.04 19.13
    SFR 62.85 59.22 19.86 -1.99
    GTE 64.16 56.10 22.82 7.26
    E5 62.12 47.03 11.43 -0.17
    SimCSE_large 56.67 45.96 8.22 -4.89
    SimCSE_base 56.60 39.54 6.19 -1.66
    """,
    4,
)
#: Encoder, whether c is subtracted: mean and deviation of the cosine to the mean vector.
TABLE_4 = parse_table(
    """
    NV 0.407 0.084 0.492 0.067
    SFR 0.537 0.055 0.708 0.021
    GTE 0.489 0.067 0.696 0.036
    E5 0.542 0.056 0.897 0.010
    SimCSE_base 0.254 0.095 0.347 0.088
    SimCSE_large 0.248 0.110 0.333 0.085
    """,
    2,
    ("yes", "no"),
)
#: Encoder: partition ratio with c subtracted, and without.
TABLE_5 = parse_table(
    """
    NV 0.9611 0.9471
    SFR 0.9463 0.9266
    GTE 0.9490 0.9310
    E5 0.8906 0.8368
    SimCSE_base 0.9461 0.9297
    SimCSE_large 0.9499 0.9406
    """,
    2,
)
#: Method: Spearman and the place of our figures. Numbers are the best setting of each paper.
TABLE_7 = {
    "Deshpande et al. (2023), bi-encoder": ("47.5", "train-lora with a prompt of joint features"),
    "Liu et al. (2025), bi-encoder": ("48.1", "no code of it is part of llmcond"),
    "Li et al. (2024b), cross-encoder": ("43.8", "train-cross is a plain cross-encoder"),
    "Yoo et al. (2024), tri-encoder": ("39.6", "Hyper-CL: reproduce_hypercl.py --tables 1"),
    "Tu et al. (2024), bi-encoder": ("75.9", "it rewrites conditions as questions to GPT-3.5"),
}
CASE_SPEARMAN = "70.0"

#: The sentence pairs of tables 3 and 8, by subject: s1, s2, and the cosine of both, on NV before
#: and after the linear head of 512 dimensions.
EXAMPLES = {
    "tennis": (
        "Young woman in orange dress about to serve in tennis game, on blue court with green "
        "sides.",
        "A girl playing tennis wears a gray uniform and holds her black racket behind her.",
        ("0.5006", "0.9016"),
    ),
    "skiers": (
        "Two snow skiers with ski poles and snow skis, standing on top of a snow covered mountain "
        "with other skiers around them.",
        "A skier stands alone at the top of a snowy slope with blue skies and mountains in the "
        "distance.",
        ("0.6318", "0.7702"),
    ),
    "beach": (
        "A bunch of people standing around at the beach with a kite in the air.",
        "a beach scene with a beach chair decorated with the Canadian Flag and surfers walking by "
        "with their surfboards",
        ("0.3988", "0.5350"),
    ),
}
#: Subject, condition, answers, and the figures before and after: of both sentences, of s1 with its
#: answer and of s2 with its answer.
CONDITIONS = tuple(
    tuple(map(str.strip, line.split("|")))
    for line in """
    tennis | The color of the dress. | orange | gray | 0.4757 0.2522 0.1986 0.3551 0.0559 0.6061
    tennis | The name of the game. | tennis | tennis | 0.6233 0.9660 0.1135 0.6448 0.0983 0.6426
    skiers | The number of person. | two | one | 0.6358 0.2788 -0.0970 0.7014 0.0227 0.7953
    skiers | The type of job. | skier | skier | 0.7502 0.9539 0.2488 0.8016 0.3409 0.8032
    beach | The type of hobby. | kite flying | surf | 0.4386 0.4886 0.3457 0.7717 0.2254 0.7281
    beach | The type of location. | beach | beach | 0.4825 0.8582 0.1034 0.6665 0.1129 0.6703
    """.strip().splitlines()
)
#: Number of dimensions of the paper's tables 2 and 3.
DIM = 512

LABELS = {
    "concat-sent-cond": "CONC(s+c)",
    "concat-cond-sent": "CONC(c+s)",
    "pair-sent": "pair-sent",
    "pair-cond": "pair-cond",
}

SCORES = (SPEARMAN, ACCURACY)

# -- what is fitted ----------------------------------------------------------------------------

#: Largest number of epochs, and number of epochs without a better score on dev before stopping.
EPOCHS, PATIENCE = 60, 15
#: The rotation of ICA changes no cosine, so that one iteration ranks as well as many.
ICA_ITERATIONS = 1
STAND_IN_NOTE = (
    "pair-sent and pair-cond are not in the paper; they replace sent and cond for encoders that "
    "take no instruction. The encoder reads the other text first, as the first text of a pair, and "
    "only the tokens of the sentence, or of the condition, are pooled."
)
ISOTROPY_NOTE = (
    "The measure covers the vectors of both sentences of each scored row; the paper does not say "
    "which vectors it used."
)


def prompts(instructs: bool) -> list[str]:
    """Return the prompts of an encoder: the paper's, and our stand-ins if it takes no instructions.

    Prompts with an instruction are included for each encoder, so that its table shows why it has
    no figures for them.
    """
    return [*INSTRUCTED] if instructs else [*INSTRUCTED, *CONCATENATED, *STAND_INS]


def main_prompts(encoder: Encoder) -> list[str]:
    """Return the prompts whose features heads are fitted on; the first is the main one."""
    return ["cond"] if encoder.instructs else ["pair-cond", "concat-cond-sent", "concat-sent-cond"]


def dim_of(encoder: Encoder) -> int:
    """Return the number of dimensions of a head on an encoder."""
    return min(DIM, encoder.dim or DIM)


def setting_label(prompt: str, subtract: bool) -> str:
    """Return the paper's name of a setting."""
    return LABELS.get(prompt, prompt) + (" - c" if subtract else "")


def zeroshot_figures(encoder: Encoder, prompt: str, subtract: bool) -> Figures:
    """Return the zero-shot figures of a prompt, or the reason why there are none."""
    reason = encoder.missing_reason(prompt)
    return reason or result_figures(encoder.zeroshot[prompt, subtract])


def stand_in_note(prompt: str) -> list[str]:
    """Return a note on a prompt that is not in the paper; empty for the paper's prompts."""
    return ["not in the paper: our stand-in"] if prompt in STAND_INS else []


def yes_or_no(subtract: bool) -> str:
    """Return whether c is subtracted, as in the keys of the paper's tables."""
    return "yes" if subtract else "no"


# -- tables ------------------------------------------------------------------------------------


def table_1(work: Work) -> Section:
    """Compute table 1: zero-shot results by prompt, with and without subtraction."""
    rows = [
        work.row(
            encoder,
            [setting_label(prompt, subtract)],
            zeroshot_figures(encoder, prompt, subtract),
            stand_in_note(prompt),
            work.printed(TABLE_1, SCORES, encoder, prompt, yes_or_no(subtract)),
        )
        for encoder in work.encoders
        for prompt, subtract in product(prompts(encoder.instructs), (True, False))
    ]
    about = [
        "Nothing is trained: the score is the cosine of the encoder's vectors, with or without "
        "e(c) subtracted from all of them.",
        *accuracy_notes(work),
        STAND_IN_NOTE,
    ]
    return Section("Table 1", "zero-shot", about, ["setting"], SCORES, rows)


def accuracy_notes(work: Work) -> list[str]:
    """Return notes on how our accuracy and the paper's are counted."""
    counts = [next(iter(p.zeroshot.values())).counts for p in work.encoders if not p.reason]
    if not counts:
        return ["Accuracy is that of equation 9."]
    compared, tied = counts[0].n_compared, counts[0].n_tied
    share = compared / (compared + tied) if compared else 0
    return [
        f"Our accuracy (equation 9) covers the {compared:,} sentence pairs whose two ratings "
        f"differ; {tied:,} tied ones are left out.",
        "The paper's accuracies are multiples of 1/379, which is about the number of pairs in 30 % "
        "of the set with ties counted. The paper therefore seems to count ties as wrong: multiply "
        f"our figures by {share:.3f} to compare.",
    ]


def table_2(work: Work) -> Section:
    """Compute table 2: supervised and unsupervised heads."""
    rows = []
    for encoder in work.encoders:
        if not encoder.instructs:
            reason = encoder.missing_reason("cond")
            rows.append(Row(encoder.name, [setting_label("cond", True), "any", "–"], reason))
        first, *others = main_prompts(encoder)
        rows += [head_row(work, encoder, head, first, dim_of(encoder)) for head in HEADS]
        # The paper has no such rows; they show how much subtraction improves a fitted head.
        rows += [head_row(work, encoder, head, first, dim_of(encoder), False) for head in HEADS[:2]]
        rows += [
            head_row(work, encoder, head, prompt, dim_of(encoder))
            for prompt in others
            for head in HEADS
        ]
    labels = ["features", "head", "dimensions"]
    return Section("Table 2", "heads on cond - c", head_notes(work), labels, SCORES, rows)


def head_notes(work: Work) -> list[str]:
    """Return notes on the fits: two on supervised heads, and two on PCA and ICA."""
    epochs = work.training_settings(EPOCHS, PATIENCE)["epochs"]
    return [
        "Heads are fitted as in the paper: Adam, learning rate 0.001, batches of 512, dropout 20 % "
        "(linear) and 15 % (MLP), squared error of the cosine.",
        "The paper does not state the MLP's hidden width, the number of epochs and the seeds. "
        f"Our MLP has a hidden width of 1,024, and a fit takes at most {epochs} epochs and stops "
        f"after {PATIENCE} epochs without a better Spearman on dev.",
        "The seed does not matter for PCA and ICA. ICA is PCA with each component divided by its "
        "spread, followed by a rotation that is computed iteratively.",
        "No rotation changes a cosine, so a single iteration of ICA is enough.",
    ]


def head_row(
    work: Work, encoder: Encoder, head: str, prompt: str, dim: int, subtract: bool = True
) -> Row:
    """Fit a head, and return its row in table 2 or figure 4."""
    changes: dict[str, str] = {"dim": str(dim)}
    seeds = 1
    if head in ("mlp", "linear"):
        changes, seeds = work.training_settings(EPOCHS, PATIENCE, dim=dim), work.seeds
    elif head == "ica":
        changes["max_iterations"] = str(ICA_ITERATIONS)
    in_paper = subtract and dim == dim_of(encoder) and prompt not in STAND_INS
    printed: Printed = ({}, {})
    if in_paper:
        column = {key: (figures[HEADS.index(head)],) for key, figures in TABLE_2.items()}
        printed = work.printed(column, [SPEARMAN], encoder)
    notes = []
    if in_paper and dim < DIM:
        notes.append(f"{dim} dimensions, all that the encoder has")
    if prompt in CONCATENATED:
        notes.append("the paper does not say which CONC it used")
    notes += stand_in_note(prompt)
    if not subtract:
        notes.append("not in the paper: without subtraction")
    labels = [setting_label(prompt, subtract), head, str(dim)]
    ours = work.fit(encoder, head, prompt, changes, subtract, seeds)
    return work.row(encoder, labels, ours, notes, printed, changes)


def figure_4(work: Work) -> Section:
    """Compute figure 4: heads by number of dimensions."""
    rows = [
        head_row(work, encoder, head, main_prompts(encoder)[0], dim)
        for encoder in work.encoders
        for head in HEADS
        for dim in dict.fromkeys(max(1, dim_of(encoder) // part) for part in (8, 4, 2, 1))
    ]
    about = [
        "The paper plots this figure for NV and prints no numbers. Supervised heads stay level "
        "above about 200 dimensions and are best at about 500.",
        "In the paper, PCA retains the quality of the features, and ICA gets worse with more "
        "dimensions.",
        *head_notes(work)[2:],
    ]
    labels = ["features", "head", "dimensions"]
    return Section("Figure 4", "heads by number of dimensions", about, labels, SCORES, rows)


PEAK_EPOCH = Measure("epoch", "epoch of the highest score", 1, 0)
PEAK = Measure("peak", "highest Spearman")
LAST = Measure("last", "last Spearman")


def figure_3(work: Work) -> Section:
    """Compute figure 3: the score of supervised heads during training."""
    rows, notes = [], []
    changes = work.training_settings(EPOCHS, PATIENCE)
    for encoder in work.encoders:
        prompt = main_prompts(encoder)[0]
        curves = encoder.missing_reason(prompt) or train_curves(work, encoder, prompt)
        if not isinstance(curves, str):
            notes += save_figure(work, 3, encoder, partial(plot_steps, curves, split=work.split))
        for head in HEADS[:2]:
            ours: Figures = curves if isinstance(curves, str) else {}
            if not isinstance(curves, str):
                ours = describe_curve(next(c for c in curves if c.head == head), work.split)
            labels = [setting_label(prompt, True), head]
            rows.append(work.row(encoder, labels, ours, stand_in_note(prompt), fit=changes))
    about = [
        f"The curves are on {work.split} (the paper: test); figures are means over seeds, with "
        "intervals over seeds only. The highest score of a curve is optimistic: it was chosen on "
        "the rows that it is measured on.",
        "The paper prints no numbers. Its non-linear heads peak within 20 epochs and then decline; "
        "its linear heads rise until the end.",
        *notes,
    ]
    measures = [PEAK_EPOCH, PEAK, LAST]
    return Section("Figure 3", "training curves", about, ["features", "head"], measures, rows)


def train_curves(work: Work, encoder: Encoder, prompt: str) -> Sequence[Result] | str:
    """Fit the supervised heads with curves on the scored split, or return why that fails."""
    options = SweepOptions(
        run=encoder.run,
        head=HEADS[:2],
        prompt=[prompt],
        set=work.training_settings(EPOCHS, PATIENCE, dim=min(DIM, encoder.dim)),
        subtract=True,
        seeds=work.seeds,
        split=work.split,
        workers=work.options.workers,
        plot_steps="steps.svg",  # asks for the curves; the figure itself is plotted later
    )
    return work.once(("curves", encoder.name), lambda: sweep(options).results)


def describe_curve(result: Result, split: str) -> dict[str, Value]:
    """Return the highest and the last score of the curves of a result, over seeds."""
    key = score_key(split, result.primary.name)
    scores = [[epoch[key] or 0.0 for epoch in fit["curve"]] for fit in result.fits]
    epochs = [curve.index(max(curve)) + 1 for curve in scores]
    return {
        PEAK_EPOCH.key: Value(statistics.fmean(epochs)),
        PEAK.key: average_over_seeds([Value(max(curve)) for curve in scores]),
        LAST.key: average_over_seeds([Value(curve[-1]) for curve in scores]),
    }


def save_figure(
    work: Work, number: int, encoder: Encoder, draw: Callable[[Path], object]
) -> list[str]:
    """Draw a figure next to the page, and return its Markdown; nothing without --out."""
    if work.options.out is None or not can_draw():
        return []
    path = figure_path(work.options.out, f"figure-{number}-{encoder.run.name}")
    draw(path)
    return [
        f"![Figure {number} for {encoder.name}]({path.name}) ([numbers]({data_path(path).name}))"
    ]


BEFORE, AFTER = Measure("before", "before", 1, 4), Measure("after", "after", 1, 4)


def example_similarities(work: Work, encoder: Encoder) -> dict[tuple[str, ...], Any] | str:
    """Return the similarities of tables 3 and 8 by both texts and the condition.

    They are computed once. If there are none, the reason is returned.
    """
    prompt = main_prompts(encoder)[0]
    names = ("sentence1", "sentence2", "condition", "answer1", "answer2")
    questions = [
        dict(zip(names, (*EXAMPLES[subject][:2], *texts), strict=True))
        for subject, *texts, _ in CONDITIONS
    ]

    def compute() -> dict[tuple[str, ...], Any]:
        changes, dim = work.training_settings(EPOCHS, PATIENCE), min(DIM, encoder.dim)
        name = work.fit_heads(encoder, "examples", "linear", changes, prompt=prompt, dim=dim)[0]
        options: dict[str, Any] = {"what": ["answers"], "answers": questions}
        (result,) = analyse(run=encoder.run, head=[name], split=work.split, **options)["answers"]
        return {(row["text1"], row["text2"], row["condition"]): row for row in result["rows"]}

    return encoder.missing_reason(prompt) or work.once(("examples", encoder.name), compute)


def examples_section(work: Work, with_answers: bool) -> Section:
    """Compute table 3, or table 8 with the answers."""
    rows, changes = [], work.training_settings(EPOCHS, PATIENCE)
    for encoder in work.encoders:
        similarities = example_similarities(work, encoder)
        for labels, texts, figures in list_comparisons(with_answers):
            row = similarities if isinstance(similarities, str) else similarities[texts]
            printed = work.printed({("NV",): figures}, (BEFORE, AFTER), encoder)
            notes = stand_in_note(main_prompts(encoder)[0])
            ours = row if isinstance(row, str) else read_values(row, (BEFORE, AFTER))
            rows.append(work.row(encoder, labels, ours, notes, printed, changes))
    about = [
        "Each figure is a cosine before and after the linear head (seed 0). The sentences are "
        "those of the paper's tables, and are part of the script.",
        "cos(s1, s2) is without a condition, f(s; I(∅)). cos(s1, orange; c1) compares s1 with the "
        "word, both under the condition; the paper does not say how it encodes the word.",
        "The rating is 1 under c1, and 5 under c2.",
    ]
    table = "Table 8" if with_answers else "Table 3"
    title = "sentences and answers" if with_answers else "examples before and after a head"
    return Section(table, title, about, ["sentences", "cosine"], [BEFORE, AFTER], rows)


def list_comparisons(
    with_answers: bool,
) -> Iterator[tuple[list[str], tuple[Any, ...], tuple[str, str]]]:
    """Yield the labels, the texts with their condition, and the paper's figures of each row."""
    for subject, (first, second, alone) in EXAMPLES.items():
        yield [subject, "cos(s1, s2)"], (first, second, None), alone
        conditions = [row for row in CONDITIONS if row[0] == subject]
        for number, (_, condition, answer1, answer2, words) in enumerate(conditions, 1):
            c, figures = f"c{number}", words.split()
            pairs = [
                (f"cos(s1, s2; {c})", first, second),
                (f"cos(s1, {answer1}; {c})", first, answer1),
                (f"cos(s2, {answer2}; {c})", second, answer2),
            ]
            for i, (label, text1, text2) in enumerate(pairs[: 3 if with_answers else 1]):
                printed = (figures[2 * i], figures[2 * i + 1])
                yield [subject, label], (text1, text2, condition), printed


def table_7(work: Work) -> Section:
    """Compute table 7: earlier methods, and our non-linear head."""
    rows = [
        Row("–", [method], f"not done: {note}", (), {"spearman": printed})
        for method, (printed, note) in TABLE_7.items()
    ]
    case: Table = {("NV",): (CASE_SPEARMAN,)}
    for encoder in work.encoders:
        row = head_row(work, encoder, "mlp", main_prompts(encoder)[0], dim_of(encoder))
        paper, others = work.printed(case, [SPEARMAN], encoder)
        rows.append(replace(row, labels=["CASE, non-linear head"], paper=paper, others=others))
    about = [
        "The paper copies the figures of earlier methods from their papers; their test rows differ "
        "from its own, except for those of Tu et al., which are another part of the same rows.",
    ]
    return Section("Table 7", "earlier methods", about, ["method"], [SPEARMAN], rows)


MEAN = Measure("mean_cosine", "mean", 1, 3)
DEVIATION = Measure("std_cosine", "deviation", 1, 3)
RATIO_SUBTRACTED = Measure("minus", "ratio, - c", 1, 4)
RATIO = Measure("partition_ratio", "ratio", 1, 4)


def isotropy_of(work: Work, encoder: Encoder, prompt: str, subtract: bool) -> Figures:
    """Return the measures of a prompt's features, or the reason why there are none."""

    def compute() -> dict[tuple[str, bool], Any]:
        options: dict[str, Any] = {"what": ["isotropy"], "figure_format": "svg"}
        result = analyse(run=encoder.run, head=["none"], split=work.split, **options)
        measures = (MEAN, DEVIATION, RATIO)
        return {
            (row["prompt"], row["subtract"]): read_values(row, measures)
            for row in result["isotropy"]
        }

    if reason := encoder.missing_reason(prompt):
        return reason
    rows = work.once(("isotropy", encoder.name), compute)
    return rows if isinstance(rows, str) else rows[prompt, subtract]


def isotropy_prompts(encoder: Encoder) -> list[str]:
    """Return the prompts of tables 4 and 5."""
    others = ["concat-cond-sent", "concat-sent-cond", "pair-cond"]
    return ["cond", *([] if encoder.instructs else others)]


def isotropy_notes(prompt: str) -> list[str]:
    """Return the notes on a prompt's row in tables 4 and 5."""
    extra = ["not in the paper's table"] if prompt == "concat-sent-cond" else []
    return [*stand_in_note(prompt), *extra]


def isotropy_table(table: Table, prompt: str) -> Table:
    """Return the rows of table 4 or 5 with a prompt; the paper has one prompt for each encoder."""
    return {
        key: figures
        for key, figures in table.items()
        if prompt == ("concat-cond-sent" if key[0].startswith("SimCSE") else "cond")
    }


def table_4(work: Work) -> Section:
    """Compute table 4: the cosine to the mean vector."""
    measures, rows = (MEAN, DEVIATION), []
    for encoder in work.encoders:
        for prompt, subtract in product(isotropy_prompts(encoder), (True, False)):
            ours = isotropy_of(work, encoder, prompt, subtract)
            printed = work.printed(
                isotropy_table(TABLE_4, prompt), measures, encoder, yes_or_no(subtract)
            )
            labels = [setting_label(prompt, subtract)]
            rows.append(work.row(encoder, labels, ours, isotropy_notes(prompt), printed))
    about = [
        ISOTROPY_NOTE,
        "Vectors are more evenly distributed if the mean is lower and the deviation is larger.",
    ]
    return Section("Table 4", "cosine to the mean vector", about, ["setting"], measures, rows)


def histogram_section(work: Work, number: int) -> Section:
    """Compute figure 5, encoders with instructions, or figure 6, the others."""
    rows, notes = [], []
    for encoder in work.encoders:
        with_instructions, *others = isotropy_prompts(encoder)
        selected_prompts = [with_instructions] if number == 5 else others
        for prompt, subtract in product(selected_prompts, (True, False)):
            ours = isotropy_of(work, encoder, prompt, subtract)
            labels = [setting_label(prompt, subtract)]
            rows.append(work.row(encoder, labels, ours, stand_in_note(prompt)))
        picture = encoder.run / "analyses" / "isotropy.svg"
        if picture.is_file() and encoder.instructs == (number == 5):
            notes += save_figure(work, number, encoder, partial(copy_figure, picture))
    about = [
        "The paper plots the distributions of the cosines to the mean vector and prints no numbers "
        "but those of table 4. Cosines without subtraction lie higher and closer together.",
        *notes,
    ]
    kind = "with instructions" if number == 5 else "without instructions"
    title = f"histograms of the cosine to the mean vector, encoders {kind}"
    return Section(f"Figure {number}", title, about, ["setting"], [MEAN, DEVIATION], rows)


def copy_figure(source: Path, path: Path) -> None:
    """Copy a figure and its numbers."""
    shutil.copyfile(source, path)
    shutil.copyfile(data_path(source), data_path(path))


def table_5(work: Work) -> Section:
    """Compute table 5: the partition ratio."""
    measures, rows = (RATIO_SUBTRACTED, RATIO), []
    for encoder in work.encoders:
        for prompt in isotropy_prompts(encoder):
            subtracted, ours = (isotropy_of(work, encoder, prompt, c) for c in (True, False))
            if not isinstance(subtracted, str) and not isinstance(ours, str):
                ours = {**ours, RATIO_SUBTRACTED.key: subtracted[RATIO.key]}
            notes = isotropy_notes(prompt)
            if encoder.dim:
                notes.append(f"{encoder.dim} dimensions: compare along a row only")
            table = isotropy_table(TABLE_5, prompt)
            printed = work.printed(table, measures, encoder)
            rows.append(work.row(encoder, [LABELS.get(prompt, prompt)], ours, notes, printed))
    about = [
        ISOTROPY_NOTE,
        "The ratio is computed over 1,000 random directions, as in the paper; a ratio of 1 means "
        "evenly distributed vectors.",
        "The ratio grows with the number of dimensions whatever the vectors are. It cannot compare "
        "encoders of different sizes.",
    ]
    return Section("Table 5", "partition ratio (IPC)", about, ["features"], measures, rows)


def table_6(work: Work) -> Section:
    """Compute table 6: zero-shot results by pooling."""
    rows = []
    for encoder in work.encoders:
        paper_name = work.paper_name(encoder)
        poolings = [key[1] for key in TABLE_6 if key[0] == paper_name]
        default = [encoder.identity.pooling] if encoder.identity else []
        for pooling in dict.fromkeys(poolings or [*default, "mean", "last"]):
            other = with_pooling(work, encoder, pooling)
            # No other table shows why a pooling could not be used.
            failed = "" if other is encoder else other.reason
            notes = work.differences(other, pooling=False) if paper_name else ["other encoder"]
            for prompt, subtract in product(prompts(other.instructs), (True, False)):
                if prompt in STAND_INS or (prompt in INSTRUCTED and not other.instructs):
                    continue
                key = (pooling, prompt, yes_or_no(subtract))
                ours = failed or zeroshot_figures(other, prompt, subtract)
                labels = [pooling, setting_label(prompt, subtract)]
                printed = work.printed(TABLE_6, SCORES, encoder, *key)
                rows.append(Row(encoder.name, labels, ours, notes, *printed))
    about = [
        "This table repeats table 1 by pooling: the paper's encoders with the poolings of the "
        "paper, others with mean pooling, last-token pooling and their default.",
        "Prompts with an instruction are left out for encoders that take none; table 1 lists them.",
    ]
    return Section("Table 6", "poolings", about, ["pooling", "setting"], SCORES, rows)


def with_pooling(work: Work, encoder: Encoder, pooling: str) -> Encoder:
    """Return an encoder with a pooling; the encoder itself if that is its pooling already."""
    if encoder.reason or encoder.identity.pooling == pooling:
        return encoder
    text = next(t for t in work.options.encoders if t.partition("=")[0] == encoder.name)
    return work.prepare_encoder(
        text, pooling, lambda instructs: [*(INSTRUCTED if instructs else CONCATENATED)]
    )


# -- the command -------------------------------------------------------------------------------


def about(work: Work) -> list[str]:
    """Return the notes on all tables."""
    return work.data_notes(
        "The paper trains on the original C-STS training ratings. It tunes on 70 % of the "
        "re-annotated validation set, which it split itself, and scores the other 30 %."
    )


PAPER = Paper(
    name="CASE",
    doc=__doc__,
    script="reproduce_case.py",
    sections={
        "1": table_1,
        "2": table_2,
        "3": partial(examples_section, with_answers=False),
        "4": table_4,
        "5": table_5,
        "6": table_6,
        "7": table_7,
        "8": partial(examples_section, with_answers=True),
        "figure3": figure_3,
        "figure4": figure_4,
        "figure5": partial(histogram_section, number=5),
        "figure6": partial(histogram_section, number=6),
    },
    about=about,
    names=NAMES,
    poolings=POOLINGS,
    prompts=prompts,
)

if __name__ == "__main__":
    sys.exit(run_paper(PAPER))
