"""What reproduce_case.py and reproduce_hypercl.py share: encoders, fits, and the printed tables.

Nothing is done twice: features and fits lie in a run folder for each encoder and pooling, and what
is there is taken from there. A command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmcond.commands.base import Command, add_arguments, create_command
from llmcond.commands.evaluate import evaluate
from llmcond.commands.extract import extract
from llmcond.data.datasets import Dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.known import find_model
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.results import Result
from llmcond.files import check_writable, write_text
from llmcond.log import log, log_to_terminal
from llmcond.metrics import METRICS, Estimate, finite_or_none
from llmcond.options import option
from llmcond.prompts import load_prompt
from llmcond.runs import Run, open_run
from llmcond.runs.rated import RatedExamples
from llmcond.system import provenance
from llmcond.workflows.options.common import DATA, ColumnOptions, DeviceOption, Split
from llmcond.workflows.options.fitting import SweepOptions
from llmcond.workflows.sweep import sweep

#: Rows of train and dev -> what data of these sizes is, in short, and what is to be known of it.
_KNOWN_DATA = {
    (11_342, 1_984): (
        "re-annotated C-STS",
        "training ratings by models and people; dev is 70 % of the re-annotated validation set",
    ),
    (11_342, 2_834): ("C-STS", "with its validation set as dev"),
}


# -- figures, rows and sections ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """A figure of ours.

    Attributes:
        value: None where it is undefined.
        low: of its 95 % interval: over seeds, or over sentence pairs where there is one fit.
        high: as ``low``.
        deviation: over seeds, where there are several.
        seeds: how many; 0 where nothing is random.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    deviation: float | None = None
    seeds: int = 0

    def shown(self, scale: float, digits: int) -> str:
        """Return it as a cell has it: value, deviation and interval."""
        if self.value is None:
            return "undefined"
        text = f"{scale * self.value:.{digits}f}"
        if self.deviation is not None:
            text += f" ± {scale * self.deviation:.{digits}f}"
        if self.low is not None and self.high is not None:
            text += f" [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}]"
        return text


def not_done(error: LlmcondError | str) -> str:
    """Return why a row has no figures: what went wrong, without what to do about it."""
    text = str(error)
    if text.startswith("every fit failed"):
        text = text.partition(": ")[2].partition(": ")[2]
    return f"not done: {text.partition('. ')[0].removesuffix('.')}"


def value_of(estimate: Estimate, seeds: int = 0) -> Value:
    """Return a figure of a result."""
    value, low, high = map(finite_or_none, astuple(estimate))
    return Value(value, low, high, seeds=seeds)


def scored(result: Result) -> dict[str, Value]:
    """Return the figures of one result, with their intervals over sentence pairs."""
    return {name: value_of(estimate) for name, estimate in result.metrics.items()}


def over_seeds(values: Sequence[Value]) -> Value:
    """Return the mean of a figure over seeds, with deviation and Student's interval."""
    found = [value.value for value in values if value.value is not None]
    if len(found) < len(values) or not found:
        return Value(None, seeds=len(values))
    if len(found) == 1:
        return replace(values[0], seeds=1)
    return _of_seeds(statistics.fmean(found), statistics.stdev(found), len(found))


def _of_seeds(mean: float, deviation: float, seeds: int) -> Value:
    from scipy.stats import t

    half = float(t.ppf(0.975, seeds - 1)) * deviation / seeds**0.5
    return Value(mean, mean - half, mean + half, deviation, seeds)


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that a table has of each row: its key, heading, factor and digits."""

    key: str
    heading: str
    scale: float = 100
    digits: int = 1

    @classmethod
    def of(cls, name: str) -> Measure:
        """Return how a metric of results is shown."""
        metric = METRICS[name]
        return cls(name, metric.heading, metric.factor, metric.decimals)


SPEARMAN, PEARSON, ACCURACY = map(Measure.of, ("spearman", "pearson", "accuracy"))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
        encoder: as it was named.
        labels: what the row is about.
        ours: measure -> figure, or why there is none.
        set_up: what differs from the paper, in words.
        paper: measure -> as printed; empty where the paper has no such row.
        others: measure -> as printed for the paper's other encoders.
    """

    encoder: str
    labels: Sequence[str]
    ours: Mapping[str, Value] | str
    set_up: Sequence[str] = ()
    paper: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def cells(self, measures: Sequence[Measure], printed: Sequence[Measure]) -> list[str]:
        """Return the row's cells: figures of some measures, and the paper's of some of them."""
        cells = [self.encoder, *self.labels]
        for measure in measures:
            if measure in printed:
                cells.append(self._printed(measure.key))
            found = None if isinstance(self.ours, str) else self.ours.get(measure.key)
            cells.append("–" if found is None else found.shown(measure.scale, measure.digits))
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
    """A table of the paper with ours beside it.

    Attributes:
        table: its number.
        title: what it is about.
        about: what holds for all rows, a sentence or two each.
        labels: headings of the rows' labels.
        measures: what each row has.
        rows: in order.
    """

    table: str
    title: str
    about: Sequence[str]
    labels: Sequence[str]
    measures: Sequence[Measure]
    rows: Sequence[Row]

    def markdown(self) -> str:
        """Return the section as Markdown."""
        # What no row has would be a column of dashes.
        had = [m for m in self.measures if any(_has(row, m.key) for row in self.rows)]
        had = had or list(self.measures)
        printed = [m for m in had if any(m.key in {*r.paper, *r.others} for r in self.rows)]
        headings = ["encoder", *self.labels]
        for measure in had:
            headings += [f"{measure.heading}, paper"] if measure in printed else []
            headings.append(f"{measure.heading}, ours")
        cells = [row.cells(had, printed) for row in self.rows]
        table = markdown_table([*headings, "what differs in set-up"], cells)
        about = "\n".join(f"- {text}" for text in self.about)
        return f"## {self.table}: {self.title}\n\n{about}\n\n{table}\n"


def _has(row: Row, key: str) -> bool:
    return not isinstance(row.ours, str) and key in row.ours


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def table_of(text: str, columns: int) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return a paper's table, typed in as words: all but the last ``columns`` words are the key."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {tuple(line[:-columns]): tuple(line[-columns:]) for line in lines}


# -- encoders ----------------------------------------------------------------------------------


@dataclass
class Place:
    """An encoder, pooled in one way, and the run folder that its features lie in.

    Attributes:
        name: as it was named.
        run: the folder.
        repo: its hub name, by which papers know it; empty for others.
        instructs: whether it takes instructions.
        reason: why nothing can be done with it; empty if it can.
        obstacles: prompt -> why it cannot take it; empty if it can.
        identity: what decides its vectors.
        dim: size of its vectors.
    """

    name: str
    run: Path
    repo: str = ""
    instructs: bool = False
    reason: str = ""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    identity: Any = None
    dim: int = 0

    def why_not(self, prompt: str) -> str:
        """Return why there is nothing of a prompt, in words; empty if there is."""
        if self.reason:
            return "not done: see what is said of the encoder above"
        obstacle = self.obstacles.get(prompt, "it was not extracted")
        # In brackets stands what to do about it, on another command line.
        obstacle = obstacle.partition(" (")[0].replace("it ", "the prompt ", 1)
        return f"not possible: {obstacle}" if obstacle else ""

    @cached_property
    def zeroshot(self) -> dict[tuple[str, bool], Result]:
        """Return the results without any head, by prompt and subtraction."""
        results = evaluate(run=self.run, head=["none"])
        return {(result.prompt, result.subtract): result for result in results}


@dataclass
class Work:
    """What one command works on.

    Attributes:
        options: of the command line.
        dataset: the rows.
        places: an encoder each, in the order given.
        poolings: hub name -> how the paper pools it.
    """

    options: argparse.Namespace
    dataset: Dataset
    poolings: Mapping[str, str]
    places: list[Place] = field(default_factory=list)

    @property
    def split(self) -> Split:
        """Return the split that is scored."""
        test = self.dataset.splits.get("test")
        return "test" if test is not None and test.rated.any() else "dev"

    @property
    def seeds(self) -> int:
        """Return how many seeds each fit has."""
        return 1 if self.options.quick else int(self.options.seeds)

    def trained(self, epochs: int, patience: int, **settings: object) -> dict[str, str]:
        """Return the settings of a fit, with fewer epochs where it is to be quick."""
        values = {"epochs": 2 if self.options.quick else epochs, "patience": patience, **settings}
        return {key: str(value) for key, value in values.items()}

    # -- encoders ------------------------------------------------------------------------------

    def place(self, text: str, pooling: str | None, prompts: Callable[[bool], list[str]]) -> Place:
        """Extract an encoder's features, or find out why it cannot be done.

        Args:
            text: NAME, or NAME=FOLDER.
            pooling: None: the paper's, or the encoder's own.
            prompts: whether it takes instructions -> prompts to extract.
        """
        name, _, folder = text.partition("=")
        known = find_model(name)
        own = known.poolings[0] if known else None
        pooling = pooling or self.poolings.get(known.repo if known else name)
        given = None if pooling == own else pooling
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name).strip("-.") or "encoder"
        run = Path(self.options.folder, f"{slug}-{given}" if given else slug)
        repo = known.repo if known else ("" if Path(name).is_dir() else name)
        # What its name tells, should it not be found.
        place = Place(name, run, repo, bool(known and known.all_settings["instruction_format"]))
        chosen = EncoderOptions(
            dtype=self.options.dtype,
            device=self.options.device,
            quantize=self.options.quantize,
            like=name if folder else None,
            pooling=given,
        )
        try:
            return self._extracted(place, folder or name, chosen, prompts)
        except LlmcondError as error:
            log.info(f"{name}: {error}")
            place.reason = str(error)
            return place

    def _extracted(
        self, place: Place, model: str, chosen: EncoderOptions, prompts: Callable[[bool], list[str]]
    ) -> Place:
        identity = resolve(model, chosen).identity
        instructs = bool(identity.instruction_format)
        wanted = prompts(instructs)
        obstacles = {name: load_prompt(name).obstacle(identity) for name in wanted}
        usable = [name for name in wanted if not obstacles[name]]
        source = _source(self.options)
        extract(
            model=model,
            run=place.run,
            prompt=usable,
            data=source.data,
            columns=source.columns,
            rating_range=source.rating_range,
            unrated=source.unrated,
            **asdict(chosen),
        )
        run = open_run(place.run)
        if run.manifest["data"]["digest"] != self.dataset.to_json()["digest"]:
            raise UserError(f"{place.run} holds other rows. Use another --folder.")
        return replace(
            place,
            instructs=instructs,
            obstacles=obstacles,
            identity=identity,
            dim=_dim(run, usable[0], self.split),
        )

    # -- fits ----------------------------------------------------------------------------------

    def fit(
        self,
        place: Place,
        head: str,
        prompt: str,
        changes: Mapping[str, str],
        subtract: bool = True,
        seeds: int | None = None,
    ) -> Mapping[str, Value] | str:
        """Return the figures of a head over seeds, or why there are none.

        Args:
            place: whose features.
            head: a recipe.
            prompt: which features.
            changes: settings of the recipe.
            subtract: whether e(c) is subtracted from joint features.
            seeds: None: as many as are asked for.
        """
        reason = place.why_not(prompt)
        if reason:
            return reason
        try:
            asked = SweepOptions(
                run=place.run,
                head=[head],
                prompt=[prompt],
                subtract=subtract,
                set=changes,
                seeds=seeds or self.seeds,
                split=self.split,
                workers=self.options.workers,
            )
            row = sweep(asked).results[0]
        except LlmcondError as error:
            return not_done(error)
        seeds = len(row.seeds)
        # A sweep's intervals are over rows as well, those of the other rows over seeds alone.
        return {
            name: value_of(estimate, seeds)
            if (deviation := finite_or_none(row.seed_sd[name])) is None
            else _of_seeds(estimate.value, deviation, seeds)
            for name, estimate in row.metrics.items()
        }

    # -- words ---------------------------------------------------------------------------------

    def differences(
        self,
        place: Place,
        names: Mapping[str, str],
        fit: Mapping[str, str] | None = None,
        pooling: bool = True,
    ) -> list[str]:
        """Return what differs from the paper in any row of an encoder, in words.

        Args:
            place: the encoder.
            names: hub name -> what the paper calls it.
            fit: settings of the fit, where there is one.
            pooling: whether it is to be told that the pooling differs.
        """
        found = []
        if place.repo not in names:
            found.append("other encoder")
        elif place.identity is not None:
            paper = self.poolings.get(place.repo, place.identity.pooling)
            if pooling and place.identity.pooling != paper:
                found.append(f"{place.identity.pooling} pooling instead of {paper}")
        if place.identity is not None and place.identity.quantize != "none":
            found.append(f"encoder in {place.identity.quantize}")
        trained = fit is not None and "epochs" in fit
        chose = ", which chose the epoch" if trained and self.split == "dev" else ""
        found.append(f"{self._source()[0]}, {self.split} scored{chose}")
        if fit is not None and trained:
            found.append(f"at most {fit['epochs']} epochs, patience {fit['patience']}")
        return found

    def _source(self) -> tuple[str, str]:
        """Return what the rows are, in short, and what is to be known of them."""
        if self.options.data is None:
            return "the bundled sample", "made by a script, and no C-STS"
        sizes = (len(self.dataset.splits["train"]), len(self.dataset.splits["dev"]))
        return _KNOWN_DATA.get(sizes, ("other rows", "no release of C-STS that is known by size"))

    def data_words(self, paper: str) -> list[str]:
        """Return what is to be known of the rows, beside the paper's."""
        splits = self.dataset.splits
        rows, train = splits[self.split], splits["train"]
        name, more = self._source()
        chosen = (
            "The same rows chose the epoch of every trained head, so its figures are a little too "
            "good: there is no test split with ratings."
            if self.split == "dev"
            else "Dev chose the epoch of every trained head; test was scored only."
        )
        return [
            f"Rows: {paper} Here: {name} ({more}); {int(train.rated.sum()):,} training rows, and "
            f"{int(rows.rated.sum()):,} rated rows of {self.split} are scored "
            f"({int((~rows.rated).sum()):,} without a rating left out). {chosen}",
        ]


def _dim(run: Run, prompt: str, split: str) -> int:
    """Return the size of a run's vectors."""
    view = run.zero_shot_views(run.prompt(prompt))[-1]
    return RatedExamples(run).pairs(view, split).dim


# -- the command -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paper:
    """What a script reproduces.

    Attributes:
        name: of the paper.
        doc: the script's docstring.
        script: its file's name.
        tables: that can be asked for.
        names: hub name -> what the paper calls it.
        poolings: hub name -> how the paper pools it.
        prompts: whether an encoder takes instructions -> prompts to extract.
        sections: the tables asked for.
        about: what holds for all tables.
    """

    name: str
    doc: str
    script: str
    tables: Sequence[str]
    names: Mapping[str, str]
    poolings: Mapping[str, str]
    prompts: Callable[[bool], list[str]]
    sections: Callable[[Work, Sequence[str]], Iterator[Section]]
    about: Callable[[Work], list[str]]


def run_paper(paper: Paper, arguments: Sequence[str] | None) -> int:
    """Run a script and return its exit code: 0 done, 2 wrong input, 1 anything else."""
    options = _parser(paper).parse_args(arguments)
    log_to_terminal()
    try:
        return _reproduce(paper, options)
    except LlmcondError as error:
        log.info(f"{paper.script}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        log.info(
            "interrupted; what was extracted and fitted is kept, and the same command resumes."
        )
        return 1


def _reproduce(paper: Paper, options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise UserError(f"seeds is {options.seeds}; it must be at least 1.")
    if options.out is not None:
        check_writable(options.out)
    work = Work(options, _source(options).data_options().read(), paper.poolings)
    for text in dict.fromkeys(options.encoders):
        work.places.append(work.place(text, None, paper.prompts))
    head = _head(paper, work)
    print(head, flush=True)
    sections = []
    texts = [head]
    for section in paper.sections(work, options.tables or paper.tables):
        sections.append(section)
        texts.append(section.markdown())
        print(texts[-1], flush=True)
    if options.out is not None:
        write_text(options.out, "\n".join(texts))
        log.info(f"tables -> {options.out}")
    if options.json:
        print(json.dumps(_record(paper, work, sections), ensure_ascii=False, allow_nan=False))
    sys.stdout.flush()
    return 0 if any(not place.reason for place in work.places) else 1


@dataclass(frozen=True, kw_only=True)
class _Source(ColumnOptions, DeviceOption, Command):
    """Where rows come from, and where encoders and heads compute."""

    data: str | None = option(None, metavar="SRC", help=f"{DATA} (default: the bundled sample)")


def _source(options: argparse.Namespace) -> _Source:
    return create_command(_Source, vars(options))


def _parser(paper: Paper) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=paper.doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--encoders",
        nargs="+",
        required=True,
        metavar="NAME",
        help="aliases, hub names or folders; NAME=FOLDER is a copy of a known one",
    )
    add_arguments(parser, _Source)
    parser.usage = None
    parser.set_defaults(data=None, device="auto", json=False)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/reproduce"),
        metavar="DIR",
        help="of the runs, one for each encoder and pooling (default: runs/reproduce)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of each fit")
    parser.add_argument("--tables", nargs="+", choices=paper.tables, metavar="T", help="(all)")
    parser.add_argument("--workers", type=int, metavar="N", help="fits at a time (default: cores)")
    parser.add_argument("--dtype", default="auto", help="of encoders: auto, float32, bfloat16, ...")
    parser.add_argument("--quantize", default="none", help="encoders in 8bit or 4bit")
    parser.add_argument("--quick", action="store_true", help="one seed and two epochs: a trial")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="the tables, as Markdown")
    return parser


def _head(paper: Paper, work: Work) -> str:
    """Return what stands before all tables."""
    options = work.options
    source = options.data or ""
    if source:
        # Where it lies on this machine is nobody's business.
        source = f" --data {source if '://' in source else Path(source).name}"
    quantize = "" if options.quantize == "none" else f" --quantize {options.quantize}"
    command = (
        f"python scripts/{paper.script} --encoders {' '.join(p.name for p in work.places)}"
        f"{source}{quantize} --seeds {work.seeds}{' --quick' if options.quick else ''}"
    )
    about = [
        *paper.about(work),
        "Cells: the paper's figure as printed, – where it has no such encoder or row, then in "
        "brackets what its other encoders have. Ours: mean ± deviation over seeds (here "
        f"{work.seeds}) [95 % interval of that mean]; of a single fit, [95 % interval over "
        "sentence pairs] or none. Correlations and accuracies are times 100.",
    ]
    if options.quick:
        about.append("A quick trial: two epochs and one seed. Figures of trained heads are low.")
    lines = "\n".join(f"- {text}" for text in about)
    headings = ["encoder", "in the paper", "dimensions", "pooling", "computed in", "remarks"]
    table = markdown_table(headings, [_describe(paper, place) for place in work.places])
    return f"# {paper.name}, reproduced\n\n```bash\n{command}\n```\n\n{lines}\n\n{table}\n"


def _describe(paper: Paper, place: Place) -> list[str]:
    called = paper.names.get(place.repo, "no")
    if place.reason:
        return [place.name, called, "–", "–", "–", f"not done: {place.reason}"]
    identity = place.identity
    kind = identity.dtype + ("" if identity.quantize == "none" else f", {identity.quantize}")
    remark = "takes instructions" if place.instructs else "takes no instructions"
    return [place.name, called, str(place.dim), identity.pooling, kind, remark]


def _record(paper: Paper, work: Work, sections: Sequence[Section]) -> dict[str, Any]:
    """Return everything as JSON has it; nothing of the rows' texts."""
    data = work.dataset.to_json()
    return {
        "paper": paper.name,
        "split": work.split,
        "data": {key: data[key] for key in ("digest", "rows", "unrated")},
        "seeds": work.seeds,
        "quick": work.options.quick,
        "encoders": [
            {
                "name": place.name,
                "in_paper": paper.names.get(place.repo),
                "dim": place.dim or None,
                "identity": place.identity and place.identity.to_json(),
                "reason": place.reason or None,
            }
            for place in work.places
        ],
        "sections": [_section_record(section) for section in sections],
        **provenance(),
    }


def _section_record(section: Section) -> dict[str, Any]:
    rows, keys = [], [measure.key for measure in section.measures]
    for row in section.rows:
        failed = isinstance(row.ours, str)
        rows.append(
            {
                "encoder": row.encoder,
                **dict(zip(section.labels, row.labels, strict=True)),
                "paper": {key: _number(text) for key, text in row.paper.items()},
                "ours": None
                if isinstance(row.ours, str)
                else {key: asdict(row.ours[key]) for key in keys if key in row.ours},
                "reason": row.ours if failed else None,
                "set_up": list(row.set_up),
            }
        )
    return {"table": section.table, "title": section.title, "rows": rows}
