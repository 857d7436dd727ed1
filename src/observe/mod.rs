//! What kvferry knows about itself and its process. A leaf: every impure module may use it.

pub mod fault;
pub mod marks;
pub mod metrics;
mod times;

pub use times::Times;
