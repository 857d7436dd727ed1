//! When the bytes of one operation moved.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// First and last byte of an operation, counted from its begin. Written by the copying threads,
/// read by everybody; no lock.
#[derive(Debug)]
pub struct Times {
    begun: Instant,
    first_ns: AtomicU64,
    last_ns: AtomicU64,
}

impl Times {
    /// An operation that begins now.
    #[must_use]
    pub fn begin() -> Self {
        Self {
            begun: Instant::now(),
            first_ns: AtomicU64::new(0),
            last_ns: AtomicU64::new(0),
        }
    }

    fn ns(&self) -> u64 {
        // Never 0, which means "not yet".
        u64::try_from(self.begun.elapsed().as_nanos()).map_or(u64::MAX, |ns| ns.max(1))
    }

    /// A copy is about to begin; only the first one counts. Gives the time since the begin.
    pub fn copying(&self) -> Duration {
        let now = self.ns();
        let _ = self
            .first_ns
            .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        Duration::from_nanos(now)
    }

    /// A copy has returned; the last one counts.
    pub fn copied(&self) {
        self.last_ns.fetch_max(self.ns(), Ordering::Relaxed);
    }

    /// Time since the begin.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Begin to the first byte, in ns; 0 = nothing was copied yet.
    pub fn first_ns(&self) -> u64 {
        self.first_ns.load(Ordering::Relaxed)
    }

    /// Begin to the last byte so far, in ns; 0 = nothing was copied yet.
    pub fn last_ns(&self) -> u64 {
        self.last_ns.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_begin_and_the_last_end_count() {
        let times = Times::begin();
        assert_eq!((times.first_ns(), times.last_ns()), (0, 0));
        times.copying();
        let first = times.first_ns();
        times.copied();
        let last = times.last_ns();
        assert!(0 < first && first <= last, "{first} {last}");
        std::thread::sleep(Duration::from_millis(1));
        times.copying();
        times.copied();
        assert_eq!(times.first_ns(), first);
        assert!(times.last_ns() >= last + 1_000_000);
    }
}
