"""Times of collectives on a fabric: of one call, and of all calls of a step."""
