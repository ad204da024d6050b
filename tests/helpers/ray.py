"""What actors of the tests hold."""

import os
import signal
import time
from pathlib import Path

from llmcond.errors import UserError


class Squares:
    """Squares numbers, and tells in which process; an item may ask for what goes wrong."""

    def __init__(self, folder: Path) -> None:
        if (folder / "broken").exists():
            raise UserError("there is no model here")
        self._folder = folder

    def work(self, item: int | str) -> tuple[int, int]:
        if item == "wrong":
            raise UserError("this one is wrong")
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
