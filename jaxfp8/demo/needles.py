# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Needles: sentences hidden in the context, and the questions that ask for them at its end.

A needle says `Behind door TAG: WORD`, TAG and WORD being random letters. The new tokens end with
a question for each, the same sentence with blanks in place of the word. The layer reads the word
back, a letter a blank, from what its attention finds (jaxfp8/demo/layer.py says how).
"""

from __future__ import annotations

import dataclasses

import numpy as np

DEPTHS = (10, 50, 90)
"""Where the needles lie, in percent of the context."""

_TAG_LETTERS = _WORD_LETTERS = 8
_PHRASE = "\nBehind door {tag}: "
_PHRASE_LENGTH = len(_PHRASE.format(tag="_" * _TAG_LETTERS))
_NEEDLE_LENGTH = _PHRASE_LENGTH + _WORD_LETTERS + 1

# The needles must fit between the depths, the questions into the new tokens.
MIN_CONTEXT = 4 * _NEEDLE_LENGTH
MIN_NEW_TOKENS = len(DEPTHS) * _NEEDLE_LENGTH


@dataclasses.dataclass(frozen=True)
class Needle:
    """A word hidden in the context, and where the answer is read.

    Attributes:
      depth: percent of the context before it.
      word: what is to be read.
      queries: the new tokens (counted from the first of them) that read its letters, one each:
        those just before the blanks, as a language model predicts the next token.
    """

    depth: int
    word: bytes
    queries: range


@dataclasses.dataclass(frozen=True)
class Document:
    """A context with needles, and new tokens that ask for them.

    Attributes:
      tokens: uint8 [context + new_tokens].
      needles: what is hidden, by depth.
    """

    tokens: np.ndarray
    needles: tuple[Needle, ...]


def plant(text: bytes, context: int, new_tokens: int, rng: np.random.Generator) -> Document:
    """Hides needles in the first `context` bytes of a text, and ends the new tokens with questions.

    Args:
      text: at least context + new_tokens bytes.
      context: number of cached tokens, at least MIN_CONTEXT.
      new_tokens: number of new tokens, at least MIN_NEW_TOKENS.
      rng: draws the letters.
    """
    tokens = bytearray(text[: context + new_tokens])
    needles = []
    for i, depth in enumerate(DEPTHS):
        phrase = _new_phrase(text, rng)
        word = _letters(_WORD_LETTERS, rng)
        _write(tokens, (context - _NEEDLE_LENGTH) * depth // 100, phrase + word)
        question = context + new_tokens - (len(DEPTHS) - i) * _NEEDLE_LENGTH
        _write(tokens, question, phrase + b"_" * _WORD_LETTERS)
        first = question - context + _PHRASE_LENGTH - 1
        needles.append(Needle(depth, word, range(first, first + _WORD_LETTERS)))
    return Document(np.frombuffer(bytes(tokens), np.uint8), tuple(needles))


def _write(tokens: bytearray, at: int, line: bytes) -> None:
    tokens[at : at + _NEEDLE_LENGTH] = line + b"\n"


def _new_phrase(text: bytes, rng: np.random.Generator) -> bytes:
    while True:
        tag = _letters(_TAG_LETTERS, rng)
        if tag not in text:
            return _PHRASE.format(tag=tag.decode()).encode()


def _letters(count: int, rng: np.random.Generator) -> bytes:
    return bytes(rng.integers(ord("A"), ord("Z") + 1, count, dtype=np.uint8))
