#!/usr/bin/env python3
"""Runs what the documentation shows: every fenced python and bash block of README.md and docs/.

The blocks of one page run in order in one temporary folder, each in a process of its own, with this
Python's environment first on the path. So a block works as it is pasted, unless a comment on the
line before its fence says otherwise:

    <!-- snippet: continues -->              the page's python block before it runs first
    <!-- snippet: skip, needs two hosts -->  left out; the reason is printed
    <!-- snippet: saved, layer.py -->        saved under that name for later blocks, and run

Other fences (console, text, ...) are shown, not run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

OPENING = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")
COMMENT = re.compile(r"^ *<!-- *snippet: *(?P<word>\w+) *(?:, *(?P<reason>.*?))? *-->\s*$")
LANGUAGES = {
    "python": "python", "python3": "python", "py": "python",
    "bash": "bash", "sh": "bash", "shell": "bash",
}  # fmt: skip


@dataclass(frozen=True)
class Snippet:
    """One fenced block; `word` and `reason` come from the comment before it."""

    page: str
    line: int
    language: str
    text: str
    word: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.language}"


def ends(line: str, fence: str) -> bool:
    """Whether a line closes the block that `fence` opened."""
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}


def snippets_of(page: str, text: str) -> Iterator[Snippet]:
    """The blocks of one page in a language that runs."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = OPENING.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while number < len(lines) and not ends(lines[number], opening["fence"]):
            number += 1
        if language := LANGUAGES.get(opening["language"].lower()):
            indent = len(opening["indent"])
            body = "\n".join(line[indent:] for line in lines[first:number]) + "\n"
            comment = COMMENT.match(lines[first - 2]) if first >= 2 else None
            word, reason = (comment["word"], comment["reason"] or "") if comment else ("", "")
            yield Snippet(page, first, language, body, word, reason)
        number += 1


def pages_of(root: Path) -> Iterator[str]:
    """README.md first, then the documentation in order."""
    if (root / "README.md").is_file():
        yield "README.md"
    for path in sorted((root / "docs").rglob("*.md")):
        yield path.relative_to(root).as_posix()


def run_limited(command: list[str], folder: Path, timeout: float) -> tuple[int | None, str]:
    """Exit code (None where it was stopped) and output; ends everything that it started."""
    environment = dict(os.environ)
    scripts = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", "")])
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


def command_for(snippet: Snippet, before: str, folder: Path) -> list[str]:
    """How to run a snippet, the python text `before` it first."""
    # The script has a file of its own because programs that start ranks import it again.
    script = folder / f"snippet_{snippet.line}.{'sh' if snippet.language == 'bash' else 'py'}"
    script.write_text(before + snippet.text, encoding="utf-8")
    if snippet.language == "bash":
        return ["bash", "-euo", "pipefail", str(script)]
    return [sys.executable, str(script)]


def say(text: str) -> None:
    """Prints it in one piece, as pages may run at the same time."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass
class Tally:
    """What happened so far."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def fail(self, snippet: Snippet, reason: str, output: str = "") -> None:
        """Counts and prints a failure."""
        self.failed += 1
        say("\n".join(filter(None, [f"FAILED {snippet}: {reason}", output.rstrip()])))


def run_page(page: str, root: Path, timeout: float) -> Tally:
    """Runs one page's snippets in a folder of its own and prints a line for each."""
    before, tally = "", Tally()
    with tempfile.TemporaryDirectory(prefix="fanfold-snippets-") as name:
        for snippet in snippets_of(page, (root / page).read_text(encoding="utf-8")):
            if snippet.word == "skip" and snippet.reason:
                say(f"skipped {snippet}: {snippet.reason}")
                tally.skipped += 1
                continue
            if snippet.word == "saved" and Path(snippet.reason).name == snippet.reason != "":
                (Path(name) / snippet.reason).write_text(snippet.text, encoding="utf-8")
            elif snippet.word not in ("", "continues"):
                tally.fail(snippet, f"its comment {snippet.word!r} is unknown or lacks a reason")
                continue
            first = before if snippet.word == "continues" else ""
            start = time.monotonic()
            code, output = run_limited(command_for(snippet, first, Path(name)), Path(name), timeout)
            if snippet.language == "python":
                before = f"{first}{snippet.text}\n"
            if code == 0:
                say(f"passed {snippet} ({time.monotonic() - start:.1f} s)")
                tally.passed += 1
            else:
                stopped = f"no end within {timeout:.0f} s"
                tally.fail(snippet, stopped if code is None else f"exit code {code}", output)
    return tally


def main() -> int:
    """Runs all pages, or those that are named."""
    parser = argparse.ArgumentParser(description="Run the documentation's code blocks.")
    parser.add_argument("pages", nargs="*", help="pages relative to the root; all without")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each block")
    parser.add_argument("--jobs", type=int, default=1, help="pages that run at the same time")
    options = parser.parse_args()
    pages = list(options.pages or pages_of(options.root))
    with ThreadPoolExecutor(options.jobs) as pool:
        tallies = list(pool.map(lambda page: run_page(page, options.root, options.timeout), pages))
    passed, failed, skipped = (
        sum(getattr(tally, what) for tally in tallies) for what in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
