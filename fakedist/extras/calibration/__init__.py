"""Makes calibration tables: matches a GPU's trace of a job with the launches of its recorded step. Never met a GPU."""
