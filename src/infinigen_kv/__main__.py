"""The command ``infinigen-kv``, also ``python -m infinigen_kv``."""

import sys


def main() -> None:
    """Run the command line; leaves through `SystemExit`."""
    try:
        import rich  # noqa: F401 - progress and tables
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"infinigen-kv: the command line needs {error.name}, which is not installed: "
            "pip install 'infinigen-kv[cli]'\n"
        )
        sys.exit(2)
    from infinigen_kv.cli.app import make_app

    make_app()(prog_name="infinigen-kv")


if __name__ == "__main__":
    main()
