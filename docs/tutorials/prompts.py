# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Compare prompt templates
#
# A prompt template says how a sentence and a condition become the input of an encoder. Which template is best depends on
# the encoder and on the data, so that it is worth a measurement. This tutorial writes two templates and compares them with
# the default one of MiniLM, on rated sentence pairs.
#
# ## The data
#
# The bundled sample has generated sentence pairs with ratings from 1 to 5, each under a condition. Templates are compared
# without fitting anything, so that only the rows of the test split count. This cell takes 240 of them, to be quick. For
# your data, pass a file or a folder with such columns.

# %% expect=["sentence1,sentence2,condition,label"]
from pathlib import Path

import llmcond

sample = Path(llmcond.__file__).parent / "data" / "sample"
Path("rows").mkdir()
for split, n_rows in {"train": 10, "dev": 10, "test": 240}.items():
    lines = (sample / f"{split}.csv").read_text(encoding="utf-8").splitlines()
    Path("rows", f"{split}.csv").write_text("\n".join(lines[: 1 + n_rows]), encoding="utf-8")
print(*lines[:3], sep="\n")

# %% [markdown]
# ## Two templates
#
# A template is a TOML file. The first one puts the condition before the sentence. `[unconditional]` is the part that is
# encoded without a sentence, and whose vector is subtracted.

# %%
about = """
description = "The condition announced before the sentence."
source = "mine"

[conditional]
text = "About {condition}: {sentence}"

[unconditional]
text = "About {condition}:"
"""
_ = Path("about.toml").write_text(about, encoding="utf-8")

# %% [markdown]
# The second one changes the default template, `routed`, in which the encoder reads the sentence alone. The tokens of the
# sentence are then weighted by their similarity to the condition. In the new template, they are weighted by their
# similarity to a question.

# %%
question = """
description = "The tokens of the sentence, weighted by their similarity to a question."
source = "mine"

[conditional]
text = "{sentence}"
router = "What is {condition}?"
temperature = 0.7
standardize = true

[unconditional]
text = "What is {condition}?"
"""
_ = Path("question.toml").write_text(question, encoding="utf-8")

# %% [markdown]
# `prompts show` prints what the encoder reads for a row, token by token. Use it to find mistakes before encoding.

# %% expect=["\\[CLS\\] about .* : ", "tokens, \\d+ pooled"]
# !llmcond prompts show about.toml --data rows --model minilm --row 3

# %% [markdown]
# Every token is pooled, marked by `^`, also those of the condition, which are the same for both sentences of a pair.
#
# ## Compare
#
# `--heads none` compares the vectors as they are. The baseline is the template with which the others are compared.

# %% expect=["about by -\\d\\d\\.\\d \\[", "no evidence of a difference from routed for question", "none( .baseline.)? routed yes 4\\d"]
# !llmcond compare-prompts --model minilm --data rows --run runs/prompts --heads none \
#     --baseline routed --prompts routed about.toml question.toml

# %% [markdown]
# - **about** is far worse than `routed`, by about 40 points. Its Spearman correlation is near 0, for MiniLM was not trained
#   to follow a condition that is a part of its text.
# - **question** has a difference to `routed` that these rows cannot distinguish from none. That is no evidence that both
#   are equal: smaller differences than the summary states need more rows.
# - Each template has two rows in the table, with and without subtracting the vector of the condition alone ("minus c").
#
# All rows, splits and seeds are the same for every template, and the intervals are of paired differences. p-values are
# corrected for the number of comparisons. A template that only seems best by luck is therefore rarely called better.
#
# ## What to do next
#
# - Encoders that take instructions, such as NV-Embed-v2, have other templates: `llmcond prompts` lists them. Put the
#   condition into `instruction` for those.
# - If you fit a head, compare templates with it: `--heads mlp --seeds 3`. Vectors that are already in the run are not
#   encoded again.
# - `--report page.html` writes a page with charts, and with the rows on which two templates differ most.
# - [Comparing](../comparing.md) explains every column and how well the statistics work.
