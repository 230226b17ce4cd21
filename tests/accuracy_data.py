"""A data folder for the accuracy figures, made up; sizes that a tiny model evaluates in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import TEXT
from fewshot_records import RECORDS
from fewshot_records import folder as few_shot
from infinigen_kv_lab.figures.accuracy.setting import AccuracyScale, Span

SCALE = AccuracyScale(
    text=Span(window=400, prompt_tokens=300, windows=2),
    sweep=Span(window=330, prompt_tokens=290, windows=2),
    stepwise=Span(window=296, prompt_tokens=280, windows=1),
    course=Span(window=330, prompt_tokens=290, windows=2),
    looks=2,
    texts=("wikitext2", "ptb"),
    lengths=(264, 300),
    length_tokens=24,
    contexts=(128, 300),
    shares=(0.1, 0.3),
    task_shares=(0.1,),
    task_alphas=(2.0,),
    capacities=(1.0, 0.5),
    passkeys=3,
    needle_lengths=(256,),
    needle_repeats=1,
    documents=2,
    shots=1,
)


def data_folder(path: Path) -> Path:
    """All files that the figures read, the few-shot tasks' included."""
    for name in ("wikitext2", "ptb", "passkey", "books"):
        (path / name).mkdir(parents=True)
    text = TEXT + TEXT[::-1]
    (path / "wikitext2" / "wiki.test.raw").write_text(text, encoding="utf-8")
    (path / "ptb" / "ptb.valid.txt").write_text(text[::-1], encoding="utf-8")
    (path / "books" / "pg1342_pride_and_prejudice.txt").write_text(text, encoding="utf-8")
    records = [
        {
            "context": TEXT[:length] + " The key is 12345. " + TEXT[length : 2 * length],
            "input": "What is the key? It is",
            "answer": "12345",
            "target_len": nominal,
            "depth": depth,
        }
        for nominal, length in ((300, 140), (400, 180))
        for depth in (0.25, 0.5)
    ]
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (path / "passkey" / "passkey_generated.jsonl").write_text(lines, encoding="utf-8")
    (path / "passkey" / "prompt_template.txt").write_text("{context}\n{input}", encoding="utf-8")
    for name, made in RECORDS.items():
        few_shot(path, name, made)
    return path
