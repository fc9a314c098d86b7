# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Decode machine code: run llvm-objdump and parse its text into `Instruction` objects."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jaxfp8.rocm.errors import MissingToolError

_LLVM_ADVICE = (
    "Reading gfx942 code needs LLVM 17 or later with the AMDGPU target "
    "(Debian: apt-get install llvm-19; or the LLVM of ROCm on PATH)"
)


@dataclass(frozen=True)
class Register:
    """`count` consecutive 32-bit registers. File is "v", "a", "s" or a special register's name."""

    file: str
    index: int
    count: int


@dataclass(frozen=True)
class Immediate:
    """A constant operand: an inline int, an inline float, or a 32-bit literal."""

    value: int | float
    is_literal: bool = False


@dataclass(frozen=True)
class Symbolic:
    """An operand that is only a word, such as `off` or `hwreg(HW_REG_MODE, 23, 1)`."""

    text: str


@dataclass(frozen=True)
class Operand:
    """An operand and its source modifiers."""

    value: Register | Immediate | Symbolic
    absolute: bool = False
    negate: bool = False
    sign_extend: bool = False

    @property
    def is_off(self) -> bool:
        return self.value == Symbolic("off")


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

    `opcode` is the mnemonic without its encoding suffix (`_e32`, `_e64`, `_sdwa`, `_dpp`);
    `modifiers` maps names to the text after the colon, or to "" for plain flags.
    """

    address: int
    size: int
    mnemonic: str
    opcode: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    words: tuple[int, ...]
    text: str

    @property
    def is_sdwa(self) -> bool:
        return self.mnemonic.endswith("_sdwa")

    @property
    def is_dpp(self) -> bool:
        return self.mnemonic.endswith("_dpp")

    def modifier_bits(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list modifier such as `op_sel:[0,1]`, padded with its default."""
        text = self.modifiers.get(name)
        if text is None:
            return default
        bits = tuple(int(bit) for bit in text.strip("[]").split(","))
        return bits + default[len(bits) :]

    def modifier_int(self, name: str, default: int = 0) -> int:
        text = self.modifiers.get(name)
        return default if text is None else int(text, 0)

    @property
    def branch_target(self) -> int:
        """Target address of a SOPP branch."""
        offset = self.words[0] & 0xFFFF
        return self.address + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)


def find_llvm_tool(name: str) -> str:
    """Path of an LLVM tool, preferring version 19, which this package was tested with.

    Raises:
      MissingToolError: it is not installed.
    """
    for candidate in (f"{name}-19", name):
        if path := shutil.which(candidate):
            return path
    versions = {
        int(match[1]): path
        for path in glob.glob(f"/usr/lib/llvm-*/bin/{name}")
        if (match := re.match(r"/usr/lib/llvm-(\d+)/", path))
    }
    if versions:
        return versions[max(versions)]
    raise MissingToolError(f"{name} is missing. {_LLVM_ADVICE}")


def disassemble_text(image: bytes) -> str:
    """The listing of all executable sections of a gfx942 ELF image.

    Raises:
      MissingToolError: llvm-objdump is not installed, or knows no gfx942.
    """
    tool = find_llvm_tool("llvm-objdump")
    with tempfile.TemporaryDirectory(prefix="jaxfp8-") as folder:
        path = Path(folder, "kernel.hsaco")
        path.write_bytes(image)
        command = [tool, "-d", "--mcpu=gfx942", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        problem = (result.stderr.strip() or "it failed").splitlines()[-1]
        raise MissingToolError(f"{tool} cannot disassemble gfx942 ({problem}). {_LLVM_ADVICE}")
    return result.stdout


def disassemble(image: bytes) -> list[Instruction]:
    """All instructions in the executable sections of an ELF image, in address order.

    Raises:
      MissingToolError: as `disassemble_text`.
    """
    return parse_listing(disassemble_text(image))


_LINE = re.compile(r"^\t(?P<text>.*?)\s*// (?P<address>[0-9A-F]+): (?P<words>[0-9A-F ]+)")


def parse_listing(listing: str) -> list[Instruction]:
    """Parse `llvm-objdump -d` output."""
    instructions = []
    for line in listing.splitlines():
        if match := _LINE.match(line):
            words = tuple(int(word, 16) for word in match["words"].split())
            instructions.append(_parse_instruction(int(match["address"], 16), match["text"], words))
    return instructions


_ENCODING_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp)$")


def _parse_instruction(address: int, text: str, words: tuple[int, ...]) -> Instruction:
    mnemonic, _, rest = text.partition(" ")
    operands: list[Operand] = []
    modifiers: dict[str, str] = {}
    if mnemonic not in ("s_waitcnt", ".long"):
        for position, field in enumerate(_split(rest, ",")):
            tokens = _split(field, " ")
            # A first field that is only a modifier, as in `buffer_wbl2 sc1`, has no operand.
            if tokens and not (position == 0 and _is_modifier(tokens[0])):
                operands.append(_parse_operand(tokens.pop(0)))
            for token in tokens:
                name, _, value = token.partition(":")
                modifiers[name] = value
    opcode = _ENCODING_SUFFIX.sub("", mnemonic)
    return Instruction(
        address, 4 * len(words), mnemonic, opcode, tuple(operands), modifiers, words, text
    )


def _split(text: str, separator: str) -> list[str]:
    """Split at separators that are outside brackets; drop empty parts."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


_REGISTER = re.compile(
    r"^(?P<file>v|a|s|ttmp)(?:(?P<index>\d+)|\[(?P<first>\d+)(?::(?P<last>\d+))?\])$"
)
_INTEGER = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"^-?\d+\.\d+(e[-+]?\d+)?$")
_CACHE_FLAGS = ("sc0", "sc1", "nt")

_SPECIAL_REGISTERS = {
    "flat_scratch": Register("s", 102, 2),
    "flat_scratch_lo": Register("s", 102, 1),
    "flat_scratch_hi": Register("s", 103, 1),
    "xnack_mask": Register("s", 104, 2),
    "vcc": Register("s", 106, 2),
    "vcc_lo": Register("s", 106, 1),
    "vcc_hi": Register("s", 107, 1),
    "m0": Register("s", 124, 1),
    "exec": Register("s", 126, 2),
    "exec_lo": Register("s", 126, 1),
    "exec_hi": Register("s", 127, 1),
}
_FIRST_TTMP = 108


def _is_modifier(token: str) -> bool:
    return token in _CACHE_FLAGS or re.match(r"^[a-z_0-9]+:", token) is not None


def _parse_operand(text: str) -> Operand:
    absolute = negate = sign_extend = False
    if match := re.match(r"^sext\((.*)\)$", text):
        sign_extend, text = True, match[1]
    if match := re.match(r"^-(\||v|a|s|neg|abs|vcc|exec|m0)", text):
        negate, text = True, text[1:]
    if match := re.match(r"^neg\((.*)\)$", text):
        negate, text = True, match[1]
    if match := re.match(r"^(?:\|(.*)\||abs\((.*)\))$", text):
        absolute, text = True, match[1] or match[2]
    return Operand(_parse_value(text), absolute, negate, sign_extend)


def _parse_value(text: str) -> Register | Immediate | Symbolic:
    if match := _REGISTER.match(text):
        first = int(match["index"] or match["first"])
        last = int(match["last"] or first)
        if match["file"] == "ttmp":
            return Register("s", _FIRST_TTMP + first, last - first + 1)
        return Register(match["file"], first, last - first + 1)
    if text in _SPECIAL_REGISTERS:
        return _SPECIAL_REGISTERS[text]
    if _INTEGER.match(text):
        return Immediate(int(text, 0), is_literal="0x" in text)
    if _FLOAT.match(text):
        return Immediate(float(text))
    return Symbolic(text)
