"""Answers from what was recorded: tables in, tables out, one question a file."""
