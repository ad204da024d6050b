"""Templates of questions to a language model, and how their answers are read.

A template is one TOML file in ``prompts/annotate``, or of a user's own. The answer is asked for as
one JSON object, whose fields follow from the template; see :attr:`Template.schema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from llmcond.bundled import bundled_names
from llmcond.config import STRICT, build, find_toml, read_toml
from llmcond.data.datasets import RatingScale
from llmcond.errors import UserError
from llmcond.files import digest_text
from llmcond.prompts.template import placeholders

#: Where the bundled ones are, below ``prompts``.
FOLDER = "annotate"
#: What is asked: for a rating of a pair under a condition, or for pairs and conditions.
Kind = Literal["rate", "propose"]
#: The placeholders of each kind, all of which a template names.
PLACEHOLDERS: Mapping[Kind, tuple[str, ...]] = {
    "rate": ("sentence1", "sentence2", "condition"),
    "propose": ("sentence", "others"),
}
#: The range of ratings, and the label of what is ill-defined: as C-STS files have them.
SCALE = RatingScale()
ILL_DEFINED = "ill-defined"
_STEPS = [str(step) for step in range(int(SCALE.low), int(SCALE.high) + 1)]
_TEXT = {"type": "string"}
#: The fields of each kind's answers, the last ones; what a template has ``first`` comes before.
_FIELDS: Mapping[Kind, Mapping[str, Any]] = {
    "rate": {"rating": {"type": "string", "enum": [*_STEPS, ILL_DEFINED]}},
    "propose": {"partner": {"type": "integer"}, "alike": _TEXT, "different": _TEXT},
}
#: What ends the thoughts that reasoning models write before they answer.
_THOUGHT_ENDS = ("</think>", "</thinking>")
_PLAIN = re.compile(
    r"(?:rating|score|similarity)\W{0,4}(?:[:=]|\bis\b)\W{0,6}?(-?\d+(?:\.\d+)?|ill.?defined)",
    re.IGNORECASE,
)
_OPENS = re.compile(r'\{\s*"')
#: Characters of an answer that are looked through, the last ones: a model may ramble on.
_MOST = 8_000


@dataclass(frozen=True, slots=True)
class Template:
    """A template file, checked.

    Attributes:
        kind: what it asks for.
        source: where the wording comes from.
        question: what the user says; names all placeholders of its kind.
        system: what is said before, to the model; empty: nothing.
        first: texts that the model writes before its answer, by the names of their fields: what
            was said of the two sentences, or reasons.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: Kind
    description: str
    source: str
    question: str
    system: str = ""
    first: tuple[str, ...] = ()
    name: str = field(default="", kw_only=True)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of an answer in their order, each with its JSON schema."""
        return {**dict.fromkeys(self.first, _TEXT), **_FIELDS[self.kind]}

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of an answer."""
        return {
            "type": "object",
            "properties": self.fields,
            "required": list(self.fields),
            "additionalProperties": False,
        }

    @property
    def digest(self) -> str:
        """Identify all of the template that changes what is asked."""
        return digest_text(self.kind, self.system, self.question, *self.first)

    def messages(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """Return a question with texts put in, as the chat protocol has it.

        Servers without structured output need to be told of the format, so all are.
        """
        legal = {name: " or ".join(own.get("enum", ["..."])) for name, own in self.fields.items()}
        form = json.dumps(legal).replace('"..."', "...")
        ask = self.question.strip().format(**values)
        asked = f"{ask}\n\nAnswer with one JSON object and nothing else: {form}"
        before = [{"role": "system", "content": self.system.strip()}] if self.system.strip() else []
        return [*before, {"role": "user", "content": asked}]

    def to_json(self) -> dict[str, Any]:
        """Return the template with its digest."""
        return {**asdict(self), "digest": self.digest}


def load_template(name_or_file: str, kind: Kind) -> Template:
    """Read a template by its bundled name or by the path of a ``.toml`` file.

    Raises:
        UserError: no such template, one of another kind, an unknown or missing key or placeholder.
    """
    path = find_toml(name_or_file, "prompts", FOLDER)
    values = read_toml(path)
    if "name" in values:
        raise UserError(f"{path}: unknown key 'name': a prompt is named by its file.")
    template = build(Template, {**values, "name": path.stem}, str(path))
    if template.kind != kind:
        others = [name for name in bundled_templates() if name.kind == kind]
        raise UserError(
            f"{path} is of the kind {template.kind!r}, and one that is to {kind} was expected, "
            f"such as {', '.join(one.name for one in others)}."
        )
    _check(template, str(path))
    return template


def bundled_templates() -> list[Template]:
    """Return all bundled templates, by their names."""
    found = []
    for name in bundled_names("prompts", FOLDER):
        path = find_toml(name, "prompts", FOLDER)
        found.append(build(Template, {**read_toml(path), "name": name}, str(path)))
    return found


def _check(template: Template, source: str) -> None:
    known = PLACEHOLDERS[template.kind]
    named = placeholders(template.question, f"{source}: question", known)
    missing = [name for name in known if name not in named]
    if missing:
        raise UserError(f"{source}: question lacks the placeholder {{{missing[0]}}}.")
    taken = [name for name in template.first if name in _FIELDS[template.kind] or not name.strip()]
    if taken:
        raise UserError(f"{source}: first has {taken[0]!r}, which cannot be a further field.")


def _final(answer: str) -> str:
    """Return the end of an answer, without what the model thought before it."""
    starts = [answer.rfind(end) + len(end) for end in _THOUGHT_ENDS if end in answer]
    return answer[max(starts, default=0) :][-_MOST:]


def _object(text: str, field: str) -> dict[str, Any] | None:
    """Return the last JSON object within a text that has a field; None if there is none."""
    found, decoder, end = None, json.JSONDecoder(), 0
    for opens in _OPENS.finditer(text):
        if opens.start() < end:  # within an object that was read
            continue
        try:
            value, end = decoder.raw_decode(text, opens.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and field in value:
            found = value
    return found


def read_rating(answer: str) -> float | None:
    """Return the rating that an answer gives, on 0 to 1; NaN: ill-defined; None: it gives none.

    It is read from a JSON object, or where there is none from words such as "Rating: 4".
    """
    text = _final(answer)
    value = _object(text, "rating")
    if value is not None:
        said = str(value["rating"])
    else:
        told = _PLAIN.findall(text)
        said = told[-1] if told else text.strip().strip("*.\"'")
    if re.fullmatch(r"ill.?defined", said.strip(), re.IGNORECASE):
        return SCALE.to_unit(SCALE.unrated)
    try:
        return SCALE.to_unit(said)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A second sentence and two conditions for a sentence.

    Attributes:
        partner: position of the second sentence among those that were offered; None: none fits.
        conditions: one under which the two are alike, and one under which they differ.
    """

    partner: int | None
    conditions: tuple[str, str]


def read_proposal(answer: str, offered: int) -> Proposal | None:
    """Return what an answer proposes, of so many sentences offered; None: it cannot be read."""
    value = _object(_final(answer), "partner")
    if value is None:
        return None
    texts = [value.get("alike"), value.get("different")]
    try:
        number = int(str(value["partner"]))
    except ValueError:
        return None
    if not 0 <= number <= offered:
        return None
    if number == 0:
        return Proposal(None, ("", ""))
    conditions = [" ".join(text.split()) for text in texts if isinstance(text, str)]
    if len(conditions) < len(texts) or not all(conditions):
        return None
    return Proposal(number - 1, (conditions[0], conditions[1]))
