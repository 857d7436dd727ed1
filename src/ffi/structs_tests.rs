//! Every rule of growing structs, run under Miri too: it sees a byte read past the caller's size.

use std::ptr::{null, null_mut};

use super::*;
use crate::error::kvf_status::*;

/// cbindgen:ignore
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct kvf_sample {
    struct_size: usize,
    abi_version: u32,
    workers: u32,
    bytes: u64,
    text: *const c_char,
}
abi_struct!(head kvf_sample { struct_size, abi_version, workers, bytes, text });

/// cbindgen:ignore
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct kvf_pair {
    a: u32,
    b: u32,
}
abi_struct!(elem kvf_pair { a, b });

fn sample() -> kvf_sample {
    kvf_sample {
        struct_size: size_of::<kvf_sample>(),
        abi_version: KVF_ABI_VERSION,
        workers: 3,
        bytes: 1 << 40,
        text: null(),
    }
}

/// `given`'s first `size` bytes (more than it has: zeros) in an allocation of exactly that size.
fn sized(mut given: kvf_sample, size: usize) -> Vec<u8> {
    given.struct_size = size;
    let mut bytes = vec![0; size];
    // SAFETY: both sides hold the bytes copied.
    unsafe {
        std::ptr::copy_nonoverlapping(
            (&raw const given).cast::<u8>(),
            bytes.as_mut_ptr(),
            size.min(size_of::<kvf_sample>()),
        );
    }
    bytes
}

fn read_sized(bytes: &[u8]) -> Result<kvf_sample> {
    // SAFETY: the tests' `struct_size` is the slice's length or is refused before it is used.
    unsafe { read(bytes.as_ptr().cast(), "config") }
}

#[test]
fn own_size_is_read_whole() {
    let given = sample();
    // SAFETY: a whole struct.
    assert_eq!(unsafe { read(&raw const given, "config") }, Ok(given));
}

#[test]
fn a_smaller_struct_is_extended_with_zeros_at_every_size() {
    // Sizes that an older header can have had: whole fields.
    for size in [HEAD, 16, 24] {
        let got = read_sized(&sized(sample(), size)).unwrap();
        assert_eq!(got.struct_size, size);
        assert_eq!(got.workers, if size >= 16 { 3 } else { 0 }, "{size}");
        assert_eq!(got.bytes, if size >= 24 { 1 << 40 } else { 0 }, "{size}");
    }
}

#[test]
fn a_larger_struct_is_accepted_only_with_a_zero_tail() {
    let own = size_of::<kvf_sample>();
    for extra in [8, 16, 304] {
        let mut bytes = sized(sample(), own + extra);
        assert_eq!(read_sized(&bytes).unwrap().bytes, 1 << 40);
        bytes[own + extra - 1] = 1;
        let err = read_sized(&bytes).unwrap_err();
        assert_eq!(err.status, KVF_ERR_ABI_MISMATCH);
        let at = format!("config sets a field at byte {}; ", own + extra - 1);
        assert!(err.text.starts_with(&at), "{err}");
    }
}

#[test]
fn an_impossible_size_is_refused_without_reading_further() {
    for size in [0, 1, HEAD - 1, MAX_STRUCT + 1, usize::MAX] {
        let mut bytes = sized(sample(), HEAD);
        bytes[..size_of::<usize>()].copy_from_slice(&size.to_ne_bytes());
        let err = read_sized(&bytes[..size_of::<usize>()]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_ABI_MISMATCH);
        let text = format!("config.struct_size is {size}, a kvf_sample has 32 bytes");
        assert!(err.text.starts_with(&text), "{err}");
        assert!(err.text.ends_with("KVF_SAMPLE_INIT"), "{err}");
    }
}

#[test]
fn a_size_that_ends_inside_a_field_is_refused() {
    let sizes = HEAD..size_of::<kvf_sample>() + 20;
    for size in sizes.filter(|size| ![HEAD, 16, 24, 32, 40, 48].contains(size)) {
        let bytes = sized(sample(), size);
        let err = read_sized(&bytes).unwrap_err();
        assert_eq!(err.status, KVF_ERR_ABI_MISMATCH);
        let text = format!("config.struct_size is {size}, which ");
        assert!(err.text.starts_with(&text), "{err}");
        assert!(
            err.text.contains("sizeof(kvf_sample), which is 32 in"),
            "{err}"
        );
        // SAFETY: `size` readable bytes.
        let same = unsafe { check_head(bytes.as_ptr().cast::<kvf_sample>(), "config") };
        assert_eq!(same, Err(err), "results are refused alike");
    }
    let words = [0u32; 12];
    for elem_size in [1, 3, 5, 7, 9, 11, 13] {
        // SAFETY: nothing of the array is read.
        let (read, write) = unsafe {
            let base = words.as_ptr().cast::<kvf_pair>();
            let write = OutArray::new(base.cast_mut(), 2, elem_size, "pairs").err();
            (read_array(base, 2, elem_size, "pairs").unwrap_err(), write)
        };
        assert_eq!(read.status, KVF_ERR_ABI_MISMATCH);
        let text = format!("elem_size of pairs is {elem_size}, which ");
        assert!(read.text.starts_with(&text), "{read}");
        assert_eq!(write, Some(read));
    }
}

/// Every struct of the C interface takes exactly the sizes at which a field begins or ends,
/// by the table that C++ compares with what a compiler makes of kvferry.h.
#[test]
fn every_struct_takes_whole_fields_only() {
    let table = include_str!("../../cpp_tests/struct_layout.inc");
    let mut known = std::collections::BTreeMap::<&str, Vec<usize>>::new();
    for row in table.lines().filter(|line| line.ends_with("),")) {
        let (_, row) = row.trim_end_matches("),").split_once('(').unwrap();
        let mut parts = row.split(", ");
        let (name, last) = (parts.next().unwrap(), parts.last().unwrap());
        known.entry(name).or_default().push(last.parse().unwrap());
    }
    macro_rules! accepted {
        ($kind:ident: $($module:ident::$name:ident),+ $(,)?) => {$(
            let (ends, align) = $kind::<crate::ffi::$module::$name>();
            let mut sizes = known.remove(stringify!($name)).unwrap();
            let own = sizes.iter().copied().max().unwrap();
            sizes.retain(|size| *size > 0);
            sizes.extend((1..4).map(|i| own + i * align));
            sizes.sort_unstable();
            assert_eq!(ends, sizes, "{}", stringify!($name));
        )+};
    }
    fn elem<T: AbiStruct>() -> (Vec<usize>, usize) {
        let (own, align) = (size_of::<T>(), align_of::<T>());
        let fits = |size: &usize| check_array::<T>(false, 1, *size, "x").is_ok();
        ((0..=own + 3 * align).filter(fits).collect(), align)
    }
    fn head<T: HeadedStruct>() -> (Vec<usize>, usize) {
        let (own, align) = (size_of::<T>(), align_of::<T>());
        let fits = |size: &usize| {
            let mut bytes = vec![0u8; own + 3 * align];
            bytes[..8].copy_from_slice(&size.to_ne_bytes());
            bytes[8..12].copy_from_slice(&KVF_ABI_VERSION.to_ne_bytes());
            // SAFETY: more bytes than any size that is tried.
            unsafe { check_head(bytes.as_ptr().cast::<T>(), "x") }.is_ok()
        };
        let mut sizes: Vec<usize> = (0..=own + 3 * align).filter(fits).collect();
        // A struct without its head is none.
        sizes.insert(0, size_of::<usize>());
        (sizes, align)
    }
    accepted!(head: agent::kvf_agent_config, engine::kvf_engine_desc, pool::kvf_host_pool_config,
        pool::kvf_pool_desc, pool::kvf_pool_info, peer::kvf_peer_info, layout::kvf_layout_desc,
        publication::kvf_publish_desc, publication::kvf_publication_info, push::kvf_receive_desc,
        push::kvf_push_desc, import::kvf_pull_desc, import::kvf_import_desc,
        transfer::kvf_transfer_info, transceiver_config::kvf_transceiver_config,
        transceiver_request::kvf_receive_request, transceiver_record::kvf_request_record);
    accepted!(elem: agent::kvf_quarantined_slot, engine::kvf_bytes, event::kvf_event,
        event::kvf_key, layout::kvf_group_desc, layout::kvf_view_desc, layout::kvf_section_desc,
        layout::kvf_tensor_desc, publication::kvf_published_group,
        publication::kvf_published_state, import::kvf_import_group, import::kvf_import_state,
        import::kvf_slot_ref, transfer::kvf_part_info, transceiver_status::kvf_request_result);
    assert!(known.is_empty(), "not tried: {:?}", known.keys());
}

#[test]
fn an_unknown_abi_version_is_refused() {
    for abi_version in [0, KVF_ABI_VERSION + 1, u32::MAX] {
        let given = kvf_sample {
            abi_version,
            ..sample()
        };
        // SAFETY: a whole struct.
        let err = unsafe { read(&raw const given, "config") }.unwrap_err();
        assert_eq!(err.status, KVF_ERR_ABI_MISMATCH);
        let text = format!("config.abi_version is {abi_version}, this library serves 1");
        assert!(err.text.starts_with(&text), "{err}");
    }
}

#[test]
fn null_is_named_or_means_the_defaults() {
    // SAFETY: NULL is allowed everywhere here.
    unsafe {
        let err = read::<kvf_sample>(null(), "config").unwrap_err();
        assert_eq!(
            (err.status, err.text.as_str()),
            (KVF_ERR_INVALID_ARGUMENT, "config is NULL")
        );
        assert_eq!(read_optional::<kvf_sample>(null(), "config"), Ok(None));
        assert_eq!(
            view::<u8>(null(), "agent").unwrap_err().text,
            "agent is NULL"
        );
        assert_eq!(
            Out::<u8>::new(null_mut(), "out").unwrap_err().text,
            "out is NULL"
        );
    }
}

#[test]
fn array_elements_grow_and_shrink_by_elem_size() {
    let words = [1u32, 2, 0, 3, 4, 0];
    // SAFETY: count * elem_size is at most the array's size in every call.
    unsafe {
        let base = words.as_ptr().cast::<kvf_pair>();
        let wide = read_array(base, 2, 12, "pairs").unwrap();
        assert_eq!(wide, [kvf_pair { a: 1, b: 2 }, kvf_pair { a: 3, b: 4 }]);
        let narrow = read_array(base, 6, 4, "pairs").unwrap();
        assert_eq!(narrow[1], kvf_pair { a: 2, b: 0 });
        assert_eq!(narrow.len(), 6);
        assert_eq!(read_array::<kvf_pair>(null(), 0, 0, "pairs"), Ok(vec![]));
    }
}

#[test]
fn a_set_unknown_field_names_its_element() {
    let words = [1u32, 2, 0, 3, 4, 9];
    // SAFETY: two elements of 12 bytes.
    let err = unsafe { read_array(words.as_ptr().cast::<kvf_pair>(), 2, 12, "pairs") }.unwrap_err();
    assert_eq!(err.status, KVF_ERR_ABI_MISMATCH);
    assert!(
        err.text.starts_with("pairs[1] sets a field at byte 8; "),
        "{err}"
    );
}

#[test]
fn impossible_arrays_are_refused_before_they_are_read() {
    let one = kvf_pair { a: 1, b: 2 };
    // SAFETY: nothing of the array is read.
    unsafe {
        let status = |base, count, size| {
            read_array::<kvf_pair>(base, count, size, "p")
                .unwrap_err()
                .status
        };
        assert_eq!(status(null(), 1, 8), KVF_ERR_INVALID_ARGUMENT);
        assert_eq!(status(&one, 1, 0), KVF_ERR_ABI_MISMATCH);
        assert_eq!(status(&one, 1, MAX_STRUCT + 1), KVF_ERR_ABI_MISMATCH);
        assert_eq!(status(&one, usize::MAX, 8), KVF_ERR_OUT_OF_RANGE);
        let plain = |base, count| read_plain::<u32>(base, count, "slots").unwrap_err().status;
        assert_eq!(plain(null(), 1), KVF_ERR_INVALID_ARGUMENT);
        assert_eq!(plain(&one.a, MAX_ELEMENTS + 1), KVF_ERR_OUT_OF_RANGE);
        assert_eq!(read_plain::<u32>(null(), 0, "slots"), Ok(vec![]));
        assert_eq!(read_plain(&raw const one.a, 1, "slots"), Ok(vec![1]));
    }
}

#[test]
fn results_are_written_up_to_the_callers_size_and_keep_its_head() {
    let value = kvf_sample {
        struct_size: 77,
        abi_version: 77,
        ..sample()
    };
    for size in [HEAD, 16, 24, 32, 40, 48] {
        let mut bytes = sized(sample(), size);
        bytes[HEAD..].fill(0xee);
        let dst = bytes.as_mut_ptr().cast::<kvf_sample>();
        // SAFETY: `size` writable bytes.
        unsafe {
            assert_eq!(check_head(dst, "outcome"), Ok(size));
            write_result(dst, size, &value);
        }
        assert_eq!(bytes, sized(sample(), size), "{size}");
    }
}

#[test]
fn result_arrays_take_what_fits() {
    let values = [kvf_pair { a: 1, b: 2 }, kvf_pair { a: 3, b: 4 }];
    for (elem_size, want) in [
        (8, vec![1u32, 2, 3, 4, 9, 9]),
        (4, vec![1, 3, 9, 9, 9, 9]),
        (12, vec![1, 2, 0, 3, 4, 0]),
    ] {
        let mut words = [9u32; 6];
        // SAFETY: two elements of at most 12 bytes.
        let out = unsafe { OutArray::new(words.as_mut_ptr().cast(), 2, elem_size, "results") };
        assert_eq!(out.unwrap().fill(&values), 2);
        assert_eq!(words.as_slice(), want, "{elem_size}");
    }
    // SAFETY: capacity 0 allows NULL.
    let none = unsafe { OutArray::<kvf_pair>::new(null_mut(), 0, 0, "results") }.unwrap();
    assert_eq!((none.capacity(), none.fill(&values)), (0, 0));
}

#[test]
fn bytes_are_given_whole_or_not_at_all() {
    let (mut buf, mut needed) = ([9u8; 4], 99);
    // SAFETY: `cap` is at most the buffer's size.
    unsafe {
        put_bytes(null_mut(), 0, &mut needed, b"abc", "buf").unwrap();
        assert_eq!(needed, 3);
        needed = 99;
        let err = put_bytes(buf.as_mut_ptr(), 2, &mut needed, b"abc", "buf").unwrap_err();
        assert_eq!(err.status, KVF_ERR_OUT_OF_RANGE);
        assert_eq!((buf, needed), ([9; 4], 3), "the size, and nothing else");
        needed = 99;
        let err = put_bytes(null_mut(), 2, &mut needed, b"abc", "buf").unwrap_err();
        assert_eq!(err.status, KVF_ERR_INVALID_ARGUMENT);
        assert_eq!(needed, 99, "untouched on error");
        put_bytes(buf.as_mut_ptr(), 4, &mut needed, b"abc", "buf").unwrap();
        assert_eq!((buf, needed), (*b"abc\x09", 3));
        put_bytes(buf.as_mut_ptr(), 4, null_mut(), b"d", "buf").unwrap();
        assert_eq!(buf[0], b'd');
    }
}

#[test]
fn texts_are_checked_and_cut_between_characters() {
    // SAFETY: NUL-terminated or NULL; `cap` is the buffer's size.
    unsafe {
        assert_eq!(read_text(null(), "name"), Ok(None));
        assert_eq!(
            read_text(c"decode 0".as_ptr(), "name"),
            Ok(Some("decode 0".into()))
        );
        let err = read_text(c"\xff".as_ptr(), "name").unwrap_err();
        assert_eq!(err.status, KVF_ERR_INVALID_ARGUMENT);
        let mut long = vec![b'a'; MAX_TEXT];
        long.push(0);
        let err = read_text(long.as_ptr().cast(), "name").unwrap_err();
        assert_eq!(err.status, KVF_ERR_INVALID_ARGUMENT);
        long[MAX_TEXT - 1] = 0;
        let text = read_text(long.as_ptr().cast(), "name").unwrap();
        assert_eq!(text.map(|t| t.len()), Some(MAX_TEXT - 1));
        let mut buf = [1 as c_char; 4];
        assert_eq!(put_text(buf.as_mut_ptr(), 3, "a\u{e9}b"), 4);
        assert_eq!(CStr::from_ptr(buf.as_ptr()), c"a", "no half of a character");
        assert_eq!(buf[3], 1);
    }
}

#[test]
fn handles_go_out_as_boxes() {
    let mut handle = null_mut::<String>();
    // SAFETY: `handle` is writable; it is freed once.
    unsafe {
        Out::new(&raw mut handle, "out")
            .unwrap()
            .set_handle("x".to_owned());
        assert_eq!(view(handle, "handle").unwrap(), "x");
        drop(Box::from_raw(handle));
    }
}
