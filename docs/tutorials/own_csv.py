# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own CSV: from similarity to a server
#
# This tutorial starts with a table of texts. It compares two of them, checks conditions, builds a search index and serves
# it over HTTP. It uses the bundled model, and therefore no training data.
#
# The table has 24 restaurant reviews. Only the column `text` is needed; the others serve as ids and filters. The
# same commands read .tsv, .json, .jsonl, .parquet and .xlsx files.

# %% expect=["24 reviews"]
import csv
from pathlib import Path

REVIEWS = """\
id,text,city,year
r01,"The pad thai was perfect, and the waiter made us laugh.",Lisbon,2023
r02,"Great green curry, but we waited an hour for it.",Lisbon,2024
r03,"A tiny place by the harbour with fresh grilled sardines.",Lisbon,2022
r04,"The tacos were soggy and the bill was wrong.",Lisbon,2024
r05,"Handmade ravioli like my grandmother's, at a fair price.",Rome,2023
r06,"The pizza was burnt and nobody apologised.",Rome,2024
r07,"Sushi of the highest quality, served by a charming couple.",Rome,2022
r08,"We loved the ramen, although the room was loud.",Rome,2024
r09,"Cold lasagne, rude staff. Never again.",Rome,2023
r10,"A cosy room above the market, and the best burritos in town.",Berlin,2024
r11,"The currywurst stand at the station is quick and cheap.",Berlin,2023
r12,"Overpriced sashimi in a hotel lobby.",Berlin,2022
r13,"The owner explained every Thai dish to our children.",Berlin,2024
r14,"Our spaghetti arrived twice, and we paid once. Lovely people.",Berlin,2023
r15,"Tortilla soup to die for, on a terrace with a view of the river.",Vienna,2024
r16,"Schnitzel larger than the plate, and a grumpy waiter.",Vienna,2022
r17,"The tom yum soup was far too salty.",Vienna,2023
r18,"A silent garden, perfect miso soup, and a polite hostess.",Vienna,2024
r19,"The risotto was undercooked, and we were charged for water.",Vienna,2023
r20,"Cheap noodles from a window in the old town, eaten on the stairs.",Lisbon,2023
r21,"Enchiladas for twelve euros? Small, greasy and cold.",Rome,2022
r22,"The gnocchi melted on the tongue. Book the table at the window.",Lisbon,2022
r23,"Tempura was crisp and light. The toilets were filthy.",Berlin,2023
r24,"Roast pork with dumplings in a cellar, with live music.",Vienna,2024
"""
Path("reviews.csv").write_text(REVIEWS, encoding="utf-8")
texts = [row["text"] for row in csv.DictReader(REVIEWS.splitlines())]
print(len(texts), "reviews")

# %% [markdown]
# ## Compare texts under a condition

# %% expect=["the cuisine 0\\.6", "the service 0\\.8", "the sentiment 0\\.8"]
# !llmcond similarity "The pizza was burnt and nobody apologised." \
#     "Sushi of the highest quality, served by a charming couple." \
#     --condition "the cuisine" --condition "the service" --condition "the sentiment"

# %% [markdown]
# One guest is angry and the other is happy. But under "the sentiment", the similarity is the highest of the three. Each
# condition has its own scale, so that a single number says little. Compare similarities under *one* condition, as
# this cell does for the review about the pizza and all others:

# %% expect=["(spaghetti.*risotto|risotto.*spaghetti).*(miso.*ravioli|ravioli.*miso).*gnocchi"]
import llmcond

embedder = llmcond.load_embedder()
similarity = embedder.similarity([texts[5]] * len(texts), texts, "the cuisine")
for i in similarity.argsort()[::-1][1:6]:
    print(f"{similarity[i]:.2f}  {texts[i]}")

# %% [markdown]
# Four of the nearest five are Italian dishes too, although none of them mentions a pizza or Italy. The miso soup is an
# error.
#
# ## Check conditions
#
# `check-condition` compares the nearest texts under each condition, and lists pairs that a condition brings together.

# %% expect=["the cuisine – 15 42", "the service 15 – 19", "answer pairs"]
# !llmcond check-condition reviews.csv --condition "the cuisine" --condition "the service"

# %% [markdown]
# The two conditions have 15 % of the nearest texts in common, so they are not alike. Whether they work is another
# question, which your answers decide: `--ask` shows 20 pairs of texts, and measures how well the embeddings agree with
# you ([how](../aspects.md#check-a-condition-on-your-texts)). Or look at results, which is the next step.
#
# ## Build an index and search it
#
# `--id` and `--keep` name columns. Conditions that are known in advance are encoded when the index is built.

# %% expect=["24 added"]
# !llmcond index reviews.csv --out reviews.index --id id --keep city year \
#     --condition "the cuisine" --condition "the service"

# %% expect=["The pizza was burnt.*risotto.*spaghetti"]
# !llmcond search reviews.index "We had pizza." --condition "the cuisine" -k 3

# %% [markdown]
# All three are Italian, although only the first mentions a pizza. `--where "city = 'Rome'"` would only search the
# reviews of a city.
#
# Now two opposite queries in Python, under the other condition and a new one. An index that is open answers in
# milliseconds, and a condition is encoded when it is first used.

# %% expect=["unfriendly. .*grumpy waiter.* friendly. .*grumpy waiter.* opinion .*unfriendly. .*grumpy.* friendly. .*polite"]
index = llmcond.Index.open("reviews.index")
for condition in ["the service", "the opinion about the service"]:
    print(condition)
    for query in ["The waiter was unfriendly.", "The waiter was friendly."]:
        print(" ", query)
        for hit in index.search(query, condition, k=3).rows:
            print(f"    {hit['score']:.2f}  {hit['text']}")

# %% [markdown]
# Under "the service", both queries find the same reviews, because both are about the staff. Under "the opinion about the
# service", one finds unhappy guests and the other happy ones, whatever they say about the food. The burnt pizza is an
# error. The check could not decide which wording you need, but the results do. [Group support tickets](tickets.md) shows
# what to try where no wording works.
#
# ## Write the vectors to a file
#
# Write the embeddings for your own program: one for each text, under one condition. `--keep` also writes other columns.

# %% expect=["24 embeddings of 384 dimensions"]
# !llmcond embed reviews.csv --out vectors.parquet --condition "the cuisine" --keep id

# %% expect=["\\(24, 384\\) .*id.*sentence.*condition.*embedding"]
import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("vectors.parquet")
vectors = np.array(table["embedding"].to_pylist())
print(vectors.shape, table.column_names)

# %% [markdown]
# The vectors have unit length, so that inner products are cosines. With pandas, which `'.[demo]'` does not install, read
# the file with `pandas.read_parquet`. `--out vectors.csv` and `--out vectors.npy` work as well.
#
# ## Serve the index
#
# `llmcond serve` needs `pip install 'llmcond[serve]'`. In a terminal, run `llmcond serve --index reviews.index`. A
# notebook starts it as a background process; `--port 0` chooses a free port, which the server prints.

# %% expect=["http://127.0.0.1:\\d+"]
import re
import subprocess

server = subprocess.Popen(
    ["llmcond", "serve", "--index", "reviews.index", "--port", "0"],
    stderr=subprocess.PIPE,
    text=True,
)
for line in server.stderr:
    print(line, end="")
    if match := re.search(r"http://[\w.:]+", line):
        break
url = match[0]

# %% [markdown]
# A request is JSON. This one only searches the reviews from Berlin. The answer has the hits with their columns. `/v1/embeddings` and `/v1/similarity` work in the same
# way ([server](../server.md)).

# %% expect=["1 r23 .* 2 r12"]
import json
import urllib.request

question = {
    "query": "We had sushi.",
    "condition": "the cuisine",
    "k": 3,
    "where": "city = 'Berlin'",
}
request = urllib.request.Request(
    f"{url}/v1/search",
    data=json.dumps(question).encode(),
    headers={"Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)
for hit in answer["results"]:
    print(hit["rank"], hit["id"], hit["city"], hit["text"])

# %% [markdown]
# Stop the server with Ctrl-C in a terminal, and with a signal in a program. It answers the requests that it has accepted
# before it stops.

# %% expect=["stopped after \\d+ s and 1 request$"]
server.terminate()
print(server.communicate()[1])

# %% [markdown]
# ## What to do next
#
# - [Search](../search.md) describes filters, adding and deleting texts, and the files of an index.
# - [Server](../server.md) describes API keys, limits and metrics. The server does not encrypt.
# - If you have pairs of texts with ratings, fit a head on them: [C-STS](csts.md) shows every step.
