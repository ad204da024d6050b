"""Where a run's features are, and those of other texts."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.errors import UserError
from llmcond.log import log

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore


def store_for_others(store: FeatureStore, *, is_bundled: bool) -> FeatureStore:
    """Return a store to add the features of other texts to.

    Where the run's own cannot be written, or is that of a bundled model, it is an empty one that
    does not last.
    """
    from llmcond.features.store import FeatureStore

    if is_bundled:
        why = "a bundled model keeps none. For those, make a run: llmcond extract"
    else:
        try:
            store.check_writable()
            return store
        except UserError as error:
            why = str(error)
    log.info(f"the features of these texts are not kept: {why}")
    folder = Path(tempfile.mkdtemp(prefix="llmcond-"))
    temporary = FeatureStore(folder, store.identity, store.dtype)
    weakref.finalize(temporary, shutil.rmtree, folder, ignore_errors=True)
    return temporary
