# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Complete a knowledge graph
#
# A knowledge graph consists of triples such as (Tolman vest, suits, rain). Given the first two parts, which entity is
# the third? In llmcond, the first entity is the sentence, the relation is the condition, and every entity is a candidate.
#
# This tutorial uses the bundled graph of clothes, so that it needs no data. It takes a minute on a laptop.
#
# ## The files of a graph
#
# A graph is a folder with the triples of each split and two tables of texts: of entities, and of relations in both
# directions.

# %% expect=["train.tsv .* .* ", "relations.tsv has_colour has the colour is the colour of"]
from pathlib import Path

import llmcond

folder = Path(llmcond.__file__).parent / "data" / "sample_graph"
for name in ["train.tsv", "entities.tsv", "relations.tsv"]:
    print(name)
    print(*(folder / name).read_text(encoding="utf-8").splitlines()[:3], sep="\n", end="\n\n")

# %% [markdown]
# An entity has an id, a name and a description. For your graph, pass such a folder with `--data`
# ([formats](../kgc.md#data)).
#
# ## Encode the texts
#
# `extract` encodes each text of an entity or a relation once, and stores the vectors in a *run*, a folder. This example
# uses plain MiniLM. `--task kgc` is remembered by the run.

# %% expect=["1,668 train, 360 dev, 360 test triples of 270 entities and 9 relations", "288 of 288 inputs"]
# !llmcond extract --task kgc --model minilm --run runs/clothes

# %% [markdown]
# The messages also count what makes a score hard to compare: 30 test triples have their reversed edge in train, and 60 are
# about entities that train lacks.
#
# ## Fit a head
#
# A head is a small model on the stored vectors. `hypernet` maps the vector of an entity by a matrix that is computed from
# the vector of the relation. The settings make it small and quick. [Its reference](../kgc.md) lists them all.

# %% expect=["epoch 6 chosen on dev; dev MRR [56]\\d"]
fit = llmcond.fit_head(
    head="hypernet", dim=64, set={"rank": 16, "batch_size": 128, "epochs": 6}, run="runs/clothes"
)

# %% [markdown]
# The score of dev chooses the epoch. The last epoch was the best one, so that more epochs may help.
#
# ## Evaluate
#
# Every test triple is two queries: one for its last entity, and one for its first. The answers are ranked among all
# entities without those that are also right. The MRR is the mean of 1 / rank.

# %% expect=["none separate no [23]\\.\\d \\[", "rule:reverse no 9\\.\\d .* 8\\.3", "hypernet separate no 5\\d\\.\\d \\["]
llmcond.evaluate(run="runs/clothes")

# %% [markdown]
# - `none` compares the plain vectors: its MRR of 3 is hardly better than chance. A description names many properties, and
#   nothing says which one is meant.
# - `rule:reverse` answers (a, r, b) where train has (b, r, a), and does no more. Its 8.3 % of hits are the triples that
#   `extract` counted.
# - The head has 54 [46, 62]: it ranks the right entity first in 41 % of the queries.
#
# `llmcond evaluate --run runs/clothes` prints the same table. With `--reverse`, it combines the head with the reversed
# edges. Settings that help on one graph can harm on another: `neighbours=true`, which is recommended for
# [WN18RR](../kgc.md), halves the MRR of this graph to 29.
#
# ## Complete a triple

# %% expect=["1 0\\.\\d+ weddings weddings yes"]
# !llmcond complete --head-entity lomax_jacket --relation spoiled_by -k 4 \
#     --no-filtered --run runs/clothes

# %% [markdown]
# The first answer is right: the triple is one of the test set, which the head has not seen. "Known" says whether a triple is in the graph, in any split. Without `--no-filtered`, known answers are left out, so that
# only new ones are shown. The same in Python, in the other direction: which clothes are of silk?

# %% expect=["1 0\\.\\d+ Corwin cap \\(known\\)"]
completer = llmcond.load_completer("runs/clothes")
for hit in completer.top(tail="silk", relation="made_of", k=4, filtered=False):
    print(hit.rank, f"{hit.score:.2f}", hit.name, "(known)" if hit.known else "")

# %% [markdown]
# ## What to do next
#
# - [Knowledge graphs](../kgc.md) describes terms for scores, training of the encoder, and pages with results.
# - [Results](../kgc.md#results) has the scores on WN18RR and FB15k-237.
