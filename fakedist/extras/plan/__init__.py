"""Changes of a job, proposed from its recording: another machine, less memory, another pipeline."""
