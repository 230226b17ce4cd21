"""The command ``infinigen-kv``: one module per subcommand, put together in `app`.

Nothing here imports torch or transformers at the top: help and usage errors come at once.
"""
