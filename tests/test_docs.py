# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The documents' code runs, in order, as a reader would paste it, and what they point to exists.

The Python blocks of a document are one program, run in an empty folder together with the
`jaxfp8 scales` commands of its shell blocks. Blocks that use torch are a second program. A block
whose first line says "# Not run by the tests: WHY" is listed as skipped.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxfp8
from jaxfp8 import cli, scales

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "interop/README.md", *sorted(ROOT.glob("docs/*.md")))
    if path.exists()
]
NOT_RUN = "# Not run by the tests: "

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


class Block(NamedTuple):
    language: str
    text: str
    line: int

    @property
    def uses_torch(self) -> bool:
        return "torch" in self.text

    @property
    def why_not_run(self) -> str | None:
        first = self.text.split("\n", 1)[0]
        return first.removeprefix(NOT_RUN) if first.startswith(NOT_RUN) else None


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    fences = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in fences]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def programs() -> Iterator[object]:
    """Each document with its blocks that run without torch, and with those that need it."""
    for path in DOCUMENTS:
        runnable = [
            block
            for block in blocks(path)
            if block.language in ("python", "sh") and block.why_not_run is None
        ]
        for with_torch in (False, True):
            chosen = [block for block in runnable if block.uses_torch == with_torch]
            if any(block.language == "python" for block in chosen):
                name = f"{name_of(path)}{' (torch)' * with_torch}"
                marks = [needs_torch] if with_torch else []
                yield pytest.param(path, chosen, id=name, marks=marks)


def blocks_not_run() -> Iterator[object]:
    for path in DOCUMENTS:
        for block in blocks(path):
            if block.language == "python" and block.why_not_run is not None:
                why = f"{name_of(path)}:{block.line}: {block.why_not_run}"
                mark = pytest.mark.skipif(True, reason=why)
                yield pytest.param(block.text, id=f"{name_of(path)}:{block.line}", marks=mark)


def scales_commands(block: Block) -> list[list[str]]:
    """The arguments of each `jaxfp8 scales ...` in a shell block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [command[1:] for command in words if command[:2] == ["jaxfp8", "scales"]]


@pytest.mark.parametrize(("path", "chosen"), list(programs()))
def test_blocks_run(path, chosen, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if any(block.uses_torch for block in chosen):
        import jaxfp8_torch

        # A document may choose sizes, which are the process's.
        request.addfinalizer(partial(jaxfp8_torch.set_buckets, jaxfp8_torch.get_buckets()))
    names: dict[str, object] = {"__name__": "__main__"}
    for block in chosen:
        if block.language == "sh":
            for command in scales_commands(block):
                assert cli.main(command) == 0, f"{path}: jaxfp8 {shlex.join(command)}"
            continue
        # So that a traceback has the document's own lines.
        source = "\n" * block.line + block.text
        exec(compile(source, str(path), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("text", list(blocks_not_run()))
def test_blocks_not_run(text):
    """Listed, with the reason that the document gives."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_compile(path):
    for block in blocks(path):
        if block.language == "python":
            compile(block.text, f"{path}:{block.line}", "exec", dont_inherit=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_what_is_pointed_to_exists(path):
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    # Files named in code: `tests/oracle.py`, python benchmarks/attention.py
    named = re.findall(r"\b((?:benchmarks|docs|interop|jaxfp8|tests)/[\w./-]*\w\.\w+)", text)
    missing += [file for file in named if not (ROOT / file).exists()]
    assert missing == []


def test_the_readme_was_found():
    assert sum(block.language == "python" for block in blocks(ROOT / "README.md")) >= 5


REFERENCES = (ROOT / "docs/api.rst", ROOT / "docs/api-torch.rst")


@pytest.mark.skipif(not REFERENCES[0].exists(), reason="the documents are not there")
def test_reference_has_every_public_name():
    source = (ROOT / "interop/jaxfp8_torch/__init__.py").read_text()
    torch_names = set(re.findall(r'^    "(\w+)",$', source, re.MULTILINE))
    elsewhere = {"jaxfp8.scales.LayerScales"} | {
        f"jaxfp8_torch.{name}"  # those of jaxfp8 and jaxfp8.scales
        for names in re.findall(r"^from jaxfp8(?:\.scales)? import ([\w, ]+)", source, re.MULTILINE)
        for name in names.replace(",", " ").split()
    }
    public = {f"jaxfp8.{name}" for name in jaxfp8.__all__}
    public |= {f"jaxfp8.scales.{name}" for name in scales.__all__}
    public |= {f"jaxfp8_torch.{name}" for name in torch_names}
    text = "".join(path.read_text() for path in REFERENCES)
    documented = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)", text, re.MULTILINE))
    assert public - documented - elsewhere == set()
