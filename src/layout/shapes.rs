//! Constructors for the shapes engines really use, as dense tensors. What they return is a plain
//! [`View`]: for a padded or sliced tensor change its strides.
//!
//! In the pictures the last axis is the fastest; `L` layers, `B` blocks (slots), `T` tokens in a
//! block, `H` heads of this rank, `d` bytes of a head.

use super::{Role, Section, Strides, Tensor, View};

/// Which part of the heads a rank holds; the default is all of them, held by nobody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Into how many shards the heads are split.
    pub shards: u32,
    /// This rank's shard.
    pub shard: u32,
    /// How many ranks hold the same shard.
    pub replicas: u32,
    /// Which of them this rank is.
    pub replica: u32,
}

impl Default for Shard {
    fn default() -> Self {
        Self {
            shards: 1,
            shard: 0,
            replicas: 1,
            replica: 0,
        }
    }
}

/// Sizes of a rank's attention cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Local layers.
    pub layers: u32,
    /// Blocks in the pool.
    pub slots: u32,
    /// Tokens in a block (a state: 1).
    pub tokens_per_block: u32,
    /// Heads of this rank.
    pub heads: u32,
    /// Bytes of one head of one token.
    pub bytes_per_head: u64,
    /// Bits of one element.
    pub element_bits: u32,
    /// Which heads they are.
    pub shard: Shard,
}

/// An axis of a dense tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The roles, in the order given to [`dense`].
    Role,
    /// Layers; left out for a tensor per layer.
    Layer,
    /// Blocks or states.
    Slot,
    /// Tokens of a block.
    Token,
    /// Heads or channels.
    Head,
}

/// Dense tensors with the axes in this order, outermost first, the bytes of a head innermost:
/// one view per role. `tensors` is one for all layers, or one per layer if `order` has no
/// [`Axis::Layer`]. Sizes that overflow give strides that [`super::check`] refuses.
pub fn dense(shape: &Shape, order: &[Axis], roles: &[Role], tensors: &[Tensor]) -> Vec<View> {
    let mut strides = Strides::default();
    let mut role_stride = 0;
    let mut extent = shape.bytes_per_head;
    for axis in order.iter().rev() {
        let (stride, count) = match axis {
            Axis::Role => (&mut role_stride, roles.len() as u64),
            Axis::Layer => (&mut strides.layer, u64::from(shape.layers)),
            Axis::Slot => (&mut strides.slot, u64::from(shape.slots)),
            Axis::Token => (&mut strides.token, u64::from(shape.tokens_per_block)),
            Axis::Head => (&mut strides.head, u64::from(shape.heads)),
        };
        *stride = extent;
        extent = extent.saturating_mul(count);
    }
    let at = |i: usize| {
        let shift = role_stride.saturating_mul(i as u64);
        let moved = |t: &Tensor| Tensor {
            offset: t.offset.saturating_add(shift),
            ..*t
        };
        tensors.iter().map(moved).collect()
    };
    let views = roles.iter().enumerate().map(|(i, role)| View {
        role: *role,
        element_bits: shape.element_bits,
        heads: shape.heads,
        bytes_per_head: shape.bytes_per_head,
        shards: shape.shard.shards,
        shard: shape.shard.shard,
        replicas: shape.shard.replicas,
        replica: shape.shard.replica,
        sections: Vec::new(),
        tensors: at(i),
        slots: shape.slots,
        strides,
    });
    views.collect()
}

const KEY_VALUE: [Role; 2] = [Role::Key, Role::Value];

/// Megatron: one buffer `[2, L, B, T, H, d]`.
///
/// ```text
/// tensor ─┬─ key   ─┬─ layer 0 ── block 0 │ block 1 │ ... │ block B-1
///         │         ├─ layer 1 ── ...         └─ token 0: head 0 head 1 .. │ token 1: ...
///         │         └─ layer L-1
///         └─ value ─── the same
/// ```
pub fn megatron(shape: &Shape, tensor: Tensor) -> Vec<View> {
    let order = [Axis::Role, Axis::Layer, Axis::Slot, Axis::Token, Axis::Head];
    dense(shape, &order, &KEY_VALUE, &[tensor])
}

/// TensorRT-LLM: one block-major pool `[B, L, 2, H, T, d]`.
///
/// ```text
/// tensor ─┬─ block 0 ─┬─ layer 0 ─┬─ key   ── head 0: token 0 token 1 .. │ head 1: ...
///         │           │           └─ value ── head 0: ...
///         │           └─ layer 1 ─── ...
///         └─ block 1 ─── ...
/// ```
pub fn trtllm(shape: &Shape, tensor: Tensor) -> Vec<View> {
    let order = [Axis::Slot, Axis::Layer, Axis::Role, Axis::Head, Axis::Token];
    dense(shape, &order, &KEY_VALUE, &[tensor])
}

/// vLLM, NHD: a tensor `[2, B, T, H, d]` per layer.
///
/// ```text
/// tensor of layer l ─┬─ key   ── block 0 │ block 1 │ ...
///                    │             └─ token 0: head 0 head 1 .. │ token 1: head 0 ...
///                    └─ value ── ...
/// ```
pub fn vllm_nhd(shape: &Shape, tensors: &[Tensor]) -> Vec<View> {
    let order = [Axis::Role, Axis::Slot, Axis::Token, Axis::Head];
    dense(shape, &order, &KEY_VALUE, tensors)
}

/// vLLM, HND: a tensor `[2, B, H, T, d]` per layer.
///
/// ```text
/// tensor of layer l ─┬─ key   ── block 0 │ block 1 │ ...
///                    │             └─ head 0: token 0 token 1 .. │ head 1: token 0 ...
///                    └─ value ── ...
/// ```
pub fn vllm_hnd(shape: &Shape, tensors: &[Tensor]) -> Vec<View> {
    let order = [Axis::Role, Axis::Slot, Axis::Head, Axis::Token];
    dense(shape, &order, &KEY_VALUE, tensors)
}

/// Tensors of their own for the keys and the values of each layer: `[B, T, H, d]`.
///
/// ```text
/// keys[l]   ── block 0 │ block 1 │ ...
///                └─ token 0: head 0 head 1 .. │ token 1: head 0 ...
/// values[l] ── the same
/// ```
pub fn per_layer(shape: &Shape, keys: &[Tensor], values: &[Tensor]) -> Vec<View> {
    let order = [Axis::Slot, Axis::Token, Axis::Head];
    let mut views = dense(shape, &order, &[Role::Key], keys);
    views.extend(dense(shape, &order, &[Role::Value], values));
    views
}

/// MLA: a tensor `[B, T, d]` per layer of one compressed latent, which every tensor-parallel rank
/// holds: one head, one shard, as many replicas as ranks. `shape.heads` is read as 1.
///
/// ```text
/// tensor of layer l ── block 0 │ block 1 │ ...
///                        └─ token 0 │ token 1 │ ...      (latent and rope part together: d bytes)
/// ```
pub fn mla_latent(shape: &Shape, tensors: &[Tensor]) -> Vec<View> {
    let shape = Shape { heads: 1, ..*shape };
    dense(
        &shape,
        &[Axis::Slot, Axis::Token, Axis::Head],
        &[Role::Latent],
        tensors,
    )
}

/// Sizes of a rank's Mamba-2 states. `d_inner`, `bc_width`, `heads` are global.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mamba2 {
    /// Local layers.
    pub layers: u32,
    /// States in the pool.
    pub slots: u32,
    /// Channels of `x`: heads x head dimension.
    pub d_inner: u32,
    /// Channels of `B`, and of `C`: groups x state dimension.
    pub bc_width: u32,
    /// Convolution width.
    pub d_conv: u32,
    /// SSM heads.
    pub heads: u32,
    /// Head dimension.
    pub head_dim: u32,
    /// State dimension.
    pub d_state: u32,
    /// Bits of one element of the convolution state.
    pub conv_bits: u32,
    /// Bits of one element of the recurrent state.
    pub recurrent_bits: u32,
    /// Which shard this rank holds.
    pub shard: Shard,
}

/// Mamba-2 convolution state: `[L, slots, conv_dim, d_conv]`, the channels packed as `x | B | C`
/// and each section split over the shards by itself.
///
/// ```text
/// tensor ─┬─ layer 0 ── slot 0 │ slot 1 │ ...
///         │               └─ x x x x x x │ B B │ C C      conv_dim channels of d_conv elements
///         └─ layer 1 ── ...
/// ```
pub fn mamba2_conv(sizes: &Mamba2, tensor: Tensor) -> View {
    let section = |name: &str, total| Section {
        name: name.to_owned(),
        total,
    };
    let bc = sizes.bc_width;
    let shards = sizes.shard.shards.max(1);
    View {
        sections: vec![
            section("x", sizes.d_inner),
            section("B", bc),
            section("C", bc),
        ],
        ..state(
            sizes,
            Role::Conv,
            sizes.d_inner / shards + bc / shards * 2,
            u64::from(sizes.d_conv),
            sizes.conv_bits,
            tensor,
        )
    }
}

/// Mamba-2 recurrent state: `[L, slots, heads, head_dim, d_state]`, split by heads.
///
/// ```text
/// tensor ─┬─ layer 0 ── slot 0 │ slot 1 │ ...
///         │               └─ head 0: head_dim x d_state │ head 1: ...
///         └─ layer 1 ── ...
/// ```
pub fn mamba2_recurrent(sizes: &Mamba2, tensor: Tensor) -> View {
    let heads = sizes.heads / sizes.shard.shards.max(1);
    let elements = u64::from(sizes.head_dim) * u64::from(sizes.d_state);
    state(
        sizes,
        Role::Recurrent,
        heads,
        elements,
        sizes.recurrent_bits,
        tensor,
    )
}

fn state(
    sizes: &Mamba2,
    role: Role,
    heads: u32,
    elements: u64,
    element_bits: u32,
    tensor: Tensor,
) -> View {
    let bytes_per_head = elements.saturating_mul(u64::from(element_bits)).div_ceil(8);
    let slot = bytes_per_head.saturating_mul(u64::from(heads));
    View {
        role,
        element_bits,
        heads,
        bytes_per_head,
        shards: sizes.shard.shards,
        shard: sizes.shard.shard,
        replicas: sizes.shard.replicas,
        replica: sizes.shard.replica,
        sections: Vec::new(),
        tensors: vec![tensor],
        slots: sizes.slots,
        strides: Strides {
            slot,
            layer: slot.saturating_mul(u64::from(sizes.slots)),
            token: 0,
            head: bytes_per_head,
        },
    }
}
