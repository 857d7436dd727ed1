//! Layouts and invariants as messages, and back.

use crate::error::Result;
use crate::layout::{
    Coordinates, Group, GroupInvariants, GroupKind, Invariants, Layout, Ordinals, Role, Section,
    Strides, Tensor, View, ViewInvariants,
};
use crate::wire;
use crate::{bail, err};

pub(super) fn invariants_message(inv: &Invariants) -> wire::Invariants {
    wire::Invariants {
        fingerprint: inv.fingerprint.clone(),
        groups: inv
            .groups
            .iter()
            .map(|g| wire::InvariantGroup {
                kind: u32::from(g.state),
                layers: g.layers.clone(),
                views: g
                    .views
                    .iter()
                    .map(|v| wire::InvariantView {
                        role: v.role as u32,
                        element_bits: v.element_bits,
                        bytes_per_head: v.bytes_per_head,
                        total_heads: v.total_heads,
                        sections: sections_message(&v.sections),
                    })
                    .collect(),
            })
            .collect(),
    }
}

pub(super) fn invariants(m: &wire::Invariants) -> Result<Invariants> {
    Ok(Invariants {
        fingerprint: m.fingerprint.clone(),
        groups: m
            .groups
            .iter()
            .map(|g| {
                Ok(GroupInvariants {
                    state: g.kind == 1,
                    layers: g.layers.clone(),
                    views: g
                        .views
                        .iter()
                        .map(|v| {
                            Ok(ViewInvariants {
                                role: role(v.role)?,
                                element_bits: v.element_bits,
                                bytes_per_head: v.bytes_per_head,
                                total_heads: v.total_heads,
                                sections: sections(&v.sections),
                            })
                        })
                        .collect::<Result<_>>()?,
                })
            })
            .collect::<Result<_>>()?,
    })
}

fn role(code: u32) -> Result<Role> {
    Role::from_code(code).ok_or_else(|| err!(KVF_ERR_INVALID_ARGUMENT, "role {code} is not known"))
}

fn sections_message(sections: &[Section]) -> Vec<wire::SectionMessage> {
    sections
        .iter()
        .map(|s| wire::SectionMessage {
            name: s.name.clone(),
            total: s.total,
        })
        .collect()
}

fn sections(messages: &[wire::SectionMessage]) -> Vec<Section> {
    messages
        .iter()
        .map(|s| Section {
            name: s.name.clone(),
            total: s.total,
        })
        .collect()
}

pub(super) fn layout_message(layout: &Layout) -> wire::LayoutMessage {
    let c = &layout.coordinates;
    wire::LayoutMessage {
        fingerprint: layout.fingerprint.clone(),
        coordinates: vec![
            c.global_rank,
            c.tp_rank,
            c.tp_size,
            c.pp_rank,
            c.pp_size,
            c.cp_rank,
            c.cp_size,
            c.dp_rank,
            c.dp_size,
        ],
        groups: layout.groups.iter().map(group_message).collect(),
    }
}

fn group_message(group: &Group) -> wire::GroupLayout {
    let (kind, tokens_per_block, window) = match group.kind {
        GroupKind::Paged {
            tokens_per_block,
            window,
        } => (0, tokens_per_block, window),
        GroupKind::State => (1, 0, 0),
    };
    wire::GroupLayout {
        kind,
        tokens_per_block,
        window,
        layers: group.layers.clone(),
        ordinal_offset: group.ordinals.offset,
        ordinal_stride: group.ordinals.stride,
        views: group
            .views
            .iter()
            .map(|v| wire::ViewLayout {
                role: v.role as u32,
                element_bits: v.element_bits,
                heads: v.heads,
                bytes_per_head: v.bytes_per_head,
                sharding: vec![v.shards, v.shard, v.replicas, v.replica],
                sections: sections_message(&v.sections),
                tensor_pools: v.tensors.iter().map(|t| t.pool).collect(),
                tensor_offsets: v.tensors.iter().map(|t| t.offset).collect(),
                slots: v.slots,
                strides: vec![
                    v.strides.slot,
                    v.strides.layer,
                    v.strides.token,
                    v.strides.head,
                ],
            })
            .collect(),
    }
}

pub(super) fn layout(m: &wire::LayoutMessage) -> Result<Layout> {
    let c = |i: usize| m.coordinates.get(i).copied().unwrap_or(0);
    Ok(Layout {
        fingerprint: m.fingerprint.clone(),
        coordinates: Coordinates {
            global_rank: c(0),
            tp_rank: c(1),
            tp_size: c(2),
            pp_rank: c(3),
            pp_size: c(4),
            cp_rank: c(5),
            cp_size: c(6),
            dp_rank: c(7),
            dp_size: c(8),
        },
        groups: m.groups.iter().map(group).collect::<Result<_>>()?,
    })
}

fn group(m: &wire::GroupLayout) -> Result<Group> {
    let kind = match m.kind {
        0 => GroupKind::Paged {
            tokens_per_block: m.tokens_per_block,
            window: m.window,
        },
        1 => GroupKind::State,
        other => bail!(KVF_ERR_INVALID_ARGUMENT, "group kind {other} is not known"),
    };
    Ok(Group {
        kind,
        layers: m.layers.clone(),
        ordinals: Ordinals {
            offset: m.ordinal_offset,
            stride: m.ordinal_stride,
        },
        views: m.views.iter().map(view).collect::<Result<_>>()?,
    })
}

fn view(m: &wire::ViewLayout) -> Result<View> {
    let (Ok(sharding), Ok(strides)) = (
        <[u32; 4]>::try_from(m.sharding.as_slice()),
        <[u64; 4]>::try_from(m.strides.as_slice()),
    ) else {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "a view without its shards or strides"
        );
    };
    if m.tensor_pools.len() != m.tensor_offsets.len() {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "a view with {} tensor pools and {} offsets",
            m.tensor_pools.len(),
            m.tensor_offsets.len()
        );
    }
    let tensors = m.tensor_pools.iter().zip(&m.tensor_offsets);
    Ok(View {
        role: role(m.role)?,
        element_bits: m.element_bits,
        heads: m.heads,
        bytes_per_head: m.bytes_per_head,
        shards: sharding[0],
        shard: sharding[1],
        replicas: sharding[2],
        replica: sharding[3],
        sections: sections(&m.sections),
        tensors: tensors
            .map(|(pool, offset)| Tensor {
                pool: *pool,
                offset: *offset,
            })
            .collect(),
        slots: m.slots,
        strides: Strides {
            slot: strides[0],
            layer: strides[1],
            token: strides[2],
            head: strides[3],
        },
    })
}
