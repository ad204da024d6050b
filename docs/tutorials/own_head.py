# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A head of your own
#
# A head maps the features of a frozen encoder to the embedding. This tutorial writes one as a plugin, fits and evaluates
# it, and compares it with the built-in `mlp`. It needs some knowledge of PyTorch.
#
# ## The data and its features
#
# The bundled sample has rated sentence pairs. This cell takes a part of it, to be quick, and encodes it with MiniLM.

# %% expect=["500 train, 100 dev, 300 test rows"]
from pathlib import Path

import llmcond

sample = Path(llmcond.__file__).parent / "data" / "sample"
Path("rows").mkdir()
for split, n_rows in {"train": 500, "dev": 100, "test": 300}.items():
    lines = (sample / f"{split}.csv").read_text(encoding="utf-8").splitlines()
    Path("rows", f"{split}.csv").write_text("\n".join(lines[: 1 + n_rows]), encoding="utf-8")

extracted = llmcond.extract(model="minilm", data="rows", run="runs/gated")

# %% [markdown]
# ## The head
#
# A head is a subclass of `HeadModule`, which is a `torch.nn.Module`. Its `forward` gets the features of a batch of
# sentences, of shape (m, dim_in), and returns their embeddings. llmcond does the rest: batches, the objective, stopping
# early, and saving the weights. In this head, a second linear map decides how much each output counts.

# %%
# %%writefile my_heads.py
import torch

from llmcond.heads import HeadModule
from llmcond.heads.settings import SizedSettings


class GatedHead(HeadModule):
    """A linear map whose outputs are gated by a second one."""

    Settings = SizedSettings

    def __init__(self, settings, dim_in, dim_condition=0):
        super().__init__(settings, dim_in, dim_condition)
        self.value = torch.nn.Linear(dim_in, settings.dim)
        self.gate = torch.nn.Linear(dim_in, settings.dim)

    def forward(self, x, condition=None, which=None):
        return self.dropout(self.value(x) * torch.sigmoid(self.gate(x)))


# %% [markdown]
# The recipe is a TOML file that names the class and its settings. `SizedSettings` defines `dim` and the settings that
# every head has, of which the recipe must give these: `dropout`, `learning_rate`, `batch_size`, `epochs` and `patience`.
# For a setting of your own, inherit it: a class with the decorator `@dataclass(frozen=True, kw_only=True)` and a field,
# such as `temperature: float = 1.0`. The recipe can then set `temperature`, and the head reads `settings.temperature`.

# %%
recipe = """
kind = "my_heads.py:GatedHead"
description = "A gated linear head."
source = "mine"
dim = 128
dropout = 0.1
learning_rate = 1e-3
batch_size = 64
epochs = 15
patience = 5
"""
_ = Path("gated.toml").write_text(recipe, encoding="utf-8")

# %% [markdown]
# ## Fit and evaluate
#
# Naming the recipe imports `my_heads.py`. The fitted head is saved in the run as `gated@routed`: its recipe, and the
# features that it reads.

# %% expect=["gated@routed: 384 -> 128 dimensions on 500 rows", "dev Spearman"]
fit = llmcond.fit_head(head="gated.toml", run="runs/gated")

# %% [markdown]
# The `mlp` gets the same dimension, batch size and number of epochs.

# %% expect=["mlp@routed: 384 -> 128 dimensions on 500 rows"]
fit = llmcond.fit_head(
    head="mlp", dim=128, set={"hidden": 256, "batch_size": 64, "epochs": 15}, run="runs/gated"
)

# %% expect=["none routed yes 4\\d", "gated routed yes [56]\\d", "mlp routed yes [56]\\d"]
llmcond.evaluate(run="runs/gated")

# %% [markdown]
# Both heads have higher scores than the features alone (`none`).
#
# ## Compare
#
# A new process must name the plugin with `--plugin`. Otherwise, a run from somebody else could execute code.

# %% expect=["No evidence of a difference from runs/gated:mlp@routed for runs/gated:gated", "holds for this seed only"]
# !llmcond compare runs/gated:mlp runs/gated:gated --plugin my_heads.py:GatedHead

# %% [markdown]
# The interval of the difference includes 0: on these rows, the new head is neither better nor worse than the `mlp`. The
# comparison also says what is missing. It needs several seeds before it holds for the recipes and not only for these two
# fits, and more rows to find a difference of a few points.
#
# ## What to do next
#
# - [Extending](../extending.md) shows objectives, metrics, poolings and tasks, and how a package offers them.
# - A head with `conditioned = True` also gets the features of the condition. It needs a prompt with separate features
#   ([heads](../heads.md)).
# - [C-STS](csts.md) fits several seeds, which a comparison needs before it says anything about a recipe.
