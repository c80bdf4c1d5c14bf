"""Compares two runs: what appeared, is gone, grew or shrank. Tables of both in, one table of changes out."""
