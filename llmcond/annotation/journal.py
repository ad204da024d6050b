"""A journal of answers, one per line, so that no answered question is repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from filelock import FileLock, Timeout

from llmcond.annotation.server import Answer
from llmcond.errors import LlmcondError, UserError
from llmcond.records import RECORD, check_record


@dataclass(frozen=True, slots=True)
class JournalLine(Answer):
    """The required keys of each line."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    key: str


class Journal:
    """The file of answers, as a context manager that locks it; the file is created when needed.

    Raises:
        UserError: another process writes the file, or it cannot be written.
        LlmcondError: a line of the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        self._answers: dict[str, Answer] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another process writes {self.path}. Wait until it has finished, or name another "
                "--out."
            ) from error
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _read(self) -> None:
        if not self.path.is_file():
            return
        text = self.path.read_bytes()
        complete = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:complete].split(b"\n")[:-1], 1):
            source = f"{self.path} line {number}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise LlmcondError(f"{source} was damaged. Remove the line.") from error
            if not isinstance(values, dict):
                raise LlmcondError(
                    f"{source} was damaged: it is not a JSON object. Remove the line."
                )
            check_record(values, JournalLine, source, "Remove the line.")
            tokens = values["tokens_in"], values["tokens_out"]
            self._answers[values["key"]] = Answer(values["text"], *tokens, values["seconds"])
        if complete < len(text):  # A process was killed while it wrote the last line.
            os.truncate(self.path, complete)

    def get(self, key: str) -> Answer | None:
        """Return the answer of a key; None if the question has not been answered yet."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Store an answer, with information about its question for readers of the file."""
        line = json.dumps({"key": key, **about, **asdict(answer)}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(f"{line}\n")
        self._answers[key] = answer
