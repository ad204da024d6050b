# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # C-STS for researchers: from rated pairs to a table
#
# Conditional semantic textual similarity (C-STS) asks how similar two sentences are under a condition, on a scale from 1
# to 5. This tutorial fits heads on frozen features, evaluates them with intervals, and tests whether they differ. The
# last section says how to do this with the real data, and how to compute the tables of papers.
#
# ## The data
#
# The files of C-STS are not part of llmcond. The bundled sample has the same columns, and generated sentences. This cell
# takes a part of it, so that the tutorial runs in seconds.

# %% expect=["sentence1,sentence2,condition,label"]
from pathlib import Path

import llmcond

sample = Path(llmcond.__file__).parent / "data" / "sample"
Path("rows").mkdir()
for split, n_rows in {"train": 600, "dev": 100, "test": 300}.items():
    lines = (sample / f"{split}.csv").read_text(encoding="utf-8").splitlines()
    Path("rows", f"{split}.csv").write_text("\n".join(lines[: 1 + n_rows]), encoding="utf-8")
print(*lines[:3], sep="\n")

# %% [markdown]
# Two rows share a sentence pair and differ in the condition and the rating. The split is by sentence pair.
#
# ## Extract features once
#
# A frozen encoder computes one vector for each sentence under its condition. All later steps read these vectors.

# %% expect=["600 train, 100 dev, 300 test rows"]
extracted = llmcond.extract(model="minilm", data="rows", run="runs/csts")

# %% [markdown]
# ## Fit heads
#
# `linear` and `mlp` are the heads of CASE. With three seeds of each, a comparison includes the variance of the fits.
# The settings suit such a small dataset.

# %% expect=["linear-2.*dev Spearman [45]\\d", "mlp-2.*dev Spearman [67]\\d"]
for head in ["linear", "mlp"]:
    for seed in range(3):
        llmcond.fit_head(
            head=head,
            dim=128,
            seed=seed,
            name=f"{head}-{seed}",
            set={"batch_size": 128, "epochs": 12},
            run="runs/csts",
        )

# %% [markdown]
# Dev chooses the epoch of each fit, so that its score on dev is a little too high. "Held-out" is an estimate without this
# advantage.
#
# ## Evaluate on the test split

# %% expect=["none routed yes 4\\d\\.", "linear-0 routed yes [56]\\d\\.", "mlp-0 routed yes [67]\\d\\."]
llmcond.evaluate(run="runs/csts")

# %% [markdown]
# Figures are times 100, with 95 % intervals over sentence pairs. `none` is zero-shot, with and without subtracting the
# vector of the condition ("minus c"). Accuracy is that of CASE: of a pair's two conditions, which one has the higher
# rating? 50 is chance.
#
# With pandas (`pip install pandas`), the same results are a data frame with one row for each system, for your own tables
# and plots: `llmcond.evaluate(run="runs/csts").to_pandas()`.
#
# ## Are the systems different?
#
# The intervals above say how well each system would do on other sentence pairs. A comparison on the *same* pairs is more
# precise. `runs/csts:mlp` is all seeds of this recipe, as one system, and `runs/csts:none` is zero-shot.

# %% expect=["Better than runs/csts:none@routed: .*csts:mlp, 3 seeds by \\+\\d+", "csts:linear, 3 seeds by \\+\\d+"]
# !llmcond compare runs/csts:none runs/csts:linear runs/csts:mlp

# %% [markdown]
# Both heads are better than zero-shot, and the intervals of the differences exclude 0. They cover the choice of sentence
# pairs and the seeds, and p is corrected for the number of comparisons. To compare the two heads with each other, add
# `--baseline runs/csts:linear`.
#
# `--format latex` prints the table for a paper, with the differences and p-values that a narrow page leaves out.
# `--report page.html` writes a page with charts and examples.
#
# ## With the real data
#
# Put the files of C-STS into a folder as `train.csv`, `dev.csv` (or `validation.csv`) and, if you have ratings,
# `test.csv`. The columns are `sentence1`, `sentence2`, `condition` and `label`. A label of -1 is a row without a rating.
# Pass the folder instead of `rows`, or a dataset of the Hugging Face hub as `hf://datasets/OWNER/NAME`.
#
# The published test split of C-STS has no ratings, so that you score dev:
#
# ```bash
# llmcond evaluate --run runs/csts --split dev
# llmcond compare runs/csts:none runs/csts:linear runs/csts:mlp --split dev
# ```
#
# Dev has also chosen the epochs, so that the scores are optimistic. Report the "held-out" column of `evaluate`, which is
# not. `compare` tests the plain scores.
#
# The scripts of a clone compute the tables of CASE and Hyper-CL for any encoder, next to the figures of the paper:
#
# ```bash
# python scripts/reproduce_case.py --encoders minilm --data CSTS_FOLDER --dtype float32 --out case.md
# python scripts/reproduce_hypercl.py --encoders minilm --data CSTS_FOLDER --dtype float32 --out hypercl.md
# ```
#
# On two shared cores, MiniLM encodes C-STS in about three minutes for each of the prompts, and the fits come on top.
# `--tables 1` computes one table only, `--quick` makes a short trial, and an interrupted run resumes.
# [All reproduced tables](../reproduced/README.md) were computed in this way.
#
# ## What to do next
#
# - [Heads](../heads.md) lists recipes, objectives and `sweep`, which varies settings over several seeds.
# - [Comparing](../comparing.md) defines every column. [Results](../results.md) has the scores on re-annotated C-STS.
# - [Fine-tuning](../finetuning.md) trains the encoder, where a head is not enough.
