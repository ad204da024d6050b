"""``llmcond annotate``: rate sentence pairs under conditions by a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import DATA, WithColumns, data_options
from llmcond.options import option
from llmcond.workflows.options import Split

if TYPE_CHECKING:
    from llmcond.workflows.annotate import AnnotationResult

_SERVER = "server"
_PROPOSE = "texts without pairs"


@dataclass(frozen=True, kw_only=True)
class Annotate(WithColumns):
    """Rate sentence pairs under conditions by a language model.

    The server speaks OpenAI's chat protocol. A key, if it needs one, is in OPENAI_API_KEY. Each
    answer is stored as it comes, so that the same command goes on where it was stopped.
    """

    example: ClassVar[str] = (
        "llmcond annotate my.csv --endpoint http://localhost:8000/v1 --model NAME --out rated.csv"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = RESUMES

    data: Any = option(
        flag="", metavar="SRC", help=f"rows, rated or not: {DATA}; for --propose: a file of texts"
    )
    endpoint: str = option(metavar="URL", help="address, such as http://localhost:8000/v1")
    model: str = option(metavar="NAME", help="as the server calls it")
    out: str | Path = option(metavar="FILE.csv", help="rated rows, as `extract --data` reads them")
    prompt: str = option(
        "rate", metavar="NAME_OR_FILE", help="what is asked: rate, answer-then-compare, or a .toml"
    )
    samples: int = option(1, metavar="K", help="answers to each question, which are averaged")
    rows: int | None = option(
        None, metavar="N", help="so many rows only, drawn by the seed (default: all)"
    )
    split: Split | None = option(None, help="of a folder (default: train)")
    seed: int = option(0, metavar="S", help="another one asks everything anew")
    yes: bool = option(False, help="do not ask whether to go on, told what it will take")
    price_in: float | None = option(None, metavar="P", help="of a million tokens that are read")
    price_out: float | None = option(None, metavar="P", help="of a million that are written")
    propose: int | None = option(
        None,
        metavar="N",
        group=_PROPOSE,
        help="let the model pair texts and name conditions, N rows, and then rate them",
    )
    propose_prompt: str = option(
        "propose", metavar="NAME_OR_FILE", group=_PROPOSE, help="what is asked for that"
    )
    text: str | None = option(
        None, metavar="COL", group=_PROPOSE, help="column of the texts in a table (default: text)"
    )
    concurrency: int = option(4, metavar="N", group=_SERVER, help="questions at once")
    per_minute: float | None = option(
        None, metavar="N", group=_SERVER, help="requests a minute at most"
    )
    timeout: float = option(
        60.0,
        metavar="S",
        group=_SERVER,
        help="seconds until a request without a complete answer is tried again",
    )
    retries: int = option(
        6, metavar="N", group=_SERVER, help="how often, later and later or when the server says"
    )
    request: Mapping[str, str] | None = option(
        None,
        metavar="NAME=VALUE",
        group=_SERVER,
        help="further fields of requests, such as temperature=0.7 max_tokens=300",
    )

    def execute(self) -> AnnotationResult:
        """Rate."""
        data = data_options(self)
        from llmcond.annotation.asking import Prices
        from llmcond.annotation.server import ServerSettings
        from llmcond.workflows.annotate import annotate

        fields = {name: _value(text) for name, text in (self.request or {}).items()}
        limits = (self.timeout, self.retries, self.per_minute)
        return self.call(
            annotate,
            data=data,
            server=ServerSettings(self.endpoint, self.model, fields, *limits),
            prices=Prices(self.price_in, self.price_out),
        )

    def show(self, result: AnnotationResult, form: str) -> None:
        """Print how far people's ratings agree, where there are any."""
        if result.agreement is not None:
            from llmcond.report.agreement import show_agreement

            show_agreement(result.agreement, result.model, form)


def _value(text: str) -> Any:
    """Return a value as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


annotate = verb(Annotate)
