//! CUDA. Only the kernel is there yet.

pub mod kernel;
