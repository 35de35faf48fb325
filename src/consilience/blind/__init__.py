"""What sites, keyholders and a blind hub agree on, so that the hub sees sums and nothing else."""
