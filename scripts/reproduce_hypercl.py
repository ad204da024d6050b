"""Reproduce the C-STS tables of Hyper-CL (ACL 2024) for any encoders, next to the paper's figures.

    python scripts/reproduce_hypercl.py --encoders minilm --data FOLDER --out hypercl.md

The script covers tables 1 (scores), 3 (time and cache), 5 (unseen conditions), 6 (with and without
contrast), 7 (hyperparameters) and 8 (ranks), figure 4 (clusters), and the analyses of sections 5.2
(clusters) and 5.4.1 (norms). ``reproduce_graphs.py`` has tables 2 and 4, of knowledge graphs.
Encoders are frozen. Table 1 also has encoders that ``llmcond train-lora`` trained in the runs that
its rows name.

Table 5 of the paper chooses epochs on a tenth of train: --tables 5 --protocol 9:1. Heads that are
analysed are saved in the run folder; a full hypernetwork on 384 dimensions takes 0.2 GiB per seed.
The same command resumes where it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from cache_costs import TABLE_3, Workload, cost_section
from reproduce import (
    PEARSON,
    SPEARMAN,
    Encoder,
    Figures,
    Measure,
    Paper,
    Printed,
    Row,
    Section,
    Value,
    average_figures,
    joint_prompt,
    parse_table,
    read_values,
    result_figures,
    run_paper,
)
from reproduce import RatedWork as Work

from llmcond.base.arrays import MatrixLike, as_matrix
from llmcond.base.errors import UserError
from llmcond.commands.score import analyse, evaluate
from llmcond.evaluation.analyses import frobenius_variance
from llmcond.features.view import FeatureView
from llmcond.heads import load_recipe
from llmcond.runs import RunFittedHead, open_run
from llmcond.runs.rated import RatedExamples

# -- the paper ---------------------------------------------------------------------------------

#: Hub name -> name in the paper, which pools all encoders by [CLS] (appendix A).
NAMES = {
    "voidism/diffcse-roberta-base-sts": "DiffCSE_base",
    "princeton-nlp/sup-simcse-roberta-base": "SimCSE_base",
    "princeton-nlp/sup-simcse-roberta-large": "SimCSE_large",
}
#: Encoder, architecture: Spearman and its deviation, Pearson and its deviation.
_PRINTED_1 = parse_table(
    """
    DiffCSE_base tri 28.9 0.8 27.8 1.2
    DiffCSE_base low-cl 33.10 0.2 31.68 0.6
    DiffCSE_base full-cl 33.82 0.1 33.10 0.3
    SimCSE_base tri 31.5 0.5 31.0 0.5
    SimCSE_base low-cl 38.36 0.1 37.53 0.04
    SimCSE_base full-cl 38.75 0.3 38.38 0.3
    SimCSE_large tri 35.3 1.0 35.6 0.9
    SimCSE_large low-cl 38.12 1.4 37.47 1.4
    SimCSE_large full-cl 39.60 0.2 39.96 0.3
    DiffCSE_base bi 43.4 0.2 43.5 0.2
    SimCSE_base bi 44.8 0.3 44.9 0.3
    SimCSE_large bi 47.5 0.1 47.6 0.1
    """,
    4,
)
TABLE_1 = {k: (f"{a} ± {b}", f"{c} ± {d}") for k, (a, b, c, d) in _PRINTED_1.items()}
#: Encoder, architecture: Spearman overall, for unseen and for seen conditions.
TABLE_5 = parse_table(
    """
    SimCSE_large tri 32.13 13.93 25.02
    SimCSE_large full-cl 38.59 36.25 41.14
    """,
    3,
)
#: Encoder, architecture: Spearman.
TABLE_6 = parse_table(
    """
    SimCSE_base low-cl 37.96
    SimCSE_base low 35.38
    SimCSE_base matched-cl 36.13
    SimCSE_base matched 35.47
    """,
    1,
)
#: Encoder, divisor of H that gives K: Spearman.
TABLE_8 = parse_table(
    """
    DiffCSE_base 33.82 34.73 34.16 33.10 33.31
    SimCSE_base 38.75 38.66 35.69 38.36 37.02
    SimCSE_large 39.60 38.76 38.19 38.12 37.83
    """,
    1,
    ("1", "4", "8", "12", "16"),
) | {("SimCSE_large", "24"): ("37.44",)}
#: Encoder, architecture: recipe for training both, learning rate, weight decay, temperature.
TABLE_7 = parse_table(
    """
    DiffCSE_base full-cl hypercl-diffcse-base-full 3e-5 0.1 1.5
    DiffCSE_base low-cl hypercl-diffcse-base-64 1e-5 0.0 1.5
    SimCSE_base full-cl hypercl-simcse-base-full 3e-5 0.1 1.9
    SimCSE_base low-cl hypercl-simcse-base-64 2e-5 0.1 1.7
    SimCSE_large full-cl hypercl-simcse-large-full 2e-5 0.1 1.5
    SimCSE_large low-cl hypercl-simcse-large-85 1e-5 0.1 1.9
    """,
    4,
)
#: Temperature of the released code, for other encoders.
TEMPERATURE = "1.5"
#: Impurities of section 5.2 in nats, before and after.
IMPURITY = ("0.739", "0.270")
#: Variances of section 5.4.1, of the hypernetwork and the Hadamard product.
VARIANCE = {"low-cl": "0.0248", "tri": "0.001"}
#: What differs of rows that the paper lacks.
NOT_PRINTED = "not in the paper's table"
#: Divisor of H that gives the paper's choice of K (appendix B).
DIVISOR = 12

# -- what is fitted ----------------------------------------------------------------------------


class Spec(NamedTuple):
    """A head, and how it is fitted: a unique name, the recipe, and changed settings of it."""

    key: str
    head: str
    changes: Mapping[str, str]


#: Heads that are saved, so that they are fitted once and can be analysed; others are only scored.
SAVED = ("tri", "g1", "concat", "g2", "low-cl", "released", "full-cl")
#: Kind of head -> recipe with the contrastive objective and without, and the sizes that it takes.
HEADS = {
    "tri": ("hadamard", "hadamard", ()),
    "g1": ("hadamard-paper", "hadamard-paper", ()),
    "concat": ("concat", "concat", ("dim",)),
    "g2": ("concat-paper", "concat-paper", ("dim",)),
    "low": ("hypernet", "hypernet-mse", ("dim", "rank")),
    "released": ("hypernet-released", "hypernet-released", ("dim", "rank")),
    "matched": ("hypernet-ablation", "hypernet-ablation", ("rank",)),
    "full": ("hypernet-full", "hypernet-full-mse", ("dim",)),
}


def rank_of(dim: int, divisor: int = DIVISOR) -> int:
    """Return K for H dimensions."""
    return max(1, dim // divisor)


def name_of(encoder: Encoder, contrast: bool = True) -> str:
    """Return the paper's name of a low-rank hypernetwork on an encoder."""
    rank = rank_of(encoder.dim) if encoder.dim else "K"
    return f"hyper{rank}-cl" if contrast else f"hyper{rank}"


def analysed_heads(encoder: Encoder) -> tuple[tuple[str, str], ...]:
    """Return the names and the keys of the heads that are analysed."""
    return (
        ("tri-encoder, Hadamard product", "tri"),
        (name_of(encoder), "low-cl"),
        ("hyper-cl", "full-cl"),
    )


def spec_of(work: Work, encoder: Encoder, key: str, rank: int | None = None) -> Spec:
    """Return the recipe and the settings of a head for an encoder.

    Args:
        work: the command, whose options determine the number of epochs.
        encoder: the encoder.
        key: ``tri``, ``concat``, ``low``, ``matched``, ``full``, each also with ``-cl`` for the
            contrastive objective, ``g1`` and ``g2`` of section 4.2, and ``released``.
        rank: K; None for the paper's choice.
    """
    kind, _, contrast = key.partition("-")
    dim, rank = encoder.dim, rank or rank_of(encoder.dim)
    if kind in ("tri", "g1", "concat", "g2"):
        epochs, patience = 60, 10
    else:
        # Hypernetworks are best within a few epochs; an epoch of a full one takes 10 to 20 s.
        epochs, patience = (8, 2) if kind == "full" else (10, 3)
    with_contrast, without, names = HEADS[kind]
    sizes = {"dim": dim, "rank": rank}
    settings: dict[str, Any] = {name: sizes[name] for name in names}
    if contrast:
        row = TABLE_7.get((work.paper_name(encoder), key), (TEMPERATURE,))
        settings = {**settings, "info_nce": "1.0", "temperature": row[-1]}
    changes = work.training_settings(epochs, patience, **settings)
    head = with_contrast if contrast else without
    return Spec(key if rank == rank_of(dim) else f"{key}{rank}", head, changes)


def fit_saved(work: Work, encoder: Encoder, spec: Spec) -> list[str] | str:
    """Return the names of a head's fits, or the reason why there are none."""

    def fit() -> list[str]:
        return work.fit_heads(encoder, spec.key, spec.head, spec.changes, prompt="separate")

    reason = encoder.missing_reason("separate")
    return reason or work.once(("names", str(encoder.run), spec.key), fit)


def score(work: Work, encoder: Encoder, spec: Spec) -> Figures:
    """Return the figures of a head over seeds, or the reason why there are none."""
    if spec.key not in SAVED:
        return work.fit(encoder, spec.head, "separate", spec.changes)
    names = fit_saved(work, encoder, spec)
    if isinstance(names, str):
        return names
    key = ("figures", str(encoder.run), spec.key)
    return work.once(key, lambda: work.score_heads(encoder, names, split=work.split))


# -- tables ------------------------------------------------------------------------------------


def head_row(
    work: Work,
    encoder: Encoder,
    labels: Sequence[str],
    spec: Spec,
    ours: Figures,
    printed: Printed,
    *notes: str,
) -> Row:
    """Return the row of a fitted head; ``notes`` say what differs besides the encoder and fit."""
    row = work.row(encoder, labels, ours, notes, printed, spec.changes)
    return replace(row, set_up=["frozen encoder", *row.set_up])


def analysed_rows(
    work: Work,
    analyse_heads: Callable[[Encoder, str, list[str]], Mapping[str, Value]],
    printed: Callable[[Encoder, str], Printed],
    note: str = "",
    first: int = 0,
) -> list[Row]:
    """Return a row of each encoder and analysed head.

    Args:
        work: the command.
        analyse_heads: function from an encoder, the key of a head and the names of the saved heads
            to figures.
        printed: function from an encoder and the key of a head to the paper's figures.
        note: note on rows without a figure of the paper.
        first: index of the first of ``analysed_heads`` to include.
    """
    rows = []
    for encoder in work.encoders:
        for name, key in analysed_heads(encoder)[first:]:
            spec = spec_of(work, encoder, key)
            names = fit_saved(work, encoder, spec)
            ours: Figures = names if isinstance(names, str) else ""
            if not isinstance(names, str):
                analysis = partial(analyse_heads, encoder, key, names)
                ours = work.once((analyse_heads, str(encoder.run), key), analysis)
            paper = printed(encoder, key)
            notes = [note] if note and not paper[0] else []
            rows.append(head_row(work, encoder, [name], spec, ours, paper, *notes))
    return rows


def table_1(work: Work) -> Section:
    """Compute table 1: tri-encoders, and bi-encoders for comparison."""
    measures = (SPEARMAN, PEARSON)
    rows = []
    for encoder in work.encoders:
        low = name_of(encoder)
        for name, key, notes in (
            ("tri-encoder, Hadamard product", "tri", []),
            ("tri-encoder, Hadamard product as in the paper", "g1", [NOT_PRINTED]),
            ("tri-encoder, concatenation", "concat", [NOT_PRINTED]),
            ("tri-encoder, concatenation as in the paper", "g2", [NOT_PRINTED]),
            (low, "low-cl", []),
            (f"{low}, as in the released code", "released", ["the paper shows no such layer"]),
            ("hyper-cl", "full-cl", []),
        ):
            spec = spec_of(work, encoder, key)
            printed = work.printed(TABLE_1, measures, encoder, key)
            ours = score(work, encoder, spec)
            rows.append(head_row(work, encoder, [name], spec, ours, printed, *notes))
        rows += [trained_row(work, encoder, key) for key in TRAININGS]
        rows.append(frozen_bi_encoder(work, encoder))
    about = [
        "K is H / 12, the paper's choice for base and large encoders.",
        "The Hadamard baseline has a linear layer on the condition, and concatenation a GELU, as "
        "in the released code. The forms of section 4.2 have neither.",
        "An encoder is trained by the command in its row, and its figures are read from that run; "
        "the interval of such a row is over sentence pairs.",
    ]
    return Section("Table 1", "tri-encoders on C-STS", about, ["architecture"], measures, rows)


#: Key of a trained encoder in the paper's tables -> name of its row in table 1, end of the name of
#: its run, and options of ``llmcond train-lora``, with the settings of the paper where it has any.
#: ``{dim}`` and ``{rank}`` are H and K.
TRAININGS = {
    "bi": ("bi-encoder", "bi", "--head none --prompt concat-cond-sent"),
    "tri": ("tri-encoder, Hadamard product", "hadamard", "--head hadamard --prompt separate"),
    "low-cl": (
        "hyper{rank}-cl",
        "low",
        "--head hypercl-simcse-base-64 --prompt separate --set dim={dim} rank={rank}",
    ),
    "full-cl": (
        "hyper-cl",
        "full",
        "--head hypercl-simcse-base-full --prompt separate --set dim={dim}",
    ),
}


def trained_row(work: Work, encoder: Encoder, key: str) -> Row:
    """Return the row of a trained encoder, whose figures are read from its run if there is one."""
    name, run_name, options = TRAININGS[key]
    printed = work.printed(TABLE_1, (SPEARMAN, PEARSON), encoder, key)
    sizes = {"dim": encoder.dim, "rank": rank_of(encoder.dim)}
    label = name.format(**sizes) + ", encoder trained"
    folder = encoder.run.with_name(f"{encoder.run.name}-{run_name}")
    command = (
        f"llmcond train-lora --model {encoder.name} --data DATA "
        f"{options.format(**sizes)} --run FOLDER/{folder.name}"
    )
    if encoder.reason or not folder.is_dir():
        reason = encoder.missing_reason("separate") or f"not done: run `{command}` first"
        return Row(encoder.name, [label], reason, [], *printed)
    run = open_run(folder)
    # `train-lora --head none` trains without subtraction.
    zero_shot = "--head none" in options
    (result,) = (
        result
        for result in evaluate(run=folder, split=work.split)
        if (result.head == "none") == zero_shot and not (zero_shot and result.subtract)
    )
    scored = work.dataset.splits[work.split]
    if result.counts.n != scored.rated.sum():
        return Row(encoder.name, [label], "not done: its run has other rows", [], *printed)
    n_train = int(run.rows("train").rated.sum())
    notes = [f"`{command}`", f"trained on {n_train:,} rows, one seed"]
    return work.row(encoder, [label], result_figures(result), notes, printed)


def frozen_bi_encoder(work: Work, encoder: Encoder) -> Row:
    """Return the row of an MLP on the joint features of sentence and condition."""
    prompt = joint_prompt(encoder.instructs)
    changes = work.training_settings(60, 15, dim=min(512, encoder.dim or 512))
    row = work.row(
        encoder,
        [f"bi-encoder, frozen: MLP on {prompt}, minus e(c)"],
        work.fit(encoder, "mlp", prompt, changes),
        fit=changes,
    )
    return replace(row, set_up=["not in the paper: CASE's head", *row.set_up])


def table_3(work: Work) -> Section:
    """Compute table 3: time, hit rate and size of caches, measured once for each run."""
    workload, title = Workload.of_dataset(work.dataset), "time, cache and memory on C-STS"
    return cost_section(work, "Table 3", title, TABLE_3, workload, work.encoders)


def table_5(work: Work) -> Section:
    """Compute table 5: seen and unseen conditions."""
    measures = (
        Measure("overall", "overall"),
        Measure("unseen", "unseen"),
        Measure("seen", "seen"),
    )
    shares = []

    def by_condition(encoder: Encoder, key: str, names: list[str]) -> dict[str, Value]:
        result = analyse(run=encoder.run, head=names, split=work.split, what=["conditions"])
        rows = [row for row in result["conditions"] if row["name"] in names]
        unseen, n = rows[0]["n_unseen"], rows[0]["n_overall"]
        shares.append(f"{unseen:,} of {n:,} rows, {100 * unseen / n:.1f} %")
        return average_figures([read_values(row, measures) for row in rows])

    rows = analysed_rows(
        work,
        by_condition,
        partial(work.printed, TABLE_5, measures),
    )
    about = [
        "The figures are Spearman correlations. A condition is seen if training has exactly the "
        "same text, and unseen otherwise.",
        f"Rows with an unseen condition: {(shares or ['none'])[-1]}; in the paper 731 of 2,834, "
        "25.8 %.",
        "The paper scores the C-STS validation set, and tunes on a tenth of the training rows.",
    ]
    return Section("Table 5", "seen and unseen conditions", about, ["architecture"], measures, rows)


def table_6(work: Work) -> Section:
    """Compute table 6: heads with and without the contrastive objective."""
    rows = []
    for encoder in work.encoders:
        for name, key in (
            (name_of(encoder), "low-cl"),
            (name_of(encoder, contrast=False), "low"),
            ("no hypernetwork, as many parameters, -cl", "matched-cl"),
            ("no hypernetwork, as many parameters", "matched"),
            ("Hadamard product, -cl", "tri-cl"),
            ("Hadamard product", "tri"),
            ("hyper-cl", "full-cl"),
            ("hyper", "full"),
        ):
            spec = spec_of(work, encoder, key)
            printed = work.printed(TABLE_6, (SPEARMAN,), encoder, key)
            ours = score(work, encoder, spec)
            notes = [] if printed[1] else [NOT_PRINTED]
            rows.append(head_row(work, encoder, [name], spec, ours, printed, *notes))
    about = [
        "Heads with -cl are trained with squared error and InfoNCE, each with weight 1; the others "
        "with squared error only. The paper's figures are of its validation set.",
        "Our InfoNCE leaves out sentence pairs whose two ratings are equal. The released code uses "
        "the first of their rows in the file as the positive.",
    ]
    return Section(
        "Table 6", "the contrastive objective", about, ["architecture"], [SPEARMAN], rows
    )


def table_8(work: Work) -> Section:
    """Compute table 8: ranks of hypernetworks."""
    rows = []
    for encoder in work.encoders:
        for divisor in (1, 4, 8, DIVISOR, 16, 24):
            rank = rank_of(encoder.dim, divisor)
            key = "full-cl" if divisor == 1 else "low-cl"
            spec = spec_of(work, encoder, key, None if divisor == 1 else rank)
            printed = work.printed(TABLE_8, (SPEARMAN,), encoder, str(divisor))
            ours = score(work, encoder, spec)
            labels = [str(rank) if encoder.dim else "–", f"H / {divisor}"]
            rows.append(head_row(work, encoder, labels, spec, ours, printed))
    about = [
        "K = H is the full form: one matrix instead of a product of two. By its caption, the "
        "paper's table is of the validation set, but it repeats the test figures of table 1.",
    ]
    return Section("Table 8", "ranks K", about, ["K", "of H"], [SPEARMAN], rows)


LEARNING_RATE = Measure("learning_rate", "learning rate", 1, 5)
WEIGHT_DECAY = Measure("weight_decay", "weight decay", 1, 1)
TEMPERATURES = Measure("temperature", "temperature", 1, 1)


def table_7(work: Work) -> Section:
    """Compare the hyperparameters of table 7 with those of the bundled recipes."""
    repos = {name: repo for repo, name in NAMES.items()}
    measures = (LEARNING_RATE, WEIGHT_DECAY, TEMPERATURES)
    rows = []
    for (encoder, _), (name, *printed) in TABLE_7.items():
        recipe = load_recipe(name)
        values = {**recipe.finetune, TEMPERATURES.key: recipe.settings.temperature}
        paper = {measure.key: text for measure, text in zip(measures, printed, strict=True)}
        equal = all(values[key] == float(text) for key, text in paper.items())
        rows.append(
            Row(
                repos[encoder],
                [f"`{name}`"],
                {measure.key: Value(values[measure.key]) for measure in measures},
                ["equal" if equal else "differs"],
                paper,
            )
        )
    about = [
        "The recipes are those of `llmcond train-lora --model ENCODER --head RECIPE`, which also "
        "set batches of 32, 5 epochs, a warmup of 10 % and all weights trained, as released.",
    ]
    return Section("Table 7", "hyperparameters", about, ["recipe"], measures, rows)


# -- analyses ----------------------------------------------------------------------------------


BEFORE = Measure("before", "before", 1, 3)
AFTER = Measure("after", "after", 1, 3)
VARIANCES = Measure("variance", "variance", 1, 7)
RELATIVE = Measure("relative", "deviation / mean", 1, 3)
PRINTED_IMPURITY = dict(zip((BEFORE.key, AFTER.key), IMPURITY, strict=True))
UNPRINTED = "not in the paper"


def section_52(work: Work) -> Section:
    """Compute the clusters of conditions of section 5.2."""

    def impurities(encoder: Encoder, key: str, names: list[str]) -> dict[str, Value]:
        return average_figures([_clusters(work, encoder, n, seed) for seed, n in enumerate(names)])

    rows = analysed_rows(
        work, impurities, lambda _, key: ({} if key == "tri" else PRINTED_IMPURITY, {}), UNPRINTED
    )
    about = [
        "The figures are the impurity of K-means in nats, for 20 sentences under each of the 3 "
        "most frequent conditions of the split (`llmcond analyse --what clusters`). The paper "
        "samples the sentences at random, under three conditions of its choice.",
        "An impurity of 0 means that each condition lies in one cluster, for which a constant "
        "offset per condition is enough. The worst value is ln 3 = 1.099.",
        "The paper does not say which encoder and rank it used.",
        '"Before" is e(s) without a head. "After" is the embedding under the condition.',
        "Deviations and intervals are over seeds; K-means has the seed of the head.",
    ]
    return Section("Section 5.2", "clusters of conditions", about, ["head"], [BEFORE, AFTER], rows)


def _clusters(
    work: Work, encoder: Encoder, name: str, seed: int, **options: Any
) -> dict[str, Value]:
    """Return the impurities of a head; ``options`` are further options of ``analyse``."""
    result = analyse(
        run=encoder.run, head=[name], split=work.split, what=["clusters"], seed=seed, **options
    )
    (row,) = (row for row in result["clusters"] if row["name"] == name)
    return {BEFORE.key: Value(row["impurity_before"]), AFTER.key: Value(row["impurity"])}


def figure_4(work: Work) -> Section:
    """Draw figure 4, the clusters of section 5.2, next to the page if there is one."""
    about = ["The points are those of section 5.2 with seed 0, projected onto a plane."]

    def draw(encoder: Encoder, key: str, names: list[str]) -> dict[str, Value]:
        if work.options.out is None:
            return _clusters(work, encoder, names[0], 0)
        page = work.options.out.with_suffix("")
        folder = page / encoder.run.name
        options = {"out": folder, "figure_format": "svg"}
        figures = _clusters(work, encoder, names[0], 0, **options)
        for end in (".svg", "-data.csv"):  # without the digest of the fit
            (folder / f"clusters-{names[0]}{end}").replace(folder / f"clusters-{key}-seed0{end}")
        name = {key: name for name, key in analysed_heads(encoder)}[key]
        path = f"{page.name}/{folder.name}/clusters-{key}-seed0.svg"
        about.append(f"{encoder.name}, {name}: ![clusters of conditions]({path})")
        return figures

    rows = analysed_rows(work, draw, lambda _, key: (PRINTED_IMPURITY, {}), first=1)
    title = "clusters before and after projection"
    return Section("Figure 4", title, about, ["head"], [BEFORE, AFTER], rows)


def section_541(work: Work) -> Section:
    """Compute the norms of W_c, the weights generated from conditions, of section 5.4.1."""

    def printed(encoder: Encoder, key: str) -> Printed:
        return {VARIANCES.key: VARIANCE[key]} if key in VARIANCE else {}, {}

    rows = analysed_rows(work, partial(_variances, work), printed, UNPRINTED)
    about = [
        "The variance is that of ||W_c|| / sqrt(number of elements) over the conditions of the "
        "split. For the Hadamard product, W_c is the diagonal matrix of the transformed condition.",
        "Cosines do not change with the size of W_c, but the variance does. It therefore depends "
        "on the length of e(c), which is 1 for our encoders, and on the initial weights.",
        "The deviation of the norms divided by their mean depends on neither. The paper does not "
        "say which encoder and rank it used.",
    ]
    measures = (VARIANCES, RELATIVE)
    return Section("Section 5.4.1", "norms of W_c", about, ["head"], measures, rows)


def _variances(work: Work, encoder: Encoder, key: str, names: Sequence[str]) -> dict[str, Value]:
    """Return both measures of norms as averages over seeds."""
    if key == "tri":
        run = open_run(encoder.run)
        view = FeatureView((run.prompt("separate"),), True, "separate", True)
        condition = RatedExamples(run).rated(view, work.split).condition
        return average_figures([_diagonal(run.load_head(name), condition) for name in names])
    result = analyse(run=encoder.run, head=names, split=work.split, what=["norms"])
    return average_figures(
        [_spread(row["normalised"], row["raw"], row["mean_norm"]) for row in result["norms"]]
    )


def _spread(normalised: float, raw: float, mean: float) -> dict[str, Value]:
    """Return both measures of norms as figures."""
    return {VARIANCES.key: Value(normalised), RELATIVE.key: Value(raw**0.5 / mean)}


def _diagonal(saved_head: RunFittedHead, condition: MatrixLike | None) -> dict[str, Value]:
    """Return both measures of the norm of diag(c'), c' = W h_c + b, over distinct conditions."""
    if condition is None:
        raise UserError(f"the head {saved_head.name} takes no conditions.")
    first, _ = as_matrix(condition).unique()
    tensors = saved_head.head.tensors
    transformed = as_matrix(condition).read(first) @ tensors["transform"].T
    norms = np.linalg.norm(transformed + tensors.get("transform_bias", 0.0), axis=1)
    variance = frobenius_variance(norms, saved_head.head.dim_in)
    return _spread(variance["normalised"], variance["raw"], float(norms.mean()))


# -- the command -------------------------------------------------------------------------------


def about(work: Work) -> list[str]:
    """Return the notes on all tables."""
    return [
        *work.data_notes(
            "The paper trains on the original C-STS training ratings. Its table 1 is of the test "
            "set, whose ratings are hidden, and its other tables are of the validation set."
        ),
        "The paper trains the encoder together with the head, with a learning rate of 1e-5 to "
        "3e-5. Its code uses batches of 32 and 5 epochs, and keeps the best epoch on validation.",
        "We freeze the encoder: e(s) and e(c) are computed once, and only the head is fitted. The "
        "fit uses Adam with learning rate 0.001, batches of 512 and dropout 0.1.",
        "Temperatures of InfoNCE are those of table 7, or 1.5 for encoders that it lacks.",
        "The paper pools by [CLS]. We do so for its encoders, and use the default pooling of "
        "others; vectors have length 1.",
    ]


PAPER = Paper(
    name="Hyper-CL on C-STS",
    doc=__doc__,
    script="reproduce_hypercl.py",
    names=NAMES,
    poolings=dict.fromkeys(NAMES, "cls"),
    prompts=lambda instructs: ["separate", joint_prompt(instructs)],
    sections={
        "1": table_1,
        "3": table_3,
        "5": table_5,
        "6": table_6,
        "7": table_7,
        "8": table_8,
        "5.2": section_52,
        "figure4": figure_4,
        "5.4.1": section_541,
    },
    about=about,
)

if __name__ == "__main__":
    sys.exit(run_paper(PAPER))
