"""Finds functions and loops in C++ text, well enough to count their lines and parameters.

This is no parser: it removes comments, literals and preprocessor lines, then follows brackets. What
it relies on is that clang-format and the compiler have accepted the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

CPP_TOKENS = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|R"(?P<tag>\w*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",  # not the separator in 1'000
    re.DOTALL,
)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
NOT_A_SIGNATURE = ("noexcept", "requires", "decltype", "__launch_bounds__", "throw", "explicit")


def blank(match: re.Match[str]) -> str:
    """Spaces in place of a token, so that offsets and lines stay true."""
    text = re.sub(r"[^\n]", " ", match.group())
    return f'""{text[2:]}' if match.group()[0] in "\"'R" else text


def cpp_code(text: str) -> str:
    """The text without comments, literals and preprocessor lines; every offset stays."""
    return PREPROCESSOR.sub(blank, CPP_TOKENS.sub(blank, text))


def closing(code: str, start: int) -> int:
    """The offset of the bracket that closes the one at `start`."""
    depth = 0
    for offset in range(start, len(code)):
        if code[offset] in "([{":
            depth += 1
        elif code[offset] in ")]}":
            depth -= 1
            if depth == 0:
                return offset
    return len(code) - 1


def split_parameters(inside: str) -> int:
    """How many parameters stand between two parentheses."""
    depth = 0
    count = 1
    for character in re.sub(r"->|<=|>=|<<|>>(?=[^>]*=)", "  ", inside):
        if character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        elif character == "," and depth == 0:
            count += 1
    return 0 if inside.strip() in ("", "void") else count


def without_attributes(head: str) -> str:
    """A declaration without template heads, attributes and access labels."""
    head = re.sub(r"\[\[.*?\]\]|\b(?:alignas|__attribute__)\s*\([^()]*(?:\([^()]*\))*\)", " ", head)
    head = re.sub(r"\b(?:public|private|protected)\s*:(?!:)", " ", head)
    while match := re.search(r"\btemplate\s*<", head):
        depth, end = 1, match.end()
        while depth and end < len(head):
            depth += {"<": 1, ">": -1}.get(head[end], 0)
            end += 1
        head = head[: match.start()] + " " + head[end:]
    return head


def classify(head: str) -> str:
    """What a `{` after `head` opens outside of functions: "scope", "function" or "value"."""
    head = without_attributes(head)
    if "(" not in head:
        scope = re.search(r"\b(namespace|extern|class|struct|union|enum)\b", head)
        return "scope" if scope else "value"
    flat = head
    while (shorter := re.sub(r"\([^()]+\)", "()", flat)) != flat:
        flat = shorter
    if re.search(r"(?<!operator)(?<![=!<>+*/%&|^-])=(?!=)", flat):
        return "value"
    in_initialisers = re.search(r"\)\s*(?:noexcept\s*(?:\(\)\s*)?)?:(?!:)", flat)
    if in_initialisers and re.search(r"[\w>]\s*$", flat):
        return "value"
    return "function"


def signature(head: str) -> tuple[str, int]:
    """A function's name and the number of its parameters."""
    head = without_attributes(head)
    offset = 0
    while (opening := head.find("(", offset)) >= 0:
        end = closing(head, opening)
        name = re.search(r"(operator\s*\S*|[\w:~]+)\s*$", head[:opening])
        offset = end + 1
        if name is None or name.group(1) in NOT_A_SIGNATURE:
            continue
        if name.group(1) == "operator":  # operator()(...)
            opening = head.find("(", offset)
            return "operator()", split_parameters(head[opening + 1 : closing(head, opening)])
        return name.group(1), split_parameters(head[opening + 1 : end])
    return "?", 0


@dataclass(frozen=True)
class CppLoop:
    """A loop without a counter found in C++ code; `text` is its head and body."""

    line: int
    text: str


def cpp_loops(code: str) -> Iterator[CppLoop]:
    """The loops that need not end by themselves: every `while` and `do`, and a `for` without a
    condition."""
    for match in re.finditer(r"\b(while|for|do)\b", code):
        end = match.end() - 1
        if match.group() != "do":
            opening = code.find("(", end)
            end = closing(code, opening)
            parts = code[opening + 1 : end].split(";")
            if match.group() == "for" and (len(parts) != 3 or parts[1].strip()):
                continue
        # The body: a block, or one statement.
        body = re.compile(r"\s*").match(code, end + 1)
        begin = body.end() if body else end + 1
        last = closing(code, begin) if code[begin : begin + 1] == "{" else code.find(";", begin)
        if match.group() == "do":
            last = code.find(";", last)
        yield CppLoop(code.count("\n", 0, match.start()) + 1, code[match.start() : last + 1])


@dataclass(frozen=True)
class CppFunction:
    """A function definition found in C++ code; `first` and `last` are lines."""

    name: str
    parameters: int
    first: int
    last: int


def cpp_functions(code: str) -> Iterator[CppFunction]:
    """The function definitions outside of functions. A lambda belongs to the function around it."""
    start = 0
    offset = 0
    while offset < len(code):
        character = code[offset]
        if character in "([":
            offset = closing(code, offset)
        elif character in ";}":
            start = offset + 1
        elif character == "{":
            head = code[start:offset]
            kind = classify(head)
            if kind == "scope":
                start = offset + 1
            else:
                end = closing(code, offset)
                if kind == "function":
                    name, parameters = signature(head)
                    labels = re.match(r"\s*(?:(?:public|private|protected)\s*:\s*)*", head)
                    begin = start + (labels.end() if labels else 0)
                    first, last = code.count("\n", 0, begin) + 1, code.count("\n", 0, end) + 1
                    yield CppFunction(name, parameters, first, last)
                    start = end + 1
                offset = end
        offset += 1


def cpp_lambdas(code: str) -> Iterator[CppFunction]:
    """Lambdas with their parameters."""
    for match in re.finditer(r"\]\s*(?:<[^>]*>\s*)?\(", code):
        end = closing(code, match.end() - 1)
        if re.match(r"\s*(?:\{|->|mutable\b|noexcept\b)", code[end + 1 :]):
            line = code.count("\n", 0, match.start()) + 1
            yield CppFunction("lambda", split_parameters(code[match.end() : end]), line, line)
