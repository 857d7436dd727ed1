//! Layouts: what a rank holds, said explicitly. `docs/layouts.md` has pictures.

use std::ffi::c_char;
use std::sync::{Arc, Weak};

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::must_be_zero;
use super::handle::{Object, Shared, destroy};
use super::pool::kvf_pool;
use super::structs::{Out, abi_struct, read, read_array, read_plain, read_text, view};
use crate::bail;
use crate::error::{Result, Status, kvf_status};
use crate::layout::{
    Coordinates, Group, GroupKind, Layout, Ordinals, Role, Section, Strides, Tensor, View,
};

/// Slots are blocks of tokens; a request has many.
pub const KVF_GROUP_PAGED: u32 = 1;
/// Slots are whole recurrent states; a request has one.
pub const KVF_GROUP_STATE: u32 = 2;

/// Attention keys.
pub const KVF_ROLE_KEY: u32 = 1;
/// Attention values.
pub const KVF_ROLE_VALUE: u32 = 2;
/// Keys and values in one tensor that is never split between them.
pub const KVF_ROLE_KEY_VALUE: u32 = 3;
/// Compressed latent (MLA).
pub const KVF_ROLE_LATENT: u32 = 4;
/// Sparse-attention index keys.
pub const KVF_ROLE_INDEX_KEY: u32 = 5;
/// Quantisation scales.
pub const KVF_ROLE_SCALE: u32 = 6;
/// Convolution state.
pub const KVF_ROLE_CONV: u32 = 7;
/// Recurrent (SSM) state.
pub const KVF_ROLE_RECURRENT: u32 = 8;
/// Bytes that only the engine understands.
pub const KVF_ROLE_OPAQUE: u32 = 9;

const _: () = {
    assert!(Role::Key as u32 == KVF_ROLE_KEY && Role::Value as u32 == KVF_ROLE_VALUE);
    assert!(Role::KeyValue as u32 == KVF_ROLE_KEY_VALUE);
    assert!(Role::Latent as u32 == KVF_ROLE_LATENT);
    assert!(Role::IndexKey as u32 == KVF_ROLE_INDEX_KEY);
    assert!(Role::Scale as u32 == KVF_ROLE_SCALE && Role::Conv as u32 == KVF_ROLE_CONV);
    assert!(Role::Recurrent as u32 == KVF_ROLE_RECURRENT);
    assert!(Role::Opaque as u32 == KVF_ROLE_OPAQUE);
};

/// What one rank holds. Immutable; any thread may use it.
pub struct kvf_layout(pub(crate) Object<RankLayout>);

/// A layout and the agent whose pools it names.
#[derive(Debug)]
pub(crate) struct RankLayout {
    layout: Layout,
    pools_of: Option<Weak<Shared>>,
}

/// Everything one rank holds. Only `global_rank` and `dp_rank` decide anything; the other
/// coordinates appear in messages.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_layout_desc {
    /// `sizeof(kvf_layout_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Unique in the engine.
    pub global_rank: u32,
    /// Tensor-parallel index.
    pub tp_rank: u32,
    /// Tensor-parallel size; 0 = 1, as for all sizes here.
    pub tp_size: u32,
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Number of pipeline stages.
    pub pp_size: u32,
    /// Context-parallel index.
    pub cp_rank: u32,
    /// Context-parallel size.
    pub cp_size: u32,
    /// Attention-data-parallel index.
    pub dp_rank: u32,
    /// Attention-data-parallel size.
    pub dp_size: u32,
    /// Layer groups; the index is the group's id and must mean the same on both sides. A rank
    /// without a layer of a group lists it with no layers.
    pub groups: *const kvf_group_desc,
    /// `sizeof(kvf_group_desc)`.
    pub groups_elem_size: usize,
    /// Elements of `groups`, at least 1.
    pub num_groups: usize,
}
abi_struct!(head kvf_layout_desc {
    struct_size, abi_version, global_rank, tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size,
    dp_rank, dp_size, groups, groups_elem_size, num_groups,
});

/// Layers that share one block table (KVF_GROUP_PAGED) or one state slot (KVF_GROUP_STATE).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_group_desc {
    /// KVF_GROUP_PAGED or KVF_GROUP_STATE.
    pub kind: u32,
    /// Tokens in one block, at least 1; of a state group 0.
    pub tokens_per_block: u32,
    /// Live tokens of a sliding window; 0 = all tokens are kept. Of a state group 0.
    pub window: u32,
    /// First block ordinal of this rank (context parallelism), below `ordinal_stride`.
    pub ordinal_offset: u32,
    /// Distance between this rank's block ordinals; 0 = 1 (all blocks).
    pub ordinal_stride: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Global layer ids in local order.
    pub layers: *const u32,
    /// Elements of `layers`; 0 = this rank has none of the group's layers.
    pub num_layers: usize,
    /// One view per role.
    pub views: *const kvf_view_desc,
    /// `sizeof(kvf_view_desc)`.
    pub views_elem_size: usize,
    /// Elements of `views`.
    pub num_views: usize,
}
abi_struct!(elem kvf_group_desc {
    kind, tokens_per_block, window, ordinal_offset, ordinal_stride, reserved, layers, num_layers,
    views, views_elem_size, num_views,
});

/// One role's bytes in a group.
///
/// The `bytes_per_head` contiguous bytes of a head lie at `tensor(layer) + slot * slot_stride +
/// layer * layer_stride + token * token_stride + head * head_stride`, all local indices from 0;
/// with one tensor per layer `layer * layer_stride` is left out, in state groups
/// `token * token_stride`. So [2,L,B,T,H,d], [B,2,L,H,T,d], NHD, HND and a tensor per layer are
/// all just strides.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_view_desc {
    /// KVF_ROLE_KEY ..., unique in the group.
    pub role: u32,
    /// Bits of one element, 4 to 32; compared with the other side, never used for addresses.
    pub element_bits: u32,
    /// Heads of this rank. Of a view with sections: channels of this rank over all sections.
    pub heads: u32,
    /// Number of slots.
    pub slots: u32,
    /// Contiguous bytes of one head of one token (state group: of one slot).
    pub bytes_per_head: u64,
    /// Into how many shards the heads are split; 0 = 1.
    pub shards: u32,
    /// Which of them this rank holds.
    pub shard: u32,
    /// How many ranks hold the same shard; 0 = 1.
    pub replicas: u32,
    /// Which of them this rank is.
    pub replica: u32,
    /// Packed channel sections, each split over the shards by itself; NULL = none.
    pub sections: *const kvf_section_desc,
    /// `sizeof(kvf_section_desc)`.
    pub sections_elem_size: usize,
    /// Elements of `sections`.
    pub num_sections: usize,
    /// One tensor for all layers, or one per layer of this rank.
    pub tensors: *const kvf_tensor_desc,
    /// `sizeof(kvf_tensor_desc)`.
    pub tensors_elem_size: usize,
    /// Elements of `tensors`: 1 or the group's `num_layers`.
    pub num_tensors: usize,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Bytes from layer to layer; 0 with one tensor per layer.
    pub layer_stride: u64,
    /// Bytes from token to token in a block; of a state group 0.
    pub token_stride: u64,
    /// Bytes from head to head.
    pub head_stride: u64,
}
abi_struct!(elem kvf_view_desc {
    role, element_bits, heads, slots, bytes_per_head, shards, shard, replicas, replica, sections,
    sections_elem_size, num_sections, tensors, tensors_elem_size, num_tensors, slot_stride,
    layer_stride, token_stride, head_stride,
});

/// A packed part of the channel axis, such as x, B and C of Mamba-2 or q, k and v.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_section_desc {
    /// Equal on both sides; not NULL.
    pub name: *const c_char,
    /// Channels of the section over all ranks, divisible by the view's shards.
    pub total: u32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(elem kvf_section_desc { name, total, reserved });

/// Where a tensor starts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_tensor_desc {
    /// The pool it lies in; not NULL.
    pub pool: *const kvf_pool,
    /// Bytes from the pool's start.
    pub offset: u64,
}
abi_struct!(elem kvf_tensor_desc { pool, offset });

/// Makes a layout from a description.
///
/// Only the form is checked here; kvf_agent_set_layout() checks that it fits its memory.
///
/// @param[in]  desc    Start from KVF_LAYOUT_DESC_INIT. Nothing of it is kept.
/// @param[out] layout  Receives the layout; end it with kvf_layout_destroy().
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT with the group and view in kvf_last_error() for an
///         unknown kind or role, a NULL pool or name, or pools of two agents.
///
/// # Safety
/// @p desc must point to `desc->struct_size` readable bytes, every array in it to as many elements
/// as it says, every pool be live; @p layout must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_layout_create(
    desc: *const kvf_layout_desc,
    layout: *mut *mut kvf_layout,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(layout, "layout") }?;
        // SAFETY: the caller's contract.
        let core = unsafe { desc.convert() }?;
        out.set_handle(kvf_layout(Object::root(core)));
        Ok(())
    })
}

/// Ends a layout. An agent that it was set on keeps its own copy.
///
/// @param layout  The layout, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p layout must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_layout_destroy(layout: *mut kvf_layout) -> kvf_status {
    // SAFETY: the caller's contract.
    unsafe { destroy(layout, |handle| handle.0, |_, _| Ok(Status::KVF_OK)) }
}

/// Says what an agent's rank holds; once, before its metadata and its first operation.
///
/// Checked here: every view lies in its memory, strides do not overlap, counts are consistent.
///
/// @param     agent   The agent.
/// @param[in] layout  A layout over pools of this agent. Copied.
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT, KVF_ERR_DUPLICATE or KVF_ERR_OUT_OF_RANGE with group,
///         view, layer and numbers in kvf_last_error(); KVF_ERR_STATE when a layout was set before.
///
/// # Safety
/// @p agent and @p layout must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_set_layout(
    agent: *mut kvf_agent,
    layout: *const kvf_layout,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let rank = unsafe { view(layout, "layout") }?.0.enter("layout")?;
        if let Some(owner) = &rank.pools_of
            && !std::ptr::eq(owner.as_ptr(), Arc::as_ptr(&agent))
        {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "layout names pools of another agent"
            );
        }
        agent.core.set_layout(rank.layout.clone())
    })
}

impl kvf_layout_desc {
    /// # Safety
    /// As `kvf_layout_create`.
    unsafe fn convert(&self) -> Result<RankLayout> {
        if self.num_groups == 0 {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "desc.num_groups is 0; list every layer group of the model, also those without a \
                 layer on this rank"
            );
        }
        // SAFETY: the caller's contract.
        let groups = unsafe {
            read_array(
                self.groups,
                self.num_groups,
                self.groups_elem_size,
                "desc.groups",
            )
        }?;
        let mut pools_of = None;
        let groups = groups
            .iter()
            .enumerate()
            // SAFETY: the caller's contract.
            .map(|(i, group)| unsafe { group.convert(&format!("desc.groups[{i}]"), &mut pools_of) })
            .collect::<Result<_>>()?;
        Ok(RankLayout {
            layout: Layout {
                fingerprint: String::new(), // the agent's
                coordinates: Coordinates {
                    global_rank: self.global_rank,
                    tp_rank: self.tp_rank,
                    tp_size: self.tp_size,
                    pp_rank: self.pp_rank,
                    pp_size: self.pp_size,
                    cp_rank: self.cp_rank,
                    cp_size: self.cp_size,
                    dp_rank: self.dp_rank,
                    dp_size: self.dp_size,
                },
                groups,
            },
            pools_of,
        })
    }
}

impl kvf_group_desc {
    /// # Safety
    /// As `kvf_layout_create`.
    unsafe fn convert(&self, place: &str, pools_of: &mut Option<Weak<Shared>>) -> Result<Group> {
        must_be_zero(self.reserved, &format!("{place}.reserved"))?;
        let kind = match self.kind {
            KVF_GROUP_PAGED => GroupKind::Paged {
                tokens_per_block: self.tokens_per_block,
                window: self.window,
            },
            KVF_GROUP_STATE if self.tokens_per_block != 0 || self.window != 0 => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{place} is a state group with tokens_per_block {} and window {}, both must be 0",
                self.tokens_per_block,
                self.window
            ),
            KVF_GROUP_STATE => GroupKind::State,
            kind => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{place}.kind is {kind}, neither KVF_GROUP_PAGED nor KVF_GROUP_STATE"
            ),
        };
        // SAFETY: the caller's contract.
        let (layers, views) = unsafe {
            (
                read_plain(self.layers, self.num_layers, &format!("{place}.layers"))?,
                read_array(
                    self.views,
                    self.num_views,
                    self.views_elem_size,
                    &format!("{place}.views"),
                )?,
            )
        };
        Ok(Group {
            kind,
            layers,
            ordinals: Ordinals {
                offset: self.ordinal_offset,
                stride: self.ordinal_stride.max(1),
            },
            views: views
                .iter()
                .enumerate()
                // SAFETY: the caller's contract.
                .map(|(i, view)| unsafe { view.convert(&format!("{place}.views[{i}]"), pools_of) })
                .collect::<Result<_>>()?,
        })
    }
}

impl kvf_view_desc {
    /// # Safety
    /// As `kvf_layout_create`.
    unsafe fn convert(&self, place: &str, pools_of: &mut Option<Weak<Shared>>) -> Result<View> {
        let Some(role) = Role::from_code(self.role) else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{place}.role is {}, not one of KVF_ROLE_*",
                self.role
            );
        };
        // SAFETY: the caller's contract.
        let (sections, tensors) = unsafe {
            (
                read_array(
                    self.sections,
                    self.num_sections,
                    self.sections_elem_size,
                    &format!("{place}.sections"),
                )?,
                read_array(
                    self.tensors,
                    self.num_tensors,
                    self.tensors_elem_size,
                    &format!("{place}.tensors"),
                )?,
            )
        };
        let section = |(i, section): (usize, &kvf_section_desc)| {
            let place = format!("{place}.sections[{i}]");
            must_be_zero(section.reserved, &format!("{place}.reserved"))?;
            // SAFETY: the caller's contract.
            let Some(name) = (unsafe { read_text(section.name, &format!("{place}.name")) })? else {
                bail!(KVF_ERR_INVALID_ARGUMENT, "{place}.name is NULL");
            };
            Ok(Section {
                name,
                total: section.total,
            })
        };
        let mut tensor = |(i, tensor): (usize, &kvf_tensor_desc)| {
            let place = format!("{place}.tensors[{i}].pool");
            // SAFETY: the caller's contract.
            let pool = unsafe { view(tensor.pool, &place) }?.0.enter("pool")?;
            let owner = pool.agent()?;
            match pools_of {
                None => *pools_of = Some(Arc::downgrade(owner)),
                Some(first) if !std::ptr::eq(first.as_ptr(), Arc::as_ptr(owner)) => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "{place} belongs to another agent than the pools before it"
                ),
                Some(_) => {}
            }
            Ok(Tensor {
                pool: pool.id,
                offset: tensor.offset,
            })
        };
        Ok(View {
            role,
            element_bits: self.element_bits,
            heads: self.heads,
            bytes_per_head: self.bytes_per_head,
            shards: self.shards.max(1),
            shard: self.shard,
            replicas: self.replicas.max(1),
            replica: self.replica,
            sections: sections
                .iter()
                .enumerate()
                .map(section)
                .collect::<Result<_>>()?,
            tensors: tensors
                .iter()
                .enumerate()
                .map(&mut tensor)
                .collect::<Result<_>>()?,
            slots: self.slots,
            strides: Strides {
                slot: self.slot_stride,
                layer: self.layer_stride,
                token: self.token_stride,
                head: self.head_stride,
            },
        })
    }
}
