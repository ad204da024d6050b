"""Where training stands, on disk: one file that is written whole, and the best weights.

What a checkpoint of accelerate has in pickles, is here in safetensors: weights and moments as
tensors, all else as JSON in the header. Random states are not among it, as every draw is a function
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
from llmcond.files import replacing
from llmcond.records import RECORD, check_record

FORMAT = 1
STATE, BEST = "state.safetensors", "best.safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training is.

    Attributes:
        step: steps done, of all epochs.
        updates: of them, those that changed the weights, at the last checkpoint.
        curve: an entry for each evaluation: step, epoch, mean loss since the one before, score.
        best_step: of the best evaluation; 0 before there is one.
        best_score: its score on dev; None where nothing was scored, or it is undefined.
        loss: sum of the losses since the last evaluation, in the order of steps.
        losses: how many.
        seconds: spent training, over all runs.
        scaler: of float16.
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
class _Header:
    """What the header of such a file holds; of the best weights no progress."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    made_of: Mapping[str, Any]
    progress: Progress | None = None


class StateFolder:
    """The folder ``training`` of a run that is being trained, made when it is written to.

    What is read raises a LlmcondError where it is missing or damaged; what is written a
    DiskFullError where there is no room.
    """

    def __init__(self, folder: Path, made_of: Mapping[str, Any]) -> None:
        """Take the folder, and by name, as JSON, all that decides what training gives."""
        self.folder, self._made_of = folder, json.loads(json.dumps(made_of))

    def load(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Return where training stands, and its tensors; None where it has not begun.

        Raises:
            UserError: it was begun with other settings; each is named.
        """
        path = self.folder / STATE
        if not path.is_file():
            return None
        record, tensors = _read(path)
        found = differences(record["made_of"], self._made_of)
        if found:
            raise UserError(
                f"{self.folder} holds a training that was begun with other settings: "
                f"{'; '.join(found)}. Give the same to go on, name another --run, or delete it "
                "to begin anew."
            )
        values = record["progress"]
        return Progress(**{**values, "curve": tuple(values["curve"])}), tensors

    def save(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Write where training stands; after a failure the file is as it was."""
        self._write(STATE, {"progress": asdict(progress)}, tensors)

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights of the best evaluation."""
        self._write(BEST, {"step": step}, tensors)

    def best(self) -> dict[str, Tensor]:
        """Return the weights of the best evaluation."""
        return _read(self.folder / BEST)[1]

    def _write(self, name: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        values = {"format": FORMAT, "made_of": self._made_of, **record}
        write_tensors(self.folder / name, tensors, {"llmcond": json.dumps(values)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors as safetensors; after a failure the file is as it was."""
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with replacing(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            # It has the operating system's error in its words only.
            found = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(found[1]) if found else errno.EIO, str(error)) from error
        # safetensors makes files that their owner alone can read.
        temporary.chmod(mode)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as opened:
            record = dict(json.loads(opened.metadata()["llmcond"]))
            # Copies: the file is replaced while what was read from it is in use.
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LlmcondError(
            f"{path} is missing or damaged: {error}. Delete {path.parent} to begin anew."
        ) from error
    if record.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version of llmcond. Use that one.")
    check_record(record, _Header, str(path), f"Delete {path.parent} to begin anew.")
    return record, tensors


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return ``name: now, not before`` for what differs, nested values each by themselves."""
    found = []
    for key in dict.fromkeys([*before, *now]):
        was, is_ = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_, dict):
            found += [f"{key}.{text}" for text in differences(was, is_)]
        elif was != is_:
            found.append(f"{key}: {is_!r}, not {was!r}")
    return found
