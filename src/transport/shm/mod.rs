//! A peer on this host, in another process.

/// Jobs up to this many bytes are copied by the thread that begins them.
pub(super) const INLINE_BYTES: u64 = 32 << 10;
