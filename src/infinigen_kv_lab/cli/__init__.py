"""The laboratory's subcommands of ``infinigen-kv``."""
