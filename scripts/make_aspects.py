"""Generate texts that carry several attributes at once, and the conditions that ask for them.

    python scripts/make_aspects.py --out FOLDER [--texts 1500] [--seed 0] [--only DOMAIN ...]
    python scripts/make_aspects.py --check [--show 20] [--only DOMAIN ...]

Each file ``scripts/aspects/DOMAIN.toml`` with templates becomes ``FOLDER/DOMAIN.json``. A template
is a text with pieces in braces:

* ``{name}`` is a random piece of the list ``name`` in ``[words]``, or a random wording of the
  text's value of the attribute ``name`` in ``[values]``. The value is sampled once per text, and
  its wording at each occurrence.
* ``{name.part}`` is a random wording of one list of a value that is a table of lists.
* ``{name?}`` is left out half of the time.
* ``{2-3 of a, b, c}`` is two or three of the names, as sentences in random order.

Pieces may contain pieces. ``include`` names files whose values, words and conditions can also be
used. ``manners`` is the share of texts that are rewritten in a manner (see ``manners.py``).
Values are sampled independently and uniformly, so that any two attributes of a domain are crossed.

The texts depend on the seed and the files only. ``--check`` also reports, for each domain, what
would make the texts too easy or too monotonous.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import manners
from common import Options

FOLDER: Final = Path(__file__).resolve().parent / "aspects"
PIECE: Final = re.compile(r"\{([^{}]*)\}")
VOWEL: Final = r"(?i:[aeio](?!ne\b|nce\b|uro)|u(?!ni(?!m|n)|s[aeu])|hour|honest)"
LOWERED: Final = (  # words that only begin a sentence with a capital
    "A|An|The|This|That|These|It|It's|My|Our|Your|We|They|You|He|She|There|Here|Please|If|As|On|In|At"
    "|For|From|To|By|When|What|Who|Where|Why|How|Can|Could|Would|Is|Are|Was|Do|Not|No|Nobody|Nothing"
    "|Some|Somebody|Someone|Any|All|Every|Everything|Each|One|Two|Three|After|Before|So|Just|Only"
)
SAMPLE: Final = re.compile(r"(\d+)-(\d+) of (.+)")
FEWEST: Final = 12  # fewer texts than this show nothing about the words of a value
TRIES: Final = 50  # attempts to generate a text that does not exist yet

Ways = list[str] | dict[str, list[str]]


class DomainError(Exception):
    """An invalid domain file; the message names the file and the position in it."""


@dataclass(frozen=True)
class Domain:
    """The templates of a domain, and all lists that their pieces refer to."""

    name: str
    templates: list[str]
    values: dict[str, dict[str, Ways]]
    words: dict[str, list[str]]
    conditions: dict[str, dict[str, Any]]
    manners: float


@dataclass(frozen=True)
class Text:
    """A generated text, the number of its template, and its attributes."""

    text: str
    template: int
    attrs: dict[str, str]


@dataclass
class Draft:
    """The values and the pieces chosen so far for one text."""

    domain: Domain
    rng: Random
    attrs: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def expand(self, text: str) -> str:
        """Replace every piece in braces."""
        return PIECE.sub(lambda match: self.piece(match[1]), text)

    def piece(self, reference: str) -> str:
        """Return the text of a piece, which is empty for an optional piece that is left out."""
        if sample := SAMPLE.fullmatch(reference):
            names = sample[3].split(", ")
            number = self.rng.randint(int(sample[1]), int(sample[2]))
            return " ".join(as_sentence(self.piece(n)) for n in self.rng.sample(names, number))
        if reference.endswith("?"):
            return self.piece(reference[:-1]) if self.rng.random() < 0.5 else ""
        name, _, part = reference.partition(".")
        if name in self.domain.values:
            values = self.domain.values[name]
            value = self.attrs.setdefault(name, self.rng.choice(list(values)))
            return self.expand(self.wording(ways_of(values[value], part)))
        return self.expand(self.wording(self.domain.words[name]))

    def wording(self, ways: Sequence[str]) -> str:
        """Choose a random wording, preferably one that the text does not have yet."""
        wording = self.rng.choice([way for way in ways if way not in self.used] or ways)
        self.used.add(wording)
        return wording


def ways_of(ways: Ways, part: str) -> list[str]:
    """Return the wordings of a value, or of one part of it."""
    return ways[part] if isinstance(ways, dict) else ways


def as_sentence(text: str) -> str:
    """Add a full stop where the text has no punctuation at its end."""
    return text if not text or text[-1] in ".!?…" else f"{text}."


def tidy(text: str) -> str:
    """Repair spaces, punctuation, capitals and articles of an expanded template."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" (?=[,.;:!?](?![\w()]))", "", text)
    text = re.sub(r"(?<![.])([.!?…])[,.](?!\.)", r"\1", text)
    text = re.sub(r",+(?=[,.;:!?])", "", text).strip(" ,;")
    text = re.sub(rf"\b([Aa]) (?={VOWEL})", r"\1n ", text)
    text = re.sub(rf"(?<=[a-z], )(?:{LOWERED})\b(?!')", lambda match: match[0].lower(), text)
    return re.sub(
        r"(^\W*|(?<!\.\w)(?<!\.)[.!?…][\"')]* )([a-z])",
        lambda match: match[1] + match[2].upper(),
        text,
    )


@cache
def read_toml(name: str, folder: Path) -> dict[str, Any]:
    """Read a domain file."""
    path = folder / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DomainError(f"{path}: this domain file does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DomainError(f"{path}: {error}") from None


def read_domain(name: str, folder: Path = FOLDER) -> Domain:
    """Read a domain file and the files that it includes, and check all references.

    Raises:
        DomainError: A file is invalid, or a reference or the wording of a condition is missing.
    """
    main = read_toml(name, folder)
    tables: dict[str, dict[str, Any]] = {"values": {}, "words": {}, "conditions": {}}
    for content in [*(read_toml(other, folder) for other in main.get("include", [])), main]:
        for table, entries in tables.items():
            entries.update(content.get(table, {}))
    domain = Domain(name, main.get("templates", []), **tables, manners=main.get("manners", 0.0))
    path = folder / f"{name}.toml"
    for position, text in pieces(domain):
        for reference in PIECE.findall(text):
            check_reference(domain, reference, f"{path}, {position}")
    attributes = [*domain.values, *(["manner"] if domain.manners else [])]
    for attribute in attributes:
        missing = {"text", "question", "short", "description", "other"} - set(
            domain.conditions.get(attribute, {})
        )
        if missing:
            lacks = ", ".join(sorted(missing))
            raise DomainError(f"{path}: [conditions.{attribute}] lacks {lacks}")
    return domain


def pieces(domain: Domain) -> Iterator[tuple[str, str]]:
    """Yield the position in the file and the text of every template and wording."""
    for number, template in enumerate(domain.templates, 1):
        yield f"template {number}", template
    for name, words in domain.words.items():
        yield from ((f"words.{name}", word) for word in words)
    for name, values in domain.values.items():
        for value, ways in values.items():
            for part, wordings in ways.items() if isinstance(ways, dict) else [("", ways)]:
                position = ".".join(filter(None, ("values", name, value, part)))
                yield from ((position, wording) for wording in wordings)


def check_reference(domain: Domain, reference: str, position: str) -> None:
    """Raise a DomainError for a reference to a name that does not exist."""
    sample = SAMPLE.fullmatch(reference)
    names = sample[3].split(", ") if sample else [reference.removesuffix("?")]
    if sample and not int(sample[1]) <= int(sample[2]) <= len(names):
        raise DomainError(f"{position}: {{{reference}}} needs more names than it lists")
    for full in names:
        name, _, part = full.partition(".")
        lists: list[Any] = [domain.words.get(name)]
        if name in domain.values:
            lists = [
                w.get(part) if isinstance(w, dict) else w for w in domain.values[name].values()
            ]
        if not all(isinstance(ways, list) and ways for ways in lists) or (
            part and name in domain.words
        ):
            raise DomainError(
                f"{position}: {{{full}}} is neither a list in [words] nor an attribute in [values] "
                "(a value that is a table needs {name.part})"
            )


def generate(domain: Domain, number: int, seed: int) -> list[Text]:
    """Generate distinct texts of a domain; fewer than ``number`` if it has no more."""
    rng = Random(f"{seed}:{domain.name}")
    texts: dict[str, Text] = {}
    for _ in range(number):
        for _ in range(TRIES):
            template = rng.randrange(len(domain.templates))
            draft = Draft(domain, rng)
            text = tidy(draft.expand(domain.templates[template]))
            if rng.random() < domain.manners:
                draft.attrs["manner"] = manner = rng.choice(list(manners.MANNERS))
                text = manners.MANNERS[manner](text, rng)
            if text not in texts:
                texts[text] = Text(text, template, draft.attrs)
                break
    return list(texts.values())


def to_json(domain: Domain, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the content of a domain's JSON file."""
    attributes = dict.fromkeys(attribute for text in texts for attribute in sorted(text.attrs))
    return {
        "name": domain.name,
        "texts": [
            {
                "text": text.text,
                "attrs": {f"{domain.name}.{name}": value for name, value in text.attrs.items()},
                "group": "",
            }
            for text in texts
        ],
        "conds": {
            f"{domain.name}.{name}": to_wordings(domain.conditions[name]) for name in attributes
        },
    }


def to_wordings(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the wordings of a condition in the format of the JSON file."""
    para = [*condition["other"], condition["short"], condition["description"]]
    return {"text": condition["text"], "question": condition["question"], "para": para}


# --- The report of --check ----------------------------------------------------------------------


def summary(numbers: Sequence[int]) -> str:
    """Return the smallest number, the median and the largest number."""
    return f"{min(numbers)}, {statistics.median(numbers):g}, {max(numbers)}"


def report(domain: Domain, texts: Sequence[Text], number: int) -> Iterator[str]:
    """Yield lines that describe the texts of a domain and what is wrong with them."""
    used = {attribute for text in texts for attribute in text.attrs}
    size = f"{len(domain.templates)} templates, {len(used)} conditions"
    yield f"{domain.name}: {len(texts)} texts, {size}"
    yield f"  words a text (min, median, max): {summary([len(t.text.split()) for t in texts])}"
    yield f"  attributes a text (min, median, max): {summary([len(t.attrs) for t in texts])}"
    if len(texts) < number:
        yield f"  only {len(texts)} of {number} texts are different"
    if len(domain.templates) < 15:
        yield f"  only {len(domain.templates)} templates"
    fewest: dict[int, int] = defaultdict(lambda: sys.maxsize)
    for text in texts:
        fewest[text.template] = min(fewest[text.template], len(text.attrs))
    for template, attributes in sorted(fewest.items()):
        if attributes < 3:
            carries = f"template {template + 1} carries only {attributes}"
            yield f"  {carries}: {domain.templates[template]}"
    for attribute in sorted(used & domain.values.keys()):
        yield from few_ways(attribute, domain.values[attribute])
    yield from revealing_words(texts, used)


def few_ways(attribute: str, values: Mapping[str, Ways]) -> Iterator[str]:
    """Yield a line for an attribute with too few or too many values, and for few wordings."""
    if not 2 <= len(values) <= 10:
        yield f"  {attribute}: {len(values)} values"
    for value, ways in values.items():
        shortest = min(map(len, ways.values())) if isinstance(ways, dict) else len(ways)
        if shortest < 6:
            yield f"  {attribute} = {value}: {shortest} ways"


def revealing_words(texts: Sequence[Text], attributes: set[str]) -> Iterator[str]:
    """Yield a line for each word that most texts of a value have and few texts of the others."""
    tokens = [set(re.findall(r"\w+", text.text.lower())) for text in texts]
    for attribute in sorted(attributes):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for text, words in zip(texts, tokens, strict=True):
            if attribute in text.attrs:
                counts[text.attrs[attribute]].update({*words, ""})  # "" counts the texts
        everywhere = sum(counts.values(), Counter[str]())
        for value, frequency in counts.items():
            if frequency[""] < FEWEST:
                continue
            others = max(everywhere[""] - frequency[""], 1)
            for word, texts_with in frequency.items():
                rest = (everywhere[word] - texts_with) / others
                if word and texts_with > 0.6 * frequency[""] and rest < 0.05:
                    share = texts_with / frequency[""]
                    where = f"{word!r} is in {share:.0%} of its texts, {rest:.0%} of others"
                    yield f"  {attribute} = {value}: {where}"


def domain_names(folder: Path = FOLDER) -> list[str]:
    """Return the names of the files that have templates; the others are only included."""
    names = sorted(path.stem for path in folder.glob("*.toml"))
    return [name for name in names if "templates" in read_toml(name, folder)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the texts of each domain, or report on them."""
    parser = Options(__doc__)
    add = parser.option
    add("--out", Path, "folder of the JSON files, one for each domain")
    add("--texts", 1500, "texts for each domain")
    add("--seed", 0, "random seed of the texts")
    add("--only", [], "domains", "all", metavar="DOMAIN")
    add("--check", False, "report on the texts of each domain")
    add("--show", 0, "number of texts to print per domain")
    args = parser.parse_args(argv)
    if not (args.out or args.check or args.show):
        parser.error("give --out FOLDER to write the texts, or --check or --show to look at them")
    try:
        domains = [read_domain(name) for name in args.only or domain_names()]
    except DomainError as error:
        parser.error(str(error))
    for domain in domains:
        texts = generate(domain, args.texts, args.seed)
        lines = [f"{t.text}\n    {t.attrs}" for t in texts[: args.show]]
        print("\n".join([*lines, *(report(domain, texts, args.texts) if args.check else [])]))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"{domain.name}.json"
            path.write_text(json.dumps(to_json(domain, texts), indent=1) + "\n", encoding="utf-8")
            print(f"{path}: {len(texts)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
