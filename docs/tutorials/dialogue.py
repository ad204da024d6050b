# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is said next in a dialogue?
#
# The same last sentence can follow different beginnings. llmcond compares a candidate for the next turn with *pairs* of
# earlier turns, each in its role: first, second, and answer (the method of Triple-Encoders).
#
# This tutorial uses the bundled dialogues, which a program has generated so that single turns are not enough.
#
# ## The data
#
# A file of dialogues has one JSON object per line.

# %% expect=["south side, raft", "1,024 train"]
import json
from pathlib import Path

import llmcond

folder = Path(llmcond.__file__).parent / "data" / "sample_dialogues"
lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
dialogues = [json.loads(line)["utterances"] for line in lines]
print(*dialogues[0], sep="\n")

run = llmcond.extract(task="dialogue", model="minilm", run="runs/rides")

# %% [markdown]
# A passenger says where and when a ride begins, and then where and when it ends. The driver asks for the course. The
# answer depends on the difference between the first two turns: neither alone says anything about it.
#
# `extract` has encoded each distinct utterance once. For your dialogues, pass a file or a folder with `--data`
# ([formats](../dialogue.md#data)).
#
# ## Fit and evaluate
#
# The head `weighted` learns a small map for each role. The sample is small, so that it needs more epochs than its recipe
# has.

# %% expect=["dev average rank [12]\\.\\d"]
fit = llmcond.fit_head(head="weighted", set={"epochs": 20, "batch_size": 128}, run="runs/rides")

# %% expect=["none separate .* 3\\d\\.\\d \\[", "weighted .* 1\\.0 \\[1\\.0, 1\\.\\d\\] .* 9?\\d?100?\\.0"]
# !llmcond evaluate --history 3 --run runs/rides

# %% [markdown]
# After three turns, the right answer is ranked among those of all 64 test dialogues. By chance, the average rank is 32.5.
#
# - **Without a head**, the four ways to compare turns are at chance, for all of them look at single turns.
# - **The head** has an average rank of 1.0: it always puts the right answer first. It has learnt how the first two turns
#   combine.
#
# This is an ideal case. On DailyDialog, which people have written, the same head improves the average rank from 53 to 36
# ([results](../dialogue.md#results)).
#
# ## Rank replies
#
# `reply` ranks the lines of a file as the next turn. This file has the last turns of all test dialogues.

# %%
replies = "".join(f"{turns[-1]}\n" for turns in dialogues)
n_characters = Path("replies.txt").write_text(replies, encoding="utf-8")

# %% expect=["1 0\\.\\d+ Drum, white flag, to the abbey"]
# !llmcond reply "Spring dawn, south side, raft." "Winter night, west side, raft." \
#     "Which course for the raft?" --candidates replies.txt -k 3 --run runs/rides

# %% [markdown]
# The right answer is first, as in the first dialogue above.
#
# In Python, a dialogue is a value to which turns are added. Only a new turn is encoded. This cell swaps the first two
# turns, so that the ride goes the other way:

# %% expect=["1 0\\.\\d+ .*(flag|Drum|horn|bell|Lamp)"]
model = llmcond.load_dialogue("runs/rides")
candidates = model.candidates(replies.splitlines())
dialogue = model.start(["Winter night, west side, raft.", "Spring dawn, south side, raft."])
dialogue = dialogue.add("Which course for the raft?")
for reply in model.top(dialogue, candidates, 3):
    print(reply.rank, f"{reply.score:.2f}", reply.text)

# %% [markdown]
# The answer is another one, although the sentences are equal: their order counts.
#
# ## What to do next
#
# - [Dialogues](../dialogue.md) describes planning towards a goal, and training of the encoder.
# - [The reference](../dialogue.md) defines the scores `last`, `average`, `bi` and `maxsim`.
