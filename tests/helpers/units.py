"""What embeds units in the actors of tests."""

import os
import signal
from pathlib import Path

from llmcond.workflows.embed_stream import UnitEmbedder


class DiesOnce(UnitEmbedder):
    """Dies with its third unit written, the first time, before anybody hears of it."""

    def work(self, unit):
        done = super().work(unit)
        died = Path(self._work.out).parent / "died"
        if unit.number == 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done
