"""A run as text: for a terminal, as Markdown, CSV and JSON."""
