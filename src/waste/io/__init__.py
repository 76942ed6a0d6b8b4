"""Bytes between files and aligned memory: checkpoints, whole reads, safe writes, checksums. Knows no model."""
