"""Templates of questions to a language model, settings of its server, and parsers of its answers.

A template is a bundled TOML file in ``prompts/annotate``, or another TOML file. The model has to
answer with one JSON object, which has the fields of ``QuestionTemplate.schema``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llmcond.base.errors import UserError
from llmcond.base.files import digest_text
from llmcond.base.package import bundled_names
from llmcond.base.records import resolve_toml
from llmcond.base.system import check_server_address
from llmcond.base.text import check_characters, condition_cell
from llmcond.data.datasets import RatingScale
from llmcond.prompts.template import placeholders, read_template

#: The texts of a question's placeholders, and the model's answer.
Example = tuple[Mapping[str, str], str]
#: Folder of the bundled templates in ``prompts``.
FOLDER = "annotate"
#: Kinds of questions: rate a pair under a condition, propose pairs and conditions, say whether a
#: text mentions a condition, or say in a few words what it says about it.
Kind = Literal["rate", "propose", "presence", "answer"]
#: The placeholders of each kind, all of which are required.
PLACEHOLDERS: Mapping[Kind, tuple[str, ...]] = {
    "rate": ("sentence1", "sentence2", "condition"),
    "propose": ("sentence", "others"),
    "presence": ("text", "condition"),
    "answer": ("text", "condition"),
}
#: The range of ratings, and the label of ill-defined rows, as in the files of C-STS.
SCALE = RatingScale()
ILL_DEFINED = "ill-defined"
_STEPS = [str(step) for step in range(int(SCALE.low), int(SCALE.high) + 1)]
_TEXT = {"type": "string"}
#: The fields of the answers of each kind. A template's ``first`` fields precede them.
_FIELDS: Mapping[Kind, Mapping[str, Any]] = {
    "rate": {"rating": {"type": "string", "enum": [*_STEPS, ILL_DEFINED]}},
    "propose": {"partner": {"type": "integer"}, "alike": _TEXT, "different": _TEXT},
    "presence": {"mentioned": {"type": "string", "enum": ["yes", "no"]}},
    "answer": {"answer": _TEXT},
}
#: Beginning and end of the thoughts that reasoning models write before they answer.
_THOUGHT_STARTS, _THOUGHT_ENDS = ("<think>", "<thinking>"), ("</think>", "</thinking>")
_PLAIN = re.compile(
    r"(?:rating|score|similarity)\W{0,4}(?:[:=]|\bis\b)\W{0,6}?(-?\d+(?:\.\d+)?|ill.?defined)",
    re.IGNORECASE,
)
#: The rating in an object that is not JSON, for example because it contains quotation marks.
_RATING_FIELD = re.compile(r'"rating"\s*:\s*"?([\w.-]+)')
_OPENS = re.compile(r'\{\s*"')
#: The longest short answer in characters; longer ones repeat the text or explain themselves.
_LONGEST_ANSWER = 100
_PLAIN_ANSWER = re.compile(r"^\W*answer\W*:\s*(.+)$", re.IGNORECASE | re.MULTILINE)
#: Answers of one or two words that stand for none.
_NO_ANSWER = re.compile(
    r"(not|none|nothing|unknown|unspecified|n/?a)"
    r"( (mentioned|specified|stated|given|applicable|said|known|available|provided))?",
    re.IGNORECASE,
)
#: Beginnings of answers in which a model refuses to answer.
_REFUSAL = re.compile(
    r"(i'?m |i am )(very )?sorry\b|(very )?sorry\W*(but |i\b|$)|as an ai\b|i apologi[sz]e\b|"
    r"i (can ?not|can'?t|am unable to|won'?t) (answer|assist|determine|help|provide)\b",
    re.IGNORECASE,
)
#: Number of characters at the end of an answer that are searched, because answers may be very long.
_MAX_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class QuestionTemplate:
    """A checked template file.

    Attributes:
        kind: kind of the question.
        description: description in one line.
        source: origin of the wording.
        question: the user's message, with all placeholders of its kind.
        system: the system message; empty: none.
        first: names of text fields that the model writes before its answer, such as reasons.
        name: name of the template.
    """

    kind: Kind
    description: str
    source: str
    question: str
    system: str = ""
    first: tuple[str, ...] = ()
    name: str = field(default="", kw_only=True)

    @property
    def fields(self) -> dict[str, Any]:
        """JSON schema of each field of an answer, in their order."""
        return {**dict.fromkeys(self.first, _TEXT), **_FIELDS[self.kind]}

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer."""
        return {
            "type": "object",
            "properties": self.fields,
            "required": list(self.fields),
            "additionalProperties": False,
        }

    @property
    def digest(self) -> str:
        """Digest of everything in the template that changes the question."""
        return digest_text(self.kind, self.system, self.question, *self.first)

    def messages(
        self, values: Mapping[str, str], examples: Sequence[Example] = ()
    ) -> list[dict[str, str]]:
        """Return the messages of a question, in the chat protocol.

        The question describes the format of the answer, which servers without structured output
        need.

        Args:
            values: texts for the placeholders.
            examples: answered questions, which precede the question as if the model had answered.
        """
        legal = {
            name: " or ".join(schema.get("enum", ["..."])) for name, schema in self.fields.items()
        }
        form = json.dumps(legal).replace('"..."', "...")

        def ask(texts: Mapping[str, str]) -> dict[str, str]:
            question = self.question.strip().format(**texts)
            content = f"{question}\n\nAnswer with one JSON object and nothing else: {form}"
            return {"role": "user", "content": content}

        messages = [{"role": "system", "content": self.system.strip()}]
        for texts, reply in examples:
            messages += [ask(texts), {"role": "assistant", "content": reply}]
        return [*(messages if self.system.strip() else messages[1:]), ask(values)]

    def to_json(self) -> dict[str, Any]:
        """Return the template and its digest as a JSON object."""
        return {**asdict(self), "digest": self.digest}


def load_template(name_or_file: str, kind: Kind) -> QuestionTemplate:
    """Read a template by its bundled name or by the path of a ``.toml`` file.

    Raises:
        UserError: there is no such template, it is of another kind, or a key or placeholder is
            unknown or missing.
    """
    path = resolve_toml(name_or_file, "prompts", FOLDER)
    template = read_template(path, QuestionTemplate)
    if template.kind != kind:
        others = [other for other in bundled_templates() if other.kind == kind]
        raise UserError(
            f"{path} is of the kind {template.kind!r}; expected the kind {kind!r}, such as "
            f"{', '.join(other.name for other in others)}."
        )
    _check(template, str(path))
    return template


def bundled_templates() -> list[QuestionTemplate]:
    """Return all bundled templates, sorted by their names."""
    paths = [resolve_toml(name, "prompts", FOLDER) for name in bundled_names("prompts", FOLDER)]
    return [read_template(path, QuestionTemplate) for path in paths]


def _check(template: QuestionTemplate, source: str) -> None:
    required = PLACEHOLDERS[template.kind]
    present = placeholders(template.question, f"{source}: question", required)
    missing = [name for name in required if name not in present]
    if missing:
        raise UserError(f"{source}: question lacks the placeholder {{{missing[0]}}}.")
    invalid = [
        name for name in template.first if name in _FIELDS[template.kind] or not name.strip()
    ]
    if invalid:
        raise UserError(
            f"{source}: first has {invalid[0]!r}, which is empty or a field of every answer."
        )


def _final_answer(answer: str) -> str:
    """Return the end of an answer, without the model's thoughts before it."""
    starts = [answer.rfind(end) + len(end) for end in _THOUGHT_ENDS if end in answer]
    text = answer[max(starts, default=0) :]
    # Thoughts that do not end were cut, and contain no answer.
    return "" if text.lstrip().startswith(_THOUGHT_STARTS) else text[-_MAX_CHARACTERS:]


def _find_object(text: str, field: str) -> dict[str, Any] | None:
    """Return the last JSON object within a text that has a field; None if there is none."""
    last, decoder, end = None, json.JSONDecoder(), 0
    for opens in _OPENS.finditer(text):
        if opens.start() < end:  # This brace is within the previous object.
            continue
        try:
            value, end = decoder.raw_decode(text, opens.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and field in value:
            last = value
    return last


def parse_rating(answer: str) -> float | None:
    """Parse the rating of an answer from a JSON object, or from words such as "Rating: 4".

    Returns:
        The rating from 0 to 1; NaN if the answer is "ill-defined"; None if it has no rating.
    """
    text = _final_answer(answer)
    value = _find_object(text, "rating")
    if value is not None:
        rating = str(value["rating"])
    else:
        matches = (_RATING_FIELD if _OPENS.search(text) else _PLAIN).findall(text)
        rating = matches[-1] if matches else text.strip().strip("*.\"'")
    if re.fullmatch(r"ill.?defined", rating.strip(), re.IGNORECASE):
        return SCALE.to_unit(SCALE.unrated)
    try:
        return SCALE.to_unit(rating)
    except ValueError:
        return None


def parse_presence(answer: str) -> bool | None:
    """Parse yes or no from a JSON object or from a text's first word; None if there is neither."""
    text = _final_answer(answer)
    value = _find_object(text, "mentioned")
    words = re.findall(r"\w+", str(value["mentioned"]) if value else text)
    return {"yes": True, "true": True, "no": False, "false": False}.get(" ".join(words[:1]).lower())


def parse_answer(answer: str) -> str | None:
    """Parse a short answer from a JSON object, from "Answer: ..." or from one line of text.

    Returns:
        The short answer; empty if it says that the text does not mention the condition. None if
        there is no answer, the model refuses, or the answer is longer than 100 characters.
    """
    text = _final_answer(answer)
    value = _find_object(text, "answer")
    if value is not None:
        short = value["answer"]
    else:
        if _OPENS.search(text):  # an object that was cut, or is not JSON
            return None
        matches = _PLAIN_ANSWER.findall(text)
        short = matches[-1] if matches else text
        if "\n" in short.strip() or short.lstrip().startswith(("{", "<")):
            return None
    if not isinstance(short, str | int | float):
        return None
    short = " ".join(str(short).split()).strip(" \"'*").rstrip(" .\"'*")
    if _NO_ANSWER.fullmatch(short) or (value is not None and not short):
        return ""
    try:
        check_characters(short)
    except ValueError:
        return None
    return None if not short or len(short) > _LONGEST_ANSWER or _REFUSAL.match(short) else short


def example_reply(kind: Kind, answer: str) -> str:
    """Return what the model should write if a short answer is right; empty: not mentioned."""
    reply = {"mentioned": "yes" if answer else "no"} if kind == "presence" else {"answer": answer}
    return json.dumps(reply, ensure_ascii=False)


def parse_proposal(
    answer: str, sentence: str, candidates: Sequence[str]
) -> list[tuple[str, str, str]] | None:
    """Parse the proposal of an answer.

    Args:
        answer: the answer.
        sentence: the first sentence of the pair.
        candidates: the candidates for the second sentence.

    Returns:
        The pair with a condition under which it is similar, and with one under which it differs.
        Empty if no candidate fits; None if the answer cannot be parsed.
    """
    value = _find_object(_final_answer(answer), "partner")
    if value is None:
        return None
    try:
        number = int(str(value["partner"]))
        if not number:
            return []
        conditions = [condition_cell(value.get(name)) for name in ("alike", "different")]
    except ValueError:
        return None
    if not 1 <= number <= len(candidates):
        return None
    return [(sentence, candidates[number - 1], condition) for condition in conditions]


# -- the server and its answers -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a model.

    Attributes:
        text: text of the answer, unchanged; empty if there was none.
        tokens_in, tokens_out: numbers of tokens that the server counted; None if it did not.
        seconds: time from the question to the answer, including retries.
    """

    text: str
    tokens_in: int | None
    tokens_out: int | None
    seconds: float


@dataclass(frozen=True)
class ChatSettings:
    """Settings of the server, the model and the requests.

    Attributes:
        endpoint: address of the server, such as ``http://localhost:8000/v1``.
        model: name of the model on the server.
        request: other fields of every request, such as ``temperature``.
        timeout: seconds after which a request is cancelled and retried.
        retries: number of retries per request.
        per_minute: largest number of requests per minute, including retries; None: no limit.
        flag: the option that names the address.
    """

    endpoint: str
    model: str
    request: Mapping[str, Any]
    timeout: float = 60.0
    retries: int = 6
    per_minute: float | None = None
    flag: str = "--endpoint"

    def check(self) -> None:
        """Check the settings before any request.

        Raises:
            UserError: a setting is invalid.
        """
        check_server_address(self.endpoint, self.flag)
        reserved = {"model", "messages", "seed", "response_format", "stream", "n"}
        conflicts = reserved & set(self.request)
        if conflicts:
            raise UserError(
                f"--request has {sorted(conflicts)[0]!r}, which llmcond sets itself. Leave it out."
            )
        try:
            json.dumps(self.request, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"--request cannot be sent as JSON: {error}. Correct it.") from None
