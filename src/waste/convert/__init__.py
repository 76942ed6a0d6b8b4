"""From a Hugging Face checkpoint to a container: checked before, resumable at any point, byte-identical always."""

from __future__ import annotations

from waste.convert.conversion import convert, plan_conversion
from waste.convert.options import ConvertOptions, ConvertResult
from waste.convert.preflight import Preflight

__all__ = ["ConvertOptions", "ConvertResult", "Preflight", "convert", "plan_conversion"]
