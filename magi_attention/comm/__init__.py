"""GroupCast and GroupReduce over torch.distributed. Imports errors and the plan records; knows no masks, kernels or planning."""

from magi_attention.comm.agree import agree, announce_refusal
from magi_attention.comm.cast import group_cast
from magi_attention.comm.gather import gather_rows, scatter_reduce_rows
from magi_attention.comm.group import SINGLE, CommGroup, comm_group
from magi_attention.comm.reduce import group_reduce, group_reduce_lse
from magi_attention.comm.work import Work

__all__ = [
    "SINGLE",
    "CommGroup",
    "Work",
    "agree",
    "announce_refusal",
    "comm_group",
    "gather_rows",
    "group_cast",
    "group_reduce",
    "group_reduce_lse",
    "scatter_reduce_rows",
]
