//! The pre-shared key and the proofs that somebody knows it.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::Open;
use crate::bail;
use crate::error::Result;

/// Fewest bytes of a key: 128 bits cannot be guessed.
pub const AUTH_KEY_MIN: usize = 16;
/// Most bytes of a key.
pub const AUTH_KEY_MAX: usize = 4096;
/// Bytes of a nonce.
pub(super) const NONCE_BYTES: usize = 32;

/// A pre-shared key. It is overwritten when it is dropped and never printed.
#[derive(Clone)]
pub struct AuthKey(Zeroizing<Vec<u8>>);

impl std::fmt::Debug for AuthKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuthKey")
    }
}

/// Whose proof it is. A proof of one side is of no use to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Caller,
    Answerer,
}

impl AuthKey {
    /// Takes a key; the bytes are overwritten even if it is refused.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT`: shorter than [`AUTH_KEY_MIN`] or longer than [`AUTH_KEY_MAX`].
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes);
        if !(AUTH_KEY_MIN..=AUTH_KEY_MAX).contains(&bytes.len()) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the pre-shared key has {} bytes; give {AUTH_KEY_MIN} to {AUTH_KEY_MAX} random ones",
                bytes.len()
            );
        }
        Ok(Self(bytes))
    }

    /// HMAC-SHA256 over everything that the two sides have said, so that a proof fits one
    /// connection only: this role, purpose, pair of agents and pair of nonces. All parts but the
    /// label have fixed lengths, which the machines have checked.
    fn over(&self, side: Side, open: &Open, nonce: &[u8]) -> Option<Hmac<Sha256>> {
        let label: &[u8] = match side {
            Side::Caller => b"kvferry opening: caller\0",
            Side::Answerer => b"kvferry opening: answerer\0",
        };
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&self.0).ok()?;
        mac.update(label);
        mac.update(&open.protocol.to_le_bytes());
        mac.update(&open.purpose.to_le_bytes());
        mac.update(&open.incarnation);
        mac.update(&open.target);
        mac.update(&open.nonce);
        mac.update(nonce);
        Some(mac)
    }

    pub(super) fn prove(&self, side: Side, open: &Open, nonce: &[u8]) -> Vec<u8> {
        // HMAC takes keys of any length, so there always is one.
        self.over(side, open, nonce)
            .map(|mac| mac.finalize().into_bytes().to_vec())
            .unwrap_or_default()
    }

    /// Compares in constant time.
    pub(super) fn verify(&self, side: Side, open: &Open, nonce: &[u8], proof: &[u8]) -> bool {
        self.over(side, open, nonce)
            .is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }
}
