"""Ranks that fork from a template: a process that has imported what an earlier rank of the same script imported."""
