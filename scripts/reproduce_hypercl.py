"""Lay out the C-STS tables of Hyper-CL (ACL 2024) for any encoders, the paper's beside ours.

    python scripts/reproduce_hypercl.py --encoders minilm --data FOLDER --out hypercl.md

Everything that needs no training of the encoder: tables 1 (tri-encoders), 5 (unseen conditions),
6 (with and without contrast) and 8 (ranks), and the analyses of sections 5.2 (clusters) and 5.4.1
(norms). Heads that are analysed stay in the run folder: those of a full hypernetwork on 384
dimensions take 0.2 GiB a seed. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reproduce import (
    PEARSON,
    SPEARMAN,
    Measure,
    Paper,
    Place,
    Row,
    Section,
    Value,
    Work,
    not_done,
    over_seeds,
    run_paper,
    scored,
    table_of,
)

from llmcond.arrays import as_matrix
from llmcond.commands.analyse import analyse
from llmcond.commands.evaluate import evaluate
from llmcond.commands.fit_head import fit_head
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.clusters import impurity
from llmcond.evaluation.conditions import frobenius_variance
from llmcond.features.view import FeatureView
from llmcond.heads import PairArrays, load_recipe
from llmcond.log import log
from llmcond.runs import RunFittedHead, open_run
from llmcond.runs.rated import RatedExamples
from llmcond.runs.trials import size_recipe
from llmcond.system import provenance

# -- the paper ---------------------------------------------------------------------------------

#: Hub name -> what the paper calls it. It pools all of them by [CLS] (appendix A).
NAMES = {
    "voidism/diffcse-roberta-base-sts": "DiffCSE_base",
    "princeton-nlp/sup-simcse-roberta-base": "SimCSE_base",
    "princeton-nlp/sup-simcse-roberta-large": "SimCSE_large",
}
#: Encoder, architecture: Spearman and its deviation, Pearson and its deviation.
_PRINTED_1 = table_of(
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
#: Encoder, architecture: Spearman overall, of unseen and of seen conditions.
TABLE_5 = table_of(
    """
    SimCSE_large tri 32.13 13.93 25.02
    SimCSE_large full-cl 38.59 36.25 41.14
    """,
    3,
)
#: Encoder, architecture: Spearman.
TABLE_6 = table_of(
    """
    SimCSE_base low-cl 37.96
    SimCSE_base low 35.38
    SimCSE_base matched-cl 36.13
    SimCSE_base matched 35.47
    """,
    1,
)
#: Encoder, what H is divided by to give K: Spearman.
TABLE_8 = table_of(
    """
    DiffCSE_base 1 33.82
    DiffCSE_base 4 34.73
    DiffCSE_base 8 34.16
    DiffCSE_base 12 33.10
    DiffCSE_base 16 33.31
    SimCSE_base 1 38.75
    SimCSE_base 4 38.66
    SimCSE_base 8 35.69
    SimCSE_base 12 38.36
    SimCSE_base 16 37.02
    SimCSE_large 1 39.60
    SimCSE_large 4 38.76
    SimCSE_large 8 38.19
    SimCSE_large 12 38.12
    SimCSE_large 16 37.83
    SimCSE_large 24 37.44
    """,
    1,
)
#: Table 7: temperatures; 1.5 is the released code's own.
TEMPERATURES = {
    ("DiffCSE_base", "full-cl"): 1.5,
    ("DiffCSE_base", "low-cl"): 1.5,
    ("SimCSE_base", "full-cl"): 1.9,
    ("SimCSE_base", "low-cl"): 1.7,
    ("SimCSE_large", "full-cl"): 1.5,
    ("SimCSE_large", "low-cl"): 1.9,
}
#: Section 5.2, in nats, before and after; section 5.4.1, of hypernetwork and Hadamard product.
IMPURITY = ("0.739", "0.270")
VARIANCE = {"low-cl": "0.0248", "tri": "0.001"}
#: H divided by it is K of the paper's choice (appendix B).
DIVISOR = 12
CONDITIONS, SENTENCES = 3, 20

# -- what is fitted ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """A head, and how it is fitted.

    Attributes:
        key: what tells it from others.
        head: a recipe.
        changes: its settings.
    """

    key: str
    head: str
    changes: Mapping[str, str]


def rank_of(dim: int, divisor: int = DIVISOR) -> int:
    """Return K for H dimensions."""
    return max(1, dim // divisor)


def name_of(place: Place, contrast: bool = True) -> str:
    """Return what the paper calls a low-rank hypernetwork on an encoder."""
    rank = rank_of(place.dim) if place.dim else "K"
    return f"hyper{rank}-cl" if contrast else f"hyper{rank}"


def analysed(place: Place) -> tuple[tuple[str, str], ...]:
    """Return names and keys of the heads that are analysed."""
    return (
        ("tri-encoder, Hadamard product", "tri"),
        (name_of(place), "low-cl"),
        ("hyper-cl", "full-cl"),
    )


def spec_of(work: Work, place: Place, key: str, rank: int | None = None) -> Spec:
    """Return how a head is fitted for an encoder.

    Args:
        work: decides the epochs.
        place: the encoder.
        key: ``tri``, ``concat``, ``low``, ``matched``, ``full``, each also with ``-cl`` for the
            contrastive objective, and ``released``.
        rank: K; None: the paper's choice.
    """
    kind, _, contrast = key.partition("-")
    dim, rank = place.dim, rank or rank_of(place.dim)
    if kind in ("tri", "concat"):
        epochs, patience = 60, 10
    else:
        # They are best within a few epochs; one of a full hypernetwork takes 10 to 20 s.
        epochs, patience = (8, 2) if kind == "full" else (10, 3)
    settings: dict[str, Any] = {
        "tri": {},
        "concat": {"dim": dim},
        "low": {"dim": dim, "rank": rank},
        "released": {"dim": dim, "rank": rank},
        "matched": {"rank": rank},
        "full": {"dim": dim},
    }[kind]
    heads = {
        "tri": "hadamard",
        "low": "hypernet" if contrast else "hypernet-mse",
        "released": "hypernet-released",
        "matched": "hypernet-ablation",
        "full": "hypernet-full" if contrast else "hypernet-full-mse",
    }
    if contrast:
        temperature = TEMPERATURES.get((NAMES.get(place.repo, ""), key), 1.5)
        settings = {**settings, "info_nce": "1.0", "temperature": str(temperature)}
    changes = work.trained(epochs, patience, **settings)
    return Spec(key if rank == rank_of(dim) else f"{key}{rank}", heads.get(kind, kind), changes)


@dataclass
class Heads:
    """The heads of a piece of work, fitted when they are asked for."""

    work: Work
    _names: dict[tuple[str, str], list[str] | str] = field(default_factory=dict)
    _scores: dict[tuple[str, str], Mapping[str, Value] | str] = field(default_factory=dict)

    def swept(self, place: Place, spec: Spec) -> Mapping[str, Value] | str:
        """Return the figures of a head that is only scored."""
        return self.work.fit(place, spec.head, "separate", spec.changes)

    def saved(self, place: Place, spec: Spec) -> list[str] | str:
        """Return the names of a head that is analysed, one for each seed; or why there is none."""
        reason = place.why_not("separate")
        if reason:
            return reason
        key = (str(place.run), spec.key)
        if key not in self._names:
            try:
                self._names[key] = [_fit(place, spec, seed) for seed in range(self.work.seeds)]
            except LlmcondError as error:
                log.info(f"{place.name}, {spec.key}: {error}")
                self._names[key] = not_done(error)
        return self._names[key]

    def scores(self, place: Place, spec: Spec) -> Mapping[str, Value] | str:
        """Return the figures of a head that is analysed."""
        names = self.saved(place, spec)
        if isinstance(names, str):
            return names
        key = (str(place.run), spec.key)
        if key not in self._scores:
            results = evaluate(run=place.run, head=names, split=self.work.split)
            found = [scored(result) for result in results if result.name in names]
            self._scores[key] = merged(found)
        return self._scores[key]


def merged(found: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return figures over seeds."""
    return {key: over_seeds([one[key] for one in found]) for key in found[0]}


def _fit(place: Place, spec: Spec, seed: int) -> str:
    """Fit a head unless it is there, and return its name."""
    name = f"{spec.key}-seed{seed}"
    recipe = load_recipe(spec.head)
    recipe = recipe.with_settings(recipe.parse_changes(dict(spec.changes), spec.key), spec.key)
    run = open_run(place.run)
    if name in run.head_names():
        # Whatever is wrong with it, it is fitted again.
        with suppress(LlmcondError):
            saved = run.load_head(name)
            head, wanted = saved.head, size_recipe(recipe, None, saved.head.dim_in, quiet=True)
            made = (head.kind, head.settings, head.seed, saved.record.get("versions"))
            asked = (recipe.kind, wanted.settings, seed, provenance()["versions"])
            if made == asked:
                return name
    fit_head(
        run=place.run,
        head=spec.head,
        prompt="separate",
        seed=seed,
        set=dict(spec.changes),
        name=name,
    )
    return name


# -- tables ------------------------------------------------------------------------------------


def words(work: Work, place: Place, spec: Spec) -> list[str]:
    """Return what differs in the set-up of a fitted head."""
    return ["frozen encoder", *work.differences(place, NAMES, spec.changes)]


def paper_of(
    table: Mapping[tuple[str, ...], tuple[str, ...]],
    place: Place,
    key: str,
    measures: Sequence[Measure],
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return a row's figures in a table of the paper, and those of its other encoders."""
    found = table.get((NAMES.get(place.repo, ""), key))
    rows = [figures for name, figures in table.items() if name[1] == key]
    names = [measure.key for measure in measures]
    others = {name: [row[i] for row in rows] for i, name in enumerate(names)} if rows else {}
    return dict(zip(names, found, strict=True)) if found else {}, others


def table_1(work: Work, heads: Heads) -> Section:
    """Tri-encoders, and bi-encoders beside them."""
    measures = (SPEARMAN, PEARSON)
    rows = []
    for place in work.places:
        low = name_of(place)
        for name, key, more in (
            ("tri-encoder, Hadamard product", "tri", []),
            ("tri-encoder, concatenation", "concat", ["not in the paper's table"]),
            (low, "low-cl", []),
            (f"{low}, as in the released code", "released", ["the paper shows no such layer"]),
            ("hyper-cl", "full-cl", []),
        ):
            spec = spec_of(work, place, key)
            printed = paper_of(TABLE_1, place, key, measures)
            ours = heads.scores(place, spec)
            rows.append(Row(place.name, [name], ours, [*words(work, place, spec), *more], *printed))
        printed = paper_of(TABLE_1, place, "bi", measures)
        reason = "not done: here encoders are not trained, and a frozen one is the next row"
        rows.append(Row(place.name, ["bi-encoder, fine-tuned"], reason, [], *printed))
        rows.append(frozen_bi_encoder(work, place))
    about = [
        "K is H / 12, the paper's choice for base and large encoders.",
        "The Hadamard baseline has the linear layer on the condition that the released code has.",
    ]
    return Section("Table 1", "tri-encoders on C-STS", about, ["architecture"], measures, rows)


def frozen_bi_encoder(work: Work, place: Place) -> Row:
    """Return the row of an MLP on the features of sentence and condition together."""
    prompt = joint_prompt(place.instructs)
    changes = work.trained(60, 15, dim=min(512, place.dim or 512))
    return Row(
        place.name,
        [f"bi-encoder, frozen: MLP on {prompt}, minus e(c)"],
        work.fit(place, "mlp", prompt, changes),
        ["not in the paper: CASE's head", *work.differences(place, NAMES, changes)],
    )


def joint_prompt(instructs: bool) -> str:
    """Return the prompt that stands for a bi-encoder."""
    return "cond" if instructs else "concat-sent-cond"


def table_5(work: Work, heads: Heads) -> Section:
    """Seen and unseen conditions."""
    measures = (
        Measure("overall", "overall"),
        Measure("unseen", "unseen"),
        Measure("seen", "seen"),
    )
    rows, share = [], ""
    for place in work.places:
        for name, key in analysed(place):
            spec = spec_of(work, place, key)
            names = heads.saved(place, spec)
            printed = paper_of(TABLE_5, place, key, measures)
            ours: Mapping[str, Value] | str
            if isinstance(names, str):
                ours = names
            else:
                result = analyse(run=place.run, head=names, split=work.split, what=["conditions"])
                found = [row for row in result["conditions"] if row["name"] in names]
                ours = merged([_values(row, measures) for row in found])
                unseen, n = found[0]["n_unseen"], found[0]["n_overall"]
                share = f"{unseen:,} of {n:,} rows, {100 * unseen / n:.1f} %"
            rows.append(Row(place.name, [name], ours, words(work, place, spec), *printed))
    about = [
        "Spearman of rows whose condition occurs in training, letter by letter, and of the others: "
        f"{share or 'none'} here, 731 of 2,834 (25.8 %) in the paper.",
        "The paper scores the C-STS validation set, and tunes on a tenth of the training rows.",
    ]
    return Section("Table 5", "seen and unseen conditions", about, ["architecture"], measures, rows)


def _values(row: Mapping[str, Any], measures: Sequence[Measure]) -> dict[str, Value]:
    return {one.key: Value(row[one.key], *row[f"{one.key}_ci"]) for one in measures}


def table_6(work: Work, heads: Heads) -> Section:
    """With and without the contrastive objective."""
    rows = []
    for place in work.places:
        for name, key, is_saved in (
            (name_of(place), "low-cl", True),
            (name_of(place, contrast=False), "low", False),
            ("no hypernetwork, as many parameters, -cl", "matched-cl", False),
            ("no hypernetwork, as many parameters", "matched", False),
            ("Hadamard product, -cl", "tri-cl", False),
            ("Hadamard product", "tri", True),
            ("hyper-cl", "full-cl", True),
            ("hyper", "full", False),
        ):
            spec = spec_of(work, place, key)
            paper, others = paper_of(TABLE_6, place, key, (SPEARMAN,))
            ours = heads.scores(place, spec) if is_saved else heads.swept(place, spec)
            set_up = words(work, place, spec)
            if not others:
                set_up.append("not in the paper's table")
            rows.append(Row(place.name, [name], ours, set_up, paper, others))
    about = [
        "-cl: squared error and InfoNCE, each with weight 1; without: squared error only. The "
        "paper's are of its validation set.",
        "Of sentence pairs whose two ratings are equal, InfoNCE takes none here; the released "
        "code takes the first row of the file for the positive.",
    ]
    return Section(
        "Table 6", "the contrastive objective", about, ["architecture"], [SPEARMAN], rows
    )


def table_8(work: Work, heads: Heads) -> Section:
    """Ranks."""
    rows = []
    for place in work.places:
        for divisor in (1, 4, 8, DIVISOR, 16, 24):
            rank = rank_of(place.dim, divisor)
            key = "full-cl" if divisor == 1 else "low-cl"
            spec = spec_of(work, place, key, None if divisor == 1 else rank)
            printed = paper_of(TABLE_8, place, str(divisor), (SPEARMAN,))
            is_saved = divisor in (1, DIVISOR)
            ours = heads.scores(place, spec) if is_saved else heads.swept(place, spec)
            labels = [str(rank) if place.dim else "–", f"H / {divisor}"]
            rows.append(Row(place.name, labels, ours, words(work, place, spec), *printed))
    about = [
        "K = H is the full form, one matrix and no product of two. The paper's table is of its "
        "validation set by its caption, but repeats the test figures of table 1.",
    ]
    return Section("Table 8", "ranks K", about, ["K", "of H"], [SPEARMAN], rows)


# -- analyses ----------------------------------------------------------------------------------


@dataclass
class Split:
    """The rated rows that are scored, as heads of separate features see them."""

    pairs: PairArrays
    conditions: Sequence[str]

    @classmethod
    def of(cls, work: Work, place: Place) -> Split:
        """Read them."""
        run = open_run(place.run)
        view = FeatureView((run.prompt("separate"),), True, "separate", True)
        rows = run.rows(work.split)
        pairs = RatedExamples(run).rated(view, work.split)
        return cls(pairs, rows.take(rows.rated).condition)

    def groups(self) -> tuple[list[int], list[str]]:
        """Return rows of the most frequent conditions, and which each has (section 5.2).

        Raises:
            UserError: a single condition.
        """
        names = [name for name, _ in Counter(self.conditions).most_common(CONDITIONS)]
        if len(names) < 2:
            raise UserError("all rows that are scored have the same condition.")
        places: list[int] = []
        for name in names:
            places += [i for i, text in enumerate(self.conditions) if text == name][:SENTENCES]
        return places, [self.conditions[i] for i in places]


BEFORE = Measure("before", "before", 1, 3)
AFTER = Measure("after", "after", 1, 3)
VARIANCES = Measure("variance", "variance", 1, 7)
RELATIVE = Measure("relative", "deviation / mean", 1, 3)


def section_52(work: Work, heads: Heads) -> Section:
    """Clusters of conditions."""
    rows = []
    for place in work.places:
        for name, key in analysed(place):
            spec = spec_of(work, place, key)
            names = heads.saved(place, spec)
            ours = names if isinstance(names, str) else _impurities(work, place, names)
            is_paper = key != "tri"
            paper = dict(zip((BEFORE.key, AFTER.key), IMPURITY, strict=True)) if is_paper else {}
            set_up = [*words(work, place, spec), "" if is_paper else "not in the paper"]
            rows.append(Row(place.name, [name], ours, list(filter(None, set_up)), paper))
    about = [
        f"Impurity of K-means in nats: {SENTENCES} sentences under each of the {CONDITIONS} most "
        "frequent conditions of the split; the paper draws them at random, under three conditions "
        "of its choice. 0: each condition lies in one cluster, which a condition's own offset is "
        f"enough for; ln {CONDITIONS} = 1.099 is the worst. Which encoder and rank the paper took "
        "is not told.",
        "Before: e(s) as it is. After: the embedding under the condition.",
    ]
    return Section("Section 5.2", "clusters of conditions", about, ["head"], [BEFORE, AFTER], rows)


def _impurities(work: Work, place: Place, names: Sequence[str]) -> Mapping[str, Value] | str:
    run, split = open_run(place.run), Split.of(work, place)
    try:
        places, labels = split.groups()
        found = []
        for seed, name in enumerate(names):
            sentences = as_matrix(split.pairs.first).read(places)
            after = run.load_head(name).head.transform(sentences, _some(split, places))
            found.append(
                {
                    BEFORE.key: Value(impurity(sentences, labels, seed).value),
                    AFTER.key: Value(impurity(after, labels, seed).value),
                }
            )
    except LlmcondError as error:
        return not_done(error)
    return merged(found)


def _some(split: Split, places: Sequence[int]) -> Any:
    condition = split.pairs.condition
    return None if condition is None else as_matrix(condition).take(np.array(places))


def section_541(work: Work, heads: Heads) -> Section:
    """Norms of what conditions generate."""
    rows = []
    for place in work.places:
        for name, key in analysed(place):
            spec = spec_of(work, place, key)
            names = heads.saved(place, spec)
            ours = names if isinstance(names, str) else _variances(work, place, key, names)
            paper = {VARIANCES.key: VARIANCE[key]} if key in VARIANCE else {}
            set_up = [*words(work, place, spec), "" if paper else "not in the paper"]
            rows.append(Row(place.name, [name], ours, list(filter(None, set_up)), paper))
    about = [
        "Variance over the conditions of the split of ||W_c|| / sqrt(number of elements); of the "
        "Hadamard product W_c is the diagonal matrix of the transformed condition. Cosines do not "
        "change with the size of W_c, but this figure does, and so it depends on the length of "
        "e(c), here 1, and on how weights began; deviation / mean of the norms does not. Which "
        "encoder and rank the paper took is not told.",
    ]
    measures = (VARIANCES, RELATIVE)
    return Section("Section 5.4.1", "norms of W_c", about, ["head"], measures, rows)


def _variances(
    work: Work, place: Place, key: str, names: Sequence[str]
) -> Mapping[str, Value] | str:
    try:
        if key == "tri":
            run, split = open_run(place.run), Split.of(work, place)
            found = [_diagonal(run.load_head(name), split) for name in names]
        else:
            result = analyse(run=place.run, head=names, split=work.split, what=["norms"])
            found = [
                _spread(row["normalised"], row["raw"], row["mean_norm"]) for row in result["norms"]
            ]
    except LlmcondError as error:
        return not_done(error)
    return merged(found)


def _spread(normalised: float, raw: float, mean: float) -> dict[str, Value]:
    """Return both measures of norms."""
    return {VARIANCES.key: Value(normalised), RELATIVE.key: Value(raw**0.5 / mean)}


def _diagonal(saved: RunFittedHead, split: Split) -> dict[str, Value]:
    """Return both measures of the norm of diag(c'), c' = W h_c + b, over distinct conditions."""
    condition = split.pairs.condition
    if condition is None:
        raise UserError(f"the head {saved.name} takes no conditions.")
    first, _ = as_matrix(condition).unique()
    tensors = saved.head.tensors
    made = as_matrix(condition).read(first) @ tensors["transform"].T
    norms = np.linalg.norm(made + tensors.get("transform_bias", 0.0), axis=1)
    variance = frobenius_variance(norms, saved.head.dim_in)
    return _spread(variance.normalised, variance.raw, float(norms.mean()))


# -- the command -------------------------------------------------------------------------------


def sections(work: Work, tables: Sequence[str]) -> Iterator[Section]:
    """Yield the tables that are asked for, each when it is done."""
    heads = Heads(work)
    makers: dict[str, Callable[[Work, Heads], Section]] = {
        "1": table_1,
        "5": table_5,
        "6": table_6,
        "8": table_8,
        "5.2": section_52,
        "5.4.1": section_541,
    }
    for name, maker in makers.items():
        if name in tables:
            yield maker(work, heads)


def about(work: Work) -> list[str]:
    """Return what holds for all tables."""
    return [
        *work.data_words(
            "the paper trains on the original C-STS training ratings; table 1 is of the test set, "
            "whose ratings are hidden, the others of the validation set."
        ),
        "The paper trains the encoder with the head: learning rate 1e-5 to 3e-5 (its code: batches "
        "of 32, 5 epochs, the best on validation kept). Here the encoder is frozen: e(s) and e(c) "
        "are computed once and only the head is fitted, by Adam with learning rate 0.001, batches "
        "of 512, dropout 0.1. Temperatures of InfoNCE are those of table 7, else 1.5.",
        "The paper pools by [CLS]; so are its encoders here, others in their own way. Vectors "
        "have length 1.",
    ]


def prompts(instructs: bool) -> list[str]:
    """Return what is extracted."""
    return ["separate", joint_prompt(instructs)]


PAPER = Paper(
    name="Hyper-CL on C-STS",
    doc=__doc__ or "",
    script="reproduce_hypercl.py",
    tables=("1", "5", "6", "8", "5.2", "5.4.1"),
    names=NAMES,
    poolings=dict.fromkeys(NAMES, "cls"),
    prompts=prompts,
    sections=sections,
    about=about,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_paper(PAPER, arguments)


if __name__ == "__main__":
    sys.exit(main())
