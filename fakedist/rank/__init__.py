"""The child: become the rank, run the script, write down how it ended."""
