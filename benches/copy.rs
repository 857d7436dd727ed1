//! `copy::run` against bare loops, alternating in one run.
//!
//!     cargo bench --bench copy -- [--quick] [--json] [--only TEXT] [--thread-time]
//!
//! Each case reads scattered blocks out of a 1 GiB memfd, mapped read-only and populated, into
//! private memory. Every repetition of every contender has its own random blocks and its own place in
//! the destination, so that none finds the caches warmed by the one before. Ratios count; the absolute figures move from machine
//! to machine. `--thread-time` takes the thread's own time instead of wall time, which a crowded
//! machine disturbs less.

use std::error::Error;
use std::io::Write;
use std::time::Instant;

use kvferry::copy::{Dim, Place, Strided, run};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const POOL: usize = 1 << 30;
const DST: usize = 256 * MIB;
const PAGE: usize = 4 * KIB;
/// Short runs: tokens in a block, and payload of one repetition.
const TOKENS: usize = 16;
const SHORT_TOTAL: usize = 32 * MIB;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A mapping that lives as long as the process.
struct Map(*mut u8);

impl Map {
    fn new(bytes: usize, prot: i32, flags: i32, fd: i32) -> Result<Map> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Map(at.cast()))
    }
}

fn word(index: usize) -> u64 {
    (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1
}

/// A pool as a peer maps it: written through one mapping, read through another.
fn pool() -> Result<Map> {
    // SAFETY: a literal name.
    let fd = unsafe { libc::memfd_create(c"bench".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor just made.
    if fd < 0 || unsafe { libc::ftruncate(fd, POOL as i64) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let (rw, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let owner = Map::new(POOL, rw, shared, fd)?;
    for i in 0..POOL / 8 {
        // SAFETY: inside the mapping.
        unsafe { owner.0.cast::<u64>().add(i).write(word(i)) };
    }
    // SAFETY: ours, and not used again.
    unsafe { libc::munmap(owner.0.cast(), POOL) };
    Map::new(POOL, libc::PROT_READ, shared | libc::MAP_POPULATE, fd)
}

/// splitmix64
fn random(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) as usize
}

/// The bare loops.
mod bare {
    use super::Strided;

    /// Calls `each(dst, src, bytes, next source)` for every block of a copy without axes.
    fn blocks(batch: &Strided<'_>, each: impl Fn(*mut u8, *const u8, usize, *const u8)) {
        for (i, at) in batch.places.iter().enumerate() {
            let next = batch.places.get(i + 1);
            let next = next.map_or(std::ptr::null(), |next| next.src);
            each(at.dst, at.src, batch.run, next);
        }
    }

    pub fn memcpy(batch: &Strided<'_>) {
        blocks(batch, |dst, src, bytes, _| {
            // SAFETY: the bench's own mappings.
            unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
        });
    }

    /// One `memcpy` per run, all axes as nested loops.
    pub fn plain_loop(batch: &Strided<'_>) {
        let [outer, inner] = batch.dims else { return };
        for at in batch.places {
            for o in 0..outer.count {
                for i in 0..inner.count {
                    // SAFETY: the bench's own mappings.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            at.src.add(o * outer.src + i * inner.src),
                            at.dst.add(o * outer.dst + i * inner.dst),
                            batch.run,
                        );
                    }
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub fn streaming(batch: &Strided<'_>) {
        // SAFETY: `contenders` offers it only where AVX2 is.
        blocks(batch, |dst, src, bytes, _| unsafe {
            nt(dst, src, bytes, std::ptr::null());
        });
    }

    #[cfg(target_arch = "x86_64")]
    pub fn streaming_l2(batch: &Strided<'_>) {
        // SAFETY: `contenders` offers it only where AVX2 is.
        blocks(batch, |dst, src, bytes, next| unsafe {
            nt_l2(dst, src, bytes, if next.is_null() { src } else { next });
        });
    }

    #[cfg(target_arch = "x86_64")]
    pub fn streaming_prefetch(batch: &Strided<'_>) {
        // SAFETY: `contenders` offers it only where AVX2 is.
        blocks(batch, |dst, src, bytes, next| unsafe {
            nt(dst, src, bytes, next)
        });
    }

    /// The loop that `copy::run` has to match: 256 bytes a round, aligned, with prefetch.
    ///
    /// # Safety
    /// `bytes` is a multiple of 256, both sides are multiples of 64 and valid.
    #[cfg(target_arch = "x86_64")]
    unsafe fn nt(dst: *mut u8, src: *const u8, bytes: usize, next: *const u8) {
        use std::arch::x86_64::*;
        for at in (0..bytes).step_by(256) {
            // SAFETY: inside `bytes`; prefetches never fault; the vectors were detected.
            unsafe {
                for line in [0, 64, 128, 192] {
                    if !next.is_null() && at < 16384 {
                        _mm_prefetch::<_MM_HINT_NTA>(next.wrapping_add(at + line).cast());
                    }
                }
                for line in [0, 64, 128, 192] {
                    _mm_prefetch::<_MM_HINT_NTA>(src.wrapping_add(at + 1024 + line).cast());
                }
                if is_x86_feature_detected!("avx512f") {
                    round512(dst.add(at), src.add(at));
                } else {
                    round256(dst.add(at), src.add(at));
                }
            }
        }
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }

    /// The same with the whole of the next block prefetched into L2, and nothing else.
    ///
    /// # Safety
    /// As [`nt`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn nt_l2(dst: *mut u8, src: *const u8, bytes: usize, next: *const u8) {
        use std::arch::x86_64::*;
        for at in (0..bytes).step_by(256) {
            // SAFETY: inside `bytes`; prefetches never fault; the vectors were detected.
            unsafe {
                for line in [0, 64, 128, 192] {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(at + line).cast());
                }
                if is_x86_feature_detected!("avx512f") {
                    round512(dst.add(at), src.add(at));
                } else {
                    round256(dst.add(at), src.add(at));
                }
            }
        }
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }

    /// # Safety
    /// As [`nt`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn round512(dst: *mut u8, src: *const u8) {
        use std::arch::x86_64::*;
        // SAFETY: the caller's promise.
        unsafe {
            let v = [0, 64, 128, 192].map(|at| _mm512_load_si512(src.add(at).cast()));
            for (i, v) in v.into_iter().enumerate() {
                _mm512_stream_si512(dst.add(64 * i).cast(), v);
            }
        }
    }

    /// # Safety
    /// As [`nt`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn round256(dst: *mut u8, src: *const u8) {
        use std::arch::x86_64::*;
        // SAFETY: the caller's promise.
        unsafe {
            for i in 0..8 {
                let v = _mm256_load_si256(src.add(32 * i).cast());
                _mm256_stream_si256(dst.add(32 * i).cast(), v);
            }
        }
    }
}

fn kvferry(batch: &Strided<'_>) {
    // SAFETY: the bench's own mappings.
    unsafe { run(std::slice::from_ref(batch)) }
}

/// Wall time, or the thread's own time, which a crowded machine disturbs less.
#[derive(Clone, Copy)]
enum Clock {
    Wall(Instant),
    Thread,
}

impl Clock {
    fn now(self) -> f64 {
        match self {
            Clock::Wall(start) => start.elapsed().as_secs_f64(),
            Clock::Thread => {
                let mut time = libc::timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                };
                // SAFETY: a local to write to.
                unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
                time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
            }
        }
    }
}

struct Contender {
    name: &'static str,
    copy: fn(&Strided<'_>),
    /// Gets one contiguous block of the same size instead of the short runs.
    whole: bool,
}

const fn contender(name: &'static str, copy: fn(&Strided<'_>), whole: bool) -> Contender {
    Contender { name, copy, whole }
}

/// Shape of the scattered pieces.
#[derive(Clone, Copy)]
enum Case {
    Blocks {
        bytes: usize,
        count: usize,
    },
    /// Half of the heads of `[block, 2, token, head, dim]`: `run` bytes a token out of tokens of
    /// twice that (split), or into such (merge); block ids are random or consecutive.
    Heads {
        run: usize,
        split: bool,
        scattered: bool,
    },
}

impl Case {
    fn name(self) -> String {
        match self {
            Case::Blocks { bytes, count } if bytes >= MIB => {
                format!("{} MiB x {count}", bytes / MIB)
            }
            Case::Blocks { bytes, count } => format!("{} KiB x {count}", bytes / KIB),
            Case::Heads {
                run,
                split,
                scattered,
            } => {
                let shape = if split { "split" } else { "merge" };
                let order = if scattered { "scattered" } else { "in order" };
                format!("{run} B runs, {shape}, {order}")
            }
        }
    }

    fn bytes(self) -> usize {
        match self {
            Case::Blocks { bytes, count } => bytes * count,
            Case::Heads { .. } => SHORT_TOTAL,
        }
    }

    fn dims(self) -> Vec<Dim> {
        match self {
            Case::Blocks { .. } => Vec::new(),
            Case::Heads { run, split, .. } => {
                let (src, dst) = if split {
                    (2 * run, run)
                } else {
                    (run, 2 * run)
                };
                let roles = Dim {
                    count: 2,
                    src: TOKENS * src,
                    dst: TOKENS * dst,
                };
                vec![
                    roles,
                    Dim {
                        count: TOKENS,
                        src,
                        dst,
                    },
                ]
            }
        }
    }

    /// Bytes of a run, and where the copies are.
    fn places(self, dims: &[Dim], pool: &Map, dst: &Map, seed: &mut u64) -> (usize, Vec<Place>) {
        let (run, src_block, dst_block, scattered) = match self {
            Case::Blocks { bytes, .. } => (bytes, bytes, bytes, true),
            Case::Heads { run, scattered, .. } => {
                (run, 2 * dims[0].src, 2 * dims[0].dst, scattered)
            }
        };
        let slots = POOL / src_block;
        let count = self.bytes() / dims.iter().fold(run, |bytes, dim| bytes * dim.count);
        let first = random(seed) % (slots - count + 1);
        let base = random(seed) % ((DST - count * dst_block) / PAGE + 1) * PAGE;
        let places = (0..count)
            .map(|i| {
                let slot = if scattered {
                    random(seed) % slots
                } else {
                    first + i
                };
                Place {
                    src: pool.0.wrapping_add(slot * src_block),
                    dst: dst.0.wrapping_add(base + i * dst_block),
                }
            })
            .collect();
        (run, places)
    }
}

/// Every byte of a copy, against the source.
fn check(batch: &Strided<'_>, who: &str) -> Result<()> {
    let once = Dim {
        count: 1,
        src: 0,
        dst: 0,
    };
    let (outer, inner) = match *batch.dims {
        [outer, inner] => (outer, inner),
        _ => (once, once),
    };
    for at in batch.places {
        for (o, i) in (0..outer.count).flat_map(|o| (0..inner.count).map(move |i| (o, i))) {
            let src = at.src.wrapping_add(o * outer.src + i * inner.src);
            let dst = at.dst.wrapping_add(o * outer.dst + i * inner.dst);
            // SAFETY: the bench's own mappings, which nothing writes now.
            let same = unsafe {
                std::slice::from_raw_parts(src, batch.run)
                    == std::slice::from_raw_parts(dst, batch.run)
            };
            if !same {
                return Err(format!("{who} copied wrong bytes").into());
            }
        }
    }
    Ok(())
}

fn contenders(case: Case) -> Vec<Contender> {
    let mut all = vec![
        contender("kvferry", kvferry, false),
        contender("memcpy", bare::memcpy, true),
    ];
    match case {
        Case::Heads { .. } => all.push(contender("plain loop", bare::plain_loop, false)),
        #[cfg(target_arch = "x86_64")]
        Case::Blocks { .. } if is_x86_feature_detected!("avx2") => {
            all.push(contender("streaming", bare::streaming, false));
            all.push(contender("+prefetch", bare::streaming_prefetch, false));
            all.push(contender("+L2 prefetch", bare::streaming_l2, false));
        }
        Case::Blocks { .. } => {}
    }
    all
}

/// Median GB/s of each contender.
fn measure(
    case: Case,
    reps: usize,
    clock: Clock,
    pool: &Map,
    dst: &Map,
    seed: &mut u64,
) -> Result<Vec<f64>> {
    let dims = case.dims();
    let all = contenders(case);
    let mut times = vec![Vec::new(); all.len()];
    for rep in 0..=reps {
        for turn in 0..all.len() {
            let who = (turn + rep) % all.len();
            let (mut run, mut places) = case.places(&dims, pool, dst, seed);
            let mut dims = &dims[..];
            if all[who].whole && !dims.is_empty() {
                let slots = POOL / SHORT_TOTAL;
                (run, dims) = (SHORT_TOTAL, &[]);
                places = vec![Place {
                    src: pool.0.wrapping_add(random(seed) % slots * SHORT_TOTAL),
                    dst: dst.0,
                }];
            }
            let batch = Strided {
                run,
                dims,
                places: &places,
            };
            let start = clock.now();
            (all[who].copy)(&batch);
            let took = clock.now() - start;
            // The first round is for checking and warming.
            if rep == 0 {
                check(&batch, all[who].name)?;
            } else {
                times[who].push(took);
            }
        }
    }
    Ok(times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            case.bytes() as f64 / 1e9 / times[times.len() / 2]
        })
        .collect())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let after = |flag: &str| args.iter().skip_while(|arg| *arg != flag).nth(1);
    let (json, only) = (has("--json"), after("--only"));
    let clock = if has("--thread-time") {
        Clock::Thread
    } else {
        Clock::Wall(Instant::now())
    };
    let reps = if has("--quick") { 5 } else { 21 };

    let pool = pool()?;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let dst = Map::new(DST, rw, anonymous | libc::MAP_POPULATE, -1)?;

    let blocks = [
        (4 * KIB, 4096),
        (16 * KIB, 2048),
        (64 * KIB, 1024),
        (256 * KIB, 512),
        (MIB, 256),
        (256 * MIB, 1),
    ];
    let blocks = blocks.map(|(bytes, count)| Case::Blocks { bytes, count });
    let heads = [true, false].into_iter().flat_map(|scattered| {
        [true, false].into_iter().flat_map(move |split| {
            [64, 128, 256, 512].map(|run| Case::Heads {
                run,
                split,
                scattered,
            })
        })
    });

    let mut out = std::io::stdout().lock();
    let mut seed = 1;
    for case in blocks.into_iter().chain(heads) {
        let name = case.name();
        if only.is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let rates = measure(case, reps, clock, &pool, &dst, &mut seed)?;
        let best = rates[1..].iter().copied().fold(0.0, f64::max);
        let named: Vec<_> = contenders(case).iter().map(|c| c.name).zip(rates).collect();
        let ratio = named[0].1 / best;
        if json {
            let rates: serde_json::Map<_, _> = named
                .iter()
                .map(|&(name, rate)| (name.to_owned(), serde_json::json!(rate)))
                .collect();
            let line = serde_json::json!({
                "case": name, "reps": reps, "gb_per_s": rates, "ratio_to_best_bare": ratio,
            });
            writeln!(out, "{line}")?;
        } else {
            write!(out, "{name:28} {ratio:5.2} x best bare   GB/s:")?;
            for (name, rate) in named {
                write!(out, "  {name} {rate:.2}")?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}
