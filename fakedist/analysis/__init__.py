"""Answers questions about a recording. Tables in, tables out, one question per file."""
