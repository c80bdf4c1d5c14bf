"""The parent process: checks the job, starts the child, follows it and builds the tables."""
