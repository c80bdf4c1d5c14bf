"""Budgets and baselines: what a change may cost, judged where there is no GPU."""
