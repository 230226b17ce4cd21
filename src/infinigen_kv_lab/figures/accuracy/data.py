"""What the figures read, and where in the data folder it is expected."""

from __future__ import annotations

from pathlib import Path

from infinigen_kv.errors import InputError

PLACES = {
    "wikitext2/wiki.test.raw": "the test split of wikitext-2-raw-v1",
    "ptb/ptb.valid.txt": "the validation split of the word-level Penn Treebank",
    "passkey/passkey_generated.jsonl": "passkey prompts",
    "passkey/prompt_template.txt": "their template",
    "books/pg1342_pride_and_prejudice.txt": "a book to hide numbers in",
    "fewshot/copa.validation.jsonl": "COPA; likewise openbookqa, winogrande, piqa, rte",
}
"""Not all of the files: enough to see which folder is meant."""


def check_data_folder(folder: Path) -> None:
    """Raise `InputError` unless the folder holds something that figures can be made from.

    What a single figure lacks is said when its turn comes.
    """
    if any((folder / place).is_file() for place in PLACES):
        return
    problem = "holds none of the files" if folder.is_dir() else "no such folder"
    wanted = "; ".join(f"{place} ({what})" for place, what in PLACES.items())
    raise InputError(
        f"--data {folder}: {problem}: fetch what you need of {wanted}, and name the "
        "folder that holds them"
    )
