"""Do all ranks hold the same thing? If not, every rank raises the same InputError instead of hanging later. Knows only digests."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch

from magi_attention import env
from magi_attention.comm.group import CommGroup, comm_group
from magi_attention.comm.work import CallInfo, Transfer
from magi_attention.errors import InputError, UnsupportedError

_TEXT_BYTES = 1024  # of each rank's description; fixed, so that no sizes need to travel


def agree(group: object, label: str, digest_bytes: bytes, describe: str | Callable[[], str], *, timeout_s: float | None = None) -> None:
    """Compare a digest over the ranks of the group. Collective; costs one small exchange (a second one only on disagreement).

    Args:
        group: a CommGroup, or anything comm_group takes.
        label: what is compared, e.g. "mask of the key".
        digest_bytes: any bytes that are equal exactly when the ranks agree.
        describe: this rank's value in words for the message, or a function that makes it on disagreement.
        timeout_s: as in group_cast.

    Raises:
        InputError: the ranks differ; the same text on every rank, with which ranks hold what.
        CommError: a peer was lost or the time ran out.
    """
    cp_group = comm_group(group)
    if cp_group.is_single:
        return
    info = CallInfo("agree", label, timeout_s)
    ours = hashlib.sha256(label.encode() + b"\0" + digest_bytes).digest()
    digests = _all_gather_bytes(cp_group, ours, info)
    if len(set(digests)) == 1:
        return
    text = f"{label}: {describe() if callable(describe) else describe}".encode()[:_TEXT_BYTES]
    texts = _all_gather_bytes(cp_group, text.ljust(_TEXT_BYTES, b"\0"), info)
    holders: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, pair in enumerate(zip(digests, texts, strict=True)):
        holders.setdefault(pair, []).append(rank)
    lines = [
        f"  - rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text.rstrip(bytes(1)).decode(errors='replace')}"
        for (_, text), ranks in holders.items()
    ]
    raise InputError(
        f"the ranks of the group (global ranks {list(cp_group.members)}) disagree; every rank must pass the same:\n" + "\n".join(lines)
    )


@contextlib.contextmanager
def announce_refusal(group: CommGroup, label: str) -> Iterator[None]:
    """In check mode, a refusal (InputError, UnsupportedError) inside is told to the other ranks, which would else wait in `agree`.

    For checks that come before an `agree` of all ranks. Ranks that refuse for the same reason raise their own error; otherwise every
    rank raises the same one, which quotes the refusal. Outside of check mode nothing is sent.
    """
    try:
        yield
    except (InputError, UnsupportedError) as refusal:
        if env.check_enabled():
            text = f"refused: {refusal}"
            agree(group, label, text.encode(), text)
        raise


def _all_gather_bytes(group: CommGroup, ours: bytes, info: CallInfo) -> list[bytes]:
    """`ours` of every rank, all of one length. Blocks the host."""
    device = torch.device("cpu") if "cpu" in group.backends else torch.device("cuda", torch.cuda.current_device())
    send = torch.frombuffer(bytearray(ours * group.size), dtype=torch.uint8).to(device)
    recv = torch.empty_like(send)
    sizes = [len(ours)] * group.size
    Transfer(recv, send, sizes, sizes, group.flat, info).wait()
    received = bytes(recv.cpu().tolist())
    return [received[first : first + len(ours)] for first in range(0, len(received), len(ours))]
