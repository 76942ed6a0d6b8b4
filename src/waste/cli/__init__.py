"""The `waste` command. Nothing heavy is imported here: `waste --version` must stay instant."""
