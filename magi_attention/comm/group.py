"""The context-parallel group as the library sees it. Knows nothing of masks, plans or tensors.

Process groups are held weakly: a key kept alive after dist.destroy_process_group keeps no connection open.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from magi_attention.errors import InputError

_NAME = "cp_group_or_mesh"
_serials = itertools.count(1)
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, CommGroup] = weakref.WeakKeyDictionary()
_known_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[CommGroup]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class CommGroup:
    """One context-parallel group. Equal groups are the same object in a process; `identity` is hashable and never reused.

    Attributes:
        rank, size: cp_rank and cp_size.
        members: global rank of each group rank; (0,) when torch.distributed is not initialised.
        num_nodes: rows of a 2-D mesh (rank = node * ranks per node + index in node); 1 for a flat group.
        backends: device type -> torch.distributed backend, e.g. {"cpu": "gloo", "cuda": "nccl"}; empty for one rank.
        identity: stands for this group in keys and caches of this process. Not comparable between processes.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    num_nodes: int = 1
    backends: dict[str, str] = field(default_factory=dict)
    identity: int = 0
    _flat: weakref.ref[dist.ProcessGroup] | None = None
    _inter: weakref.ref[dist.ProcessGroup] | None = None
    _intra: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def is_single(self) -> bool:
        """True when there is nobody to talk to; then there is no communicator either."""
        return self.size == 1

    @property
    def is_two_level(self) -> bool:
        """True for a 2-D mesh with more than one node and more than one rank in a node."""
        return self.num_nodes > 1

    @property
    def flat(self) -> dist.ProcessGroup:
        """All ranks."""
        return self._alive(self._flat)

    @property
    def inter(self) -> dist.ProcessGroup:
        """The ranks with our index, one per node, in node order."""
        return self._alive(self._inter)

    @property
    def intra(self) -> dist.ProcessGroup:
        """The ranks of our node."""
        return self._alive(self._intra)

    def backend_for(self, device: torch.device) -> str:
        """Backend that moves tensors of `device`.

        Raises:
            InputError: the group has none for this device type.
        """
        if device.type not in self.backends:
            served = ", ".join(f"{name} ({backend})" for name, backend in self.backends.items())
            raise InputError(
                f"tensor on {device}: the group of global ranks {list(self.members)} only serves {served}; move the tensor or make "
                "the group with a backend for this device (gloo for cpu, nccl for cuda)"
            )
        return self.backends[device.type]

    def _alive(self, reference: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup:
        group = reference() if reference is not None else None
        if group is None:
            raise InputError(
                f"cp group of global ranks {list(self.members)} was destroyed or has no communicator; build the key again on a live group"
            )
        return group


SINGLE = CommGroup(rank=0, size=1, members=(0,))


def comm_group(group_or_mesh: Any) -> CommGroup:
    """The record of a user's group. The same group or mesh gives the same record.

    Args:
        group_or_mesh: a CommGroup (returned as it is), a ProcessGroup, a 1-D DeviceMesh, a 2-D DeviceMesh (inter, intra), or
            None for the default group. Without torch.distributed initialised None is the only choice and gives one rank.
            The first call with a 2-D mesh that is not the whole job is collective over the mesh: it makes the flat group.

    Raises:
        InputError: wrong type, a group this rank is not in, a mesh with more than two dimensions, or a destroyed group.
    """
    if isinstance(group_or_mesh, CommGroup):
        return group_or_mesh
    is_started = dist.is_available() and dist.is_initialized()
    if group_or_mesh is None and not is_started:
        return SINGLE
    if not is_started:
        raise InputError(
            f"{_NAME}={group_or_mesh!r} but torch.distributed is not initialised; call torch.distributed.init_process_group first, "
            "or pass None to run on one rank"
        )
    if group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(f"{_NAME} does not contain this process (global rank {dist.get_rank()}); pass the group this rank is in")
    if group_or_mesh is None:
        return _from_process_group(_default_group())
    if isinstance(group_or_mesh, dist.ProcessGroup):
        return _from_process_group(group_or_mesh)
    if isinstance(group_or_mesh, DeviceMesh):
        return _from_mesh(group_or_mesh)
    raise InputError(
        f"{_NAME}={group_or_mesh!r} is a {type(group_or_mesh).__name__}; it must be a torch.distributed.ProcessGroup, a DeviceMesh of one "
        "or two dimensions, or None"
    )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _from_process_group(group: dist.ProcessGroup) -> CommGroup:
    try:
        rank = dist.get_rank(group)  # also tells a destroyed group from a live one
        known = _known.get(group)
        if known is not None:
            return known
        members = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"{_NAME} is a process group that torch.distributed no longer knows; pass a live one") from error
    if rank < 0:
        raise InputError(f"{_NAME} has global ranks {list(members)}, not this process (global rank {dist.get_rank()}); pass its own group")
    record = CommGroup(
        rank=rank,
        size=len(members),
        members=members,
        backends=_backends_of(group) if len(members) > 1 else {},
        identity=next(_serials),
        _flat=weakref.ref(group) if len(members) > 1 else None,
    )
    _known[group] = record
    return record


def _from_mesh(mesh: DeviceMesh) -> CommGroup:
    if mesh.get_coordinate() is None:
        raise InputError(f"{_NAME}={mesh} does not contain this process (global rank {dist.get_rank()}); pass the mesh this rank is in")
    if mesh.ndim not in (1, 2):
        raise InputError(
            f"{_NAME}={mesh} has {mesh.ndim} dimensions; it must have one, or two (inter, intra): slice it, e.g. mesh['inter', 'intra']"
        )
    if mesh.ndim == 1:
        return _from_process_group(mesh.get_group())
    inter, intra = mesh.get_group(0), mesh.get_group(1)
    num_nodes, node_size = inter.size(), intra.size()
    if num_nodes == 1 or node_size == 1:
        return _from_process_group(intra if num_nodes == 1 else inter)
    for record in _known_meshes.get(inter, []):
        if record._intra is not None and record._intra() is intra:
            return record
    flat = _from_process_group(_flat_group(mesh))
    record = CommGroup(
        rank=flat.rank,
        size=flat.size,
        members=flat.members,
        num_nodes=num_nodes,
        backends=flat.backends,
        identity=next(_serials),
        _flat=flat._flat,
        _inter=weakref.ref(inter),
        _intra=weakref.ref(intra),
    )
    _known_meshes.setdefault(inter, []).append(record)
    return record


def _flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    members = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    world = _default_group()
    if members == dist.get_process_group_ranks(world):
        return world
    if members != sorted(members):
        raise InputError(
            f"{_NAME}={mesh} lists global ranks in the order {members}; flattened, a 2-D mesh must have ascending global ranks, since "
            "torch.distributed sorts the members of a group"
        )
    # Only the members call: the rest of the job need not know that this mesh exists.
    group = dist.new_group(members, backend=dist.get_backend(mesh.get_group(1)), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """{"cpu": "gloo", "cuda": "nccl"} from torch's "cpu:gloo,cuda:nccl"."""
    pairs = (entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(",") if ":" in entry)
    return {device.strip(): backend.strip() for device, backend in pairs}
