"""The ranks that do not exist: their environment, and what arrives from them."""
