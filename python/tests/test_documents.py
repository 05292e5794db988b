"""The blocks of Python in the guides are programs that run.

A block with `file=NAME` is written to that file; one with `server=NAME` runs beside that program.
"""

from __future__ import annotations

import doctest
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tensor_rpc import disco

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.M | re.S)
LIMIT = 60.0


def blocks(document: str) -> list[tuple[dict[str, str], str]]:
    """Return the blocks of a document, with what stands behind the name of the language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    assert len(found) == text.count("```python"), f"{document}: a block does not end"
    return [(dict(re.findall(r"(\w+)=(\S+)", head)), body) for head, body in found]


@pytest.mark.parametrize("document", ["docs/python.md", "README.md"])
def test_the_blocks_of_a_document_run(document: str) -> None:
    """Each block ends without an error, in the order of the document."""
    found = blocks(document)
    assert found, f"{document} has no block of Python"
    folder = Path(tempfile.mkdtemp())
    # A socket file in the place of a port, which another program could have.
    path = folder / "socket"
    programs: dict[str, Path] = {}
    servers: dict[str, subprocess.Popen[str]] = {}
    try:
        for number, (head, body) in enumerate(found):
            program = folder / head.get("file", f"block{number}.py")
            program.write_text(body.replace("tcp://127.0.0.1:9090", f"unix:{path}"), encoding="utf-8")
            if "file" in head:
                programs[head["file"]] = program
                continue
            if "server" in head and head["server"] not in servers:
                servers[head["server"]] = serve(programs[head["server"]], path)
            done = subprocess.run([sys.executable, str(program)], timeout=LIMIT, capture_output=True, text=True)
            assert done.returncode == 0, f"block {number} of {document}:\n{body}\n{done.stderr}"
    finally:
        for server in servers.values():
            server.terminate()
            server.wait(LIMIT)
        shutil.rmtree(folder)


@pytest.mark.parametrize("module", [disco])
def test_the_examples_of_docstrings_run(module: ModuleType) -> None:
    """They print what they say."""
    failed, attempted = doctest.testmod(module, extraglobs={"np": np})
    assert attempted > 0 and failed == 0


def serve(program: Path, path: Path) -> subprocess.Popen[str]:
    """Start a program, and wait until it listens."""
    server = subprocess.Popen([sys.executable, str(program)], text=True)
    end = time.monotonic() + LIMIT
    while True:
        assert server.poll() is None, "the server has ended"
        assert time.monotonic() < end, "the server does not listen"
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return server
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("example", "printed"), [("board.py time --size 32", "gemm 32: "), ("serve_model.py ask", "classes: ")]
)
def test_the_examples_run(example: str, printed: str) -> None:
    """They check their own results."""
    name, *arguments = example.split()
    program = [sys.executable, str(ROOT / "python" / "examples" / name), *arguments]
    done = subprocess.run(program, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(printed), done.stdout
