"""Rotary settings of a Hugging Face config, wherever its writer put them, as frequencies and an attention factor.

transformers 5 writes `rope_parameters`, older files `rope_theta` beside `rope_scaling`, some put theta inside
`rope_scaling`, and `rope_parameters` may hold one object per layer type. None of them silently becomes 10000.
"""

from __future__ import annotations

import math
from typing import Any

from waste.backends.shapes import Rotary
from waste.errors import InputError
from waste.models.hf_layers import FULL_ATTENTION
from waste.models.hf_reader import Reader, shown


def rotary(text: Reader, dim: int) -> tuple[Rotary, float]:
    """Frequencies for `dim` rotated channels, and the factor m*m of YaRN on the attention scale (1.0 without).

    YaRN as transformers 5.24 (`modeling_rope_utils`, `yarn_apply_mscale`): m = 0.1 * mscale_all_dim * ln(factor) + 1.
    Raises InputError for a missing theta, UnsupportedError for other kinds of scaling and for YaRN settings that
    would scale cosine and sine.
    """
    settings, theta = _settings(text)
    settings.usual = frozenset(("type",))  # what every release before transformers 5 wrote
    kind = settings.raw("rope_type", ("type",))
    for reader in (settings, text):
        reader.require("partial_rotary_factor", 1, 1.0, None)
    if kind is None or kind == "default":
        return Rotary.plain(dim, theta), 1.0
    if kind != "yarn":
        raise settings.unsupported("rope_type", kind, "default or yarn")
    return _yarn(settings, dim, theta)


def _yarn(settings: Reader, dim: int, theta: float) -> tuple[Rotary, float]:
    factor = settings.number("factor")
    original = settings.integer("original_max_position_embeddings")
    fast = settings.optional_number("beta_fast") or 32.0  # the paper's values, transformers' too
    slow = settings.optional_number("beta_slow") or 1.0
    settings.require("truncate", True)
    if factor < 1:
        raise settings.wrong("factor", factor, "a number of at least 1")
    if fast < slow:
        raise InputError(f"{settings.where}beta_fast is {shown(fast)}, below beta_slow, {shown(slow)}")
    scale = settings.optional_number("mscale", positive=False) or 0.0
    all_dim = settings.optional_number("mscale_all_dim", positive=False) or 0.0
    wave = settings.optional_number("attention_factor")
    if wave is None:
        wave = _m(factor, scale) / _m(factor, all_dim) if scale and all_dim else _m(factor, 1.0)
    if not math.isclose(wave, 1.0, rel_tol=1e-9):
        # Cosine and sine would be scaled apart from the rest of the head; no release of these families does it.
        raise settings.unsupported("mscale", settings.raw("mscale"), "a value equal to mscale_all_dim")
    m = _m(factor, all_dim) if all_dim else 1.0
    return Rotary.yarn(dim, theta, factor, original, fast, slow), m * m


def _m(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _settings(text: Reader) -> tuple[Reader, float]:
    """The object with the rotary settings (an empty one if there is none) and theta."""
    new, old = _parameters(text), text.sub("rope_scaling")
    flat = text.optional_number("rope_theta")
    chosen = new or old or Reader({}, text.where, text.notices)
    inner = chosen.optional_number("rope_theta") if (new or old) else None
    if new is not None and old is not None and _plain(new.data) != _plain(old.data):
        text.notice(f"{text.where}rope_parameters and rope_scaling disagree; rope_parameters is used")
    theta = inner if inner is not None else flat
    if theta is None:
        raise text.missing("rope_theta")
    if flat is not None and flat != theta:
        text.notice(
            f"{text.where}rope_theta is {shown(flat)} but {chosen.where.rpartition(': ')[2]}rope_theta is "
            f"{shown(theta)}, which is used"
        )
    if theta <= 1:
        raise text.wrong("rope_theta", theta, "a number above 1")
    return chosen, theta


def _parameters(text: Reader) -> Reader | None:
    """`rope_parameters`, the entry for full attention if it holds one object per layer type."""
    new = text.sub("rope_parameters")
    if new is None or not new.data or not all(isinstance(value, dict) for value in new.data.values()):
        return new if new is not None and new.data else None
    for name in FULL_ATTENTION:
        if name in new.data:
            return new.sub(name)
    raise new.unsupported("keys", sorted(new.data), f"one of {', '.join(FULL_ATTENTION)}")


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Settings without the spelling differences of the two places."""
    plain = {("rope_type" if key == "type" else key): value for key, value in data.items()}
    plain.pop("rope_theta", None)
    return plain
