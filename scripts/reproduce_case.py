"""Lay out the tables of CASE (arXiv 2503.17279) for any encoders, the paper's figures beside ours.

    python scripts/reproduce_case.py --encoders minilm --data FOLDER --out case.md
    python scripts/reproduce_case.py --encoders nvidia/NV-Embed-v2 --quantize 4bit --data FOLDER

Tables 1 (zero-shot), 2 (heads), 4 and 5 (isotropy) and 6 (poolings), and figure 4 (sizes). What is
extracted and fitted is kept: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduce import (
    ACCURACY,
    SPEARMAN,
    Measure,
    Paper,
    Place,
    Row,
    Section,
    Value,
    Work,
    not_done,
    run_paper,
    scored,
    table_of,
)

from llmcond.commands.analyse import analyse
from llmcond.errors import LlmcondError

# -- the paper ---------------------------------------------------------------------------------

#: Hub name -> what the paper calls it (appendix A), and how it pools it for table 1.
NAMES = {
    "nvidia/NV-Embed-v2": "NV",
    "Salesforce/SFR-Embedding-Mistral": "SFR",
    "Alibaba-NLP/gte-Qwen2-7B-instruct": "GTE",
    "intfloat/multilingual-e5-large-instruct": "E5",
    "princeton-nlp/sup-simcse-roberta-large": "SimCSE_large",
    "princeton-nlp/sup-simcse-bert-base-uncased": "SimCSE_base",
}
POOLINGS = dict(zip(NAMES, "latent mean last mean last last".split(), strict=True))

#: Encoder, pooling, prompt, whether c is subtracted: Spearman and accuracy. Table 1 is the part of
#: it with the poolings of above.
TABLE_6 = table_of(
    """
    NV latent sent yes 16.98 52.24
    NV latent sent no 22.07 59.89
    NV latent cond yes 31.32 64.91
    NV latent cond no 27.02 48.02
    SFR last sent yes 11.88 46.97
    SFR last sent no -0.18 33.77
    SFR last cond yes 19.28 50.66
    SFR last cond no 13.00 44.33
    SFR mean sent yes 19.54 57.52
    SFR mean sent no 11.89 43.01
    SFR mean cond yes 20.38 52.51
    SFR mean cond no 18.32 46.44
    GTE last sent yes 7.16 42.48
    GTE last sent no 7.16 37.20
    GTE last cond yes 20.40 54.08
    GTE last cond no 16.58 45.12
    GTE mean sent yes 13.01 42.48
    GTE mean sent no 11.34 36.67
    GTE mean cond yes 17.87 42.22
    GTE mean cond no 18.42 42.22
    E5 mean sent yes 11.08 42.21
    E5 mean sent no 3.77 33.77
    E5 mean cond yes 12.01 42.74
    E5 mean cond no 6.18 37.47
    E5 last sent yes 9.28 41.69
    E5 last sent no 0.49 31.13
    E5 last cond yes 8.90 39.84
    E5 last cond no 3.05 34.56
    SimCSE_large last concat-sent-cond no 5.59 37.46
    SimCSE_large last concat-cond-sent no 4.00 35.09
    SimCSE_large last concat-sent-cond yes 8.32 34.56
    SimCSE_large last concat-cond-sent yes 8.58 48.02
    SimCSE_base last concat-sent-cond no 4.37 39.81
    SimCSE_base last concat-cond-sent no 1.25 34.82
    SimCSE_base last concat-sent-cond yes 7.05 42.74
    SimCSE_base last concat-cond-sent yes 6.00 36.67
    """,
    2,
)
TABLE_1 = {
    (key[0], *key[2:]): figures
    for key, figures in TABLE_6.items()
    if key[1] == dict(zip(NAMES.values(), POOLINGS.values(), strict=True))[key[0]]
}
#: Encoder: MLP, linear, PCA, ICA; 512 dimensions.
HEADS = ("mlp", "linear", "pca", "ica")
TABLE_2 = table_of(
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
TABLE_4 = table_of(
    """
    NV yes 0.407 0.084
    NV no 0.492 0.067
    SFR yes 0.537 0.055
    SFR no 0.708 0.021
    GTE yes 0.489 0.067
    GTE no 0.696 0.036
    E5 yes 0.542 0.056
    E5 no 0.897 0.010
    SimCSE_base yes 0.254 0.095
    SimCSE_base no 0.347 0.088
    SimCSE_large yes 0.248 0.110
    SimCSE_large no 0.333 0.085
    """,
    2,
)
#: Encoder: partition ratio with c subtracted, and without.
TABLE_5 = table_of(
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
#: The paper's dimension of tables 2 and 3.
DIM = 512

INSTRUCTED, JOINED, STAND_INS = (
    ("sent", "cond"),
    ("concat-sent-cond", "concat-cond-sent"),
    ("pair-sent", "pair-cond"),
)
LABELS = {
    "concat-sent-cond": "CONC(s+c)",
    "concat-cond-sent": "CONC(c+s)",
    "pair-sent": "pair-sent",
    "pair-cond": "pair-cond",
}

# -- what is fitted ----------------------------------------------------------------------------

#: At most, and without a better score on dev.
EPOCHS, PATIENCE = 60, 15
#: Of ICA: its rotation changes no cosine, so that one iteration ranks as well as all.
ICA_ITERATIONS = 1


def prompts(instructs: bool) -> list[str]:
    """Return the prompts that an encoder has in the paper; without instructions, our own as well.

    Those with an instruction are there for each encoder, so that it is told why it has none.
    """
    return [*INSTRUCTED] if instructs else [*INSTRUCTED, *JOINED, *STAND_INS]


def settings_of(place: Place) -> list[tuple[str, bool]]:
    """Return prompt and subtraction of an encoder's rows in tables 1 and 6."""
    return [(prompt, subtract) for prompt in prompts(place.instructs) for subtract in (True, False)]


def main_prompts(place: Place) -> list[str]:
    """Return the prompts whose features heads are fitted on; the first is the main one."""
    return ["cond"] if place.instructs else ["pair-cond", "concat-cond-sent", "concat-sent-cond"]


def label(prompt: str, subtract: bool) -> str:
    """Return what the paper calls a setting."""
    return LABELS.get(prompt, prompt) + (" - c" if subtract else "")


def paper_of(
    table: Mapping[tuple[str, ...], tuple[str, ...]], called: str | None, *rest: str
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return a row's Spearman and accuracy in a table, and those of other encoders."""
    names = ("spearman", "accuracy")
    found = table.get((called or "", *rest))
    rows = [figures for key, figures in table.items() if key[1:] == rest]
    others = {name: [row[i] for row in rows] for i, name in enumerate(names)} if rows else {}
    return dict(zip(names, found, strict=True)) if found else {}, others


def zeroshot(place: Place, prompt: str, subtract: bool) -> Mapping[str, Value] | str:
    """Return the figures of features as they are."""
    reason = place.why_not(prompt)
    return reason or scored(place.zeroshot[prompt, subtract])


# -- tables ------------------------------------------------------------------------------------


def table_1(work: Work) -> Section:
    """Zero-shot: prompts, with and without subtraction."""
    rows = []
    for place in work.places:
        called = NAMES.get(place.repo)
        for prompt, subtract in settings_of(place):
            paper, others = paper_of(TABLE_1, called, prompt, "yes" if subtract else "no")
            rows.append(
                Row(
                    place.name,
                    [label(prompt, subtract)],
                    zeroshot(place, prompt, subtract),
                    [*work.differences(place, NAMES), *own(prompt)],
                    paper,
                    others,
                )
            )
    about = [
        "Nothing is trained: the cosine of the encoder's own vectors, all of them with e(c) "
        "subtracted or not.",
        accuracy_words(work),
        STAND_IN_WORDS,
    ]
    return Section("Table 1", "zero-shot", about, ["setting"], [SPEARMAN, ACCURACY], rows)


def own(prompt: str) -> list[str]:
    """Say of our own prompts that they are."""
    return ["not in the paper: our stand-in"] if prompt in STAND_INS else []


STAND_IN_WORDS = (
    "pair-sent and pair-cond are ours: they stand in for sent and cond where an encoder takes no "
    "instruction. The other text is read before it as the first of a pair, and only the tokens of "
    "the sentence, or of the condition, are pooled."
)


def accuracy_words(work: Work) -> str:
    """Say what accuracy counts here and there."""
    counts = [next(iter(p.zeroshot.values())).counts for p in work.places if not p.reason]
    if not counts:
        return "Accuracy: equation 9."
    compared, tied = counts[0].n_compared, counts[0].n_tied
    share = compared / (compared + tied) if compared else 0
    return (
        f"Accuracy (equation 9): ours is of the {compared:,} sentence pairs whose two ratings "
        f"differ; {tied:,} tied ones are left out. The paper's are multiples of 1/379, about as "
        "many pairs as 30 % of the set has with ties counted, so it seems to count those as wrong: "
        f"multiply ours by {share:.3f} to compare."
    )


def table_2(work: Work) -> Section:
    """Heads: supervised and unsupervised."""
    rows = []
    for place in work.places:
        if not place.instructs:
            reason = place.why_not("cond")
            rows.append(Row(place.name, [label("cond", True), "any", "–"], reason))
        for number, prompt in enumerate(main_prompts(place)):
            for head in HEADS:
                rows.append(head_row(work, place, head, prompt, min(DIM, place.dim or DIM)))
            # The paper has no such rows; they tell what subtraction is worth to a fitted head.
            for head in HEADS[:2] if number == 0 else ():
                rows.append(head_row(work, place, head, prompt, min(DIM, place.dim or DIM), False))
    return Section(
        "Table 2",
        "heads on cond - c",
        head_words(work),
        ["features", "head", "dimensions"],
        [SPEARMAN, ACCURACY],
        rows,
    )


def head_words(work: Work) -> list[str]:
    """Say how heads are fitted here and there."""
    epochs = work.trained(EPOCHS, PATIENCE)["epochs"]
    return [
        "Fitted as the paper has it: Adam, learning rate 0.001, batches of 512, dropout 20 % "
        "(linear) and 15 % (MLP), squared error of the cosine. The paper does not state the "
        f"MLP's hidden width (here 1,024), nor epochs (here at most {epochs}, stopped after "
        f"{PATIENCE} without a better Spearman on dev), nor seeds.",
        "PCA and ICA have no seed that matters. ICA is PCA, each component divided by its spread, "
        "and then a rotation that is sought for in iterations. No rotation changes a cosine, so "
        "one iteration does here.",
    ]


def head_row(
    work: Work, place: Place, head: str, prompt: str, dim: int, subtract: bool = True
) -> Row:
    """Return a head's row in table 2 or figure 4."""
    changes: dict[str, str] = {"dim": str(dim)}
    seeds = 1
    if head in ("mlp", "linear"):
        changes, seeds = work.trained(EPOCHS, PATIENCE, dim=dim), work.seeds
    elif head == "ica":
        changes["max_iterations"] = str(ICA_ITERATIONS)
    called = NAMES.get(place.repo)
    in_paper = subtract and dim == min(DIM, place.dim or DIM) and prompt not in STAND_INS
    column = HEADS.index(head)
    paper = {}
    if in_paper and (called or "",) in TABLE_2:
        paper = {"spearman": TABLE_2[called or "",][column]}
    others = {"spearman": [figures[column] for figures in TABLE_2.values()]} if in_paper else {}
    set_up = work.differences(place, NAMES, changes)
    if in_paper and dim < DIM:
        set_up.append(f"{dim} dimensions, all that it has")
    if prompt in JOINED:
        set_up.append("the paper does not say which CONC it took")
    set_up += own(prompt)
    if not subtract:
        set_up.append("not in the paper: without subtraction")
    return Row(
        place.name,
        [label(prompt, subtract), head, str(dim)],
        work.fit(place, head, prompt, changes, subtract, seeds),
        set_up,
        paper,
        others,
    )


def figure_4(work: Work) -> Section:
    """Heads by size."""
    rows = []
    for place in work.places:
        full = min(DIM, place.dim or DIM)
        for head in HEADS:
            for dim in dict.fromkeys(max(1, full // part) for part in (8, 4, 2, 1)):
                rows.append(head_row(work, place, head, main_prompts(place)[0], dim))
    about = [
        "The paper draws it for NV and prints no figures: supervised heads stay level above some "
        "200 dimensions and are best at about 500; PCA keeps what the features have, ICA gets "
        "worse the larger it is.",
        *head_words(work)[1:],
    ]
    return Section(
        "Figure 4",
        "heads by number of dimensions",
        about,
        ["features", "head", "dimensions"],
        [SPEARMAN, ACCURACY],
        rows,
    )


MEAN = Measure("mean_cosine", "mean", 1, 3)
DEVIATION = Measure("std_cosine", "deviation", 1, 3)
MINUS = Measure("minus", "ratio, - c", 1, 4)
PLAIN = Measure("plain", "ratio", 1, 4)


@dataclass
class Isotropies:
    """The isotropy of each encoder's features, measured once for tables 4 and 5."""

    work: Work

    def __post_init__(self) -> None:
        self._found: dict[str, dict[tuple[str, bool], Any] | str] = {}

    def of(self, place: Place, prompt: str, subtract: bool) -> dict[str, Any] | str:
        """Return both measures of a prompt's features, or why there are none."""
        reason = place.why_not(prompt)
        if reason:
            return reason
        if place.name not in self._found:
            try:
                result = analyse(
                    run=place.run, head=["none"], split=self.work.split, what=["isotropy"]
                )
                self._found[place.name] = {
                    (row["prompt"], row["subtract"]): row for row in result["isotropy"]
                }
            except LlmcondError as error:
                self._found[place.name] = not_done(error)
        found = self._found[place.name]
        if isinstance(found, str):
            return found
        one: dict[str, Any] = found[prompt, subtract]
        return one


def isotropy_prompts(place: Place) -> list[str]:
    """Return the prompts of tables 4 and 5."""
    return (
        ["cond"]
        if place.instructs
        else ["cond", "concat-cond-sent", "concat-sent-cond", "pair-cond"]
    )


ISOTROPY = (
    "Of the vectors of both sentences of each scored row; the paper does not say which it took. "
)


def keyed(measures: Sequence[Measure], figures: Sequence[str] | None) -> dict[str, str]:
    """Return a row of the paper by measure."""
    return dict(zip([m.key for m in measures], figures, strict=True)) if figures else {}


def columns(measures: Sequence[Measure], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return rows of the paper by measure."""
    return {m.key: [row[i] for row in rows] for i, m in enumerate(measures)} if rows else {}


def table_4(work: Work, isotropies: Isotropies) -> Section:
    """Cosine to the mean vector."""
    measures = (MEAN, DEVIATION)
    rows = []
    for place in work.places:
        called = NAMES.get(place.repo)
        for prompt in isotropy_prompts(place):
            for subtract in (True, False):
                found = isotropies.of(place, prompt, subtract)
                key = "yes" if subtract else "no"
                kin = [f for k, f in TABLE_4.items() if k[1] == key and same_kind(k[0], prompt)]
                figures = TABLE_4.get((called or "", key)) if same_kind(called, prompt) else None
                ours = found
                if not isinstance(found, str):
                    ours = {m.key: Value(found[m.key]) for m in measures}
                rows.append(
                    Row(
                        place.name,
                        [label(prompt, subtract)],
                        ours,
                        [*work.differences(place, NAMES), *own(prompt), *beyond(prompt)],
                        keyed(measures, figures),
                        columns(measures, kin),
                    )
                )
    about = [ISOTROPY + "Lower means, and larger deviations, are more even."]
    return Section("Table 4", "cosine to the mean vector", about, ["setting"], measures, rows)


def same_kind(called: str | None, prompt: str) -> bool:
    """Tell whether tables 4 and 5 have this prompt for an encoder."""
    if called is None:
        return False
    return prompt == ("concat-cond-sent" if called.startswith("SimCSE") else "cond")


def beyond(prompt: str) -> list[str]:
    """Say of the other concatenation that tables 4 and 5 do not have it."""
    return ["not in the paper's table"] if prompt == "concat-sent-cond" else []


def table_5(work: Work, isotropies: Isotropies) -> Section:
    """Partition ratio."""
    measures = (MINUS, PLAIN)
    rows = []
    for place in work.places:
        called = NAMES.get(place.repo)
        for prompt in isotropy_prompts(place):
            both = [isotropies.of(place, prompt, subtract) for subtract in (True, False)]
            found = [one for one in both if not isinstance(one, str)]
            kin = [f for k, f in TABLE_5.items() if same_kind(k[0], prompt)]
            figures = TABLE_5.get((called or "",)) if same_kind(called, prompt) else None
            ours = {
                measure.key: Value(one["partition_ratio"])
                for measure, one in zip(measures, found, strict=False)
            }
            set_up = [*work.differences(place, NAMES), *own(prompt), *beyond(prompt)]
            if place.dim:
                set_up.append(f"{place.dim} dimensions: compare along a row only")
            rows.append(
                Row(
                    place.name,
                    [LABELS.get(prompt, prompt)],
                    ours if len(found) == 2 else str(both[0]),
                    set_up,
                    keyed(measures, figures),
                    columns(measures, kin),
                )
            )
    about = [
        ISOTROPY + "1,000 random directions, as in the paper; 1 is even. The ratio grows with the "
        "dimension whatever the vectors are, so that encoders of other sizes cannot be compared "
        "by it.",
    ]
    return Section("Table 5", "partition ratio (IPC)", about, ["features"], measures, rows)


def table_6(work: Work) -> Section:
    """Zero-shot by pooling."""
    rows = []
    for place in work.places:
        called = NAMES.get(place.repo)
        for pooling in poolings_of(place, called):
            other = pooled(work, place, pooling)
            for prompt, subtract in settings_of(other):
                if prompt in STAND_INS or (prompt in INSTRUCTED and not other.instructs):
                    continue
                key = (pooling, prompt, "yes" if subtract else "no")
                paper, others = paper_of(TABLE_6, called, *key)
                # What is wrong with a pooling stands nowhere else.
                reason = not_done(other.reason) if other is not place and other.reason else ""
                reason = reason or other.why_not(prompt)
                rows.append(
                    Row(
                        place.name,
                        [pooling, label(prompt, subtract)],
                        reason or zeroshot(other, prompt, subtract),
                        work.differences(other, dict.fromkeys(NAMES, ""))
                        if called
                        else ["other encoder"],
                        paper,
                        others,
                    )
                )
    about = [
        "As table 1, by pooling; each encoder in the poolings that the paper has of it, others by "
        "mean and last token and their own. Prompts with an instruction, for encoders that take "
        "none, are left to table 1.",
    ]
    return Section("Table 6", "poolings", about, ["pooling", "setting"], [SPEARMAN, ACCURACY], rows)


def poolings_of(place: Place, called: str | None) -> list[str]:
    """Return the poolings of an encoder's rows in table 6."""
    if called is not None:
        return list(dict.fromkeys(key[1] for key in TABLE_6 if key[0] == called))
    own_pooling = [place.identity.pooling] if place.identity else []
    return list(dict.fromkeys([*own_pooling, "mean", "last"]))


def pooled(work: Work, place: Place, pooling: str) -> Place:
    """Return an encoder pooled in another way; itself where it is pooled so."""
    if place.reason or place.identity.pooling == pooling:
        return place
    text = next(t for t in work.options.encoders if t.partition("=")[0] == place.name)
    return work.place(text, pooling, lambda instructs: [*(INSTRUCTED if instructs else JOINED)])


# -- the command -------------------------------------------------------------------------------


def sections(work: Work, tables: Sequence[str]) -> Iterator[Section]:
    """Yield the tables that are asked for, each when it is done."""
    isotropies = Isotropies(work)
    makers: dict[str, Callable[[], Section]] = {
        "1": lambda: table_1(work),
        "2": lambda: table_2(work),
        "4": lambda: table_4(work, isotropies),
        "5": lambda: table_5(work, isotropies),
        "6": lambda: table_6(work),
        "figure4": lambda: figure_4(work),
    }
    for name, maker in makers.items():
        if name in tables:
            yield maker()


def about(work: Work) -> list[str]:
    """Return what holds for all tables."""
    return work.data_words(
        "the paper trains on the original C-STS training ratings, tunes on 70 % of the "
        "re-annotated validation set and scores the other 30 %, by a split of its own."
    )


PAPER = Paper(
    name="CASE",
    doc=__doc__ or "",
    script="reproduce_case.py",
    tables=("1", "2", "4", "5", "6", "figure4"),
    names=NAMES,
    poolings=POOLINGS,
    prompts=prompts,
    sections=sections,
    about=about,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_paper(PAPER, arguments)


if __name__ == "__main__":
    sys.exit(main())
