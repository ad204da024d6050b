"""What the commands do, as functions: keyword arguments are named as the flags are.

Each takes what its command takes and returns a typed result; ``help(llmcond.extract)`` lists both.
"""

from __future__ import annotations

from llmcond.commands.analyse import Analyse
from llmcond.commands.base import verb
from llmcond.commands.compare_prompts import ComparePrompts
from llmcond.commands.embed import Embed
from llmcond.commands.evaluate import Evaluate
from llmcond.commands.extract import Extract
from llmcond.commands.fit_head import FitHead
from llmcond.commands.push import Push
from llmcond.commands.sweep import Sweep
from llmcond.commands.train_lora import TrainLora

extract = verb(Extract)
fit_head = verb(FitHead)
evaluate = verb(Evaluate)
compare_prompts = verb(ComparePrompts)
sweep = verb(Sweep)
train_lora = verb(TrainLora)
analyse = verb(Analyse)
embed = verb(Embed)
push = verb(Push)
