"""Tools for agents over the Model Context Protocol: reports as data, and, if allowed, runs (docs/mcp.md)."""
