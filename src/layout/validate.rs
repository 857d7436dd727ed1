//! Checks of one rank's layout.

use super::overlap::{Axis, Region, meet};
use super::{Group, GroupKind, Layout, Ordinals, View};
use crate::error::Result;
use crate::{bail, err};

/// No address may reach this; keeps every sum in the planner far from overflow.
const ADDRESS_LIMIT: u64 = 1 << 62;
/// Ranks of context parallelism; every ordinal class is looked at once.
const MAX_ORDINAL_STRIDE: u32 = 4096;
/// Steps for one pair of regions; regular pools need fewer than a hundred.
const OVERLAP_BUDGET: u32 = 200_000;

/// Checks a layout against the pools of its agent: [`check`], every view inside its memory, and
/// no byte in two places of the layout. `pool_bytes` gives a pool's size, `None` = no such pool.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT`, `KVF_ERR_DUPLICATE`, `KVF_ERR_NOT_FOUND` (pool) or
/// `KVF_ERR_OUT_OF_RANGE` (memory), naming group, view, layer and the numbers.
pub fn validate(layout: &Layout, pool_bytes: &dyn Fn(u32) -> Option<u64>) -> Result<()> {
    check(layout)?;
    let mut placed: Vec<Placed<'_>> = Vec::new();
    for (g, group) in layout.groups.iter().enumerate() {
        for view in group.views.iter().filter(|_| !group.layers.is_empty()) {
            in_memory(group, view, pool_bytes).map_err(|e| e.context(place(g, view)))?;
            placed.extend(Placed::all(g, group, view));
        }
    }
    disjoint(placed)
}

/// Checks a layout by itself: counts, shards, sections, and strides that do not overlap inside a
/// view. The pools need not be known (a peer's layout).
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` or `KVF_ERR_DUPLICATE`, naming group, view and the numbers.
pub fn check(layout: &Layout) -> Result<()> {
    for (g, group) in layout.groups.iter().enumerate() {
        check_group(group).map_err(|e| e.context(format!("group {g}")))?;
        if group.layers.is_empty() {
            continue; // a stage without a layer of the group may leave its views as they are
        }
        for (v, view) in group.views.iter().enumerate() {
            if group.views[..v].iter().any(|other| other.role == view.role) {
                bail!(
                    KVF_ERR_DUPLICATE,
                    "group {g}: two views have the role {}",
                    view.role
                );
            }
            check_counts(group, view).map_err(|e| e.context(place(g, view)))?;
            check_sections(view).map_err(|e| e.context(place(g, view)))?;
            check_strides(group, view).map_err(|e| e.context(place(g, view)))?;
        }
    }
    Ok(())
}

fn place(group: usize, view: &View) -> String {
    format!("group {group}, view {}", view.role)
}

fn check_group(group: &Group) -> Result<()> {
    let Ordinals { offset, stride } = group.ordinals;
    if offset >= stride {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "ordinals start at {offset} with stride {stride}; the offset must be below the stride (all blocks: 0 and 1)"
        );
    }
    if stride > MAX_ORDINAL_STRIDE {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "ordinals have stride {stride}; at most {MAX_ORDINAL_STRIDE} is supported"
        );
    }
    match group.kind {
        GroupKind::Paged {
            tokens_per_block: 0,
            ..
        } => {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "a paged group has 0 tokens per block; at least 1 is needed"
            )
        }
        GroupKind::State if stride != 1 => {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "a state group has ordinals with stride {stride}; a state is one slot and belongs to ordinal 0"
            )
        }
        _ => {}
    }
    let mut sorted = group.layers.clone();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|w| w[0] == w[1]) {
        bail!(KVF_ERR_DUPLICATE, "layer {} is listed twice", twice[0]);
    }
    if !group.layers.is_empty() && group.views.is_empty() {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} layers but no view; a group with layers has at least one",
            group.layers.len()
        );
    }
    Ok(())
}

fn check_counts(group: &Group, view: &View) -> Result<()> {
    for (name, value) in [
        ("heads", u64::from(view.heads)),
        ("bytes per head", view.bytes_per_head),
        ("shards", u64::from(view.shards)),
        ("replicas", u64::from(view.replicas)),
        ("slots", u64::from(view.slots)),
    ] {
        if value == 0 {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{name} is 0; at least 1 is needed"
            );
        }
    }
    if !(4..=32).contains(&view.element_bits) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "elements have {} bits; 4 to 32 are known",
            view.element_bits
        );
    }
    for (name, index, count) in [
        ("shard", view.shard, view.shards),
        ("replica", view.replica, view.replicas),
    ] {
        if index >= count {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{name} {index} of {count}; the index must be below the count"
            );
        }
    }
    // A slot id is an i32 in every table, so more slots could not be named.
    if view.slots > i32::MAX as u32 {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} slots; at most {} can be named",
            view.slots,
            i32::MAX
        );
    }
    if view.total_heads() > u64::from(u32::MAX) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} heads in each of {} shards; at most {} together",
            view.heads,
            view.shards,
            u32::MAX
        );
    }
    let (tensors, layers) = (view.tensors.len(), group.layers.len());
    if tensors != 1 && tensors != layers {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{tensors} tensors for {layers} layers; one for all or one per layer is needed"
        );
    }
    Ok(())
}

fn check_sections(view: &View) -> Result<()> {
    let mut heads = 0u64;
    for (i, s) in view.sections.iter().enumerate() {
        if s.name.is_empty() {
            bail!(KVF_ERR_INVALID_ARGUMENT, "section {i} has no name");
        }
        if view.sections[..i].iter().any(|other| other.name == s.name) {
            bail!(KVF_ERR_DUPLICATE, "two sections have the name {}", s.name);
        }
        if s.total == 0 || s.total % view.shards != 0 {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "section {} has {} channels, which {} shards do not divide",
                s.name,
                s.total,
                view.shards
            );
        }
        heads += u64::from(s.total / view.shards);
    }
    if !view.sections.is_empty() && heads != u64::from(view.heads) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "heads is {} but the sections give {heads} channels for each of {} shards",
            view.heads,
            view.shards
        );
    }
    Ok(())
}

/// The axes of a view, outermost in the address formula first; the layer axis only for a common
/// tensor.
fn axes(group: &Group, view: &View) -> [(&'static str, Axis); 4] {
    let s = view.strides;
    let layers = if view.tensors.len() == 1 {
        group.layers.len() as u64
    } else {
        1
    };
    [
        ("slot", (u64::from(view.slots), s.slot)),
        ("layer", (layers, s.layer)),
        ("token", (u64::from(group.tokens_per_slot()), s.token)),
        ("head", (u64::from(view.heads), s.head)),
    ]
}

/// Axes must nest: each stride at least as long as everything inside it. All real tensors (dense,
/// padded, sliced, transposed) do, and it makes every byte's place unique.
fn check_strides(group: &Group, view: &View) -> Result<()> {
    let mut sorted = axes(group, view);
    sorted.sort_by_key(|(_, (_, stride))| *stride);
    let mut inside = u128::from(view.bytes_per_head);
    let mut inner = "bytes of one head";
    for (name, (count, stride)) in sorted.into_iter().filter(|(_, (count, _))| *count > 1) {
        if u128::from(stride) < inside {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the {name} stride is {stride} bytes but what lies inside it (up to the {inner}) takes {inside}; {count} {name}s would overlap"
            );
        }
        inside += u128::from(count - 1) * u128::from(stride);
        inner = name;
    }
    let first = view.tensors.iter().map(|t| t.offset).max().unwrap_or(0);
    if inside + u128::from(first) > u128::from(ADDRESS_LIMIT) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the strides span {inside} bytes from offset {first}; no memory is that large"
        );
    }
    Ok(())
}

fn in_memory(group: &Group, view: &View, pool_bytes: &dyn Fn(u32) -> Option<u64>) -> Result<()> {
    let one_layer: u64 = axes(group, view)
        .into_iter()
        .filter(|(name, _)| *name != "layer")
        .map(|(_, (count, stride))| (count - 1) * stride)
        .sum::<u64>()
        + view.bytes_per_head;
    for (local, layer) in group.layers.iter().enumerate() {
        let base = view
            .layer_base(local)
            .ok_or_else(|| err!(KVF_ERR_INVALID_ARGUMENT, "layer {layer}: no tensor"))?;
        let Some(bytes) = pool_bytes(base.pool) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "layer {layer}: pool {} is not registered",
                base.pool
            );
        };
        let end = base.offset + one_layer;
        if end > bytes {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "layer {layer}: needs bytes {}..{end} of pool {}, which has {bytes}",
                base.offset,
                base.pool
            );
        }
    }
    Ok(())
}

/// A region of a pool with its name.
struct Placed<'a> {
    group: usize,
    view: &'a View,
    /// The layer of a tensor per layer.
    layer: Option<u32>,
    pool: u32,
    region: Region,
}

impl<'a> Placed<'a> {
    fn all(g: usize, group: &'a Group, view: &'a View) -> impl Iterator<Item = Self> {
        let mut sorted: Vec<Axis> = axes(group, view)
            .into_iter()
            .map(|(_, axis)| axis)
            .filter(|(count, _)| *count > 1)
            .collect();
        sorted.sort_by_key(|(_, stride)| std::cmp::Reverse(*stride));
        let per_layer = view.tensors.len() > 1;
        view.tensors
            .iter()
            .enumerate()
            .map(move |(i, tensor)| Self {
                group: g,
                view,
                layer: group.layers.get(i).copied().filter(|_| per_layer),
                pool: tensor.pool,
                region: Region {
                    base: tensor.offset,
                    run: view.bytes_per_head,
                    axes: sorted.clone(),
                },
            })
    }

    fn name(&self) -> String {
        let layer = self
            .layer
            .map(|l| format!(", layer {l}"))
            .unwrap_or_default();
        format!("{}{layer}", place(self.group, self.view))
    }
}

/// No byte of a pool may belong to two views, or to two layers' tensors.
fn disjoint(mut placed: Vec<Placed<'_>>) -> Result<()> {
    placed.sort_by_key(|p| (p.pool, p.region.base));
    for (i, a) in placed.iter().enumerate() {
        let end = a.region.base + a.region.extent();
        let near = placed[i + 1..]
            .iter()
            .take_while(|b| b.pool == a.pool && b.region.base < end);
        for b in near {
            let mut budget = OVERLAP_BUDGET;
            let problem = match meet(&a.region, &b.region, &mut budget) {
                Some(false) => continue,
                Some(true) => "share bytes",
                None => "have strides too unlike to prove that they share no bytes",
            };
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} (from byte {}) and {} (from byte {}) {problem} in pool {}",
                a.name(),
                a.region.base,
                b.name(),
                b.region.base,
                a.pool
            );
        }
    }
    Ok(())
}
