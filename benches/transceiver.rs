//! What a status call costs: with nothing in flight, and with many requests pending; and what one
//! completion costs, from the operation's notice to its result. No bytes are moved.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../tests/transceiver_fake/mod.rs"]
mod transceiver_fake;

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvferry::transceiver::{Config, Side};
use transceiver_fake::{Half, done, half};

fn check(h: &Half, at_least: Option<u32>) -> usize {
    let mut out = Vec::new();
    let timeout = Some(Duration::from_secs(1));
    let checked = match h.side {
        Side::Context => {
            h.t.check_context_transfer_status(at_least, timeout, 64, &mut out)
        }
        Side::Generation => {
            h.t.check_gen_transfer_status(at_least, timeout, 64, &mut out)
        }
    };
    black_box(checked.unwrap());
    out.len()
}

/// Median of rounds, in nanoseconds per call.
fn per_call(calls: u32, mut body: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..15)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| body());
            start.elapsed().as_nanos() as f64 / f64::from(calls)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn main() {
    for side in Side::ALL {
        let idle = half(side, Config::default());
        for at_least in [Some(0), Some(1), None] {
            let ns = per_call(20_000, || assert_eq!(check(&idle, at_least), 0));
            println!("{side:?}: nothing in flight, at_least {at_least:?}: {ns:.0} ns");
        }
        for pending in [100u64, 10_000] {
            let h = half(side, Config::default());
            (0..pending).for_each(|request| h.begin(request).unwrap());
            let sweep = per_call(20_000, || assert_eq!(check(&h, Some(0)), 0));
            let mut next = pending;
            let completion = per_call(200, || {
                h.begin(next).unwrap();
                h.fake.last().end(done());
                assert_eq!(check(&h, Some(1)), 1);
                next += 1;
            });
            println!(
                "{side:?}: {pending} pending: sweep {sweep:.0} ns, request to result \
                 {completion:.0} ns"
            );
        }
    }
}
