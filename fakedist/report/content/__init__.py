"""A report of each subject: what it says, as blocks, without a format."""
