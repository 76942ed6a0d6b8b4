"""The machine: what it has and what of it is free."""
