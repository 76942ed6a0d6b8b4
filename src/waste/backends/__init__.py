"""Backends: the same coarse operations (`base.Ops`) in torch (`reference`) and in native code (`cpu`)."""
