"""Figures as people read them: terminal text and JSON."""
