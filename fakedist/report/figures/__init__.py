"""Charts of runs as plotly figures: they show in a notebook, and save as HTML or PNG like any plotly figure.

``run.figures`` has those of one run; :func:`~fakedist.report.figures.memory_figures.compared_timeline` draws two.
"""
