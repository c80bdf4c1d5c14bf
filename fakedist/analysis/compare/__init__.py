"""Two runs side by side: what appeared, went, grew and shrank. Tables of both in, one table of changes out."""
