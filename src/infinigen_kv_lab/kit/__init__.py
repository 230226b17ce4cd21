"""What every measurement shares: divergence, intervals."""
