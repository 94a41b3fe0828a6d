"""tools/snippets.py runs what a page shows, and nothing escapes it in silence."""

import subprocess
import sys
from pathlib import Path

SNIPPETS = Path(__file__).resolve().parents[2] / "tools" / "snippets.py"


def run(root: Path, page: str, *options: str) -> tuple[int, list[str]]:
    """Exit code and output lines for a README with the text of `page`."""
    (root / "README.md").write_text(page, encoding="utf-8")
    command = [sys.executable, str(SNIPPETS), "--root", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_python_and_bash_run_with_this_environment(tmp_path: Path) -> None:
    page = f"""# Title

```python
import sys
assert sys.executable == {sys.executable!r}
open("left.txt", "w").write("here")
```

```sh
test "$(cat left.txt)" = here
python -c 'import sys; assert sys.executable == "{sys.executable}"'
```

```text
not run
```
"""
    code, lines = run(tmp_path, page)
    assert code == 0
    assert [line.split(" (")[0] for line in lines] == [
        "passed README.md:3 python",
        "passed README.md:9 bash",
        "2 passed, 0 failed, 0 skipped",
    ]
    assert not (tmp_path / "left.txt").exists()


def test_pages_under_docs_run_too(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "tutorials" / "01.md"
    page.parent.mkdir(parents=True)
    page.write_text("```python\nraise SystemExit(3)\n```\n", encoding="utf-8")
    code, lines = run(tmp_path, "")
    assert code == 1
    assert lines == [
        "FAILED docs/tutorials/01.md:1 python: exit code 3",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_pages_run_at_the_same_time_and_each_failure_counts(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()

    def page(own: str, other: str) -> str:
        wait = f"while [ ! -e {tmp_path}/{other} ]; do sleep 0.01; done"
        return f"```bash\ntouch {tmp_path}/{own}\n{wait}\n```\n```bash\nfalse\n```\n"

    (tmp_path / "docs" / "1.md").write_text(page("a", "b"), encoding="utf-8")
    code, lines = run(tmp_path, page("b", "a"), "--jobs", "2", "--timeout", "30")
    assert code == 1
    assert lines[-1] == "2 passed, 2 failed, 0 skipped"


def test_a_failing_line_in_bash_fails_the_block_and_shows_its_output(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "```bash\necho before\nfalse\necho after\n```\n")
    assert code == 1
    assert lines == [
        "FAILED README.md:1 bash: exit code 1",
        "before",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_a_block_stands_alone_unless_it_continues(tmp_path: Path) -> None:
    block = "```python\nassert x == 1\n```\n"
    page = "```python\nx = 1\n```\n<!-- snippet: continues -->\n" + block + "\n" + block
    code, lines = run(tmp_path, page)
    assert code == 1
    assert lines[1].startswith("passed README.md:5 python")
    assert lines[2] == "FAILED README.md:9 python: exit code 1"
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"


def test_a_block_is_saved_for_later_ones(tmp_path: Path) -> None:
    block = "```python\nx = 1\nprint(x)\n```\n\n```bash\npython one.py\n```\n"
    code, lines = run(tmp_path, "<!-- snippet: saved, one.py -->\n" + block)
    assert code == 0
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"
    for wrong in ("saved", "saved, ../one.py"):
        code, lines = run(tmp_path, f"<!-- snippet: {wrong} -->\n" + block)
        assert code == 1
        assert lines[0].startswith("FAILED README.md:2 python: its comment 'saved'")


def test_skipping_needs_a_reason(tmp_path: Path) -> None:
    block = "```python\nraise SystemExit(1)\n```\n"
    code, lines = run(tmp_path, "<!-- snippet: skip, needs two hosts -->\n" + block)
    assert code == 0
    assert lines == [
        "skipped README.md:2 python: needs two hosts",
        "0 passed, 0 failed, 1 skipped",
    ]
    code, lines = run(tmp_path, "<!-- snippet: skip -->\n" + block)
    assert code == 1
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    code, lines = run(tmp_path, "<!-- snippet: later, someday -->\n" + block)
    assert code == 1


def test_a_block_that_does_not_end_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "```bash\nsleep 600 | cat\n```\n", "--timeout", "1")
    assert code == 1
    assert lines[0] == "FAILED README.md:1 bash: no end within 1 s"


def test_fences_inside_fences_and_lists(tmp_path: Path) -> None:
    page = "````markdown\n```python\nraise SystemExit(1)\n```\n````\n\n1. Step\n\n   ```python\n"
    page += "   if True:\n       print(1)\n   ```\n"
    code, lines = run(tmp_path, page)
    assert code == 0
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"
