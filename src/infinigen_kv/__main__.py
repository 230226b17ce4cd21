"""``python -m infinigen_kv``: the same as the command ``infinigen-kv``."""

from infinigen_kv.cli import main

if __name__ == "__main__":
    main()
