"""Many runs of one job: a space of layouts, each point of it a run, and which point is fastest of those that fit."""
