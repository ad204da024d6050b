"""Import OpenVINO, without the telemetry that it sends when it is imported."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

_TELEMETRY = "openvino_telemetry"


def is_installed() -> bool:
    """Return whether OpenVINO is installed; it is not imported."""
    return "openvino" in sys.modules or find_spec("openvino") is not None


@cache
def import_openvino() -> Any:
    """Return the module ``openvino``.

    Importing it reports that import to Google Analytics wherever the package openvino_telemetry is
    found, which it depends on. So that package is hidden meanwhile, and OpenVINO takes the stub
    that it has for its absence.
    """
    if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import of it fails
        try:
            import openvino
        finally:
            del sys.modules[_TELEMETRY]
    import openvino

    return openvino


@cache
def computes_bfloat16() -> bool:
    """Return whether OpenVINO multiplies bfloat16 in hardware on this CPU."""
    found = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in found
