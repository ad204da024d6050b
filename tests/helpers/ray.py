"""The object that the tests run in Ray actors."""

import os
import signal
import time
from pathlib import Path

from llmcond.base.errors import UserError


class SquareWorker:
    """Squares numbers and returns the process id; some items trigger a fault."""

    def __init__(self, folder: Path) -> None:
        if (folder / "broken").exists():
            raise UserError("the model cannot be loaded")
        self._folder = folder

    def work(self, item: int | str) -> tuple[int, int]:
        if item == "wrong":
            raise UserError("the item is invalid")
        if item == "deadly" or (item == "deadly once" and self._first_time()):
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "slow":
            time.sleep(0.2)
        return (item**2 if isinstance(item, int) else 0), os.getpid()

    def _first_time(self) -> bool:
        try:
            (self._folder / "died").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
