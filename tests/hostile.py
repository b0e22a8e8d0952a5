"""Values that nobody should pass, and the rule for what a public function may do with them. Knows no function."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magi_attention.errors import InputError, UnsupportedError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # quantisation is deprecated in torch, and people still have such tensors
    _QUANTISED = torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.qint8)

HOSTILE: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "fraction": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "-1": -1,
    "0": 0,
    "2**31": 2**31,
    "2**63": 2**63,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "complex": 1j,
    "text": "abc",
    "no text": "",
    "bytes": b"ab",
    "set": {1, 2},
    "dict": {0: 1, 1: 2},
    "object": object(),
    "class": int,
    "function": len,
    "numpy int": np.int64(2),
    "numpy uint": np.uint64(3),
    "numpy float": np.float32(2.0),
    "numpy bool": np.bool_(True),
    "array without dims": np.array(2),
    "tensor without dims": torch.tensor(2),
    "learnable number": torch.tensor(2.0, requires_grad=True),
    "no list": [],
    "empty row": [[]],
    "list of None": [None],
    "ragged": [[0, 1], [2]],
    "list of text": ["a", "b"],
    "list of bytes": [b"ab"],
    "list of sets": [{0, 4}],
    "list of dicts": [{0: 1, 4: 2}],
    "nested": [[[0, 1]]],
    "deque": collections.deque([0, 1]),
    "bool array": np.array([[True, False]]),
    "uint array past int64": np.array([[0, 2**63 + 5]], np.uint64),
    "object array": np.array([[0, None]], object),
    "float array": np.array([[0.0, 4.0]]),
    "strided array": np.arange(16).reshape(4, 4)[:, ::2],
    "structured array": np.zeros(2, [("a", int), ("b", int)]),
    "tensor without memory": torch.empty(2, 2, 2, device="meta"),
    "integer without memory": torch.empty((), device="meta", dtype=torch.int64),
    "bfloat16 tensor": torch.zeros(1, 2, dtype=torch.bfloat16),
    "complex tensor": torch.zeros(1, 2, dtype=torch.complex64),
    "sparse tensor": torch.zeros(2, 2).to_sparse(),
    "quantised tensor": _QUANTISED,
    "nested tensor": torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
    "empty tensor": torch.zeros(0, 2),
    "int tensor of three dims": torch.zeros(8, 2, 4, dtype=torch.int64),
    "tensor that requires grad": torch.zeros(8, 2, 4, requires_grad=True),
}


def raw_errors(function: Callable[..., Any], good: dict[str, Any], names: tuple[str, ...] = ()) -> list[str]:
    """One line for each hostile value of each argument at which `function` raised anything but our errors, or said nothing useful.

    Args:
        good: arguments that work; each of them (or those in `names`) is replaced in turn.
    """
    wrong = []
    for argument in names or tuple(good):
        for label, value in HOSTILE.items():
            try:
                function(**{**good, argument: value})
            except (InputError, UnsupportedError) as error:
                if len(str(error)) < 20:
                    wrong.append(f"{argument}={label}: the message {str(error)!r} helps nobody")
            except Exception as error:
                wrong.append(f"{argument}={label}: {type(error).__name__}: {str(error)[:100]}")
    return wrong
