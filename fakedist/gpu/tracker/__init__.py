"""Which operation ran at each event of the allocator's history, where torch keeps no metadata with it."""
