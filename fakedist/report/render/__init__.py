"""Renderers of reports: terminal, Markdown, page and JSON, each in one place."""
