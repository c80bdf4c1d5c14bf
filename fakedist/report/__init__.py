"""Reports for people and programs: terminal text, Markdown, CSV, JSON and the page."""
