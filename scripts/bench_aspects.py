"""Measure whether embeddings follow conditions, on texts with several attributes.

    python scripts/bench_aspects.py --data FOLDER
    python scripts/bench_aspects.py --data FOLDER --conditions 8 --average \
        --change none general ignore-each ignore-others
    python scripts/bench_aspects.py --data FOLDER --model minilm --variant routed --values 0 4
    python scripts/bench_aspects.py --data FOLDER --model RUN --only snips hwu --json

FOLDER contains NAME.json for each dataset and, where a dataset has triples, triples/NAME.json.
docs/aspects.md describes the format and the measures. A model is a bundled model, the folder of a
run, or an encoder. There are four variants: ``plain`` measures sentence embeddings of the base
encoder without a condition; ``joint`` uses the prompt concat-cond-sent, without subtraction;
``routed`` uses the prompt routed; ``model`` uses the prompt and the head of a run. Figures are in
percent: the mean over several wordings of each condition, the 95 % confidence interval, and the
standard deviation over wordings. Commit 17f6c5ba can also measure guides and classifiers that
learn from a few labelled texts (``--labels``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from aspect_figures import (
    FIGURES,
    AspectFigures,
    ConditionedVectors,
    IgnoringVectors,
    Mentions,
    average_wordings,
    is_redundant,
    limit_conditions,
    list_wordings,
    mean_estimate,
    measure,
    mention_aucs,
    needed_rows,
    read_samples,
    read_sets,
    sample_mentions,
)
from bench import BenchOptions
from common import markdown_table, print_json
from scipy.stats import sem
from scipy.stats import t as student

from llmcond import Condition, Embedder, load_embedder, load_encoder
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.metrics import Estimate, estimates_json, finite_or_none, format_number
from llmcond.base.output import log, log_to_terminal
from llmcond.base.package import DEFAULT_MODEL, pretrained_folder
from llmcond.data.guides import AspectSample
from llmcond.encoders.encoder import Encoder
from llmcond.evaluation.paired import LEVEL
from llmcond.features.view import FeatureView
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import base_encoder

VARIANTS = ("plain", "joint", "routed", "model")
#: What is done with the vectors, and its name in the tables.
CHANGES = {
    "none": "",
    "general": "general component subtracted",
    "ignore-each": "ignoring one other condition",
    "ignore-others": "ignoring all others",
}
#: The conditions whose mean is the general component.
GENERAL = "the topic", "the object", "the place", "the opinion"
#: Clusters follow another condition if they agree more with it than with their own condition, and
#: at least this much.
_FOLLOWS = 0.1

Vectors = Any
#: Maps n texts and n conditions to (n, d) vectors.
Encode = Callable[[Sequence[str], Sequence[str]], Vectors]
#: Maps n texts and n conditions to (n,) scores of whether a text mentions the condition.
Score = Callable[[Sequence[str], Sequence[str]], Vectors]


@dataclass(frozen=True)
class System:
    """A source of vectors.

    Attributes:
        model: name of the model.
        variant: a value of ``VARIANTS``.
        n_values: number of example values in each condition.
        encode: the function that computes the vectors.
        score: the function that scores mentions; None: vectors without a condition.
    """

    model: str
    variant: str
    n_values: int
    encode: Encode
    score: Score | None = None

    @property
    def label(self) -> str:
        """Name in the tables."""
        parts = [self.model, "" if self.variant == "model" else self.variant]
        return ", ".join(filter(None, [*parts, f"{self.n_values} values" * bool(self.n_values)]))


# -- models ------------------------------------------------------------------------------------


def systems(options: argparse.Namespace) -> Iterator[System]:
    """Yield every system, model by model; plain vectors of an encoder only once."""
    plain = set()
    for name in options.model:
        is_run = pretrained_folder(name) is not None or Path(name, "run.json").is_file()
        model = load_embedder(name, device=options.device) if is_run else None
        encoder = _encoder(name, model, options)
        for variant in options.variant or (["plain", "model"] if is_run else VARIANTS[:3]):
            if variant == "plain":
                base = base_encoder(encoder) or encoder
                if base.identity.fingerprint not in plain:
                    plain.add(base.identity.fingerprint)
                    yield System(base.name, variant, 0, _plain(base))
                continue
            embedder = _embedder(name, variant, model, encoder)
            for n_values in options.values:
                yield System(name, variant, n_values, embedder.encode, embedder.mentions)


def _encoder(name: str, model: Embedder | None, options: argparse.Namespace) -> Encoder:
    if model is None:
        return load_encoder(name, dtype=options.dtype or "float32", device=options.device)
    if options.dtype not in (None, model.encoder.identity.dtype):
        raise UserError(
            f"--dtype is {options.dtype}, but {name} was trained in "
            f"{model.encoder.identity.dtype}. Omit --dtype: it applies to encoders only."
        )
    return model.encoder


def _plain(encoder: Encoder) -> Encode:
    def encode(texts: Sequence[str], _: Sequence[str]) -> Vectors:
        distinct = list(dict.fromkeys(texts))
        position = {text: i for i, text in enumerate(distinct)}
        return encoder.encode(distinct)[[position[text] for text in texts]]

    return encode


def _embedder(name: str, variant: str, model: Embedder | None, encoder: Encoder) -> Embedder:
    if variant == "joint":
        return Embedder(encoder, FeatureView((load_prompt("concat-cond-sent"),), subtract=False))
    if variant == "routed":
        return Embedder(encoder, FeatureView((load_prompt("routed"),)))
    if model is None:
        raise UserError(
            f"{name} is an encoder, so it has no variant 'model', which is the prompt and head of "
            "a run. Choose plain, joint or routed."
        )
    if not model.head.compares_by_cosine:
        raise UserError(
            f"the head {model.name} of {name} does not compare embeddings by their cosine. This "
            "benchmark measures cosines only; choose another head."
        )
    return model


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What is measured of a system: its vectors as they are, or changed.

    Attributes:
        average: whether vectors are averaged over the wordings of a condition.
        change: a key of ``CHANGES``.
    """

    average: bool
    change: str

    @property
    def label(self) -> str:
        """Name in the tables, after that of the system."""
        parts = "wordings averaged" * self.average, CHANGES[self.change]
        return "".join(f", {part}" for part in parts if part)


def list_ways(system: System, options: argparse.Namespace) -> list[Way]:
    """Return the ways to measure a system; vectors without a condition have only one."""
    if system.variant == "plain":
        return [Way(False, "none")]
    averages = (False, True) if options.average else (False,)
    return [Way(average, change) for average in averages for change in options.change]


def encode_wordings(
    system: System, sample: AspectSample, ways: Sequence[Way], n: int
) -> list[ConditionedVectors]:
    """Encode all texts that the figures of a sample need, under each of n wordings."""
    rows = needed_rows(sample)
    if any(way.change.startswith("ignore") for way in ways):
        rows = [(i, condition) for i in range(len(sample.texts)) for condition in sample.conditions]
    texts = [sample.texts[position].text for position, _ in rows]
    wordings = {key: list_wordings(item, n) for key, item in sample.conditions.items()}
    values = {key: sample.values[key][: system.n_values] for key in sample.conditions}
    encoded = []
    for number in range(1 if system.variant == "plain" else n):
        conditions = {key: Condition(wordings[key][number], values[key]) for key in wordings}
        vectors = system.encode(texts, [conditions[condition] for _, condition in rows])
        encoded.append(ConditionedVectors(rows, vectors))
    return encoded


def measure_ways(
    system: System, sample: AspectSample, options: argparse.Namespace
) -> dict[Way, list[AspectFigures]]:
    """Measure a sample in every way; each has one value for each wording, or one of their mean."""
    ways = list_ways(system, options)
    encoded = encode_wordings(system, sample, ways, options.wordings)
    general = np.empty(0)
    if any(way.change == "general" for way in ways):
        texts = [text.text for text in sample.texts]
        under = [system.encode(texts, [condition] * len(texts)) for condition in GENERAL]
        general = np.mean(under, axis=0, dtype=np.float64)
    figures: dict[Way, list[AspectFigures]] = {way: [] for way in ways}
    for way in ways:
        for vectors in [average_wordings(encoded)] if way.average else encoded:
            changed = vectors
            if way.change == "general":
                changed = vectors.without_general(general)
            elif way.change != "none":
                changed = IgnoringVectors(sample, vectors, way.change == "ignore-others")
            figures[way].append(measure(sample, changed, options.seed))
    return figures


def over_wordings(figures: Sequence[AspectFigures], name: str) -> tuple[Estimate, float]:
    """Return the mean of a figure over wordings, and its standard deviation; NaN for one only."""
    estimates = [astuple(getattr(each, name)) for each in figures]
    value, low, high = np.mean(estimates, axis=0).tolist()
    spread = float(np.std([each[0] for each in estimates], ddof=1)) if len(figures) > 1 else np.nan
    return Estimate(value, low, high), spread


# -- confounded pairs --------------------------------------------------------------------------

#: Figures of a pair of conditions.
PAIR_FIGURES = "precision", "v_measure"


def confounded_pairs(
    sample: AspectSample, before: Sequence[AspectFigures], after: Sequence[AspectFigures]
) -> list[dict[str, float]]:
    """Return the figures before and after of pairs whose clusters follow the ignored condition.

    Args:
        sample: the sample.
        before: figures for each wording, with nothing ignored.
        after: figures for each wording, with one condition ignored at a time.
    """
    pairs = []
    for plain, ignoring in zip(before, after, strict=True):
        for (condition, other), figures in plain.pairs.items():
            if is_redundant(sample, condition, other):
                continue
            if figures["v_other"] > max(figures["v_measure"], _FOLLOWS):
                changed = ignoring.pairs[condition, other]
                pairs.append(
                    {name: figures[name] for name in PAIR_FIGURES}
                    | {f"{name}_ignoring": changed[name] for name in PAIR_FIGURES}
                )
    return pairs


# -- mentions ----------------------------------------------------------------------------------


def measure_mentions(
    system: System, sets: Sequence[AspectSample], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure the scores of texts that mention a condition or not, and print a row for each set.

    Returns:
        The AUCs of each set and condition for JSON: the means over wordings.
    """
    rows: list[dict[str, Any]] = []
    for whole in sets if system.score else ():
        aucs = {
            each.condition: [
                _mention_aucs(system, each, wording)
                for wording in list_wordings(whole.conditions[each.condition], options.wordings)
            ]
            for each in sample_mentions(whole, options.seed)
        }
        if not aucs:
            log.info(f"{whole.name} has no condition that enough texts have, and enough lack")
            continue
        table = np.array(list(aucs.values()))  # (conditions, wordings, figures)
        cells = [_mean_over_conditions(part) for part in np.moveaxis(table, 2, 0)]
        cells = [system.label, whole.name, str(len(aucs)), *cells]
        print(f"| {' | '.join(cells)} |", flush=True)
        means = dict(zip(aucs, table.mean(axis=1).tolist(), strict=True))
        figures = {
            key: dict(zip(MENTION_FIGURES, mean, strict=True)) for key, mean in means.items()
        }
        rows.append({"vectors": system.label, "set": whole.name, "conditions": figures})
    return rows


def _mention_aucs(system: System, mentions: Mentions, wording: str) -> tuple[float, float]:
    assert system.score is not None
    groups = mentions.present, mentions.same_topic, mentions.any_topic
    texts = list(dict.fromkeys(chain.from_iterable(groups)))
    scores = system.score(texts, [wording] * len(texts)).tolist()
    return mention_aucs(mentions, dict(zip(texts, scores, strict=True)))


def _mean_over_conditions(aucs: Vectors) -> str:
    """Format the mean of (conditions, wordings) AUCs, whose interval is over conditions."""
    by_condition, by_wording = aucs.mean(axis=1), aucs.mean(axis=0)
    mean, n = float(by_condition.mean()), len(by_condition)
    half = student.ppf(1 - LEVEL / 2, n - 1) * sem(by_condition) if n > 1 else np.nan
    spread = by_wording.std(ddof=1) if len(by_wording) > 1 else np.nan
    return format_cell(Estimate(mean, max(mean - half, 0.0), min(mean + half, 1.0)), spread)


# -- tables and JSON ---------------------------------------------------------------------------

#: Headings of the tables of figures, and of confounded pairs.
HEADINGS = "vectors", "set", "accuracy", "right under both", "P@10", "chance", "V-measure"
MENTION_FIGURES = "AUC, same topic", "AUC, any topic"
MENTION_HEADINGS = "vectors", "set", "conditions", *MENTION_FIGURES
PAIR_HEADINGS = "vectors", "cases", "P@10", "ignoring", "V-measure", "ignoring"


def percent(value: float) -> str:
    """Format a fraction in percent."""
    return format_number(100 * value, 1)


def format_cell(estimate: Estimate, spread: float) -> str:
    """Format a figure with its confidence interval and the spread over wordings."""
    value, low, high = map(percent, astuple(estimate))
    text = f"{value} [{low}, {high}]" if np.isfinite(estimate.low) else value
    return f"{text} ± {percent(spread)}" if np.isfinite(spread) else text


def format_row(
    label: str, name: str, figures: Mapping[str, tuple[Estimate, float]], chance: float
) -> str:
    """Format a row of figures."""
    cells = [format_cell(*figures[key]) for key in FIGURES]
    cells.insert(3, percent(chance))
    return f"| {' | '.join([label, name, *cells])} |"


def measure_system(
    system: System, samples: Sequence[AspectSample], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure a system on all samples, and print a row for each way and set, then their means.

    Returns:
        The figures of each sample, and their means, for JSON.
    """
    rows: list[dict[str, Any]] = []
    of_ways: dict[Way, list[dict[str, tuple[Estimate, float]]]] = {}
    chances, pairs = [], []
    for sample in samples:
        began = time.process_time()
        measured = measure_ways(system, sample, options)
        for way, figures in measured.items():
            means = {name: over_wordings(figures, name) for name in FIGURES}
            of_ways.setdefault(way, []).append(means)
            wordings = [each.to_json() for each in figures]
            rows.append(_to_json(system, way, means, set=sample.name, wordings=wordings))
            # Print now, so that an interrupted run has reported what it measured.
            label = system.label + way.label
            print(format_row(label, sample.name, means, figures[0].chance), flush=True)
        chances.append(next(iter(measured.values()))[0].chance)
        plain, each = (measured.get(Way(False, change)) for change in ("none", "ignore-each"))
        if plain and each:
            pairs += confounded_pairs(sample, plain, each)
        seconds = time.process_time() - began
        log.info(f"{system.label}, {sample.name}: {seconds:.1f} s of CPU time")
    results = []
    chance = mean_estimate([Estimate(each) for each in chances]).value
    for way, of_samples in of_ways.items():
        means = {
            name: (
                mean_estimate([each[name][0] for each in of_samples]),
                mean_estimate([Estimate(each[name][1]) for each in of_samples]).value,
            )
            for name in FIGURES
        }
        label, name = system.label + way.label, f"mean of {len(samples)}"
        print(format_row(label, name, means, chance), flush=True)
        counts = {"n_sets": len(samples), "chance": finite_or_none(chance)}
        results.append(_to_json(system, way, means, **counts))
    if pairs:
        keys = [key for name in PAIR_FIGURES for key in (name, f"{name}_ignoring")]
        mean = {key: float(np.mean([pair[key] for pair in pairs])) for key in keys}
        results[0]["confounded"] = {"n": len(pairs), **mean}
        cells = [system.label, str(len(pairs)), *(percent(mean[key]) for key in keys)]
        print(f"\n{markdown_table(PAIR_HEADINGS, [cells])}\n", flush=True)
    return rows, results


def _to_json(
    system: System, way: Way, figures: Mapping[str, tuple[Estimate, float]], **more: Any
) -> dict[str, Any]:
    return {
        "vectors": system.label + way.label,
        "model": system.model,
        "variant": system.variant,
        "values": system.n_values,
        "average": way.average,
        "change": way.change,
        **estimates_json({name: estimate for name, (estimate, _) in figures.items()}),
        **{f"{name}_spread": finite_or_none(spread) for name, (_, spread) in figures.items()},
        **more,
    }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--data", Path, "folder with the datasets", required=True, metavar="FOLDER")
    add("--model", [DEFAULT_MODEL], "bundled models, runs or encoders")
    unset = "plain and model for a bundled model or a run, plain, joint and routed for an encoder"
    add("--variant", str, "vectors to measure", unset, nargs="+", choices=VARIANTS)
    add("--wordings", 5, "number of wordings of each condition, whose figures are averaged")
    average = "also average the vectors over the wordings, as for a condition with several wordings"
    add("--average", False, average)
    changes = "what is done with the vectors: conditions are ignored without labels"
    add("--change", ["none"], changes, choices=CHANGES)
    absence = "only measure whether scores find the texts that do not mention a condition, on sets "
    add("--mentions", False, f"{absence}whose texts have all attributes that they mention")
    add("--conditions", int, "largest number of conditions of a set", "no limit", metavar="N")
    values = "numbers of example values to add to each condition, which no measured text has"
    add("--values", [0], values, metavar="N")
    add("--only", [], "datasets to measure", "all", metavar="NAME")
    add("--dtype", str, "dtype of encoders; the dtype of a run is fixed", "float32")
    add("--device", "auto", "auto, cpu, cuda or cuda:N")
    add("--seed", 0, "random seed of samples, K-means and bootstrap")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures of every system on every dataset, and their means."""
    options = parse_options(arguments)
    log_to_terminal()
    results: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    try:
        for name in ("wordings", "conditions"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1.")
        if options.mentions:
            if options.average or options.values != [0] or options.change != ["none"]:
                raise UserError("--mentions has no --average, --values or --change.")
            sets = read_sets(options.data, options.only)
            print(markdown_table(MENTION_HEADINGS, []), flush=True)
            for system in systems(options):
                results += measure_mentions(system, sets, options)
            print_json(options, {"data": str(options.data), "mentions": results})
            return 0
        samples = read_samples(options.data, options.only, options.seed)
        if options.conditions is not None:
            samples = [limit_conditions(sample, options.conditions) for sample in samples]
        print(markdown_table(HEADINGS, []), flush=True)
        for system in systems(options):
            rows, of_system = measure_system(system, samples, options)
            results += rows
            means += of_system
    except LlmcondError as error:
        log.info(f"bench_aspects: {error}")
        return error.exit_code
    about = {"data": str(options.data), "wordings": options.wordings, "seed": options.seed}
    print_json(options, {**about, "results": results, "means": means})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
