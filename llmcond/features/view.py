"""What a head sees of sentences under conditions: the features of one prompt, or of several.

Several are seen side by side. Joint features are e(s|c), with the prompt's unconditional ones
subtracted or not (CASE, equation 1); separate ones are e(s) and e(c) (Hyper-CL, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from llmcond.arrays import Concatenated, Difference, Matrix
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.prompts import Prompt
from llmcond.prompts import template as templates

if TYPE_CHECKING:
    from llmcond.heads import Recipe

T = TypeVar("T")
Part = Literal["conditional", "unconditional"]
#: (prompt, part) -> (n, dim) features of n rows.
Read = Callable[[Prompt, Part], Matrix]


@dataclass(frozen=True, slots=True)
class View:
    """Which features of which prompts are taken.

    Attributes:
        subtract: whether joint features have the unconditional ones subtracted.
        features: of a sentence: ``joint``, ``separate`` or ``both``, side by side; or ``alone``:
            e(s), where there are no conditions.
        conditioned: whether the condition's own features e(c) are taken as well.
    """

    prompts: tuple[Prompt, ...]
    subtract: bool = True
    features: str = "joint"
    conditioned: bool = False

    def __post_init__(self) -> None:
        """Raise a UserError for what would leave the condition out, or cannot be had."""
        if self.features == "alone":
            self._check_alone()
            return
        apart = [prompt for prompt in self.prompts if prompt.separate]
        if self.features in ("separate", "both") and len(apart) != 1:
            got = f"{len(apart)} such" if apart else "joint features only"
            raise UserError(
                f"the head takes e(s) and e(c) each by itself, and the prompt {self.name} gives "
                f"{got}. Extract the prompt that does (llmcond extract --prompt separate), and fit "
                f"the head on it: llmcond fit-head --prompt {self._named(apart)}"
            )
        if self.features == "separate" and len(self.prompts) > 1:
            raise UserError(
                f"the head takes separate features only, and --prompt {self.name} names joint ones "
                f"as well. Give --prompt {apart[0].name}, or --set features=both."
            )
        if len(apart) == len(self.prompts):
            self._check_apart()
        self.of_condition()

    def _check_alone(self) -> None:
        if self.subtract:
            raise UserError(
                "the head takes sentences by themselves, e(s), which have no condition, so that "
                "there is nothing to subtract. Leave out --subtract."
            )
        for prompt in self.prompts:
            if prompt.alone is None:
                raise UserError(
                    f"the head takes sentences by themselves, e(s), and the prompt {prompt.name} "
                    "encodes none without its condition. Name another --prompt, such as separate."
                )

    def _named(self, apart: list[Prompt]) -> str:
        """Return what to name: one prompt with separate features, and those with joint ones."""
        names = [apart[0].name if apart else "separate"]
        if self.features == "both":
            names += [prompt.name for prompt in self.prompts if not prompt.separate]
        return "+".join(names)

    def _check_apart(self) -> None:
        """Refuse separate features alone for what needs others, or leaves the condition out."""
        start = f"the prompt {self.name} gives e(s) and e(c) each by itself, so "
        if not self.conditioned and not (self.subtract and self.features == "joint"):
            raise UserError(
                f"{start}without subtraction the condition would be ignored. Subtract, choose a "
                "prompt that joins both, or a head that takes both."
            )
        if self.conditioned and self.features != "separate":
            alone = "" if self.features == "both" else "--prompt PROMPT or "
            raise UserError(
                f"{start}the head has no joint features to work on. Fit it on a prompt that joins "
                f"both: llmcond fit-head {alone}--prompt PROMPT+{self.name}"
            )

    @property
    def name(self) -> str:
        """Return the names of the prompts, joined by +."""
        return "+".join(prompt.name for prompt in self.prompts)

    @property
    def subtracts(self) -> bool:
        """Return whether anything is subtracted; nothing is from separate features."""
        return any(subtracted for _, subtracted in self.terms())

    def sentence(
        self,
        read: Callable[[Prompt, Part], T],
        subtract: Callable[[T, T], T] = Difference,  # type: ignore[assignment]
        concatenate: Callable[[list[T]], T] = Concatenated,  # type: ignore[assignment]
        conditioned: bool = True,
    ) -> T:
        """Return the features of sentences, (n, dim), from those that ``read`` gives of prompts.

        ``subtract`` and ``concatenate`` (columns side by side) are of matrices, or of tensors. Of
        sentences without a condition nothing is subtracted.
        """
        parts = []
        for prompt, subtracts in self.terms():
            found = read(prompt, "conditional")
            if subtracts and conditioned:
                found = subtract(found, read(prompt, "unconditional"))
            parts.append(found)
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def condition(self, read: Read) -> Matrix | None:
        """Return the features of the conditions, (n, dim_c), if the head takes them."""
        prompt = self.of_condition()
        return None if prompt is None else read(prompt, "unconditional")

    def terms(self) -> list[tuple[Prompt, bool]]:
        """Return the prompts of a sentence's features, and whether each has e(c) subtracted."""
        found = []
        for prompt in self.prompts:
            apart = self.features in ("separate", "alone") or (
                self.features == "both" and prompt.separate
            )
            found.append((prompt, self.subtract and not apart and prompt.subtractable))
        return found

    def of_condition(self) -> Prompt | None:
        """Return the prompt whose unconditional features are those of the condition, if wanted.

        Of several, the one with separate features: others may set e(c) into an instruction.
        """
        if not self.conditioned:
            return None
        for prompt in sorted(self.prompts, key=lambda prompt: not prompt.separate):
            if prompt.of_condition:
                return prompt
        raise UserError(
            f"the head takes e(c), and the prompt {self.name} encodes no condition by itself "
            "([unconditional] names {sentence}). Choose another prompt."
        )

    def needed(self) -> list[tuple[Prompt, Part]]:
        """Return every part of every prompt that is needed, each once."""
        found: list[tuple[Prompt, Part]] = []
        for prompt, subtracts in self.terms():
            found.append((prompt, "conditional"))
            if subtracts or prompt is self.of_condition():
                found.append((prompt, "unconditional"))
        return found

    def check_sides(self, conditioned: Sequence[bool]) -> None:
        """Raise a UserError unless both texts have a condition, for heads that take e(c)."""
        if self.conditioned and not all(conditioned):
            raise UserError(
                "the head takes the condition's own features for both texts, and in this task only "
                "one of them has a condition. Choose a head of joint features, such as linear."
            )

    def check_texts(self) -> None:
        """Raise a UserError for controls, which tell nothing of a condition of one's own."""
        does = {
            "left-out": "it leaves the condition out",
            "shuffled": "it puts another row's condition in the place of a row's own",
        }
        for prompt in self.prompts:
            if prompt.control is not None:
                raise UserError(
                    f"the prompt {prompt.name} is a control, for comparing only: "
                    f"{does[prompt.control]}. Name a --prompt that is none, or a --head that was "
                    "fitted on one."
                )

    def inputs(self, rows: Sequence[tuple[str, str]]) -> ViewInputs:
        """Return every input that is needed for (sentence, condition) rows, row by row.

        Raises:
            UserError: a prompt is a control, whose inputs are those of a whole split.
        """
        self.check_texts()
        return ViewInputs(rows, [getattr(prompt, part) for prompt, part in self.needed()])


class ViewInputs:
    """Every input of some rows under parts of templates, repeats included; made when asked for."""

    def __init__(self, rows: Sequence[tuple[str, str]], parts: Sequence[templates.Part]) -> None:
        self._rows, self._parts = rows, parts

    def __iter__(self) -> Iterator[EncoderInput]:
        for row in self._rows:
            for part in self._parts:
                yield part.render(*row)

    def __len__(self) -> int:
        return len(self._rows) * len(self._parts)


def view_of(recipe: Recipe, prompts: Sequence[Prompt], subtract: bool) -> View:
    """Return what a recipe's head sees; a UserError if the prompts do not give it."""
    return View(tuple(prompts), subtract, recipe.features, recipe.family.conditioned)
