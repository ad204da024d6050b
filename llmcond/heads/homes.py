"""Where kinds of heads live: names of modules, which are imported when they are first used.

Modules that all kinds of heads share do not import those that map queries or utterances of
dialogues: they find them by these names.
"""

from __future__ import annotations

#: The kind of a head -> its class. A new one is a new file and a line here.
FAMILIES = {
    "none": "llmcond.heads.identity:Identity",
    "linear": "llmcond.heads.linear:Linear",
    "mlp": "llmcond.heads.mlp:Mlp",
    "pca": "llmcond.heads.projections:Pca",
    "ica": "llmcond.heads.projections:Ica",
    "whitening": "llmcond.heads.projections:Whitening",
    "random": "llmcond.heads.projections:Random",
    "hadamard": "llmcond.heads.hadamard:Hadamard",
    "concat": "llmcond.heads.concat:Concat",
    "hypernet": "llmcond.heads.hypernet:Hypernet",
    "hypernet-ablation": "llmcond.heads.ablation:HypernetAblation",
    "towers": "llmcond.heads.towers:Towers",
    "regression": "llmcond.heads.regression:Regression",
    "roles": "llmcond.kinds.dialogue.roles:Roles",
    "no-roles": "llmcond.kinds.dialogue.roles:NoRoles",
}

#: What a kind begins with that is made of another kind -> the function that makes its class of
#: that one's class. The other kind's name follows.
PREFIXES = {"query-": "llmcond.kinds.ranking.heads:query_family"}
