"""Imported first by what cannot do without torch: says in one sentence how to get it. Imports no torch itself."""

from __future__ import annotations

from magi_attention._build_record import read_record, requirement_of, torch_here
from magi_attention.errors import InstallError

if torch_here() is None:
    pin = read_record().get("torch")
    built_for = f"torch {pin}" if pin else "torch"
    raise InstallError(f"magi_attention was built for {built_for}, and there is none here; python -m pip install {requirement_of(pin)}")
