//! Block tables on the wire: four bytes a slot, so that thousands are unpacked in one go.

use crate::bail;
use crate::error::Result;

/// A table as bytes: each slot as a little-endian `i32`.
pub fn pack_slots(slots: &[i32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * slots.len()];
    for (bytes, slot) in bytes.as_chunks_mut().0.iter_mut().zip(slots) {
        *bytes = slot.to_le_bytes();
    }
    bytes
}

/// The table that was packed.
///
/// # Errors
/// `KVF_ERR_PROTOCOL` if a slot was cut.
pub fn unpack_slots(bytes: &[u8]) -> Result<Vec<i32>> {
    let (slots, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        bail!(
            KVF_ERR_PROTOCOL,
            "a block table of {} bytes: slots have 4 each",
            bytes.len()
        );
    }
    Ok(slots.iter().map(|slot| i32::from_le_bytes(*slot)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status::KVF_ERR_PROTOCOL;

    #[test]
    fn a_table_survives_and_a_cut_one_is_refused() {
        let table = [0, -1, 7, i32::MAX, i32::MIN];
        let bytes = pack_slots(&table);
        assert_eq!(bytes[8..12], [7, 0, 0, 0]);
        assert_eq!(unpack_slots(&bytes).unwrap(), table);
        let err = unpack_slots(&bytes[..19]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_PROTOCOL);
        assert_eq!(err.text, "a block table of 19 bytes: slots have 4 each");
    }
}
