"""Fixtures of the core's tests that those of plans take."""

from tests.unit.analysis.conftest import made

__all__ = ["made"]
