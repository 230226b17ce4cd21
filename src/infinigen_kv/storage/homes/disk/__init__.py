"""The disk home: one file for a cache, read past the page cache."""
