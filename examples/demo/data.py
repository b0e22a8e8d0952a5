"""Real text as packed byte sequences: files of a folder become documents, documents fill sequences of a fixed length."""

from __future__ import annotations

import random
import sysconfig
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
    """Text files under `folder` in a fixed order, third-party packages left out."""
    if not folder.is_dir():
        raise SystemExit(f"--data {folder}: no such folder; give one that holds text files ({', '.join(TEXT_SUFFIXES)})")
    found = sorted(p for p in folder.rglob("*") if p.suffix in TEXT_SUFFIXES and "site-packages" not in p.parts and p.is_file())
    if not found:
        raise SystemExit(f"--data {folder}: no text file below it; looked for {', '.join(TEXT_SUFFIXES)}")
    return found


def packs(folder: Path, num_packs: int, seq_len: int, seed: int = 0) -> list[Pack]:
    """`num_packs` sequences of exactly `seq_len` tokens. A document that does not fit is continued in the next sequence.

    A folder with too little text is read again from the start.
    """
    files = text_files(folder)
    random.Random(seed).shuffle(files)
    result: list[Pack] = []
    tokens = bytearray()
    cu_seqlens = [0]
    file_idx = 0
    empty_in_a_row = 0
    rest = b""
    while len(result) < num_packs:
        if not rest:
            rest = files[file_idx % len(files)].read_bytes()
            file_idx += 1
            empty_in_a_row = 0 if rest else empty_in_a_row + 1
            if empty_in_a_row > len(files):
                raise SystemExit(f"--data {folder}: every text file below it is empty")
            continue
        taken, rest = rest[: seq_len - len(tokens)], rest[seq_len - len(tokens) :]
        tokens += taken
        cu_seqlens.append(len(tokens))
        if len(tokens) == seq_len:
            result.append(Pack(torch.tensor(list(tokens), dtype=torch.int64), cu_seqlens))
            tokens, cu_seqlens = bytearray(), [0]
    return result
