#!/usr/bin/env python3
"""Checks what rustfmt does not: widths of comments and of code, first lines of files, and the size of the README.

Each rule is one function below. Folders that break a rule today stand in NOT_YET with the number of
lines that do. A number may only become smaller: take it down with every line that you mend.
"""

import collections
import re
import subprocess
import sys

COMMENT_COLUMNS = 100
CODE_COLUMNS = 120
README_LINES = 160

# Rule and folder: how many lines of the folder still break the rule.
NOT_YET = {}


def tracked(*patterns):
    """Names of the files that git tracks, in order."""
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name]


def read(name):
    with open(name, encoding="utf-8") as file:
        return file.read().splitlines()


def is_comment(line):
    return line.lstrip().startswith(("//", "/*", "* "))


def too_wide(lines):
    """Rust: comments and code have limits of their own; what cannot be broken, such as an address, may stand alone."""
    for number, line in enumerate(lines, 1):
        limit = COMMENT_COLUMNS if is_comment(line) else CODE_COLUMNS
        if len(line) > limit and "://" not in line:
            yield number, f"{len(line)} columns, and {limit} are allowed"


def without_a_header(lines):
    """A file says in its first line what is in it."""
    first = lines[0] if lines else ""
    if not first.startswith("//!"):
        yield 1, "the first line does not begin with '//!' and say what is in the file"


def names_a_machine(lines):
    """Paths that exist on the machine of one person only."""
    for number, line in enumerate(lines, 1):
        if found := re.search(r"(?<![\w.])/(?:home/\w+|root|work)/\w+", line):
            yield number, f"'{found[0]}' is a path of one machine"


def wide_prose(lines):
    """Markdown: wrapped, but for tables and addresses."""
    for number, line in enumerate(lines, 1):
        if len(line) > CODE_COLUMNS and "://" not in line and not line.startswith("|"):
            yield number, f"{len(line)} columns, and {CODE_COLUMNS} are allowed"


def long_readme(lines):
    """The README is one page."""
    if len(lines) > README_LINES:
        yield README_LINES + 1, f"{len(lines)} lines, and {README_LINES} are allowed"


RULES = [
    ("width", ["*.rs"], too_wide),
    ("header", ["*.rs"], without_a_header),
    ("machine", ["*.rs", "*.md", "*.toml", "*.sh", "*.py", ".ci/*"], names_a_machine),
    ("prose", ["*.md"], wide_prose),
    ("page", ["README.md"], long_readme),
]


def main():
    found = collections.defaultdict(list)
    for rule, patterns, check in RULES:
        for name in tracked(*patterns):
            folder = name.split("/")[0] if "/" in name else "."
            for number, problem in check(read(name)):
                found[rule, folder].append(f"{name}:{number}: {problem}")
    failed = False
    for key in sorted(found.keys() | NOT_YET.keys()):
        problems, allowed = found[key], NOT_YET.get(key, 0)
        if len(problems) > allowed:
            failed = True
            print("\n".join(problems))
            print(f"{key[0]}, {key[1]}: {len(problems)} lines, and {allowed} are allowed", file=sys.stderr)
        elif len(problems) < allowed:
            print(f"{key[0]}, {key[1]}: {len(problems)} lines; take {allowed} in NOT_YET down to that")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
