//! How every connection begins, control link or data connection: who is it, whom does it mean, and
//! does each side know the pre-shared key? Two machines without sockets, clock or randomness; the
//! caller of each gives it the nonce and a deadline.
//!
//! ```text
//! caller                                   answerer
//!   Open(agents, purpose, nonce)   ->
//!                                  <-      Challenge(nonce)       both have a key
//!   Proof(caller's mac)            ->
//!                                  <-      Accepted(answerer's mac)
//! ```
//!
//! Without keys `Accepted` follows `Open` at once. The answerer gives nothing away to a caller that
//! has not proven the key, and the caller says nothing else before it has seen the answerer's
//! proof. Frames are small and each is answered before the next may come.

use super::auth::{AuthKey, NONCE_BYTES, Side};
use super::{Accepted, Body, Challenge, Open, PROTOCOL, Proof, Refuse};
use crate::err;
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;

/// Longest frame that an answerer takes from a stranger.
pub const CALLER_FRAME: usize = 512;
/// Longest frame that a caller takes: a refusal with its text.
pub const ANSWERER_FRAME: usize = 4096;
/// Longest name that a stranger may tell.
const MAX_NAME: usize = 128;

/// 32 bytes that were never used before.
pub type Nonce = [u8; NONCE_BYTES];

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// The control link of two agents.
    Control = 1,
    /// A reader's data connection.
    Data = 2,
}

/// What comes next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// To be sent.
    pub send: Option<Body>,
    /// The connection is open once that has been sent.
    pub open: bool,
}

/// Why an answerer refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Another version of the protocol.
    Version,
    /// Another agent was meant.
    Replaced,
    /// The caller has no key and this side has one.
    NoKey,
    /// The caller has a key and this side has none.
    UnexpectedKey,
    /// The caller's key is another one.
    WrongKey,
    /// Not our protocol, or not in this order.
    Malformed,
}

impl Cause {
    /// The word for it, in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::Replaced => "replaced",
            Self::NoKey => "no_key",
            Self::UnexpectedKey => "unexpected_key",
            Self::WrongKey => "wrong_key",
            Self::Malformed => "malformed",
        }
    }
}

/// An answerer's refusal: counted, told to the caller, and the connection ends.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Why, in a word.
    pub cause: Cause,
    /// Why, for both sides.
    pub error: Error,
}

impl Refusal {
    fn new(cause: Cause, error: Error) -> Self {
        Self { cause, error }
    }

    /// A caller whose bytes make no sense.
    pub fn malformed(error: Error) -> Self {
        Self::new(Cause::Malformed, error)
    }

    /// What is sent before the connection ends.
    pub fn answer(&self) -> Body {
        Body::Refuse(Refuse {
            status: self.error.status as i32,
            text: self.error.text.clone(),
        })
    }
}

/// The connecting side.
#[derive(Debug)]
pub struct Caller {
    key: Option<AuthKey>,
    open: Open,
    /// The answerer's nonce, once its challenge has been answered.
    challenge: Option<Vec<u8>>,
}

impl Caller {
    /// A machine for one connection and the message to begin with.
    pub fn new(
        key: Option<AuthKey>,
        purpose: Purpose,
        own: (Incarnation, &str),
        target: Incarnation,
        nonce: Nonce,
    ) -> (Self, Body) {
        let mut name = own.1.to_owned();
        name.truncate(
            (0..=MAX_NAME)
                .rev()
                .find(|n| name.is_char_boundary(*n))
                .unwrap_or(0),
        );
        let open = Open {
            protocol: PROTOCOL,
            purpose: purpose as u32,
            incarnation: own.0.0.to_vec(),
            target: target.0.to_vec(),
            nonce: nonce.to_vec(),
            keyed: key.is_some(),
            name,
        };
        let body = Body::Open(open.clone());
        let caller = Self {
            key,
            open,
            challenge: None,
        };
        (caller, body)
    }

    /// The answerer has said something.
    ///
    /// # Errors
    /// The answerer's refusal; `KVF_ERR_AUTH` if it does not know our key, `KVF_ERR_PROTOCOL` if it
    /// does not keep to the order. The connection is of no more use.
    pub fn hears(&mut self, body: Body) -> Result<Step> {
        match (body, &self.key, &self.challenge) {
            (Body::Refuse(refuse), ..) => Err(Error::new(
                Status::from_code(refuse.status)
                    .filter(|s| (*s as i32) < 0)
                    .unwrap_or(Status::KVF_ERR_PROTOCOL),
                format!("refused: {}", refuse.text),
            )),
            (Body::Challenge(challenge), Some(key), None)
                if challenge.nonce.len() == NONCE_BYTES =>
            {
                let mac = key.prove(Side::Caller, &self.open, &challenge.nonce);
                self.challenge = Some(challenge.nonce);
                Ok(Step {
                    send: Some(Body::Proof(Proof { mac })),
                    open: false,
                })
            }
            (Body::Accepted(_), None, None) => Ok(Step {
                send: None,
                open: true,
            }),
            (Body::Accepted(accepted), Some(key), Some(nonce)) => {
                if !key.verify(Side::Answerer, &self.open, nonce, &accepted.mac) {
                    return Err(err!(
                        KVF_ERR_AUTH,
                        "whoever answers there does not know our pre-shared key"
                    ));
                }
                Ok(Step {
                    send: None,
                    open: true,
                })
            }
            (Body::Accepted(_), Some(_), None) => Err(err!(
                KVF_ERR_AUTH,
                "whoever answers there did not ask for our pre-shared key: it has none"
            )),
            _ => Err(err!(
                KVF_ERR_PROTOCOL,
                "whoever answers there does not speak kvferry's protocol {PROTOCOL}"
            )),
        }
    }
}

/// The side that was called.
#[derive(Debug)]
pub struct Answerer {
    key: Option<AuthKey>,
    own: Incarnation,
    nonce: Nonce,
    open: Option<Open>,
    done: bool,
}

/// Who called, after the connection is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The connecting agent.
    pub agent: Incarnation,
    /// What for.
    pub purpose: Purpose,
}

impl Answerer {
    /// A machine for one connection. The nonce is used only if there is a key.
    pub fn new(key: Option<AuthKey>, own: Incarnation, nonce: Nonce) -> Self {
        Self {
            key,
            own,
            nonce,
            open: None,
            done: false,
        }
    }

    /// The caller has said something.
    ///
    /// # Errors
    /// A refusal to be told; the connection is of no more use.
    pub fn hears(&mut self, body: Body) -> std::result::Result<Step, Refusal> {
        let step = match (body, self.open.take()) {
            (Body::Open(open), None) if !self.done => self.opens(open),
            (Body::Proof(proof), Some(open)) if !self.done => self.proves(open, &proof),
            (Body::Hello(_) | Body::DataHello(_), None) => Err(Refusal::new(
                Cause::Version,
                err!(
                    KVF_ERR_PROTOCOL,
                    "protocol {PROTOCOL} here, 1 there: use the same release on both sides"
                ),
            )),
            _ => Err(Refusal::malformed(err!(
                KVF_ERR_PROTOCOL,
                "a message out of its order at the begin of a connection"
            ))),
        };
        self.done |= step.as_ref().map_or(true, |step| step.open);
        step
    }

    fn opens(&mut self, open: Open) -> std::result::Result<Step, Refusal> {
        if open.protocol != PROTOCOL {
            return Err(Refusal::new(
                Cause::Version,
                err!(
                    KVF_ERR_PROTOCOL,
                    "protocol {PROTOCOL} here, {} there: use the same release on both sides",
                    open.protocol
                ),
            ));
        }
        if open.incarnation.len() != 16
            || open.target.len() != 16
            || open.nonce.len() != NONCE_BYTES
            || open.name.len() > MAX_NAME
            || purpose(&open).is_none()
        {
            return Err(Refusal::malformed(err!(
                KVF_ERR_PROTOCOL,
                "the first message of a connection has fields of a wrong size"
            )));
        }
        if open.target != self.own.0 {
            return Err(Refusal::new(
                Cause::Replaced,
                err!(
                    KVF_ERR_PEER_LOST,
                    "this is agent {:?}, not the one that was meant: it has been replaced",
                    self.own
                ),
            ));
        }
        match (&self.key, open.keyed) {
            (None, false) => {
                self.open = Some(open);
                Ok(Step {
                    send: Some(Body::Accepted(Accepted { mac: Vec::new() })),
                    open: true,
                })
            }
            (Some(_), true) => {
                self.open = Some(open);
                Ok(Step {
                    send: Some(Body::Challenge(Challenge {
                        nonce: self.nonce.to_vec(),
                    })),
                    open: false,
                })
            }
            (Some(_), false) => Err(Refusal::new(
                Cause::NoKey,
                err!(
                    KVF_ERR_AUTH,
                    "agent {:?} connects without a pre-shared key to one that has a key: set the \
                     same auth_key on both sides",
                    open.name
                ),
            )),
            (None, true) => Err(Refusal::new(
                Cause::UnexpectedKey,
                err!(
                    KVF_ERR_AUTH,
                    "agent {:?} connects with a pre-shared key to one that has no key: set the \
                     same auth_key on both sides",
                    open.name
                ),
            )),
        }
    }

    fn proves(&mut self, open: Open, proof: &Proof) -> std::result::Result<Step, Refusal> {
        let Some(key) = &self.key else {
            return Err(Refusal::malformed(err!(
                KVF_ERR_PROTOCOL,
                "a proof that nobody asked for"
            )));
        };
        if !key.verify(Side::Caller, &open, &self.nonce, &proof.mac) {
            return Err(Refusal::new(
                Cause::WrongKey,
                err!(
                    KVF_ERR_AUTH,
                    "agent {:?} has another pre-shared key than the one it connects to: set the \
                     same auth_key on both sides",
                    open.name
                ),
            ));
        }
        let mac = key.prove(Side::Answerer, &open, &self.nonce);
        self.open = Some(open);
        Ok(Step {
            send: Some(Body::Accepted(Accepted { mac })),
            open: true,
        })
    }

    /// Who called. Of meaning after a step that is `open`.
    pub fn opened(&self) -> Option<Opened> {
        let open = self.open.as_ref()?;
        let agent = Incarnation(open.incarnation.as_slice().try_into().ok()?);
        let purpose = purpose(open)?;
        Some(Opened { agent, purpose })
    }
}

fn purpose(open: &Open) -> Option<Purpose> {
    [Purpose::Control, Purpose::Data]
        .into_iter()
        .find(|p| *p as u32 == open.purpose)
}

#[cfg(test)]
mod tests;
