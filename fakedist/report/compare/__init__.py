"""Two runs and what changed between them, as text and as a page."""
