"""Demand paging: full attention to a memory-mapped file, read page by page on demand."""
