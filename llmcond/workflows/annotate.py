"""Rate sentence pairs under conditions by a language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.annotation.asking import Asker, Forecast, Prices, Question
from llmcond.annotation.journal import Journal
from llmcond.annotation.proposals import Offer, offers, proposed_rows
from llmcond.annotation.server import Answer, ServerSettings
from llmcond.annotation.template import SCALE, Template, load_template, read_proposal, read_rating
from llmcond.data.candidates import text_file
from llmcond.data.datasets import Columns, DataOptions, RatingScale, read_pairs, read_rows
from llmcond.data.rows import Rows
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.evaluation.agreement import Agreement, agreement
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.metrics import Floats
from llmcond.progress import duration
from llmcond.workflows.options.texts import AnnotateOptions

#: Questions of each kind that are asked to measure what one takes.
_FEW = 3
#: Questions that are asked without asking the user, where there is no terminal to ask on.
_UNASKED = 100


@dataclass(frozen=True)
class AnnotationResult(Displayed):
    """What was rated and written.

    Attributes:
        out: the file.
        model: that rated.
        prompt: name of the template.
        rows: written.
        ill_defined: of them, those that are.
        unanswered: rows left out, as no answer to them can be read.
        questions: asked by this call; others were answered before.
        tokens_in, tokens_out, cost: of these; None: unknown.
        agreement: with the ratings that the rows had; None: they had none.
    """

    out: Path
    model: str
    prompt: str
    rows: int
    ill_defined: int
    unanswered: int
    questions: int
    tokens_in: int | None
    tokens_out: int | None
    cost: float | None
    agreement: Agreement | None


@dataclass(frozen=True)
class _Plan:
    """What is rated.

    Attributes:
        wanted: rows.
        pairs: they, where they are there.
        offered: else the texts that a model is to pair, and the questions that ask for it.
        asks: those questions.
    """

    wanted: int
    pairs: Rows | None = None
    offered: Sequence[Offer] = ()
    asks: Sequence[Question] = ()

    def rows(self, asker: Asker) -> Rows:
        """Return the rows, as far as they are known: those of proposals that were answered."""
        if self.pairs is not None:
            return self.pairs
        found = proposed_rows(self.offered, [asker.value(ask) for ask in self.asks])
        return found.take(np.arange(min(self.wanted, len(found))))


def annotate(asked: AnnotateOptions) -> AnnotationResult:
    """Write a file of rows rated by a language model, which ``extract`` reads.

    Answers are stored beside it as they come, in ``NAME.answers``, a JSON object a line: a call
    that was stopped goes on there.

    Raises:
        UserError: options, data or a template that is wrong, a server that refuses, or the user
            does not agree to what it will take.
        LlmcondError: the server fails.
    """
    fields = {name: _value(text) for name, text in (asked.request or {}).items()}
    limits = (asked.timeout, asked.retries, asked.per_minute)
    server = ServerSettings(asked.endpoint, asked.model, fields, *limits)
    server.check()
    prices = Prices(asked.price_in, asked.price_out)
    data, out = asked.data_options(), Path(asked.out)
    samples, split, rows, seed = asked.samples, asked.split, asked.rows, asked.seed
    check_output(out, (".csv",), [data.source])
    rate = load_template(asked.prompt, "rate")
    if asked.propose is None:
        pairs = _read(data, split, rows, seed)
        plan = _Plan(len(pairs), pairs)
    else:
        _check_propose(data, split, rows)
        template = load_template(asked.propose_prompt, "propose")
        plan = _proposing(template, _texts(data.source, asked.text), asked.propose, seed)
    with Journal(out.with_suffix(".answers")) as journal:
        asker = Asker(server, journal, seed, asked.concurrency)
        _measure(asker, plan, rate, samples, prices, asked.yes)
        asker.ask(plan.asks)
        found = plan.rows(asker)
        questions = _questions(rate, found, samples)
        asker.ask(questions)
    if not len(found):
        raise UserError(f"{server.model} pairs none of the texts; name another, or other texts.")
    if len(found) < plan.wanted:
        log.info(f"{len(found):,} of {plan.wanted:,} rows were proposed; other texts did not fit")
    values = [asker.value(one) for one in questions]
    given = [
        [one for one in values[start : start + samples] if one is not None]
        for start in range(0, len(values), samples)
    ]
    answered = np.array([bool(own) for own in given], dtype=np.bool_)
    kept, given = found.take(answered), [own for own in given if own]
    model = np.array([_mean(own) for own in given])
    _write(out, kept, model, given)
    unanswered = int((~answered).sum())
    log.info(f"{len(kept):,} rows, {int(np.isnan(model).sum()):,} of them ill-defined -> {out}")
    if unanswered:
        log.warning(
            f"{unanswered:,} rows are left out: none of the answers to them can be read "
            f"({journal.path}). Another --seed asks again."
        )
    tokens_in, tokens_out = (_total(asker.asked, name) for name in ("tokens_in", "tokens_out"))
    return AnnotationResult(
        out=out,
        model=server.model,
        prompt=rate.name,
        rows=len(kept),
        ill_defined=int(np.isnan(model).sum()),
        unanswered=unanswered,
        questions=len(asker.asked),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=prices.cost(tokens_in, tokens_out),
        agreement=agreement(kept, model) if kept.rated.any() else None,
    )


def _proposing(template: Template, texts: Sequence[str], wanted: int, seed: int) -> _Plan:
    offered = offers(texts, wanted, seed)
    asks = [
        Question(template, own.values, partial(read_proposal, offered=len(own.others)))
        for own in offered
    ]
    return _Plan(wanted, None, offered, asks)


def _measure(
    asker: Asker, plan: _Plan, rate: Template, samples: int, prices: Prices, yes: bool
) -> None:
    """Ask a few questions of each kind, tell what the others will take, and ask the user.

    Raises:
        UserError: none of the few answers can be read, or the user does not agree.
    """
    few = plan.asks[:_FEW]
    asker.ask(few)
    asker.check_readable(few)
    questions = _questions(rate, plan.rows(asker), samples)
    first = questions[:_FEW]
    asker.ask(first)
    asker.check_readable(first)
    rated = len(questions) - len(asker.missing(questions))
    left = [(len(asker.missing(plan.asks)), few), (samples * plan.wanted - rated, first)]
    _agree(asker.forecast(left, prices), asker.settings, yes)


def _value(text: str) -> Any:
    """Return a value as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_propose(data: DataOptions, split: str | None, rows: int | None) -> None:
    given = {
        "--columns, --rating-range or --unrated": data.columns or data.scale,
        "--split": split,
        "--rows": rows,
    }
    for option, value in given.items():
        if value:
            raise UserError(f"{option} is of rows that are there; --propose makes them from texts.")


def _read(data: DataOptions, split: str | None, most: int | None, seed: int) -> Rows:
    """Return the rows that are to be rated: all, or so many drawn by the seed, in their order."""
    columns, scale = Columns(**data.columns), RatingScale(**data.scale)
    if "label" in data.columns:
        rows, _ = read_rows(data.source, split or "train", columns, scale)
    else:
        rows = read_pairs(data.source, split or "train", columns, scale)
    if most is None or most >= len(rows):
        return rows
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows))[:most]))


def _texts(source: Any, column: str | None) -> list[str]:
    if isinstance(source, str | Path):
        return text_file(Path(source), "texts", column or "text")
    if isinstance(source, Sequence) and all(isinstance(one, str) for one in source):
        return [one for one in source if one.strip()]
    raise UserError("--propose takes texts: a file of them, or from Python a list of strings.")


def _questions(template: Template, rows: Rows, samples: int) -> list[Question]:
    """Return the questions of each row, all samples of a row together."""
    columns = zip(*rows.texts.values(), strict=True)
    texts = [dict(zip(rows.texts, own, strict=True)) for own in columns]
    return [
        Question(template, own, read_rating, sample) for own in texts for sample in range(samples)
    ]


def _agree(forecast: Forecast, server: ServerSettings, yes: bool) -> None:
    """Tell what is left to ask, and ask the user; a UserError if the answer is no."""
    if not forecast.questions:
        return
    log.info(
        f"to ask: {forecast.text}, {duration(forecast.seconds)}; {server.model} at "
        f"{server.endpoint}"
    )
    if yes:
        return
    stored = "what was answered is stored"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if forecast.questions > _UNASKED:
            raise UserError(
                f"{forecast.questions:,} questions are to be asked, and there is no terminal to "
                f"agree on. Say --yes (from Python: yes=True); {stored}."
            )
        return
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"not agreed to; {stored}, and the same command goes on.")


def _mean(ratings: Sequence[float]) -> float:
    """Return the mean of a row's ratings; NaN where more than half find it ill-defined."""
    rated = [one for one in ratings if not np.isnan(one)]
    return float(np.mean(rated)) if 2 * len(rated) >= len(ratings) else float("nan")


def _label(rating: float) -> str:
    """Return a rating as files have it: 1 to 5, -1 for what is ill-defined."""
    scaled = SCALE.unrated if np.isnan(rating) else SCALE.low + rating * (SCALE.high - SCALE.low)
    return f"{scaled:.4g}"


def _total(answers: Sequence[Answer], name: str) -> int | None:
    """Return how many tokens answers took together; None where the server does not tell."""
    counts = [getattr(answer, name) for answer in answers]
    return None if None in counts else sum(counts)


def _write(path: Path, rows: Rows, model: Floats, given: Sequence[Sequence[float]]) -> None:
    answers = [" ".join(map(_label, own)) for own in given]
    columns = {**rows.texts, "label": list(map(_label, model)), "answers": answers}
    if rows.rated.any():
        columns["human"] = list(map(_label, rows.rating))
    write_csv(path, columns, zip(*columns.values(), strict=True))
