use proptest::prelude::*;

use super::super::{Decoder, Frame, Heartbeat, Hello, encode};
use super::*;

const I: Incarnation = Incarnation([1; 16]);
const R: Incarnation = Incarnation([2; 16]);
const OTHER: Incarnation = Incarnation([3; 16]);

fn key(byte: u8) -> Option<AuthKey> {
    Some(AuthKey::new(vec![byte; 16]).unwrap())
}

fn caller(key: Option<AuthKey>, nonce: u8) -> (Caller, Body) {
    Caller::new(key, Purpose::Control, (I, "decode"), R, [nonce; 32])
}

fn answerer(key: Option<AuthKey>, nonce: u8) -> Answerer {
    Answerer::new(key, R, [nonce; 32])
}

/// Lets two sides talk until one of them is done for; what each came to, and what was said.
fn talk(
    (mut caller, first): (Caller, Body),
    mut answerer: Answerer,
    mut on_the_way: impl FnMut(usize, Body) -> Body,
) -> (Result<bool>, std::result::Result<bool, Refusal>, Vec<Body>) {
    let (mut said, mut body) = (Vec::new(), first);
    let mut open = (false, false);
    for turn in 0..8 {
        body = on_the_way(turn, body);
        said.push(body.clone());
        let send = if turn % 2 == 0 {
            match answerer.hears(body) {
                Ok(step) => {
                    open.1 |= step.open;
                    step.send
                }
                Err(refusal) => {
                    let heard = caller.hears(refusal.answer()).map(|s| s.open);
                    return (heard, Err(refusal), said);
                }
            }
        } else {
            match caller.hears(body) {
                Ok(step) => {
                    open.0 |= step.open;
                    step.send
                }
                Err(e) => return (Err(e), Ok(open.1), said),
            }
        };
        match send {
            Some(next) => body = next,
            None => break,
        }
    }
    (Ok(open.0), Ok(open.1), said)
}

fn honest(turn: usize, body: Body) -> Body {
    let _ = turn;
    body
}

#[test]
fn equal_keys_and_no_keys_open() {
    for (k, turns) in [(key(7), 4), (None, 2)] {
        let (caller_open, answerer_open, said) = talk(caller(k.clone(), 1), answerer(k, 2), honest);
        assert!(caller_open.unwrap() && answerer_open.unwrap());
        assert_eq!(said.len(), turns);
    }
}

#[test]
fn frames_are_within_the_limits_of_strangers() {
    let long = "ä".repeat(1000);
    let (c, first) = Caller::new(key(1), Purpose::Data, (I, &long), R, [9; 32]);
    let (_, open, said) = talk((c, first), answerer(key(1), 2), honest);
    assert!(open.unwrap());
    for (turn, body) in said.into_iter().enumerate() {
        let mut bytes = Vec::new();
        encode(&Frame { body: Some(body) }, &mut bytes).unwrap();
        let limit = if turn % 2 == 0 {
            CALLER_FRAME
        } else {
            ANSWERER_FRAME
        };
        assert!(bytes.len() - 4 <= limit, "{} bytes", bytes.len());
    }
}

#[test]
fn each_side_says_which_key_is_missing_or_wrong() {
    for (mine, theirs, cause, word) in [
        (None, key(1), Cause::NoKey, "without a pre-shared key"),
        (key(1), None, Cause::UnexpectedKey, "has no key"),
        (key(1), key(2), Cause::WrongKey, "another pre-shared key"),
    ] {
        let (heard, refused, _) = talk(caller(mine, 1), answerer(theirs, 2), honest);
        let (heard, refused) = (heard.unwrap_err(), refused.unwrap_err());
        assert_eq!(refused.cause, cause);
        for e in [&heard, &refused.error] {
            assert_eq!(e.status, Status::KVF_ERR_AUTH);
            assert!(e.text.contains(word), "{}", e.text);
        }
    }
}

#[test]
fn a_caller_is_not_fooled_by_an_answerer_without_the_key() {
    // It claims to have no key: no downgrade.
    let (mut c, _) = caller(key(1), 1);
    let e = c.hears(Body::Accepted(Accepted::default())).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_AUTH);
    // It sends the caller's own proof back.
    let (mut c, _) = caller(key(1), 1);
    let challenge = Challenge { nonce: vec![5; 32] };
    let step = c.hears(Body::Challenge(challenge)).unwrap();
    let Some(Body::Proof(proof)) = step.send else {
        panic!("{step:?}")
    };
    let back = Accepted { mac: proof.mac };
    let e = c.hears(Body::Accepted(back)).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_AUTH);
}

#[test]
fn a_proof_is_of_no_use_anywhere_else() {
    let (_, open, said) = talk(caller(key(1), 1), answerer(key(1), 2), honest);
    assert!(open.unwrap());
    // Replayed as a whole: the answerer's nonce is another one.
    let mut later = answerer(key(1), 3);
    later.hears(said[0].clone()).unwrap();
    let refusal = later.hears(said[2].clone()).unwrap_err();
    assert_eq!(refusal.cause, Cause::WrongKey);
    // For another purpose, in another name, to another agent.
    let Body::Open(first) = &said[0] else {
        panic!()
    };
    let changes: [fn(&mut Open); 3] = [
        |o| o.purpose = Purpose::Data as u32,
        |o| o.incarnation = OTHER.0.to_vec(),
        |o| o.nonce = vec![0; 32],
    ];
    for change in changes {
        let mut open = first.clone();
        change(&mut open);
        let mut same_nonce = answerer(key(1), 2);
        same_nonce.hears(Body::Open(open)).unwrap();
        let refusal = same_nonce.hears(said[2].clone()).unwrap_err();
        assert_eq!(refusal.cause, Cause::WrongKey);
    }
    let mut open = first.clone();
    open.target = OTHER.0.to_vec();
    let mut other = Answerer::new(key(1), OTHER, [2; 32]);
    other.hears(Body::Open(open)).unwrap();
    assert_eq!(
        other.hears(said[2].clone()).unwrap_err().cause,
        Cause::WrongKey
    );
    // The answerer's proof, reflected as a caller's.
    let Body::Accepted(accepted) = &said[3] else {
        panic!()
    };
    let mut again = answerer(key(1), 2);
    again.hears(said[0].clone()).unwrap();
    let proof = Proof {
        mac: accepted.mac.clone(),
    };
    assert_eq!(
        again.hears(Body::Proof(proof)).unwrap_err().cause,
        Cause::WrongKey
    );
}

#[test]
fn a_challenge_cannot_be_reflected_to_its_maker() {
    // R calls nobody: a stranger opens a connection to R, and a second one as if it were R's
    // challenge's answerer. What R proves as an answerer is no proof of a caller.
    let stranger = Open {
        protocol: PROTOCOL,
        purpose: 1,
        incarnation: R.0.to_vec(),
        target: R.0.to_vec(),
        nonce: vec![4; 32],
        keyed: true,
        name: String::new(),
    };
    let mut r = answerer(key(1), 2);
    let step = r.hears(Body::Open(stranger.clone())).unwrap();
    let Some(Body::Challenge(challenge)) = step.send else {
        panic!()
    };
    // R called the stranger at the same time with the same nonces (the worst case).
    let (mut r_calls, _) = Caller::new(key(1), Purpose::Control, (R, ""), OTHER, [4; 32]);
    let step = r_calls.hears(Body::Challenge(challenge)).unwrap();
    let Some(Body::Proof(proof)) = step.send else {
        panic!()
    };
    assert_eq!(
        r.hears(Body::Proof(proof)).unwrap_err().cause,
        Cause::WrongKey
    );
}

#[test]
fn the_order_is_kept() {
    let (_, first) = caller(None, 1);
    let mut a = answerer(None, 2);
    assert!(a.hears(first.clone()).unwrap().open);
    assert_eq!(a.hears(first).unwrap_err().cause, Cause::Malformed);
    let mut a = answerer(key(1), 2);
    let refusal = a
        .hears(Body::Proof(Proof { mac: vec![0; 32] }))
        .unwrap_err();
    assert_eq!(refusal.cause, Cause::Malformed);
    let mut a = answerer(key(1), 2);
    let old = a.hears(Body::Hello(Hello::default())).unwrap_err();
    assert_eq!(
        (old.cause, old.error.status),
        (Cause::Version, Status::KVF_ERR_PROTOCOL)
    );
    let (_, first) = caller(key(1), 1);
    assert_eq!(
        a.hears(first).unwrap_err().cause,
        Cause::Malformed,
        "one try each connection"
    );
    let (mut c, _) = caller(None, 1);
    let e = c.hears(Body::Heartbeat(Heartbeat::default())).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_PROTOCOL);
    let refuse = Refuse {
        status: 0,
        text: "?".into(),
    };
    let e = c.hears(Body::Refuse(refuse)).unwrap_err();
    assert_eq!(
        e.status,
        Status::KVF_ERR_PROTOCOL,
        "a refusal in success is none"
    );
}

#[test]
fn a_key_is_bounded_and_never_printed() {
    for n in [0, 15, 4097] {
        let e = AuthKey::new(vec![1; n]).unwrap_err();
        assert_eq!(e.status, Status::KVF_ERR_INVALID_ARGUMENT);
    }
    assert_eq!(
        format!("{:?}", AuthKey::new(vec![65; 16]).unwrap()),
        "AuthKey"
    );
}

/// One byte of a message changed.
fn corrupt(body: Body, at: usize, bit: u8) -> Option<Body> {
    let mut bytes = Vec::new();
    encode(&Frame { body: Some(body) }, &mut bytes).unwrap();
    let at = 4 + at % (bytes.len() - 4);
    bytes[at] ^= 1 << (bit % 8);
    let mut decoder = Decoder::new(ANSWERER_FRAME);
    decoder.push(&bytes);
    decoder.next_frame().ok()??.body
}

proptest! {
    /// Whatever is changed on the way, no side opens that the other one would not have opened for:
    /// a keyed pair opens only if both nonces, agents and purposes are what was said.
    #[test]
    fn a_changed_message_opens_nothing(
        turn in 0usize..4, at in any::<usize>(), bit in any::<u8>(),
        nonces in any::<(u8, u8)>(),
    ) {
        let mut changed = None;
        let (caller_open, answerer_open, said) = talk(
            caller(key(1), nonces.0),
            answerer(key(1), nonces.1),
            |now, body| match (now == turn).then(|| corrupt(body.clone(), at, bit)).flatten() {
                Some(other) if other != body => {
                    changed = Some(body);
                    other
                }
                _ => body,
            },
        );
        if let Some(original) = changed {
            let both = caller_open.is_ok_and(|o| o) && answerer_open.is_ok_and(|o| o);
            // The name and fields of newer peers are for people and not proven.
            let harmless = match (&original, &said[turn]) {
                (Body::Open(a), Body::Open(b)) => Open { name: b.name.clone(), ..a.clone() } == *b,
                _ => false,
            };
            prop_assert!(harmless || !both, "{original:?} became {:?}", said[turn]);
        }
    }

    /// Any two different keys.
    #[test]
    fn different_keys_never_open(
        a in proptest::collection::vec(any::<u8>(), 16..80),
        b in proptest::collection::vec(any::<u8>(), 16..80),
        nonces in any::<([u8; 32], [u8; 32])>(),
    ) {
        // HMAC pads short keys with zeros.
        let trimmed = |k: &[u8]| {
            let end = k.iter().rposition(|b| *b != 0).map_or(0, |n| n + 1);
            k[..end].to_vec()
        };
        prop_assume!(trimmed(&a) != trimmed(&b));
        let c = Caller::new(AuthKey::new(a).ok(), Purpose::Data, (I, ""), R, nonces.0);
        let r = Answerer::new(AuthKey::new(b).ok(), R, nonces.1);
        let (heard, refused, _) = talk(c, r, honest);
        prop_assert_eq!(heard.unwrap_err().status, Status::KVF_ERR_AUTH);
        prop_assert_eq!(refused.unwrap_err().cause, Cause::WrongKey);
    }

    /// A stranger's messages, in any order: never open, never a panic.
    #[test]
    fn arbitrary_messages_open_nothing(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..120), 1..6),
    ) {
        let mut a = answerer(key(1), 2);
        let (mut c, _) = caller(key(1), 1);
        for bytes in messages {
            let Ok(Frame { body: Some(body) }) = super::super::decode(&bytes) else { continue };
            prop_assert!(!a.hears(body.clone()).is_ok_and(|s| s.open));
            prop_assert!(!c.hears(body).is_ok_and(|s| s.open));
        }
    }
}
