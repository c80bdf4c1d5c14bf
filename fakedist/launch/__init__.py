"""The parent: check, start the child, follow it, make the tables."""
