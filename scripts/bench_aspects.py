"""Measure whether embeddings follow conditions, on texts with several attributes.

    python scripts/bench_aspects.py --data FOLDER
    python scripts/bench_aspects.py --data FOLDER --model minilm --variant routed --values 0 4
    python scripts/bench_aspects.py --data FOLDER --model RUN --only snips hwu --json

FOLDER contains NAME.json for each dataset and, where a dataset has triples, triples/NAME.json.
docs/aspects.md describes the format and the measures. A model is a bundled model, the folder of a
run, or an encoder. There are four variants: ``plain`` measures sentence embeddings of the base
encoder without a condition; ``joint`` uses the prompt concat-cond-sent, without subtraction;
``routed`` uses the prompt routed; ``model`` uses the prompt and the head of a run. Figures are in
percent, with 95 % confidence intervals. Commit 17f6c5ba can also measure guides and classifiers
that learn from a few labelled texts (``--labels``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aspect_figures import (
    FIGURES,
    WORDINGS,
    ConditionedVectors,
    Wording,
    mean_estimate,
    measure,
    needed_rows,
    read_samples,
    say,
)
from bench import BenchOptions
from common import markdown_table, print_json

from llmcond import Condition, Embedder, load_embedder, load_encoder
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.metrics import Estimate, estimates_json, finite_or_none, format_number
from llmcond.base.output import log, log_to_terminal
from llmcond.base.package import DEFAULT_MODEL, pretrained_folder
from llmcond.data.guides import AspectSample
from llmcond.encoders.encoder import Encoder
from llmcond.features.view import FeatureView
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import base_encoder

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


# -- tables and JSON ---------------------------------------------------------------------------

#: Headings of the table of figures.
HEADINGS = "vectors", "set", "accuracy", "right under both", "nearest", "chance", "V-measure"


def format_row(label: str, name: str, figures: Mapping[str, Estimate], chance: float) -> str:
    """Format a row of the table of figures, in percent with confidence intervals."""

    def cell(estimate: Estimate) -> str:
        value, low, high = (format_number(100 * figure, 1) for figure in astuple(estimate))
        has_interval = np.isfinite([estimate.low, estimate.high]).all()
        return f"{value} [{low}, {high}]" if has_interval else value

    cells = [cell(figures[key]) for key in FIGURES]
    cells.insert(3, format_number(100 * chance, 1))
    return f"| {' | '.join([label, name, *cells])} |"


def measure_system(
    system: System, samples: Sequence[AspectSample], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure a system on all samples, and print a row for each and one for their mean.

    Returns:
        The figures of each sample, and their means, for JSON.
    """
    about = {
        "vectors": system.label,
        "model": system.model,
        "variant": system.variant,
        "values": system.n_values,
    }
    figures, rows = [], []
    for sample in samples:
        began = time.process_time()
        vectors = encode_sample(system, sample, options.wording)
        of_sample = measure(sample, vectors, options.seed)
        figures.append(of_sample)
        conditions = {"conditions": of_sample.conditions}
        rows.append({**about, "set": sample.name, **of_sample.to_json(), **conditions})
        # Print now, so that an interrupted run has reported what it measured.
        estimates = {key: getattr(of_sample, key) for key in FIGURES}
        print(format_row(system.label, sample.name, estimates, of_sample.chance), flush=True)
        seconds = time.process_time() - began
        log.info(f"{system.label}, {sample.name}: {seconds:.1f} s of CPU time")
    means = {key: mean_estimate([getattr(f, key) for f in figures]) for key in FIGURES}
    chance = mean_estimate([Estimate(f.chance) for f in figures]).value
    print(format_row(system.label, f"mean of {len(figures)}", means, chance), flush=True)
    counts = {"n_sets": len(figures), "chance": finite_or_none(chance)}
    return rows, {**about, **counts, **estimates_json(means)}


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
        samples = read_samples(options.data, options.only, options.seed)
        print(markdown_table(HEADINGS, []), flush=True)
        for system in systems(options):
            rows, mean = measure_system(system, samples, options)
            results += rows
            means.append(mean)
    except LlmcondError as error:
        log.info(f"bench_aspects: {error}")
        return error.exit_code
    about = {"data": str(options.data), "wording": options.wording, "seed": options.seed}
    print_json(options, {**about, "results": results, "means": means})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
