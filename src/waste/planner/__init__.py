"""The planner: what a model needs, before anything is allocated."""
