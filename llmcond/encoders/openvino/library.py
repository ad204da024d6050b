"""Importing OpenVINO without the telemetry that it sends on import."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from llmcond.system import native_bfloat16

_TELEMETRY = "openvino_telemetry"


def is_installed() -> bool:
    """Return whether OpenVINO is installed, without importing it."""
    return "openvino" in sys.modules or find_spec("openvino") is not None


@cache
def import_openvino() -> Any:
    """Import the module ``openvino`` without its telemetry.

    openvino depends on the package openvino_telemetry. If it finds that package when it is
    imported, it reports the import to Google Analytics. So the package is hidden during the import,
    and openvino uses a stub instead.
    """
    if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # makes its import fail
        try:
            import openvino
        finally:
            del sys.modules[_TELEMETRY]
    import openvino

    return openvino


def computes_bfloat16() -> bool:
    """Return whether OpenVINO multiplies bfloat16 in hardware on this CPU.

    OpenVINO also reports bfloat16 on CPUs with AVX-512 that lack it, where it would be emulated.
    """
    return native_bfloat16() and _supports_bfloat16()


@cache
def _supports_bfloat16() -> bool:
    capabilities = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in capabilities
