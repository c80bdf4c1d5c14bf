"""Budgets and baselines: how much a change may cost, checked on machines without a GPU."""
