"""Whether embeddings follow conditions, on texts with several attributes, for any models.

    python scripts/bench_aspects.py --data FOLDER
    python scripts/bench_aspects.py --data FOLDER --model minilm --variant routed --values 0 4
    python scripts/bench_aspects.py --data FOLDER --model RUN --only snips hwu --labels 8 64 --json

FOLDER holds NAME.json of each data set and, where there are any, triples/NAME.json; see
docs/aspects.md for the format and the measures. A model is a bundled model, the folder of a run,
or an encoder. Variants: ``plain`` are sentence embeddings of the base encoder, without a condition;
``joint`` and ``routed`` use the prompts concat-cond-sent (without subtraction) and routed;
``model`` is the prompt and the head of a run. Figures are in percent, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
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

VARIANTS = ("plain", "joint", "routed", "model")

Vectors = Any
#: From n texts and n conditions to (n, d) vectors.
Encode = Callable[[Sequence[str], Sequence[str]], Vectors]


@dataclass(frozen=True)
class System:
    """What makes vectors: a model, its variant, and the number of example values of conditions."""

    model: str
    variant: str
    n_values: int
    encode: Encode

    @property
    def label(self) -> str:
        """Return what tables call it."""
        parts = [self.model, "" if self.variant == "model" else self.variant]
        return ", ".join(filter(None, [*parts, f"{self.n_values} values" * bool(self.n_values)]))


# -- models ------------------------------------------------------------------------------------


def systems(options: argparse.Namespace) -> Iterator[System]:
    """Yield every system, one model after the other; plain vectors of an encoder only once."""
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
            f"--dtype is {options.dtype}, and {name} was trained in "
            f"{model.encoder.identity.dtype}. Leave it out: it is for encoders."
        )
    return model.encoder


def _plain(encoder: Encoder) -> Encode:
    def encode(texts: Sequence[str], _: Sequence[str]) -> Vectors:
        distinct = list(dict.fromkeys(texts))
        place = {text: i for i, text in enumerate(distinct)}
        return encoder.encode(distinct)[[place[text] for text in texts]]

    return encode


def _embedder(name: str, variant: str, model: Embedder | None, encoder: Encoder) -> Embedder:
    if variant == "joint":
        return Embedder(encoder, FeatureView((load_prompt("concat-cond-sent"),), subtract=False))
    if variant == "routed":
        return Embedder(encoder, FeatureView((load_prompt("routed"),)))
    if model is None:
        raise UserError(
            f"{name} is an encoder, which has no prompt of its own. Name other variants than "
            "model: plain, joint or routed."
        )
    if not model.head.compares_by_cosine:
        raise UserError(
            f"the head {model.name} of {name} does not compare embeddings by their cosine, which "
            "is what is measured here."
        )
    return model


# -- figures -----------------------------------------------------------------------------------


def vectors_of(system: System, sample: AspectSample, wording: Wording) -> ConditionedVectors:
    """Encode all that the figures of a sample need, in one call."""
    conditions = {
        key: Condition(say(wordings, wording), sample.values[key][: system.n_values])
        for key, wordings in sample.conditions.items()
    }
    rows = needed_rows(sample)
    texts = [sample.texts[position].text for position, _ in rows]
    return ConditionedVectors(
        rows, system.encode(texts, [conditions[condition] for _, condition in rows])
    )


def by_vectors(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Classify by the nearest mean of a label's vectors, and cluster."""
    classes, members = np.unique(labels, return_inverse=True)
    means = np.eye(len(classes))[members].T @ vectors[labelled]
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    predicted = classes[(vectors @ means.T).argmax(axis=1)]
    return LabelFitted(predicted, kmeans(vectors, len(classes), seed=0), vectors)


def by_guide(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Do the same with vectors that a guide maps."""
    return by_vectors(fit_guide(vectors[labelled], labels).transform(vectors), labelled, labels)


def by_logistic_regression(vectors: Vectors, labelled: Any, labels: Sequence[str]) -> LabelFitted:
    """Classify by logistic regression; its classes are the clusters."""
    from sklearn.linear_model import LogisticRegression

    predicted = LogisticRegression(max_iter=1_000).fit(vectors[labelled], labels).predict(vectors)
    return LabelFitted(predicted, predicted)


class Benchmark:
    """The figures of systems on samples, as they are computed."""

    def __init__(self, samples: Sequence[AspectSample], options: argparse.Namespace) -> None:
        self.rows: list[tuple[System, str, AspectFigures]] = []
        self.labels: list[tuple[str, str, LabelFigures]] = []
        self._samples, self._options = samples, options

    def add(self, system: System) -> None:
        """Measure a system on all samples, and print a line of the table for each."""
        options = self._options
        for sample in self._samples:
            began = time.process_time()
            vectors = vectors_of(system, sample, options.wording)
            figures = measure(sample, vectors, options.seed)
            self.rows.append((system, sample.name, figures))
            # A long run that is interrupted has then shown what it measured.
            estimates = {key: getattr(figures, key) for key in FIGURES}
            print(line(system.label, sample.name, estimates, figures.chance), flush=True)
            ways: dict[str, LabelFit] = {
                "nearest mean": by_vectors,
                "guide": by_guide,
                "logistic regression": by_logistic_regression,
            }
            for way, fit in ways.items() if options.labels else []:
                self.labels += [
                    (f"{system.label}, {way}", sample.name, own)
                    for own in measure_labels(
                        sample, vectors, options.labels, fit, options.draws, options.seed
                    )
                ]
            log.info(
                f"{system.label}, {sample.name}: {time.process_time() - began:.1f} s of CPU time"
            )

    def means(self) -> list[tuple[System, dict[str, Estimate], float, int]]:
        """Return for each system its means over data sets, of chance too, and their number."""
        found = []
        for system in dict.fromkeys(own for own, _, _ in self.rows):
            of_sets = [figures for own, _, figures in self.rows if own is system]
            means = {n: mean_estimate([getattr(f, n) for f in of_sets]) for n in FIGURES}
            chance = mean_estimate([Estimate(f.chance) for f in of_sets]).value
            found.append((system, means, chance, len(of_sets)))
        return found

    def label_means(self) -> list[tuple[str, int, int, float, float, float]]:
        """Return means over data sets.

        These are what is measured, labels, sets, accuracy, V-measure and nearest neighbours.
        """
        found = []
        for name, size in dict.fromkeys((name, own.n_labels) for name, _, own in self.labels):
            of_sets = [
                own
                for other, _, own in self.labels
                if (other, own.n_labels) == (name, size) and own.n_conditions
            ]
            if of_sets:
                names = ("accuracy", "v_measure", "nearest")
                means = [float(np.mean([getattr(own, n) for own in of_sets])) for n in names]
                found.append((name, size, len(of_sets), means[0], means[1], means[2]))
        return found


# -- tables and JSON ---------------------------------------------------------------------------


def shown(estimate: Estimate) -> str:
    """Return a figure in percent with its interval."""
    text = format_number(100 * estimate.value, 1)
    if np.isfinite([estimate.low, estimate.high]).all():
        text += (
            f" [{format_number(100 * estimate.low, 1)}, {format_number(100 * estimate.high, 1)}]"
        )
    return text


#: Headings of the table of figures.
HEADINGS = "vectors", "set", "accuracy", "right under both", "nearest", "chance", "V-measure"


def line(label: str, name: str, figures: Mapping[str, Estimate], chance: float) -> str:
    """Return a line of the table of figures."""
    cells = [shown(figures[key]) for key in FIGURES]
    cells.insert(3, format_number(100 * chance, 1))
    return f"| {' | '.join([label, name, *cells])} |"


def summary(benchmark: Benchmark) -> Iterator[str]:
    """Yield the lines of means, and the table of what labels bring."""
    for system, means, chance, n in benchmark.means():
        yield line(system.label, f"mean of {n}", means, chance)
    if not benchmark.labels:
        return
    yield "\n| vectors | set | labels | accuracy | V-measure | nearest |\n|---|---|---|---|---|---|"
    for label, name, own in benchmark.labels:
        if own.n_conditions:
            accuracy = f"{100 * own.accuracy:.1f} ± {format_number(100 * own.deviation, 1)}"
            others = f"{100 * own.v_measure:.1f} | {format_number(100 * own.nearest, 1)}"
            yield f"| {label} | {name} | {own.n_labels} | {accuracy} | {others} |"
    for label, size, n, *values in benchmark.label_means():
        cells = " | ".join(format_number(100 * value, 1) for value in values)
        yield f"| {label} | mean of {n} | {size} | {cells} |"


def to_json(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was measured; figures are fractions."""

    def named(system: System) -> dict[str, Any]:
        return {
            "vectors": system.label,
            "model": system.model,
            "variant": system.variant,
            "values": system.n_values,
        }

    means = []
    for system, figures, chance, n in benchmark.means():
        row = {**named(system), "n_sets": n, "chance": finite_or_none(chance)}
        for key, own in figures.items():
            row |= {
                key: finite_or_none(own.value),
                f"{key}_ci": [finite_or_none(own.low), finite_or_none(own.high)],
            }
        means.append(row)
    return {
        "data": str(options.data),
        "wording": options.wording,
        "seed": options.seed,
        "results": [
            {**named(system), "set": name, **own.to_json(), "conditions": own.conditions}
            for system, name, own in benchmark.rows
        ],
        "means": means,
        "labels": [
            {
                "vectors": label,
                "set": name,
                "labels": own.n_labels,
                "n_conditions": own.n_conditions,
                "accuracy": finite_or_none(own.accuracy),
                "deviation": finite_or_none(own.deviation),
                "v_measure": finite_or_none(own.v_measure),
                "nearest": finite_or_none(own.nearest),
            }
            for label, name, own in benchmark.labels
        ],
        "label_means": [
            {
                "vectors": label,
                "labels": size,
                "n_sets": n,
                "accuracy": finite_or_none(accuracy),
                "v_measure": finite_or_none(agreement),
                "nearest": finite_or_none(nearest),
            }
            for label, size, n, accuracy, agreement, nearest in benchmark.label_means()
        ],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="folder with the data sets")
    add("--model", nargs="+", default=[DEFAULT_MODEL], help="bundled models, runs or encoders")
    add(
        "--variant",
        nargs="+",
        choices=VARIANTS,
        help="vectors to measure (default: plain and model for a bundled model or a run, plain, "
        "joint and routed for an encoder)",
    )
    add("--wording", choices=WORDINGS, default="text", help="wording of the conditions")
    add(
        "--values",
        type=_count,
        nargs="+",
        default=[0],
        metavar="N",
        help="numbers of example values, which no text measured has, beside each condition",
    )
    add("--labels", type=_positive, nargs="+", metavar="N", help="numbers of labelled texts")
    add("--draws", type=_positive, default=5, help="draws of labelled texts (default: 5)")
    add("--only", nargs="+", default=[], metavar="NAME", help="data sets to measure (default: all)")
    add("--limit", type=_positive, metavar="N", help="triples of each set at most, for a quick try")
    add("--dtype", help="dtype of encoders (default: float32); a run has its own")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--seed", type=_count, default=0, help="random seed of samples, K-means and bootstrap")
    add("--json", action="store_true", help="print one JSON object on the last line")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Print tables of every system and data set, and their means."""
    options = parse(arguments)
    log_to_terminal()
    try:
        samples = read_samples(options.data, options.only, options.seed)
        if options.limit:
            samples = [limited(sample, options.limit) for sample in samples]
        benchmark = Benchmark(samples, options)
        print(f"| {' | '.join(HEADINGS)} |\n" + "|---" * len(HEADINGS) + "|", flush=True)
        for system in systems(options):
            benchmark.add(system)
    except LlmcondError as error:
        log.info(f"bench_aspects: {error}")
        return error.exit_code
    print("\n".join(summary(benchmark)))
    if options.json:
        print(json.dumps(to_json(benchmark, options), allow_nan=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
