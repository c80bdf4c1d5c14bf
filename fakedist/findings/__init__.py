"""Rules over a run's tables that say what is wrong with a job, where, and what it gains to change it."""
