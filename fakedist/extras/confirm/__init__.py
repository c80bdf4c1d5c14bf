"""``fakedist confirm``: the accuracy set on this machine's GPU against the virtual GPU, as one file to send."""
