"""Speed figures: latency, throughput and bytes of every system, measured by the bench."""
