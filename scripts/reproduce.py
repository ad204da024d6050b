"""The runner of the scripts that reproduce papers: encoders, fits, tables and pages.

A script describes its paper by a ``Paper``, with functions that compute its tables.

Features and fits are stored in a run folder for each encoder and pooling, and are never computed
twice. An interrupted command resumes where it stopped.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from common import Options, markdown_table, print_json

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import can_draw, check_output, write_csv, write_json, write_text
from llmcond.base.metrics import METRICS, Estimate, finite_or_none
from llmcond.base.options import option
from llmcond.base.output import log, log_to_terminal
from llmcond.base.system import provenance
from llmcond.commands.base import Command, add_arguments, create_command
from llmcond.commands.encode import extract
from llmcond.commands.score import evaluate
from llmcond.commands.train import fit_head
from llmcond.data.datasets import Columns
from llmcond.data.rows import Rows, split_by_pair
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.settings import find_model
from llmcond.evaluation.paired import LEVEL, combine_errors
from llmcond.evaluation.results import Result
from llmcond.heads import load_recipe
from llmcond.options.common import DATA, ColumnOptions, DeviceOption, Split
from llmcond.options.training import SweepOptions
from llmcond.prompts import load_prompt
from llmcond.report.figures import Point, plot_curve
from llmcond.runs import open_any_run, open_run
from llmcond.runs.rated import RatedExamples
from llmcond.workflows.fit import sweep

T = TypeVar("T")
#: Numbers of train and dev rows -> name and description of the data with these sizes.
_KNOWN_DATA = {
    (11_342, 1_984): (
        "re-annotated C-STS",
        "training ratings by models and people; dev is 70 % of the re-annotated validation set",
    ),
    (11_342, 2_834): ("C-STS", "with its validation set as dev"),
}


#: Protocol -> which rows choose the epochs and which are scored, as a note on all tables.
PROTOCOLS = {
    "dev": "",
    "9:1": (
        "Hyper-CL's protocol: a tenth of the training pairs chose the epoch of every trained head. "
        "All rated rows of the dataset's dev are scored, as test."
    ),
    "70:30": (
        "CASE's protocol: 70 % of the sentence pairs of the dataset's dev chose the epoch of every "
        "trained head. The other 30 % are scored, as test."
    ),
}


# -- figures, rows and sections ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """A figure that a script computed.

    Attributes:
        value: the figure; None if it is undefined.
        low: lower end of the 95 % interval.
        high: upper end of the interval.
        deviation: standard deviation over seeds, if there are several.
        seeds: number of seeds; 0 if nothing is random.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    seeds: int = 0

    def bounds(self, scale: float) -> tuple[float, float, float]:
        """Return the figure and its interval for a chart."""
        figures = (self.value, self.low, self.high)
        middle, low, high = (math.nan if x is None else scale * x for x in figures)
        return middle, low, high

    def format(self, scale: float, digits: int) -> str:
        """Return the text of a table cell: value, deviation and interval."""
        if self.value is None:
            return "undefined"
        text = f"{scale * self.value:.{digits}f}"
        if self.deviation is not None:
            text += f" ± {scale * self.deviation:.{digits}f}"
        if self.low is not None and self.high is not None:
            text += f" [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}]"
        return text


def failure_reason(error: LlmcondError | str) -> str:
    """Return why a row has no figures: the first sentence of the error, without its advice.

    Folders are left out, because they are specific to one machine and may be private.
    """
    text = re.sub(r"(?<!\S)/\S*/", "", str(error))
    if text.startswith("every fit failed"):
        text = text.partition(": ")[2].partition(": ")[2]
    return f"not done: {text.partition('. ')[0].removesuffix('.')}"


def to_value(estimate: Estimate, seeds: int = 0) -> Value:
    """Convert an estimate of a result."""
    value, low, high = map(finite_or_none, astuple(estimate))
    return Value(value, low, high, seeds=seeds)


def result_figures(result: Result) -> dict[str, Value]:
    """Return the figures of one result, with intervals over sentence pairs."""
    return {name: to_value(estimate) for name, estimate in result.metrics.items()}


def average_over_seeds(values: Sequence[Value]) -> Value:
    """Return the mean of a figure over seeds, with its deviation and 95 % interval.

    The interval covers the error of seeds and, if the fits have intervals, that of rows, as in
    ``llmcond compare``: both variances are added, with Welch's degrees of freedom. The variance of
    rows is the mean over the fits, which is slightly above that of their mean.
    """
    from scipy.stats import norm, t

    defined = [value.value for value in values if value.value is not None]
    seeds = len(values)
    if len(defined) < seeds or not defined:
        return Value(None, seeds=seeds)
    if seeds == 1:
        return replace(values[0], seeds=1)
    mean, deviation = statistics.fmean(defined), statistics.stdev(defined)
    widths = [v.high - v.low for v in values if v.low is not None and v.high is not None]
    of_rows = 0.0
    if len(widths) == seeds:
        of_rows = statistics.fmean((width / 2 / norm.ppf(1 - LEVEL / 2)) ** 2 for width in widths)
    of_seeds = np.array(deviation**2 / seeds)
    with np.errstate(divide="ignore", invalid="ignore"):  # both variances can be 0
        error, freedom = combine_errors(np.array(of_rows), math.inf, of_seeds, seeds - 1)
    half = float(t.ppf(1 - LEVEL / 2, freedom) * error) if error else 0.0
    return Value(mean, mean - half, mean + half, deviation, seeds)


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of figures in a table: its key, heading, factor and number of digits."""

    key: str
    heading: str
    scale: float = 100
    digits: int = 1

    @classmethod
    def of(cls, name: str) -> Measure:
        """Return the column of a metric of results."""
        metric = METRICS[name]
        return cls(name, metric.heading, metric.factor, metric.decimals)


SPEARMAN, PEARSON, ACCURACY = map(Measure.of, ("spearman", "pearson", "accuracy"))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
        encoder: name of the encoder, as given on the command line.
        labels: text of the label columns.
        ours: measure -> figure, or the reason why there is none.
        set_up: differences from the paper, in words.
        paper: measure -> figure as printed; empty if the paper has no such row.
        others: measure -> figures as printed for the paper's other encoders.
    """

    encoder: str
    labels: Sequence[str]
    ours: Mapping[str, Value] | str
    set_up: Sequence[str] = ()
    paper: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def cells(self, measures: Sequence[Measure], printed: Sequence[Measure]) -> list[str]:
        """Return the row's cells.

        Args:
            measures: columns with our figures.
            printed: those of ``measures`` that also have a column with the paper's figures.
        """
        cells = [self.encoder, *self.labels]
        for measure in measures:
            if measure in printed:
                cells.append(self._printed(measure.key))
            figure = None if isinstance(self.ours, str) else self.ours.get(measure.key)
            cells.append("–" if figure is None else figure.format(measure.scale, measure.digits))
        return [*cells, self.ours if isinstance(self.ours, str) else "; ".join(self.set_up)]

    def _printed(self, key: str) -> str:
        if key in self.paper:
            return self.paper[key]
        texts = [text.partition(" ")[0] for text in self.others.get(key, ())]
        if not texts:
            return "–"
        low, high = min(texts, key=float), max(texts, key=float)
        return f"– (others {low} to {high})" if low != high else f"– (other {low})"


def _number(text: str) -> float:
    return float(text.split(" ", maxsplit=1)[0])


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the paper, with our figures next to the paper's.

    Attributes:
        table: number of the table in the paper.
        title: subject of the table.
        about: notes on all rows, of one or two sentences each.
        labels: headings of the label columns.
        measures: columns of figures.
        rows: rows in the order in which they are printed.
        command: the command that computes the table, if it is not the script with ``--tables``.
        figure: file name of a picture below the table, if there is one.
    """

    table: str
    title: str
    about: Sequence[str]
    labels: Sequence[str]
    measures: Sequence[Measure]
    rows: Sequence[Row]
    command: str = ""
    figure: str = ""

    def markdown(self) -> str:
        """Return the section as Markdown."""
        # A measure that no row has would be a column of dashes.
        figures = [row.ours for row in self.rows if not isinstance(row.ours, str)]
        measures = [m for m in self.measures if any(m.key in ours for ours in figures)]
        measures = measures or list(self.measures)
        printed = [m for m in measures if any(m.key in {*r.paper, *r.others} for r in self.rows)]
        headings = ["encoder", *self.labels]
        for measure in measures:
            headings += [f"{measure.heading}, paper"] if measure in printed else []
            headings.append(f"{measure.heading}, ours")
        cells = [row.cells(measures, printed) for row in self.rows]
        table = markdown_table([*headings, "what differs in set-up"], cells)
        about = "\n".join(f"- {text}" for text in self.about)
        picture = f"\n![{self.title}]({self.figure})\n" if self.figure else ""
        return f"## {self.table}: {self.title}\n\n{about}\n\n{table}\n{picture}"


def draw_rows(work: Work, section: Section, xlabel: str, ylabel: str) -> Section:
    """Return a section with a picture next to the page of the measures that are numbers."""
    series: dict[str, list[Point]] = {}
    for row in section.rows:
        ours = {} if isinstance(row.ours, str) else row.ours
        points: list[Point] = [
            (int(m.key), *ours[m.key].bounds(m.scale))
            for m in section.measures
            if m.key.isdecimal() and m.key in ours
        ]
        if points:
            encoders = [row.encoder] if len(work.encoders) > 1 else []
            series[", ".join([*encoders, *row.labels])] = points
    if work.options.out is None or not series or not can_draw():
        return section
    path = figure_path(work.options.out, section.table)
    plot_curve(series, path, xlabel, ylabel, band="with 95 % intervals")
    return replace(section, figure=path.name)


def figure_path(out: Path, name: str) -> Path:
    """Return the file of a figure next to the page."""
    return out.with_name(f"{out.stem}-{name.lower().replace(' ', '-')}.svg")


def section_record(section: Section, command: str) -> dict[str, Any]:
    """Return the JSON record of a table.

    Args:
        section: the table.
        command: the command that computes it, unless the section names another one.
    """
    rows, keys = [], [measure.key for measure in section.measures]
    for row in section.rows:
        rows.append(
            {
                "encoder": row.encoder,
                **dict(zip(section.labels, row.labels, strict=True)),
                "paper": {key: _number(text) for key, text in row.paper.items()},
                "paper_others": {
                    key: [_number(text) for text in texts] for key, texts in row.others.items()
                },
                "ours": None
                if isinstance(row.ours, str)
                else {key: asdict(row.ours[key]) for key in keys if key in row.ours},
                "reason": row.ours if isinstance(row.ours, str) else None,
                "set_up": list(row.set_up),
            }
        )
    return {
        "table": section.table,
        "title": section.title,
        "command": section.command or command,
        "measures": [asdict(measure) for measure in section.measures],
        "rows": rows,
    }


#: Encoder and further keys of each row of a paper's table -> figures as printed.
Table = Mapping[tuple[str, ...], Sequence[str]]
#: Measure -> figure, or the reason why there are none.
Figures = Mapping[str, Value] | str
#: Figures of a row as printed: those of its encoder, and those of other encoders.
Printed = tuple[Mapping[str, str], Mapping[str, Sequence[str]]]


def parse_table(
    text: str, columns: int, settings: Sequence[str] = ("",)
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Parse a table typed in as words: each line has a key, and then figures.

    Args:
        text: the table.
        columns: number of figures of each setting.
        settings: the settings, whose words are added to the key of a line.
    """
    table = {}
    for line in text.strip().splitlines():
        words = line.split()
        n_keys = len(words) - columns * len(settings)
        for start, setting in zip(range(n_keys, len(words), columns), settings, strict=True):
            key = (*words[:n_keys], *setting.split())
            table[key] = tuple(words[start : start + columns])
    return table


def printed_figures(table: Table, measures: Sequence[Measure], *key: str) -> Printed:
    """Return a row's figures in a table of the paper, and those of its other encoders.

    Args:
        table: encoder and further keys of each row -> figures as printed.
        measures: the columns of the table.
        key: the encoder, empty if the paper lacks it, and the further keys.
    """
    names = [measure.key for measure in measures]
    rows = [figures for other, figures in table.items() if other[1:] == key[1:]]
    others = {name: [row[i] for row in rows] for i, name in enumerate(names)} if rows else {}
    return dict(zip(names, table.get(key, ()), strict=False)), others


def read_values(row: Mapping[str, Any], measures: Iterable[Measure]) -> dict[str, Value]:
    """Return figures from a row in JSON, with their intervals if it has them."""
    return {m.key: Value(row[m.key], *row.get(f"{m.key}_ci", ())) for m in measures}


def average_figures(figures: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the figures of several seeds as averages over seeds."""
    return {key: average_over_seeds([row[key] for row in figures]) for key in figures[0]}


# -- encoders and fits ---------------------------------------------------------------------------


@dataclass
class Encoder:
    """An encoder with one pooling, and the run folder of its features.

    Attributes:
        name: name as given on the command line.
        run: folder of the run.
        reason: why the encoder cannot be used; empty if it can.
        repo: hub name, which identifies the encoder in the papers; empty for a folder.
        instructs: whether the encoder takes instructions.
        obstacles: prompt -> why the encoder cannot take it; empty if it can.
        identity: the settings that determine the vectors.
        dim: dimension of the vectors.
        source: source of the rows, if a command has several.
    """

    name: str
    run: Path
    reason: str = ""
    repo: str = ""
    instructs: bool = False
    obstacles: Mapping[str, str] = field(default_factory=dict)
    identity: Any = None
    dim: int = 0
    source: str = ""

    @property
    def label(self) -> str:
        """The name in tables: of a folder, which is specific to one machine, its last part."""
        return Path(self.name).name if Path(self.name).exists() else self.name

    def missing_reason(self, prompt: str) -> str:
        """Return why a prompt has no features, in words; empty if it has some."""
        if self.reason:
            return "not done: see the remark on the encoder above"
        obstacle = self.obstacles.get(prompt, "it was not extracted")
        # The advice in brackets is for another command line.
        obstacle = obstacle.partition(" (")[0].replace("it ", "the prompt ", 1)
        return f"not possible: {obstacle}" if obstacle else ""

    @cached_property
    def zeroshot(self) -> dict[tuple[str, bool], Result]:
        """The zero-shot results, by prompt and subtraction."""
        results = evaluate(run=self.run, head=["none"])
        return {(result.prompt, result.subtract): result for result in results}


def joint_prompt(instructs: bool) -> str:
    """Return the prompt whose features represent a bi-encoder."""
    return "cond" if instructs else "concat-sent-cond"


def slug(name: str) -> str:
    """Return a name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name).strip("-.") or "encoder"


class Work:
    """The options and the encoders of one command; papers extend it by their data.

    Args:
        paper: the paper.
        options: options of the command line.
    """

    #: Headings of the table of encoders.
    headings: Sequence[str] = ()

    def __init__(self, paper: Paper, options: argparse.Namespace) -> None:
        self.paper, self.options = paper, options
        self.encoders: list[Any] = []
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T | str:
        """Return what a function computes, or the reason why it fails, computed once by key."""
        if key not in self._results:
            try:
                self._results[key] = compute()
            except LlmcondError as error:
                log.info(f"{key}: {error}")
                self._results[key] = failure_reason(error)
        result: T | str = self._results[key]
        return result

    @property
    def seeds(self) -> int:
        """The number of seeds of each fit."""
        return 1 if self.options.quick else int(self.options.seeds)

    def add_encoder(self, encoder: Encoder, **options: Any) -> None:
        """Add an encoder and extract its features, or record why that is not possible."""
        self.encoders.append(encoder)
        try:
            extract(
                model=encoder.name,
                run=encoder.run,
                dtype=self.options.dtype,
                device=self.options.device,
                **options,
            )
        except LlmcondError as error:
            log.info(f"{encoder.name}: {error}")
            encoder.reason = failure_reason(error)

    def fit_heads(
        self,
        encoder: Encoder,
        key: str,
        head: str,
        changes: Mapping[str, str],
        starts: Sequence[str] = (),
        **options: Any,
    ) -> list[str]:
        """Return the names of a head's fits, one for each seed, and fit those that the run lacks.

        A name ends with a digest of what determines the fit: settings, seed, start and versions.

        Args:
            encoder: the encoder whose features are used.
            key: beginning of the names.
            head: name of a recipe.
            changes: settings of the recipe that differ from its defaults.
            starts: names of the heads that the fits start from, one for each seed.
            options: further options of ``fit_head``.

        Raises:
            LlmcondError: a fit failed.
        """
        run, names = open_any_run(encoder.run), []
        recipe = load_recipe(head, run.task.recipes).settings
        for seed in range(self.seeds):
            fit = {"head": head, "set": dict(changes), "seed": seed, **options}
            fit |= {"start": starts[seed]} if starts else {}
            facts = repr((sorted(fit.items()), recipe, provenance()["versions"]))
            names.append(f"{key}-seed{seed}-{sha256(facts.encode()).hexdigest()[:8]}")
            if names[-1] not in run.head_names():
                fit_head(run=encoder.run, name=names[-1], device=self.options.device, **fit)
        return names

    def score_heads(
        self,
        encoder: Encoder,
        names: Sequence[str] = ("none",),
        figures: Callable[[Result], dict[str, Value]] = result_figures,
        **options: Any,
    ) -> dict[str, Value]:
        """Return the figures of a head's fits as averages over seeds, or those without a head.

        Args:
            encoder: the encoder whose features are used.
            names: names of the fits; by default there is no head.
            figures: function that reads the figures of a result; none to leave it out.
            options: further options of ``evaluate``.
        """
        zero_shot = tuple(names) == ("none",)
        device = self.options.device
        results: Any = evaluate(run=encoder.run, head=list(names), device=device, **options)
        # A name may end with what it was scored by.
        matching = [row for row in results if row.name.startswith(tuple(names))]
        matching = [row for row in results if row.head == "none"] if zero_shot else matching
        rows = [row for row in map(figures, matching) if row]
        return rows[0] if zero_shot else average_figures(rows)

    def paper_name(self, encoder: Encoder) -> str:
        """Return the name of an encoder in the paper; empty if the paper lacks it."""
        return self.paper.names.get(encoder.repo, "")

    def printed(
        self, table: Table, measures: Sequence[Measure], encoder: Encoder, *key: str
    ) -> Printed:
        """Return the figures of an encoder's row in a table of the paper, and of its others."""
        return printed_figures(table, measures, self.paper_name(encoder), *key)

    def notes(self) -> list[str]:
        """Return the notes that follow those of the paper."""
        return []

    def describe(self, encoder: Any) -> list[str]:
        """Return an encoder's row in the table of encoders."""
        return [encoder.label]

    def record(self) -> dict[str, Any]:
        """Return what the JSON record says about all tables, without texts of rows."""
        return {}

    def command(self) -> str:
        """Return the command line, without options that do not change figures."""
        parser, options = _parser(self.paper), self.options
        skipped = "help encoders seeds quick tables folder out device workers json plugin".split()
        data = [action for action in parser._actions if action.dest == "data"]
        words = ["--encoders", *dict.fromkeys(encoder.label for encoder in self.encoders)]
        for action in [*data, *(a for a in parser._actions if a.dest != "data")]:
            value = None if action.dest in skipped else vars(options).get(action.dest)
            if value not in (None, False, parser.get_default(action.dest)):
                values = value if isinstance(value, list) else [] if value is True else [value]
                # A path is shortened to its name, as it may be private.
                texts = [t if "://" in t else Path(t).name for t in map(str, values)]
                words += [action.option_strings[0], *texts]
        words += [f"--seeds {self.seeds}", *(["--quick"] if options.quick else [])]
        words += ["--tables", *options.tables] if options.tables else []
        return " ".join([f"python scripts/{self.paper.script}", *words])


class RatedWork(Work):
    """A paper's command on rated rows, C-STS or others."""

    headings = ("encoder", "in the paper", "dimensions", "pooling", "computed in", "remarks")

    def __init__(self, paper: Paper, options: argparse.Namespace) -> None:
        super().__init__(paper, options)
        self.source = create_command(_Source, vars(options))
        self.dataset = self.source.data_options().read()
        if options.protocol != "dev":
            self._apply_protocol()
        for text in dict.fromkeys(options.encoders):
            self.encoders.append(self.prepare_encoder(text))

    def _apply_protocol(self) -> None:
        """Divide the rows anew, and read the result.

        Raises:
            UserError: the data has a test split with ratings, so no other protocol is needed.
        """
        options = self.options
        if self.split == "test":
            raise UserError(
                f"--protocol {options.protocol} divides dev anew, but {options.data} has a rated "
                "test split, which is scored. Leave out --protocol."
            )
        train, dev = self.dataset.splits["train"], self.dataset.splits["dev"]
        splits: Mapping[str, Rows]
        if options.protocol == "9:1":
            splits = {**split_by_pair(train, {"train": 0.9, "dev": 0.1}, seed=0), "test": dev}
        else:
            splits = {"train": train, **split_by_pair(dev, {"dev": 0.7, "test": 0.3}, seed=0)}
        options.folder /= options.protocol.replace(":", "-")
        folder = options.folder / "data"
        for name, rows in splits.items():
            labels = [str(rating) if rating >= 0 else "-1" for rating in rows.rating.tolist()]
            texts = (rows.sentence1, rows.sentence2, rows.condition, labels)
            write_csv(folder / f"{name}.csv", asdict(Columns()), zip(*texts, strict=True))
        divided = {"data": str(folder), "columns": None, "rating_range": [0.0, 1.0]}
        self.source = create_command(_Source, {**vars(options), **divided, "unrated": None})
        self.dataset = self.source.data_options().read()

    @property
    def split(self) -> Split:
        """The split that is scored: test if it has ratings, otherwise dev."""
        test = self.dataset.splits.get("test")
        return "test" if test is not None and test.rated.any() else "dev"

    def training_settings(self, epochs: int, patience: int, **settings: object) -> dict[str, str]:
        """Return the settings of a fit, with two epochs for ``--quick``."""
        values = {"epochs": 2 if self.options.quick else epochs, "patience": patience, **settings}
        return {key: str(value) for key, value in values.items()}

    def prepare_encoder(
        self, text: str, pooling: str | None = None, prompts: Prompts | None = None
    ) -> Encoder:
        """Extract an encoder's features, or record why that is not possible.

        Args:
            text: NAME, or NAME=FOLDER.
            pooling: the pooling; None for the paper's, or the encoder's default.
            prompts: function from whether the encoder takes instructions to the prompts to extract;
                None for the paper's.
        """
        name, _, folder = text.partition("=")
        known = find_model(name)
        pooling = pooling or self.paper.poolings.get(known.repo if known else name)
        if known and pooling == known.poolings[0]:
            pooling = None
        run = Path(self.options.folder, f"{slug(name)}-{pooling}" if pooling else slug(name))
        # The facts that follow from the name alone, in case the encoder cannot be loaded.
        encoder = Encoder(
            name,
            run,
            repo=known.repo if known else "" if Path(name).is_dir() else name,
            instructs=bool(known and known.all_settings["instruction_format"]),
        )
        options = EncoderOptions(
            dtype=self.options.dtype,
            device=self.options.device,
            quantize=self.options.quantize,
            like=name if folder else None,
            pooling=pooling,
        )
        prepare = partial(self._extract, encoder, folder or name, options, prompts)
        result = self.once((name, pooling), prepare)
        return replace(encoder, reason=result) if isinstance(result, str) else result

    def _extract(
        self, encoder: Encoder, model: str, options: EncoderOptions, prompts: Prompts | None
    ) -> Encoder:
        identity = resolve(model, options).identity
        instructs = bool(identity.instruction_format)
        names = (prompts or self.paper.prompts)(instructs)
        obstacles = {name: load_prompt(name).obstacle(identity) for name in names}
        usable = [name for name in names if not obstacles[name]]
        source = {name: getattr(self.source, name) for name in ("columns", "rating_range")}
        source |= {"data": self.source.data, "unrated": self.source.unrated}
        extract(model=model, run=encoder.run, prompt=usable, **source, **asdict(options))
        run = open_run(encoder.run)
        if run.manifest["data"]["digest"] != self.dataset.to_json()["digest"]:
            raise UserError(f"{encoder.run} contains other rows. Use another --folder.")
        view = run.zero_shot_views(run.prompt(usable[0]))[-1]
        dim = RatedExamples(run).pairs(view, self.split).dim
        facts: dict[str, Any] = {"instructs": instructs, "obstacles": obstacles, "dim": dim}
        return replace(encoder, identity=identity, **facts)

    def fit(
        self,
        encoder: Encoder,
        head: str,
        prompt: str,
        changes: Mapping[str, str],
        subtract: bool = True,
        seeds: int | None = None,
    ) -> Figures:
        """Return the figures of a head over seeds, or the reason why there are none.

        Args:
            encoder: the encoder whose features are used.
            head: name of a recipe.
            prompt: prompt of the features.
            changes: settings of the recipe that differ from its defaults.
            subtract: whether e(c) is subtracted from joint features.
            seeds: number of seeds; None for the number of the command line.
        """
        if reason := encoder.missing_reason(prompt):
            return reason
        log.info(f"{encoder.name}: {head} on {prompt}")
        try:
            sweep_options = SweepOptions(
                run=encoder.run,
                head=[head],
                prompt=[prompt],
                subtract=subtract,
                set=changes,
                seeds=seeds or self.seeds,
                split=self.split,
                workers=self.options.workers,
            )
            row = sweep(sweep_options).results[0]
        except LlmcondError as error:
            return failure_reason(error)
        return {
            name: replace(
                to_value(estimate, len(row.seeds)), deviation=finite_or_none(row.seed_sd[name])
            )
            for name, estimate in row.metrics.items()
        }

    # -- words ---------------------------------------------------------------------------------

    def row(
        self,
        encoder: Encoder,
        labels: Sequence[str],
        ours: Figures,
        notes: Iterable[str] = (),
        printed: Printed = ({}, {}),
        fit: Mapping[str, str] | None = None,
    ) -> Row:
        """Return a row of an encoder.

        Args:
            encoder: the encoder.
            labels: text of the label columns.
            ours: measure -> figure, or the reason why there is none.
            notes: what differs from the paper besides the encoder, the data and the fit.
            printed: the paper's figures of the encoder, and of others.
            fit: settings of the fit, if there is one.
        """
        set_up = [*self.differences(encoder, fit), *notes]
        return Row(encoder.name, labels, ours, set_up, *printed)

    def differences(
        self, encoder: Encoder, fit: Mapping[str, str] | None = None, pooling: bool = True
    ) -> list[str]:
        """Return how any row of an encoder differs from the paper, in words.

        Args:
            encoder: the encoder.
            fit: settings of the fit, if there is one.
            pooling: whether to mention that the pooling differs.
        """
        differences, identity = [], encoder.identity
        if not self.paper_name(encoder):
            differences.append("other encoder")
        elif identity is not None:
            paper = self.paper.poolings.get(encoder.repo, identity.pooling)
            if pooling and identity.pooling != paper:
                differences.append(f"{identity.pooling} pooling instead of {paper}")
        if identity is not None and identity.quantize != "none":
            differences.append(f"encoder in {identity.quantize}")
        trained = fit is not None and "epochs" in fit
        epoch_note = ", which also chose the epoch" if trained and self.split == "dev" else ""
        differences.append(f"{self._data_name()[0]}, scored on {self.split}{epoch_note}")
        if fit is not None and trained:
            differences.append(f"at most {fit['epochs']} epochs, patience {fit['patience']}")
        return differences

    def _data_name(self) -> tuple[str, str]:
        """Return the name and a description of the rows."""
        if self.options.data is None:
            return "the bundled sample", "generated by a script; not C-STS"
        train, dev, *test = map(len, self.dataset.splits.values())
        sizes = {"9:1": (train + dev, sum(test)), "70:30": (train, dev + sum(test))}
        return _KNOWN_DATA.get(
            sizes.get(self.options.protocol, (train, dev)),
            ("other rows", "their numbers match no known C-STS release"),
        )

    def data_notes(self, paper: str) -> list[str]:
        """Return notes on the rows, after ``paper``, a note on the paper's rows."""
        rows, train = self.dataset.splits[self.split], self.dataset.splits["train"]
        name, description = self._data_name()
        epoch_note = PROTOCOLS[self.options.protocol] or (
            "The epoch of every trained head was chosen on the scored rows, because there is no "
            "test split with ratings. The figures of these heads are therefore slightly too high."
            if self.split == "dev"
            else "The epoch of every trained head was chosen on dev; test only for scoring."
        )
        return [
            paper,
            f"Data: {name} ({description}). It has {int(train.rated.sum()):,} rated training "
            f"rows, and {int(rows.rated.sum()):,} rated rows of {self.split} are scored "
            f"({int((~rows.rated).sum()):,} rows without a rating are left out).",
            epoch_note,
        ]

    def notes(self) -> list[str]:
        """Return the notes that follow those of the paper."""
        return [
            'Columns headed "paper" contain the figure as printed, or – if the paper has no such '
            "encoder or row. In that case, brackets show the range of the paper's other encoders.",
            'Columns headed "ours" contain mean ± deviation over seeds '
            f"({self.seeds} per fit) [95 % interval]. The interval covers the error of sentence "
            "pairs and of seeds, unless a table says otherwise.",
            "Correlations and accuracies are multiplied by 100.",
        ]

    def describe(self, encoder: Encoder) -> list[str]:
        """Return an encoder's row in the table of encoders."""
        paper_name, identity = self.paper_name(encoder) or "no", encoder.identity
        if encoder.reason:
            return [encoder.name, paper_name, "–", "–", "–", encoder.reason]
        kind = identity.dtype + ("" if identity.quantize == "none" else f", {identity.quantize}")
        remark = "takes instructions" if encoder.instructs else "takes no instructions"
        return [encoder.name, paper_name, str(encoder.dim), identity.pooling, kind, remark]

    def record(self) -> dict[str, Any]:
        """Return what the JSON record says about all tables, without texts of rows."""
        data = self.dataset.to_json()
        return {
            "split": self.split,
            "protocol": self.options.protocol,
            "data": {key: data[key] for key in ("digest", "rows", "unrated")},
            "encoders": [
                {
                    "name": encoder.name,
                    "in_paper": self.paper.names.get(encoder.repo),
                    "dim": encoder.dim or None,
                    "identity": encoder.identity and encoder.identity.to_json(),
                    "reason": encoder.reason or None,
                }
                for encoder in self.encoders
            ],
        }


# -- the command -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Device(DeviceOption, Command):
    """Options for the device of encoders and heads."""


@dataclass(frozen=True, kw_only=True)
class _Source(ColumnOptions, _Device):
    """Options for the source of the rows, and for the device of encoders and heads."""

    data: str | None = option(None, metavar="SRC", help=f"{DATA} (default: the bundled sample)")


#: Function from whether an encoder takes instructions to the prompts to extract.
Prompts = Callable[[bool], list[str]]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, and how a script reproduces it.

    Attributes:
        name: name of the paper.
        doc: docstring of the script.
        script: file name of the script.
        sections: name of each table on the command line -> function that computes its sections.
        about: function that returns the notes on all tables.
        work: class that prepares the data and the encoders.
        names: hub name -> name in the paper.
        poolings: hub name -> pooling in the paper.
        prompts: function that returns the prompts to extract.
        options: function that adds the options that only this script has.
        folder: default folder of the runs.
    """

    name: str
    doc: str | None
    script: str
    sections: Mapping[str, Callable[[Any], Section | Sequence[Section]]]
    about: Callable[[Any], list[str]]
    work: type[Work] = RatedWork
    names: Mapping[str, str] = field(default_factory=dict)
    poolings: Mapping[str, str] = field(default_factory=dict)
    prompts: Prompts = lambda instructs: []
    options: Callable[[Options], object] = lambda parser: None
    folder: str = "runs/reproduce"


def run_paper(paper: Paper, arguments: Sequence[str] | None = None) -> int:
    """Run a script; return its exit code: 0 for success, 2 for invalid input, 1 otherwise."""
    options = _parser(paper).parse_args(arguments)
    log_to_terminal()
    try:
        create_command(_Device, vars(options))  # loads the code that --plugin names
        for name in ("seeds", "epochs"):
            if vars(options).get(name, 1) < 1:
                raise UserError(f"--{name} is {vars(options)[name]}; it must be at least 1.")
        check_output(options.out, (".md",))
        return _reproduce(paper.work(paper, options))
    except LlmcondError as error:
        log.info(f"{paper.script}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        log.info(
            "interrupted; the same command resumes from the features and fits computed so far."
        )
        return 1


def _reproduce(work: Work) -> int:
    """Print the tables, each as soon as it is complete, and write the page of ``--out``."""
    paper, options = work.paper, work.options
    about = [*paper.about(work), *work.notes()]
    if options.quick:
        about.append("This is a quick trial with few epochs and one seed; the figures are low.")
    lines = "\n".join(f"- {text}" for text in about)
    table = markdown_table(work.headings, map(work.describe, work.encoders))
    table = f"\n{table}\n" if work.headings else ""
    command = f"```bash\n{work.command()}\n```"
    texts, records = [f"# {paper.name}, reproduced\n\n{command}\n\n{lines}\n{table}"], []
    print(texts[0], flush=True)
    for name in (name for name in paper.sections if name in (options.tables or paper.sections)):
        computed = paper.sections[name](work)
        for section in [computed] if isinstance(computed, Section) else computed:
            records.append(section_record(section, f"{paper.script} --tables {name}"))
            texts.append(section.markdown())
            print(texts[-1], flush=True)
    record = {"paper": paper.name, "command": work.command(), "seeds": work.seeds}
    record |= {"quick": options.quick, **work.record(), "sections": records, **provenance()}
    if options.out is not None:
        write_text(options.out, "\n".join(texts))
        write_json(options.out.with_suffix(".json"), record)
        log.info(f"tables -> {options.out}, and their figures as JSON next to it")
    print_json(options, record)
    sys.stdout.flush()
    return 0 if any(not encoder.reason for encoder in work.encoders) else 1


def _parser(paper: Paper) -> Options:
    """Return a parser with the options that all scripts have, and those of a paper."""
    parser = Options(paper.doc)
    add, is_rated = parser.option, paper.work is RatedWork
    encoders = "aliases, hub names or folders"
    if is_rated:
        encoders += "; NAME=FOLDER is a local copy of the encoder NAME"
    add("--encoders", str, encoders, nargs="+", required=True, metavar="NAME")
    add_arguments(parser, _Source if is_rated else _Device)
    parser.usage = None
    parser.set_defaults(data=None, device="auto", json=False)
    add("--folder", Path(paper.folder), "folder of the runs, one for each encoder and source")
    add("--seeds", 3, "number of seeds of each fit", metavar="N")
    add("--tables", str, "tables", "all", nargs="+", choices=[*paper.sections], metavar="T")
    add("--dtype", "auto", "number format of encoders: auto, float32, bfloat16, ...")
    add("--quick", False, "trial with one seed and few epochs")
    out = "file to write the tables to, as Markdown; a .json file next to it gets the figures"
    add("--out", Path, out, metavar="FILE.md")
    if is_rated:
        add(
            "--protocol",
            "dev",
            "rows that choose epochs and rows that are scored, without a rated test split. dev: "
            "dev is both; 9:1: a tenth of train chooses, and dev is scored; 70:30: 70 %% of dev "
            "chooses, and 30 %% is scored",
            choices=tuple(PROTOCOLS),
        )
        add("--workers", int, "number of fits that run in parallel", "number of cores")
        add("--quantize", "none", "quantisation of encoders: none, 8bit or 4bit")
    paper.options(parser)
    return parser
