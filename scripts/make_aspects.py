"""Generate texts that carry several attributes at once, and the conditions that ask for them.

    python scripts/make_aspects.py --out FOLDER [--texts 1500] [--seed 0] [--only DOMAIN ...]
    python scripts/make_aspects.py --out FOLDER --left-out

Each file ``scripts/aspects/DOMAIN.toml`` with templates becomes ``FOLDER/DOMAIN.json``. A template
is a text with pieces in braces:

* ``{name}`` is a random piece of the list ``name`` in ``[words]``, or a random wording of the
  text's value of the attribute ``name`` in ``[values]``. The value is sampled once per text, and
  its wording at each occurrence.
* ``{name.part}`` is a random wording of one list of a value that is a table of lists.
* ``{name?}`` is left out half of the time.
* ``{2-3 of a, b, c}`` is two or three of the names, as sentences in random order.

Pieces may contain pieces. ``include`` names files whose values, words and conditions can also be
used. ``manners`` is the share of texts that are rewritten in a manner, such as casual or terse, and
``weight`` says how often training samples the domain, relative to others. Values are sampled
independently and uniformly, so that any two attributes of a domain are crossed.

Files with a table ``[aspects]`` are reviews; see ``aspect_opinions.py``.

The texts depend on the seed and the files only.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from aspect_opinions import SENTIMENTS, generate_opinions, opinion_wordings
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
TRIES: Final = 50  # attempts to generate a text that does not exist yet

Ways = list[str] | dict[str, list[str]]


# -- manners -------------------------------------------------------------------------------------


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of words and their replacements in ``old = new; old = new; ...``."""
    return tuple((old, new) for old, new in re.findall(r"([^=;]+) = ([^;]+)(?:; |$)", text))


CONTRACTIONS: Final = (
    *_pairs(
        "cannot = can't; will not = won't; it is = it's; that is = that's; there is = there's; "
        "I am = I'm; I have = I've; I would = I'd; I will = I'll; we are = we're; "
        "we have = we've; they are = they're; you are = you're; let us = let's"
    ),
    *((f"{verb} not", f"{verb}n't") for verb in ("do", "does", "did", "is", "are", "was", "were")),
    *((f"{verb} not", f"{verb}n't") for verb in ("has", "have", "had", "would", "could", "should")),
)
SLANG: Final = _pairs(
    "because = cos; want to = wanna; going to = gonna; please = pls; thank you = thx; "
    "thanks = thx; you = u; your = ur; really = rly; very = super; about = abt; with = w/; "
    "tomorrow = tmrw; probably = prob; people = ppl"
)
FORMAL: Final = _pairs(
    "thanks = thank you; a lot of = a great deal of; lots of = a considerable number of; "
    "really = truly; pretty = rather; buy = purchase; bought = purchased; also = furthermore; "
    "kids = children"
)
TAGS: Final = ("tbh", "lol", "ngl", "btw", "imo", "fyi", "just saying", "haha", "anyway")
HESITATIONS: Final = (
    "um,",
    "well,",
    "I mean,",
    "let's see,",
    "er,",
    "how do I put this,",
    "so, like,",
)
OPENINGS: Final = (
    "I am writing with regard to the following.",
    "Please permit me to state my case.",
    "It should be noted that this is written in good faith.",
    "Further to our previous correspondence, allow me to add these lines.",
    "With reference to the above, I wish to put on record what occurred.",
    "",
    "",
    "",
)
EXCITED: Final = ("OMG", "Wow", "Guys", "You won't believe this", "Aaah", "Whoa", "Okay so")


def _replace(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Replace whole words, and preserve a capital at their beginning."""
    replacements = {old.lower(): new for old, new in pairs}
    pattern = "|".join(sorted(replacements, key=len, reverse=True))

    def replace(match: re.Match[str]) -> str:
        new = replacements[match[0].lower()]
        return new[0].upper() + new[1:] if match[0][0].isupper() else new

    return re.sub(rf"\b(?:{pattern})\b", replace, text, flags=re.IGNORECASE)


def _casual(text: str, rng: Random) -> str:
    text = _replace(_replace(text, CONTRACTIONS), SLANG).lower().rstrip(".")
    tag = rng.choice(TAGS)
    text = text if rng.random() < 0.5 else rng.choice((f"{tag} {text}", f"{text} {tag}"))
    return re.sub(r"(?<!\.)\. ", rng.choice((". ", "... ", " - ", ", ")), text)


def _formal(text: str, rng: Random) -> str:
    expanded = _replace(text, tuple((short, long) for long, short in CONTRACTIONS))
    expanded = _replace(expanded, FORMAL).replace("!", ".")
    return f"{rng.choice(OPENINGS)} {expanded}".strip()


def _shouting(text: str, rng: Random) -> str:
    return re.sub(r"[.!]+(?= |$)", lambda _: "!" * rng.randint(1, 3), text.upper())


def _terse(text: str, rng: Random) -> str:
    text = re.sub(
        r"\b(?:the|a|an|my|our|your|very|really|just|i am|i'm|it is|it's|there is|i have|i've)\b ",
        "",
        text,
        flags=re.IGNORECASE,
    )
    text = re.sub(r"(^|[.!?] )(?:I|We|It|They|He|She) ", r"\1", text).replace("!", ".")
    text = re.sub(r"(^|[.!?] )([a-z])", lambda match: match[1] + match[2].upper(), text)
    return re.sub(",? and ", rng.choice((", ", " + ", " & ")), text)


def _excited(text: str, rng: Random) -> str:
    text = re.sub(r"(?<!\.)\.(?= |$)", lambda _: rng.choice(("!", "!!", "!!!")), text)
    text = re.sub(r"\bso\b", "sooo", text)
    return rng.choice(
        (f"{rng.choice(EXCITED)}! {text}", f"{text} {rng.choice((':D', '!!1', 'xx', '<3'))}")
    )


def _hesitant(text: str, rng: Random) -> str:
    sentences = re.split(r"(?<=[.!?]) ", text)
    for index, sentence in enumerate(sentences):
        if index == 0 or rng.random() < 0.5:
            opening = rng.choice(HESITATIONS)
            first = sentence if re.match(r"I\b", sentence) else sentence[:1].lower() + sentence[1:]
            sentences[index] = f"{opening[0].upper()}{opening[1:]} {first}"
    return re.sub(
        r"(?<!\.)\.$", rng.choice((".", "...", ", sort of.", ", I suppose.")), " ".join(sentences)
    )


# Each manner takes a text and a random generator, and returns the rewritten text.
MANNERS: Final[Mapping[str, Callable[[str, Random], str]]] = {
    "plain": lambda text, _: text,
    "casual": _casual,
    "formal": _formal,
    "shouting": _shouting,
    "terse": _terse,
    "excited": _excited,
    "hesitant": _hesitant,
}


#: The sentiment of texts that express an emotion, if they have no sentence on it.
SENTIMENT_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(("joy", "gratitude", "pride"), "positive"),
    **dict.fromkeys(("anger", "sadness", "fear", "disappointment", "boredom"), "negative"),
}


# -- domains -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Domain:
    """The templates of a domain, and all lists that their pieces refer to."""

    name: str
    templates: list[str]
    values: dict[str, dict[str, Ways]]
    words: dict[str, list[str]]
    conditions: dict[str, dict[str, Any]]
    manners: float


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
            pieces = [self.piece(name) for name in self.rng.sample(names, number)]
            return " ".join(re.sub(r"[^.!?…]\Z", r"\g<0>.", piece) for piece in pieces)
        if reference.endswith("?"):
            return self.piece(reference[:-1]) if self.rng.random() < 0.5 else ""
        name, _, part = reference.partition(".")
        if name in self.domain.values:
            values = self.domain.values[name]
            value = self.attrs.setdefault(name, self.rng.choice(list(values)))
            ways = values[value]
            return self.expand(self.wording(ways[part] if isinstance(ways, dict) else ways))
        return self.expand(self.wording(self.domain.words[name]))

    def wording(self, ways: Sequence[str]) -> str:
        """Choose a random wording, preferably one that the text does not have yet."""
        wording = self.rng.choice([way for way in ways if way not in self.used] or ways)
        self.used.add(wording)
        return wording


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
def read_toml(name: str) -> dict[str, Any]:
    """Read a domain file."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def read_domain(name: str) -> Domain:
    """Read a domain file and the files that it includes."""
    main = read_toml(name)
    tables: dict[str, dict[str, Any]] = {"values": {}, "words": {}, "conditions": {}}
    for content in [*map(read_toml, main.get("include", [])), main]:
        for table, entries in tables.items():
            entries.update(content.get(table, {}))
    return Domain(name, main.get("templates", []), **tables, manners=main.get("manners", 0.0))


def generate(domain: Domain, number: int, seed: int) -> dict[str, dict[str, str]]:
    """Return the attributes of distinct texts; fewer than ``number`` if the domain has no more."""
    rng = Random(f"{seed}:{domain.name}")
    texts: dict[str, dict[str, str]] = {}
    for _ in range(number):
        for _ in range(TRIES):
            draft = Draft(domain, rng)
            text = tidy(draft.expand(rng.choice(domain.templates)))
            manner = rng.choice(list(MANNERS)) if rng.random() < domain.manners else "plain"
            text = MANNERS[manner](text, rng)
            if domain.manners:
                draft.attrs["manner"] = manner
            if text not in texts:
                texts[text] = draft.attrs
                break
    return texts


def domain_json(name: str, number: int, seed: int) -> dict[str, Any]:
    """Generate the content of a domain's JSON file."""
    if "aspects" in read_toml(name):
        content, rng = read_toml(name), Random(f"{seed}:{name}")
        texts = generate_opinions(content, number, rng)
        sentiment = to_wordings(read_toml("common")["conditions"]["sentiment"])
        conditions = opinion_wordings(content, rng) | {"sentiment": sentiment}
    else:
        domain = read_domain(name)
        texts = list(generate(domain, number, seed).items())
        if any("sentiment" in attrs for _, attrs in texts):
            for _, attrs in texts:
                if mood := SENTIMENT_OF.get(attrs.get("emotion", "")):
                    attrs.setdefault("sentiment", mood)
        attributes = dict.fromkeys(key for _, attrs in texts for key in sorted(attrs))
        conditions = {key: to_wordings(domain.conditions[key]) for key in attributes}
    for key, wordings in conditions.items():
        values = {attrs[key] for _, attrs in texts if key in attrs}
        if values and values <= SENTIMENTS:
            wordings["kind"] = "opinion"
    return {
        "name": name,
        "complete": True,
        "weight": read_toml(name).get("weight", 1),
        "texts": [
            {"text": text, "attrs": {f"{name}.{key}": value for key, value in attrs.items()}}
            for text, attrs in texts
        ],
        "conds": {f"{name}.{key}": wordings for key, wordings in conditions.items()},
    }


def to_wordings(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the wordings of a condition in the format of the JSON file."""
    para = [*condition["other"], condition["short"], condition["description"]]
    return {"text": condition["text"], "question": condition["question"], "para": para}


def domain_names() -> list[str]:
    """Return the names of the files of domains; the others are only included."""
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return [name for name in names if {"templates", "aspects"} & set(read_toml(name))]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the texts of each domain."""
    parser = Options(__doc__)
    add = parser.option
    out = "folder of the JSON files, one for each domain"
    add("--out", Path, out, required=True, metavar="FOLDER")
    add("--texts", 1500, "texts for each domain")
    add("--seed", 0, "random seed of the texts")
    add("--left-out", False, "write the domains that training leaves out, instead of the others")
    add("--only", [], "domains", "all", choices=domain_names(), metavar="DOMAIN")
    args = parser.parse_args(argv)
    names = [n for n in domain_names() if read_toml(n).get("left_out", False) == args.left_out]
    if others := set(args.only) - set(names):
        parser.error(f"--only {others.pop()} needs {'no ' if args.left_out else ''}--left-out")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or names:
        content = domain_json(name, args.texts, args.seed)
        path = args.out / f"{name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {len(content['texts'])} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
