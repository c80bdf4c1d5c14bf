"""Records what happens in the rank, as it happens."""
