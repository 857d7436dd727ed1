//! Registered memory ranges and shareable pools.

/// A registered memory range.
#[derive(Debug)]
pub struct Pool {
    id: u32,
}

impl Pool {
    /// The agent's id of the pool.
    pub fn id(&self) -> u32 {
        self.id
    }
}
