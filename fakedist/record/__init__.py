"""What happened in the rank, written down as it happens."""
