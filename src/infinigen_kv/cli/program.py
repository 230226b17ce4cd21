"""How the command ends: exit codes, and one line on stderr for what went wrong."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from infinigen_kv.errors import CacheStateError, InfiniGenError, SettingLeftOut

DEBUG_VARIABLE = "INFINIGEN_KV_DEBUG"

FAULT, BAD_INPUT, INTERRUPTED = 1, 2, 130

# Recent releases of typer carry a copy of click: the class is reached through one they both export.
_UsageError: Any = typer.BadParameter.__mro__[1]


class Program(TyperGroup):
    """The group of all subcommands, with this project's way to report errors."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and leave with an exit code."""
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            path = prog_name or self.name if context is None else context.command_path
            _say(f"{path}: {error.format_message().rstrip('.')} (see: {path} --help)")
            code = BAD_INPUT
        except OSError as error:  # only stdout is left to fail here
            if not isinstance(error, BrokenPipeError):  # a reader that has seen enough
                _say(f"{prog_name or self.name}: stdout: {_reason(error)}")
            _drop_stdout()
            code = BAD_INPUT
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; errors become exit codes, and settings left out become notes."""
        try:
            with _notes():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, _UsageError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost handler of the program
            raise typer.Exit(_report(ctx, error)) from None


@contextmanager
def _notes() -> Iterator[None]:
    """Say each setting that is left out once and on one line, not with the code that warned."""
    with warnings.catch_warnings():
        shown = warnings.showwarning
        notes: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, SettingLeftOut):
                shown(message, category, *where, **more)
            elif str(message) not in notes:
                notes.add(str(message))
                _say(f"note: {message}")

        warnings.showwarning = show
        yield


def _drop_stdout() -> None:
    """Keep the interpreter from failing again when it flushes stdout at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:  # noqa: PTH123 - a device, not a path
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _report(ctx: Any, error: Exception) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    debug = bool(ctx.params.get("debug"))
    if debug:
        traceback.print_exception(error)
    # A misused cache is this program's doing, whatever the user gave.
    if isinstance(error, InfiniGenError | OSError) and not isinstance(error, CacheStateError):
        _say(f"{ctx.command_path}: {_reason(error)}")
        return BAD_INPUT
    hint = "" if debug else f" ({ctx.command_path} --debug ..., or {DEBUG_VARIABLE}=1, shows where)"
    _say(f"{ctx.command_path}: fault: {_reason(error)}{hint}")
    return FAULT


def _reason(error: BaseException) -> str:
    """What an error says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: " if error.filename else ""
        return f"{what}{error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, InfiniGenError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
