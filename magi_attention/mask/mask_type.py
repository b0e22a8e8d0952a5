"""AttnMaskType: the four ways a caller describes one (q_range, k_range) pair. Knows nothing of bands or slices."""

from __future__ import annotations

import enum

from magi_attention.arguments import integer, shown
from magi_attention.errors import InputError


class AttnMaskType(enum.Enum):
    """Which keys of its k_range a query of its q_range sees; `AttnMaskType("causal")` builds one from its name.

    FULL: all of them. CAUSAL: aligned bottom-right, the last query sees up to the last key. INVCAUSAL: aligned top-left, the
    first query sees from the first key on. BICAUSAL: both bounds, a diagonal band (empty when there are more queries than keys).

    Attributes:
        int_type: the number 0..3 that arrays of types hold.
    """

    FULL = "full"
    CAUSAL = "causal"
    INVCAUSAL = "inv_causal"
    BICAUSAL = "bi_causal"

    def __init__(self, _: str) -> None:
        self.int_type = len(type(self).__members__)  # the order above is the order of the ints

    @classmethod
    def _missing_(cls, value: object) -> AttnMaskType:
        raise InputError(f"attn_mask_type={shown(value)} is unknown; pass one of {', '.join(kind.value for kind in cls)}")

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """0 FULL, 1 CAUSAL, 2 INVCAUSAL, 3 BICAUSAL.

        Raises:
            InputError: another number.
        """
        rule = "is unknown; pass 0 (full), 1 (causal), 2 (inv_causal) or 3 (bi_causal)"
        number = integer("attn_type", int_type, rule)
        for kind in cls:
            if kind.int_type == number:
                return kind
        raise InputError(f"attn_type={number} {rule}")

    def to_int_type(self) -> int:
        """0 FULL, 1 CAUSAL, 2 INVCAUSAL, 3 BICAUSAL."""
        return self.int_type
