//! Registered memory ranges and shareable pools.
