"""Real text as packed byte sequences: files of a folder become documents, documents fill sequences of a fixed length."""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB_SIZE = 256
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".json", ".html", ".csv", ".log", ".tex")


@dataclass(frozen=True)
class Pack:
    """One training sequence.

    Attributes:
        tokens: int64 [T], bytes of the documents one after another.
        cu_seqlens: document borders, starts with 0, ends with T.
    """

    tokens: torch.Tensor
    cu_seqlens: list[int]


def default_folder() -> Path:
    """The Python standard library of this machine: real text that is always there."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(folder: Path) -> list[Path]:
    """`folder` itself when it is a file, else the text files under it in a fixed order, third-party packages left out."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise SystemExit(f"--data {folder}: no such file or folder; give a text file, or a folder of them ({', '.join(TEXT_SUFFIXES)})")
    found = sorted(p for p in folder.rglob("*") if p.suffix in TEXT_SUFFIXES and "site-packages" not in p.parts and p.is_file())
    if not found:
        raise SystemExit(f"--data {folder}: no text file below it; looked for {', '.join(TEXT_SUFFIXES)}")
    return found


def documents(folder: Path, max_document: int, seed: int) -> Iterator[bytes]:
    """Documents without end: pass after pass over the shuffled files, in pass p the p-th `max_document` bytes of each."""
    files = text_files(folder)
    random.Random(seed).shuffle(files)
    for piece in itertools.count():
        is_used_up = True
        for file in files:
            with file.open("rb") as stream:
                stream.seek(piece * max_document)
                document = stream.read(max_document)
            if document:
                is_used_up = False
                yield document
        if is_used_up:
            if piece == 0:
                raise SystemExit(f"--data {folder}: every text file below it is empty")
            yield from documents(folder, max_document, seed + 1)


def packs(folder: Path, num_packs: int, seq_len: int, seed: int = 0) -> list[Pack]:
    """`num_packs` sequences of exactly `seq_len` tokens; no document takes more than half of one.

    A document that does not fit is continued in the next sequence. A folder with too little text is read again from the start.
    """
    result: list[Pack] = []
    tokens, cu_seqlens = bytearray(), [0]
    for document in documents(folder, max(1, seq_len // 2), seed):
        rest = document
        while rest:
            num_free = seq_len - len(tokens)
            tokens += rest[:num_free]
            rest = rest[num_free:]
            cu_seqlens.append(len(tokens))
            if len(tokens) == seq_len:
                result.append(Pack(torch.tensor(list(tokens), dtype=torch.int64), cu_seqlens))
                tokens, cu_seqlens = bytearray(), [0]
            if len(result) == num_packs:
                return result
    raise AssertionError("documents() never ends")
