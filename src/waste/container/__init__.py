"""The streaming container: trunk tensors and expert records on disk, written once, checked on every read."""
