"""English text that every Python carries: input for the demo and the tests, and for calibration.

The two texts share nothing: the documentation topics are what the package is measured on, so no
calibration text comes from them (or from the modules whose sources serve as evaluation text).
"""

import ast
import importlib.util
import tokenize
from pathlib import Path

from infinigen_kv.errors import InputError

# Rich in prose, pure Python, and part of every CPython >= 3.10 that Debian installs. Modules that
# the documentation topics quote (pdb, string) and evaluation texts (argparse, decimal) are absent.
CALIBRATION_MODULES = (
    "typing",
    "doctest",
    "difflib",
    "logging",
    "inspect",
    "ipaddress",
    "unittest.mock",
    "statistics",
    "xml.etree.ElementTree",
    "threading",
    "email.message",
    "smtplib",
    "http.cookiejar",
    "configparser",
    "unittest.case",
    "tarfile",
    "subprocess",
    "shutil",
    "urllib.request",
    "socketserver",
)

# Modules whose sources make one text together, and characters taken from each of them.
SOURCE_GROUP = 4
SOURCE_CHARS = 8_000

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documentation_text() -> str:
    """Python's language reference as ``pydoc`` holds it: about 465,000 characters of English.

    Returns
    -------
    str
        All topics, sorted by name. The same for every run of one Python version.
    """
    from pydoc_data.topics import topics  # half a megabyte, needed only here

    return "\n\n".join(topics[name] for name in sorted(topics))


def calibration_texts() -> list[str]:
    """Docstrings and source of a fixed list of standard-library modules.

    Returns
    -------
    list of str
        One text of docstrings per module, and after every `SOURCE_GROUP` of them one text with
        an excerpt of their sources (without docstrings): about 500,000 characters in all, three
        quarters of them prose. The same for every run of one Python version.

    Raises
    ------
    InputError
        Fewer than half of the modules have their source installed.
    """
    sources = {
        name: source for name in CALIBRATION_MODULES if (source := _source(name)) is not None
    }
    if 2 * len(sources) < len(CALIBRATION_MODULES):
        raise InputError(
            f"calibration text: only {len(sources)} of {len(CALIBRATION_MODULES)} "
            "standard-library modules have their source installed (at least half are needed): "
            "install Python's full standard library, or give a text of your own"
        )
    texts = []
    names = list(sources)
    for start in range(0, len(names), SOURCE_GROUP):
        group = names[start : start + SOURCE_GROUP]
        texts += [_docstrings(name, sources[name]) for name in group]
        texts.append("\n\n".join(_code_excerpt(sources[name]) for name in group))
    return texts


def _source(name: str) -> str | None:
    """Source of a module, found and read without executing it; None where it is absent."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is absent
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    if not path.is_file():
        return None
    with tokenize.open(path) as file:
        return file.read()


def _docstrings(name: str, source: str) -> str:
    """Join headings and docstrings of a module in the order of its source, each docstring once."""
    seen: set[str] = set()
    parts = []
    for heading, node in _documented(ast.parse(source), name):
        text = ast.get_docstring(node)
        if text and text not in seen:
            seen.add(text)
            parts.append(f"{heading}\n\n{text}")
    return "\n\n".join(parts)


def _documented(node: _Documented, heading: str) -> list[tuple[str, _Documented]]:
    """Return a node and all below it that can carry a docstring, with dotted headings."""
    found = [(heading, node)]
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found += _documented(child, f"{heading}.{child.name}")
    return found


def _code_excerpt(source: str) -> str:
    """`SOURCE_CHARS` of the source without docstrings, which the prose texts hold already.

    It starts a third into the module, past the imports and the lists of names.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            for number in range(text.lineno - 1, text.end_lineno or text.lineno):
                lines[number] = ""
    lines = [line for line in lines if line.strip()]
    return "\n".join(lines[len(lines) // 3 :])[:SOURCE_CHARS]
