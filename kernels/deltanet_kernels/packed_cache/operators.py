"""The operators on a packed cache."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.packed_cache.calls import PackedAppendCall, PackedAttentionCall, PackGroupsCall
from deltanet_kernels.packed_cache.checks import check_pack_groups, check_packed_append, check_packed_attention
from deltanet_kernels.packed_cache.reference import (
    torch_pack_groups,
    torch_packed_append_,
    torch_packed_attention,
)


def _attention():
    from deltanet_kernels.packed_cache.launches import packed_attention_triton

    return packed_attention_triton


def _append():
    from deltanet_kernels.packed_cache.launches import packed_append_triton_

    return packed_append_triton_


def _pack():
    from deltanet_kernels.packed_cache.launches import pack_groups_triton

    return pack_groups_triton


packed_attention = Operator(
    "packed_attention",
    PackedAttentionCall,
    check=check_packed_attention,
    cpu=torch_packed_attention,
    triton=_attention,
)
packed_append_ = Operator(
    "packed_append_", PackedAppendCall, check=check_packed_append, cpu=torch_packed_append_, triton=_append
)
pack_groups = Operator("pack_groups", PackGroupsCall, check=check_pack_groups, cpu=torch_pack_groups, triton=_pack)
