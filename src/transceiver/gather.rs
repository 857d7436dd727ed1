//! An all-gather of lists of any length made from the caller's exchange of equal contributions.

use super::api::{Gather, Group};
use crate::bail;
use crate::error::Result;

/// Bytes per rank in the first exchange. What ranks say in one iteration fits nearly always (some
/// 60 lines); if one rank has more, all ranks see that and add a second exchange.
const FRAME: usize = 1024;

const LENGTH: usize = size_of::<u32>();

/// Most bytes that one exchange may bring together.
const MAX_GATHERED: usize = 64 << 20;

/// A [`Gather`] upon `exchange(group, mine, all)`: every member of the group calls it with as many
/// bytes, and `all` receives the members' contributions in the same order everywhere.
///
/// `members`: of the tensor and of the pipeline group.
pub fn framed(
    members: [u32; 2],
    exchange: impl Fn(Group, &[u8], &mut [u8]) -> Result<()> + Send + Sync + 'static,
) -> Gather {
    Box::new(move |group, mine| {
        let [tensor, pipeline] = members;
        let count = match group {
            Group::Tensor => tensor,
            Group::Pipeline => pipeline,
        } as usize;
        let Ok(length) = u32::try_from(mine.len()) else {
            bail!(
                KVF_ERR_LIMIT,
                "{} bytes of verdicts in one exchange",
                mine.len()
            );
        };
        let mut first = vec![0; FRAME];
        let inline = mine.len().min(FRAME - LENGTH);
        first[..LENGTH].copy_from_slice(&length.to_le_bytes());
        first[LENGTH..LENGTH + inline].copy_from_slice(&mine[..inline]);
        let mut all = vec![0; FRAME * count];
        exchange(group, &first, &mut all)?;

        let frames = all.chunks_exact(FRAME).map(|frame| {
            let (head, body) = frame.split_at(LENGTH);
            let length = head.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
            (length, body)
        });
        let frames: Vec<(usize, &[u8])> = frames.collect();
        let longest = frames.iter().map(|(length, _)| *length).max();
        let rest = longest.unwrap_or(0).saturating_sub(FRAME - LENGTH);
        if rest.saturating_mul(count) > MAX_GATHERED {
            bail!(
                KVF_ERR_GROUP_LOST,
                "a member of the {group:?} group announced {} bytes; the exchange must give every \
                 member's contribution unchanged",
                longest.unwrap_or(0)
            );
        }
        let mut second = Vec::new();
        if rest > 0 {
            let mut tail = mine[inline..].to_vec();
            tail.resize(rest, 0);
            second = vec![0; rest * count];
            exchange(group, &tail, &mut second)?;
        }
        let lists = frames.iter().enumerate().map(|(i, (length, body))| {
            let tail = second.get(i * rest..(i + 1) * rest).unwrap_or_default();
            let mut list = [body, tail].concat();
            list.truncate(*length);
            list
        });
        Ok(lists.collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Barrier, Mutex};

    /// Runs one gather on as many threads as there are lists.
    fn gather(lists: Vec<Vec<u8>>) -> (Vec<Vec<Vec<u8>>>, u32) {
        let members = lists.len();
        let shared = Arc::new((
            Barrier::new(members),
            Mutex::new(vec![Vec::new(); members]),
            AtomicU32::new(0),
        ));
        let threads = lists.into_iter().enumerate().map(|(rank, mine)| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let gather = framed([members as u32, 1], move |_, mine, all| {
                    let (barrier, board, calls) = &*shared;
                    calls.fetch_add(1, Ordering::Relaxed);
                    board.lock().unwrap()[rank] = mine.to_vec();
                    barrier.wait();
                    all.copy_from_slice(&board.lock().unwrap().concat());
                    barrier.wait();
                    Ok(())
                });
                gather(Group::Tensor, &mine).unwrap()
            })
        });
        let threads: Vec<_> = threads.collect();
        let all = threads.into_iter().map(|t| t.join().unwrap()).collect();
        (all, shared.2.load(Ordering::Relaxed))
    }

    #[test]
    fn short_lists_take_one_exchange_and_long_ones_two() {
        for (longest, exchanges) in [(0, 1), (1020, 1), (1021, 2), (100_000, 2)] {
            let lists: Vec<Vec<u8>> = vec![vec![1; longest], vec![2; 3], vec![]];
            let (all, calls) = gather(lists.clone());
            assert_eq!(all, vec![lists; 3], "longest {longest}");
            assert_eq!(calls, 3 * exchanges, "longest {longest}");
        }
    }

    #[test]
    fn a_broken_exchange_is_an_error() {
        let failing = framed([2, 1], |_, _, _| {
            bail!(KVF_ERR_GROUP_LOST, "rank 1 is gone")
        });
        let error = failing(Group::Tensor, b"x").unwrap_err();
        assert_eq!(error.status, Status::KVF_ERR_GROUP_LOST);
        let garbage = framed([2, 1], |_, _, all| {
            all.fill(0xff);
            Ok(())
        });
        let error = garbage(Group::Tensor, b"x").unwrap_err();
        assert_eq!(error.status, Status::KVF_ERR_GROUP_LOST);
    }
}
