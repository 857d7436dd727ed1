//! What a channel takes.

use super::*;

/// A channel that expects 100 bytes and then 50, at the begin of `memory`.
fn channel(memory: &mut [u8]) -> Channel {
    let channel = Channel::new(9, 1, SECRET).unwrap();
    let base = memory.as_mut_ptr();
    for (at, bytes) in [(0, 100), (100, 50)] {
        let mut ranges = Ranges::default();
        ranges.push(base.wrapping_add(at), bytes);
        // SAFETY: the memory outlives the channel, and is looked at when nothing comes any more.
        unsafe { channel.expect(ranges, bytes as u64) };
    }
    channel
}

#[test]
fn a_channel_takes_what_it_expects_and_nothing_else() {
    let head = |offset, last| Head {
        secret: SECRET,
        job: 9,
        offset,
        status: 0,
        last,
        held: true,
    };
    let mut memory = vec![0xee; 200];
    let good = channel(&mut memory);
    good.take(&head(0, false), &[1; 60]).unwrap();
    good.take(&head(60, true), &[2; 40]).unwrap();
    assert_eq!((good.done(), good.lease_lost()), (1, false));
    let lost = Head {
        held: false,
        ..head(0, true)
    };
    good.take(&lost, &[3; 50]).unwrap();
    assert_eq!((good.done(), good.lease_lost()), (2, true));
    assert_eq!(good.take(&head(0, true), &[4; 50]), Err(Dropped::Late));
    assert!(good.error().is_none());
    let expected = [vec![1; 60], vec![2; 40], vec![3; 50], vec![0xee; 50]].concat();
    assert!(memory == expected);

    let stranger = Head {
        secret: [0; KEY_BYTES],
        ..head(0, true)
    };
    let wrong: [(Head, usize, Dropped); 6] = [
        (stranger, 100, Dropped::Stranger),
        (head(0, true), 99, Dropped::Garbage),
        (head(0, true), 101, Dropped::Garbage),
        (head(0, false), 101, Dropped::Garbage),
        (head(1, true), 99, Dropped::Garbage),
        (head(u64::MAX, false), 1, Dropped::Garbage),
    ];
    for (head, bytes, why) in wrong {
        let mut memory = vec![0xee; 200];
        let channel = channel(&mut memory);
        assert_eq!(channel.take(&head, &vec![1; bytes]), Err(why));
        let failed = channel.error().map(|e| e.status);
        match why {
            Dropped::Stranger => assert_eq!(failed, None),
            _ => {
                assert_eq!(failed, Some(Status::KVF_ERR_PROTOCOL));
                let next = channel.take(&Head { offset: 0, ..head }, &[1; 100]);
                assert_eq!(next, Err(Dropped::Late));
            }
        }
        drop(channel);
        assert!(memory.iter().all(|byte| *byte == 0xee));
    }

    let mut memory = vec![0xee; 200];
    let refused = channel(&mut memory);
    let no = Head {
        status: Status::KVF_ERR_EXPIRED as i32,
        ..head(0, true)
    };
    refused.take(&no, b"too late").unwrap();
    let e = refused.error().unwrap();
    assert_eq!(e.status, Status::KVF_ERR_EXPIRED);
    assert_eq!(e.text, "the source refused: too late");
    let closed = channel(&mut memory);
    closed.fail(err!(KVF_ERR_CANCELLED, "closed"));
    assert_eq!(closed.take(&head(0, true), &[1; 100]), Err(Dropped::Late));
    assert!(memory.iter().all(|byte| *byte == 0xee));
}
