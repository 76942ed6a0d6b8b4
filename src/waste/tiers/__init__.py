"""Tiers: where routed experts are kept, and which of them leave when there is no room."""
