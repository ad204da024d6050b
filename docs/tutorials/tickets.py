# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Group support tickets by aspect
#
# The same tickets can be grouped by product, by mood or by problem. This tutorial groups 64 tickets of a shop under
# several conditions. One of them fails, and the tutorial repairs it step by step, measuring each step.
#
# ## The tickets
#
# Each ticket is about one of four products and one of four problems. The other columns have the right answers, so that
# this tutorial can measure what it does. Your tickets need only the column `text`.

# %%
import csv
from pathlib import Path

TICKETS = """\
text,product,problem,mood,urgency
"The kettle was due last week, and I need it for a party tonight. Please call me.",kettle,delivery,neutral,urgent
"Where on earth is my kettle? Five promises, five lies. I want it this afternoon!",kettle,delivery,angry,urgent
"My kettle seems to be held up in the post. No problem, I am away until May anyway.",kettle,delivery,friendly,not urgent
"Tracking for the kettle has not moved since Monday. Could you look into it some time?",kettle,delivery,neutral,not urgent
"Steam burns my hand each time I use your kettle. Tell me right now what I should do!",kettle,defect,angry,urgent
"The kettle died this morning and our café opens at six tomorrow. Can you help, please?",kettle,defect,neutral,urgent
"The lid of the kettle sticks a little. It is a lovely kettle, so just reply when you can.",kettle,defect,friendly,not urgent
"The kettle leaks at the spout. I have another one, so take your time.",kettle,defect,neutral,not urgent
"You took the money for the kettle twice, and my rent is due today. Pay it back now!",kettle,billing,angry,urgent
"I need a corrected invoice for the kettle before our books close at noon.",kettle,billing,neutral,urgent
"The bill for my kettle lists the old price. Thank you for sorting it out whenever you like.",kettle,billing,friendly,not urgent
"A voucher was not deducted from the price of the kettle. It can wait until next month.",kettle,billing,neutral,not urgent
"I move out tomorrow and must hand the kettle to the courier before that. Which label?",kettle,return,neutral,urgent
"Third request, and nobody answers: how do I send this awful kettle back? My time runs out today!",kettle,return,angry,urgent
"I got a kettle as a gift and have one already. I would like to exchange it, there is no rush.",kettle,return,friendly,not urgent
"What is the address for returning a kettle? I will do it some day this spring.",kettle,return,neutral,not urgent
"We leave for the mountains on Friday, and the tent is not here. Please send it by express.",tent,delivery,neutral,urgent
"Your courier left the tent in the rain and drove off. Disgraceful. Call me within the hour!",tent,delivery,angry,urgent
"My tent is late, but we only camp in August. Your hotline was very kind, thank you.",tent,delivery,friendly,not urgent
"The parcel with the tent went to a depot. I shall pick it up when I pass by.",tent,delivery,neutral,not urgent
"A pole of the tent snapped and we are standing in a storm. What can we do?",tent,defect,neutral,urgent
"Your rubbish tent let the water in and my children are soaked. I demand a new one today!",tent,defect,angry,urgent
"One peg of the tent is bent. It is a minor thing, and I am very happy with the tent.",tent,defect,friendly,not urgent
"The zip of the tent jams at times. The season is over, so this is not pressing.",tent,defect,neutral,not urgent
"The bank blocks my card at midnight because of the double charge for the tent. Please act.",tent,billing,neutral,urgent
"You cheats billed three tents instead of one. Refund me immediately!",tent,billing,angry,urgent
"I would be glad to get a receipt for the tent at some point. Many thanks for the great advice.",tent,billing,friendly,not urgent
"The shipping fee for the tent looks too high. Could someone check it when there is time?",tent,billing,neutral,not urgent
"The return period for the tent ends tonight. Please send me the form at once.",tent,return,neutral,urgent
"I refuse to keep this miserable tent for one more day. Have it collected this morning!",tent,return,angry,urgent
"The tent is a bit too small for us. May I swap it next season? Kind regards to the team.",tent,return,friendly,not urgent
"Do you take back a tent that was opened? I am only asking for later.",tent,return,neutral,not urgent
"The printer must be in our office by nine tomorrow for an exam. Where is it?",printer,delivery,neutral,urgent
"Two weeks and still no printer, what a joke of a company! I need it within the hour.",printer,delivery,angry,urgent
"The printer may come next month, that suits me perfectly. You have been so helpful.",printer,delivery,friendly,not urgent
"I would like a later delivery date for my printer. Any week in June is fine.",printer,delivery,neutral,not urgent
"The printer smokes and smells of burnt plastic. Please tell me quickly whether it is dangerous.",printer,defect,neutral,urgent
"This useless printer eats my contract, which I must sign by noon. Fix it now!",printer,defect,angry,urgent
"The printer is wonderful. Only the display has a scratch, and I do not mind waiting.",printer,defect,friendly,not urgent
"The printer pulls in two sheets from time to time. I can live with it for a while.",printer,defect,neutral,not urgent
"Our account is frozen until the invoice of the printer is corrected. We need it in an hour.",printer,billing,neutral,urgent
"How dare you send a reminder for a printer that I paid? Stop it today or I call a lawyer!",printer,billing,angry,urgent
"The discount on the printer is missing. Your shop is great, so I am sure it gets sorted in time.",printer,billing,friendly,not urgent
"Could the invoice of the printer show our tax number? We need it at the end of the year.",printer,billing,neutral,not urgent
"The van for the printer is at the door, and I have no return label. Please mail it now.",printer,return,neutral,urgent
"I am sick of this printer. Your collection never came, and I leave the country tonight!",printer,return,angry,urgent
"I would like to give the printer back at some point. Thanks for the friendly support.",printer,return,friendly,not urgent
"How does the return of a printer work? I have not decided yet.",printer,return,neutral,not urgent
"My flight leaves at six and the headphones are still in your van. Can I collect them?",headphones,delivery,neutral,urgent
"Lost again! These headphones were a birthday present for today. I am furious.",headphones,delivery,angry,urgent
"The headphones arrive later than planned. I am in no hurry, and I love your packaging.",headphones,delivery,friendly,not urgent
"Please hold back the headphones until I am home from holiday in three weeks.",headphones,delivery,neutral,not urgent
"The headphones get hot on my ears. I have a concert in an hour, may I use them?",headphones,defect,neutral,urgent
"Your stupid headphones fail in the middle of every call. I want new ones by tomorrow!",headphones,defect,angry,urgent
"The left side of the headphones crackles a bit. Otherwise they are superb, no need to rush.",headphones,defect,friendly,not urgent
"The cable of the headphones is loose. Answer me whenever it suits you.",headphones,defect,neutral,not urgent
"The payment for the headphones fails, and the offer ends in ten minutes. What now?",headphones,billing,neutral,urgent
"You robbed me of ninety euros for headphones! Give me my money back this minute.",headphones,billing,angry,urgent
"I paid the headphones with two cards, which was silly of me. Please have a look one day, thanks!",headphones,billing,friendly,not urgent
"The receipt of the headphones has the wrong street. It is not important.",headphones,billing,neutral,not urgent
"The parcel shop closes in half an hour. Which code do I need to return the headphones?",headphones,return,neutral,urgent
"Nobody takes these horrible headphones back, and tomorrow is the last day. Answer me!",headphones,return,angry,urgent
"The headphones are a little heavy for me. I may send them back later, you were lovely to deal with.",headphones,return,friendly,not urgent
"Within how many weeks can I return headphones? I would just like to know.",headphones,return,neutral,not urgent
"""
Path("tickets.csv").write_text(TICKETS, encoding="utf-8")
tickets = list(csv.DictReader(TICKETS.splitlines()))
print(len(tickets), "tickets, among them:", tickets[1]["text"])

# %% [markdown]
# ## See what goes wrong
#
# Group the tickets under two conditions. `--labels` names the column with the right answers for each condition. It only
# adds the last table.

# %% expect=["problem: \\d clusters", "kettle, spout, leaks", "sentiment mood 64 [345]\\d\\.", "problem problem 64 [0-3]?\\d\\."]
# !llmcond cluster tickets.csv --out groups.csv \
#     --condition "the sentiment" --labels mood \
#     --condition "the problem" --labels problem

# %% [markdown]
# The V-measure says how well clusters agree with the right answers: 100 is perfect, and 0 is chance. The sentiment
# works in part. The clusters under the problem have little to do with the problem. Their names say why: most are
# kettles, tents, headphones and printers.
#
# Without right answers, names and typical texts show this, so always read some of them. A second sign needs no labels
# either: how far the condition changes which texts are near.

# %% expect=["'the problem' changes little in these texts: 5\\d% of the nearest"]
# !llmcond check-condition tickets.csv --condition "the product" --condition "the problem"

# %% [markdown]
# Under the problem, mostly the same tickets are near as without any condition. The model still compares products.
#
# ## Try other wordings, and ignore the product
#
# Two remedies need no labels. Write several wordings of the condition, separated by `|`: their embeddings are averaged.
# And name what the clusters follow instead: `--ignore "the product"` removes what tickets differ in under the product.
#
# Choose by measurement. `check-condition --ask` shows 20 pairs of your tickets, asks whether they are the same in this
# respect, and takes two minutes. In a notebook, `--labels` answers from the column instead.

# %% expect=["the problem 6\\d ", "what is wrong 6\\d ", "all wordings 6\\d ", "ignoring the product 7\\d "]
# !llmcond check-condition tickets.csv --labels problem \
#     --condition "the problem | the complaint | what is wrong" --ignore "the product"

# %% [markdown]
# An AUC of 50 is chance. The wordings have 62 to 64 and their mean has 66, which is not much better than no condition at
# all (58). Ignoring the product has the highest AUC, 76.
#
# Now group the tickets in that way.

# %% expect=["problem 64 (4[5-9]|5\\d)\\.", "invoice, paid"]
# !llmcond cluster tickets.csv --clusters 4 --labels problem \
#     --condition "the problem | the complaint | what is wrong" --ignore "the product"

# %% [markdown]
# The V-measure is 50, while the same four clusters without `--ignore` have 31. One cluster is about payments now, and one
# about returns and deliveries. Of the others, one has most of the defects, and one is mostly headphones.
#
# ## Ignore a column
#
# If your table has a column with what to ignore, `--ignore-column` removes it more exactly.

# %% expect=["problem 64 [45]\\d\\.", "invoice, paid"]
# !llmcond cluster tickets.csv --clusters 4 --labels problem \
#     --condition "the problem | the complaint | what is wrong" --ignore-column product

# %% [markdown]
# No cluster is about a product now. The V-measure is 46, which does not differ from 50 if you compare the intervals. With
# example values (`--condition "the type of problem" --values "delivery, defect, billing, return"`), it is 54. Values
# can also harm a condition, so measure ([clusters](../clusters.md#example-values)).
#
# ## The last resort: label about 40 tickets
#
# A *guide* is a table of labelled texts, and embeddings then follow the labels. Label a random sample of your texts.
# This cell copies 40 labels from the table instead.

# %%
import random

condition = "the problem | the complaint | what is wrong"
sample = random.Random(1).sample(tickets, 40)
with Path("labelled.csv").open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["text", "condition", "label"])
    writer.writerows([ticket["text"], condition, ticket["problem"]] for ticket in sample)

# %% expect=["problem 24 [5-7]\\d\\.", "billing 8", "delivery 1\\d", "defect 1\\d"]
# !llmcond cluster tickets.csv --guide labelled.csv --out guided.csv --labels problem \
#     --condition "the problem | the complaint | what is wrong" --ignore-column product

# %% [markdown]
# Each cluster has the labels of one problem now. The score is of the 24 tickets that are not in the guide, so that its
# interval is wide. It depends on the sample: with the seeds 0 and 2 instead of 1 in the cell above, the V-measure is 52
# and 57 instead of 61.
#
# ## What to conclude
#
# 1. Read the names and typical texts of clusters. They show which aspect the model followed.
# 2. Try several wordings, then `--ignore` what the clusters follow, or `--ignore-column` if a column has it.
# 3. Choose by `check-condition --ask` or `--labels`, not by the silhouette.
# 4. Try values. Label about 40 texts if this is not enough, and measure on the others.
#
# [Ignoring a condition](../ignoring.md) explains how that works. [Clusters](../clusters.md) describes all options, among
# them a map of the texts as a page (`--report map.html`). [Guides](../guides.md) explains how labels change the
# embeddings.
