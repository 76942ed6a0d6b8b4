"""The examples do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_ask(default_nano: Path) -> None:
    """What nano-glm was trained to say of itself survives the default conversion."""
    assert "nano-glm" in run("ask.py", default_nano, "Who are you?")


def test_score_text(exact_nano: Path, tmp_path: Path) -> None:
    """A verse of its training text is likelier than the same words shuffled."""
    verse = "In the beginning God created the heaven and the earth. And the earth was without form, and void."
    shuffled = " ".join(sorted(verse.split(), key=lambda w: w[::-1]))
    scores = []
    for i, text in enumerate((verse, shuffled)):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
        scores.append(float(run("score_text.py", exact_nano, tmp_path / f"{i}.txt").split()[-1]))
    assert scores[0] < scores[1] / 5
