"""Command-line programs around the optimizer: corpus preparation, the quickstart, its curves."""
