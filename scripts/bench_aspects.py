"""Measure whether embeddings follow conditions, on texts with several attributes.

    python scripts/bench_aspects.py --data FOLDER
    python scripts/bench_aspects.py --data FOLDER --model minilm --variant routed --values 0 4
    python scripts/bench_aspects.py --data FOLDER --model RUN --only snips hwu --labels 8 64 --json

FOLDER contains NAME.json for each dataset and, where a dataset has triples, triples/NAME.json.
docs/aspects.md describes the format and the measures. A model is a bundled model, the folder of a
run, or an encoder. There are four variants: ``plain`` measures sentence embeddings of the base
encoder without a condition; ``joint`` uses the prompt concat-cond-sent, without subtraction;
``routed`` uses the prompt routed; ``model`` uses the prompt and the head of a run. Figures are in
percent, with 95 % confidence intervals.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aspect_figures import (
    FIGURES,
    AspectFigures,
    ConditionedVectors,
    LabelFigures,
    LabelFit,
    LabelFitted,
    mean_estimate,
    measure,
    measure_labels,
    needed_rows,
)
from aspect_samples import WORDINGS, Wording, limited, read_samples, say
from bench import BenchOptions
from common import markdown_table, print_json

from llmcond import Condition, Embedder, load_embedder, load_encoder
from llmcond.bundled import DEFAULT_MODEL, pretrained_folder
from llmcond.clustering.methods import kmeans
from llmcond.data.aspects import AspectSample
from llmcond.encoders.encoder import Encoder
from llmcond.errors import LlmcondError, UserError
from llmcond.features.view import FeatureView
from llmcond.heads.guide import fit_guide
from llmcond.log import log, log_to_terminal
from llmcond.metrics import Estimate, finite_or_none, format_number
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import base_encoder

#: The figures of the table by number of labels.
LABEL_FIGURES = ("accuracy", "v_measure", "nearest")
VARIANTS = ("plain", "joint", "routed", "model")

Vectors = Any
#: Maps n texts and n conditions to (n, d) vectors.
Encode = Callable[[Sequence[str], Sequence[str]], Vectors]


@dataclass(frozen=True)
class System:
    """A source of vectors.

    Attributes:
        model: name of the model.
        variant: a value of ``VARIANTS``.
        n_values: number of example values in each condition.
        encode: the function that computes the vectors.
    """

    model: str
    variant: str
    n_values: int
    encode: Encode

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
                yield System(name, variant, n_values, embedder.encode)


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


def encode_sample(system: System, sample: AspectSample, wording: Wording) -> ConditionedVectors:
    """Encode all texts that the figures of a sample need, in one call."""
    conditions = {
        key: Condition(say(wordings, wording), sample.values[key][: system.n_values])
        for key, wordings in sample.conditions.items()
    }
    rows = needed_rows(sample)
    texts = [sample.texts[position].text for position, _ in rows]
    return ConditionedVectors(
        rows, system.encode(texts, [conditions[condition] for _, condition in rows])
    )


def classify_by_mean(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Classify by the nearest mean of a label's vectors, and cluster with K-means."""
    classes, members = np.unique(labels, return_inverse=True)
    means = np.eye(len(classes))[members].T @ vectors[labelled]
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    predicted = classes[(vectors @ means.T).argmax(axis=1)]
    return LabelFitted(predicted, kmeans(vectors, len(classes), seed=0), vectors)


def classify_with_guide(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Classify and cluster the vectors after a guide has mapped them."""
    return classify_by_mean(
        fit_guide(vectors[labelled], labels).transform(vectors), labelled, labels
    )


def classify_by_regression(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Classify by logistic regression; the predicted classes serve as clusters."""
    from sklearn.linear_model import LogisticRegression

    predicted = LogisticRegression(max_iter=1_000).fit(vectors[labelled], labels).predict(vectors)
    return LabelFitted(predicted, predicted)


class Benchmark:
    """The figures of all systems on all samples."""

    def __init__(self, samples: Sequence[AspectSample], options: argparse.Namespace) -> None:
        self.rows: list[tuple[System, str, AspectFigures]] = []
        self.labels: list[tuple[str, str, LabelFigures]] = []
        self._samples, self._options = samples, options

    def add(self, system: System) -> None:
        """Measure a system on all samples, and print a line of the table for each."""
        options = self._options
        for sample in self._samples:
            began = time.process_time()
            vectors = encode_sample(system, sample, options.wording)
            figures = measure(sample, vectors, options.seed)
            self.rows.append((system, sample.name, figures))
            # Print now, so that an interrupted run has reported what it measured.
            estimates = {key: getattr(figures, key) for key in FIGURES}
            print(format_row(system.label, sample.name, estimates, figures.chance), flush=True)
            fits: dict[str, LabelFit] = {
                "nearest mean": classify_by_mean,
                "guide": classify_with_guide,
                "logistic regression": classify_by_regression,
            }
            for way, fit in fits.items() if options.labels else []:
                self.labels += [
                    (f"{system.label}, {way}", sample.name, label_figures)
                    for label_figures in measure_labels(
                        sample, vectors, options.labels, fit, options.draws, options.seed
                    )
                ]
            log.info(
                f"{system.label}, {sample.name}: {time.process_time() - began:.1f} s of CPU time"
            )

    def means(self) -> list[tuple[System, dict[str, Estimate], float, int]]:
        """Return (system, mean figures, mean chance, number of datasets) of each system."""
        means = []
        for system in dict.fromkeys(system for system, _, _ in self.rows):
            of_system = [figures for other, _, figures in self.rows if other is system]
            estimates = {n: mean_estimate([getattr(f, n) for f in of_system]) for n in FIGURES}
            chance = mean_estimate([Estimate(f.chance) for f in of_system]).value
            means.append((system, estimates, chance, len(of_system)))
        return means

    def label_means(self) -> list[dict[str, Any]]:
        """Return the means over datasets, by system and number of labels."""
        rows = []
        for name, size in dict.fromkeys((name, f.n_labels) for name, _, f in self.labels):
            of_name = [
                figures
                for other, _, figures in self.labels
                if (other, figures.n_labels) == (name, size) and figures.n_conditions
            ]
            if of_name:
                means = {k: float(np.mean([getattr(f, k) for f in of_name])) for k in LABEL_FIGURES}
                rows.append({"vectors": name, "labels": size, "n_sets": len(of_name), **means})
        return rows


# -- tables and JSON ---------------------------------------------------------------------------


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate in percent, with its confidence interval."""
    text = format_number(100 * estimate.value, 1)
    if np.isfinite([estimate.low, estimate.high]).all():
        text += (
            f" [{format_number(100 * estimate.low, 1)}, {format_number(100 * estimate.high, 1)}]"
        )
    return text


#: Headings of the table of figures.
HEADINGS = "vectors", "set", "accuracy", "right under both", "nearest", "chance", "V-measure"


def format_row(label: str, name: str, figures: Mapping[str, Estimate], chance: float) -> str:
    """Format a row of the table of figures."""
    cells = [format_estimate(figures[key]) for key in FIGURES]
    cells.insert(3, format_number(100 * chance, 1))
    return f"| {' | '.join([label, name, *cells])} |"


def format_summary(benchmark: Benchmark) -> Iterator[str]:
    """Yield the rows of means, then the table of figures by number of labels."""
    for system, means, chance, n in benchmark.means():
        yield format_row(system.label, f"mean of {n}", means, chance)
    if not benchmark.labels:
        return
    yield "\n| vectors | set | labels | accuracy | V-measure | nearest |\n|---|---|---|---|---|---|"
    for label, name, figures in benchmark.labels:
        if figures.n_conditions:
            accuracy = f"{100 * figures.accuracy:.1f} ± {format_number(100 * figures.deviation, 1)}"
            others = f"{100 * figures.v_measure:.1f} | {format_number(100 * figures.nearest, 1)}"
            yield f"| {label} | {name} | {figures.n_labels} | {accuracy} | {others} |"
    for row in benchmark.label_means():
        cells = " | ".join(format_number(100 * row[key], 1) for key in LABEL_FIGURES)
        yield f"| {row['vectors']} | mean of {row['n_sets']} | {row['labels']} | {cells} |"


def to_json(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """Return all results as JSON; figures are fractions."""

    def describe(system: System) -> dict[str, Any]:
        return {
            "vectors": system.label,
            "model": system.model,
            "variant": system.variant,
            "values": system.n_values,
        }

    means = []
    for system, estimates, chance, n in benchmark.means():
        row = {**describe(system), "n_sets": n, "chance": finite_or_none(chance)}
        for key, estimate in estimates.items():
            interval = [finite_or_none(estimate.low), finite_or_none(estimate.high)]
            row |= {key: finite_or_none(estimate.value), f"{key}_ci": interval}
        means.append(row)
    return {
        "data": str(options.data),
        "wording": options.wording,
        "seed": options.seed,
        "results": [
            {**describe(system), "set": name, **figures.to_json(), "conditions": figures.conditions}
            for system, name, figures in benchmark.rows
        ],
        "means": means,
        "labels": [
            {
                "vectors": label,
                "set": name,
                "labels": figures.n_labels,
                "n_conditions": figures.n_conditions,
                **{
                    key: finite_or_none(getattr(figures, key))
                    for key in (*LABEL_FIGURES, "deviation")
                },
            }
            for label, name, figures in benchmark.labels
        ],
        "label_means": [
            {**row, **{key: finite_or_none(row[key]) for key in LABEL_FIGURES}}
            for row in benchmark.label_means()
        ],
    }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--data", Path, "folder with the datasets", required=True, metavar="FOLDER")
    add("--model", [DEFAULT_MODEL], "bundled models, runs or encoders")
    unset = "plain and model for a bundled model or a run, plain, joint and routed for an encoder"
    add("--variant", str, "vectors to measure", unset, nargs="+", choices=VARIANTS)
    add("--wording", "text", "wording of the conditions", choices=WORDINGS)
    values = "numbers of example values to add to each condition, which no measured text has"
    add("--values", [0], values, type=_parse_count, metavar="N")
    labels = "numbers of labelled texts"
    add("--labels", _parse_positive, labels, "no labels", nargs="+", metavar="N")
    add("--draws", 5, "random samples of labelled texts", type=_parse_positive)
    add("--only", [], "datasets to measure", "all", metavar="NAME")
    limit = "maximum number of triples per dataset, for a quick try"
    add("--limit", _parse_positive, limit, "all", metavar="N")
    add("--dtype", str, "dtype of encoders; the dtype of a run is fixed", "float32")
    add("--device", "auto", "auto, cpu, cuda or cuda:N")
    add("--seed", 0, "random seed of samples, K-means and bootstrap", type=_parse_count)
    return parser.parse_args(arguments)


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _parse_positive(text: str) -> int:
    if _parse_count(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures of every system on every dataset, and their means."""
    options = parse_options(arguments)
    log_to_terminal()
    try:
        samples = read_samples(options.data, options.only, options.seed)
        if options.limit:
            samples = [limited(sample, options.limit) for sample in samples]
        benchmark = Benchmark(samples, options)
        print(markdown_table(HEADINGS, []), flush=True)
        for system in systems(options):
            benchmark.add(system)
    except LlmcondError as error:
        log.info(f"bench_aspects: {error}")
        return error.exit_code
    print("\n".join(format_summary(benchmark)))
    print_json(options, to_json(benchmark, options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
