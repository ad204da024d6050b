"""The state of training on disk: one file that is replaced atomically, and the best weights.

Checkpoints of accelerate use pickles; these use safetensors: weights and moments are tensors, and
the rest is JSON in the header. Random states are not stored, as every random number is a function
of seed and step.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmcond.errors import LlmcondError, UserError
from llmcond.files import replace_atomically
from llmcond.records import RECORD, check_record

FORMAT = 1
STATE, BEST = "state.safetensors", "best.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of training.

    Attributes:
        step: number of finished steps, over all epochs.
        updates: number of those that changed the weights, at the last checkpoint.
        curve: one entry per evaluation: step, epoch, mean loss since the previous one, and score.
        best_step: step of the best evaluation; 0 before the first.
        best_score: dev score of the best evaluation; None if nothing was scored or it is undefined.
        loss: sum of the losses since the last evaluation, in the order of steps.
        losses: number of those losses.
        seconds: training time in seconds, over all runs of the command.
        scaler: state of the gradient scaler of float16.
        done: whether training has ended.
    """

    step: int = 0
    updates: int = 0
    curve: tuple[Mapping[str, Any], ...] = ()
    best_step: int = 0
    best_score: float | None = None
    loss: float = 0.0
    losses: int = 0
    seconds: float = 0.0
    scaler: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True)
class _StateHeader:
    """The header of a state file; that of the best weights has no progress."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    made_of: Mapping[str, Any]
    progress: TrainingProgress | None = None


class TrainingState:
    """The folder ``training`` of a run that is being trained; it is created on the first write.

    Reading raises a LlmcondError if a file is missing or damaged; writing raises a DiskFullError if
    the disk is full.
    """

    def __init__(self, folder: Path, training_config: Mapping[str, Any]) -> None:
        """Store the folder, and the settings that determine the result of training, as JSON."""
        self.folder, self._training_config = folder, json.loads(json.dumps(training_config))

    def load(self) -> tuple[TrainingProgress, dict[str, Tensor]] | None:
        """Return the progress and the tensors; None if training has not begun.

        Raises:
            UserError: training was begun with other settings; the message names each.
        """
        path = self.folder / STATE
        if not path.is_file():
            return None
        record, tensors = _read_state(path)
        changes = describe_differences(record["made_of"], self._training_config)
        if changes:
            raise UserError(
                f"{self.folder} holds a training that was begun with other settings: "
                f"{'; '.join(changes)}. Give the same settings to resume it, name another "
                "--run, or delete the folder to start again."
            )
        values = record["progress"]
        return TrainingProgress(**{**values, "curve": tuple(values["curve"])}), tensors

    def save(self, progress: TrainingProgress, tensors: Mapping[str, Tensor]) -> None:
        """Write the progress and the tensors; after a failure the file is unchanged."""
        self._write_state(STATE, {"progress": asdict(progress)}, tensors)

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights of the best evaluation."""
        self._write_state(BEST, {"step": step}, tensors)

    def load_best(self) -> dict[str, Tensor]:
        """Return the weights of the best evaluation."""
        return _read_state(self.folder / BEST)[1]

    def _write_state(
        self, name: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        values = {"format": FORMAT, "made_of": self._training_config, **record}
        write_tensors(self.folder / name, tensors, {"llmcond": json.dumps(values)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors as safetensors; after a failure the file is unchanged."""
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with replace_atomically(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            # The error of the operating system is only in the text of the message.
            match = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(match[1]) if match else errno.EIO, str(error)) from error
        # safetensors creates files that only their owner can read.
        temporary.chmod(mode)


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as opened:
            record = dict(json.loads(opened.metadata()["llmcond"]))
            # Copy, as the file is replaced while its tensors are still in use.
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LlmcondError(
            f"{path} is missing or damaged: {error}. Delete {path.parent} to start again."
        ) from error
    if record.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version of llmcond. Use that one.")
    check_record(record, _StateHeader, str(path), f"Delete {path.parent} to start again.")
    return record, tensors


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return ``name: now, not before`` for each difference, including nested values."""
    texts = []
    for key in dict.fromkeys([*before, *now]):
        # A tuple becomes a list when it is recorded as JSON.
        old_value, new_value = (
            list(value) if isinstance(value, tuple) else value
            for value in (before.get(key), now.get(key))
        )
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            texts += [f"{key}.{text}" for text in describe_differences(old_value, new_value)]
        elif old_value != new_value:
            texts.append(f"{key}: {new_value!r}, not {old_value!r}")
    return texts
