//! What every C function does with NULL, with structs of other versions and with descriptions that
//! say nothing sensible, before an agent is needed. Runs under Miri.

#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};

use kvferry::ffi::kvf_status::*;
use kvferry::ffi::*;

fn last_error() -> String {
    let mut buf = [0 as c_char; 1024];
    // SAFETY: the buffer and its size belong together; the result has its NUL.
    unsafe {
        kvf_last_error(buf.as_mut_ptr(), buf.len());
        CStr::from_ptr(buf.as_ptr()).to_str().unwrap().to_owned()
    }
}

/// Refused with this status and a text that says this.
#[track_caller]
fn refused(status: kvf_status, with: kvf_status, saying: &str) {
    let text = last_error();
    assert_eq!(status, with, "{text}");
    assert!(text.contains(saying), "{saying:?} is not in {text:?}");
}

/// A struct with its head and nothing else: what its `_INIT` gives, `elem_size`s aside.
macro_rules! init {
    ($name:ident) => {{
        // SAFETY: all-zero is a value of every struct of the C interface.
        let mut value: $name = unsafe { zeroed() };
        value.struct_size = size_of::<$name>();
        value.abi_version = KVF_ABI_VERSION;
        value
    }};
}

#[test]
fn destroying_null_does_nothing() {
    // SAFETY: NULL is allowed.
    unsafe {
        assert_eq!(kvf_agent_destroy(null_mut(), 0), KVF_OK);
        assert_eq!(kvf_pool_destroy(null_mut()), KVF_OK);
        assert_eq!(kvf_layout_destroy(null_mut()), KVF_OK);
        assert_eq!(kvf_engine_destroy(null_mut()), KVF_OK);
        assert_eq!(kvf_peer_destroy(null_mut()), KVF_OK);
        assert_eq!(kvf_publication_destroy(null_mut()), KVF_OK);
        assert_eq!(kvf_transfer_destroy(null_mut()), KVF_OK);
    }
}

#[test]
fn every_other_function_names_its_null_handle() {
    let (mut fd, mut n, mut id) = (0, 0, 0);
    let (mut base, text, bytes) = (null_mut::<c_void>(), null_mut(), null_mut());
    // SAFETY: NULL handles are refused before anything else is looked at.
    let table = unsafe {
        [
            ("agent", kvf_agent_event_fd(null(), &mut fd)),
            (
                "agent",
                kvf_agent_take_events(null_mut(), null_mut(), 0, 0, &mut n),
            ),
            ("agent", kvf_agent_drain(null_mut(), 0)),
            ("agent", kvf_agent_metadata(null(), bytes, 0, &mut n)),
            (
                "agent",
                kvf_agent_quarantine(null(), null_mut(), 0, 0, &mut n),
            ),
            ("agent", kvf_metrics_text(null(), text, 0, &mut n)),
            ("agent", kvf_agent_set_layout(null_mut(), null())),
            (
                "agent",
                kvf_host_pool_create(null_mut(), null(), null_mut()),
            ),
            ("agent", kvf_pool_register(null_mut(), null(), null_mut())),
            ("agent", kvf_engine_create(null_mut(), null(), null_mut())),
            ("agent", kvf_peer_add(null_mut(), null(), 0, 0, null_mut())),
            ("agent", kvf_publish(null_mut(), null(), null_mut())),
            ("agent", kvf_pull_begin(null_mut(), null(), null_mut())),
            ("agent", kvf_import_begin(null_mut(), null(), null_mut())),
            ("agent", kvf_receive_begin(null_mut(), null(), null_mut())),
            ("agent", kvf_push_begin(null_mut(), null(), null_mut())),
            ("agent", kvf_ticket_hold(null_mut(), null(), null(), 0)),
            (
                "agent",
                kvf_ticket_decline(null_mut(), null(), null(), 0, -23),
            ),
            ("pool", kvf_pool_memory(null(), &mut base, null_mut())),
            ("pool", kvf_pool_id(null(), &mut id)),
            ("pool", kvf_pool_unregister_begin(null_mut(), 0)),
            ("pool", kvf_pool_query(null(), null_mut())),
            ("engine", kvf_engine_metadata(null(), bytes, 0, &mut n)),
            ("peer", kvf_peer_query(null(), null_mut())),
            ("peer", kvf_peer_text(null(), text, 0, &mut n)),
            ("peer", kvf_peer_wait(null(), 0)),
            ("peer", kvf_peer_remove(null_mut())),
            (
                "publication",
                kvf_publication_ticket(null(), bytes, 0, &mut n),
            ),
            ("publication", kvf_publication_query(null(), null_mut())),
            ("publication", kvf_publication_wait(null(), 0)),
            ("publication", kvf_publication_release(null_mut())),
            ("transfer", kvf_transfer_poll(null())),
            ("transfer", kvf_transfer_wait(null(), 0)),
            ("transfer", kvf_transfer_cancel(null_mut())),
            (
                "transfer",
                kvf_transfer_query(null(), null_mut(), null_mut(), 0, 0),
            ),
            ("transfer", kvf_transfer_error_text(null(), text, 0, &mut n)),
            ("transfer", kvf_transfer_aux(null(), bytes, 0, &mut n)),
            ("transfer", kvf_transfer_offer(null(), bytes, 0, &mut n)),
            ("transfer", kvf_transfer_stream_wait(null_mut(), null_mut())),
        ]
    };
    for (at, (what, status)) in table.into_iter().enumerate() {
        assert_eq!(status, KVF_ERR_INVALID_ARGUMENT, "entry {at}: {what}");
    }
    refused(
        // SAFETY: as above.
        unsafe { kvf_transfer_poll(null()) },
        KVF_ERR_INVALID_ARGUMENT,
        "transfer is NULL",
    );
    assert_eq!((fd, n, id), (0, 0, 0), "results are untouched");
    assert!(base.is_null());
}

#[test]
fn agent_configs_are_checked_before_anything_starts() {
    let none = null_mut::<kvf_agent>();
    let mut agent = none;
    let mut create = |config: *const kvf_agent_config| {
        // SAFETY: NULL or a live config; `agent` is writable.
        unsafe { kvf_agent_create(config, &mut agent) }
    };
    refused(create(null()), KVF_ERR_INVALID_ARGUMENT, "config is NULL");

    let mut config = init!(kvf_agent_config);
    config.struct_size = 3;
    refused(
        create(&config),
        KVF_ERR_ABI_MISMATCH,
        "config.struct_size is 3",
    );
    let mut config = init!(kvf_agent_config);
    config.abi_version = 77;
    refused(
        create(&config),
        KVF_ERR_ABI_MISMATCH,
        "config.abi_version is 77",
    );
    let mut config = init!(kvf_agent_config);
    config.log_level = 5;
    refused(
        create(&config),
        KVF_ERR_INVALID_ARGUMENT,
        "config.log_level is 5",
    );
    config.log_level = KVF_LOG_INFO;
    refused(
        create(&config),
        KVF_ERR_INVALID_ARGUMENT,
        "without config.log",
    );
    let mut config = init!(kvf_agent_config);
    config.name = c"\xff".as_ptr();
    refused(
        create(&config),
        KVF_ERR_INVALID_ARGUMENT,
        "config.name is not UTF-8",
    );
    let mut config = init!(kvf_agent_config);
    config.num_affinity = 2;
    refused(
        create(&config),
        KVF_ERR_INVALID_ARGUMENT,
        "config.affinity is NULL with a count of 2",
    );
    assert_eq!(agent, none, "untouched");
    let config = init!(kvf_agent_config);
    refused(
        // SAFETY: a live config; a NULL result is refused.
        unsafe { kvf_agent_create(&config, null_mut()) },
        KVF_ERR_INVALID_ARGUMENT,
        "agent is NULL",
    );
}

#[test]
fn a_config_of_a_newer_header_is_taken_only_with_a_zero_tail() {
    #[repr(C)]
    struct Newer {
        known: kvf_agent_config,
        added: u64,
    }
    let mut newer = Newer {
        known: init!(kvf_agent_config),
        added: 0,
    };
    newer.known.struct_size = size_of::<Newer>();
    newer.known.log_level = 9; // so that no agent is made
    let mut agent = null_mut();
    let mut create = |newer: &Newer| {
        // SAFETY: `struct_size` bytes are readable.
        unsafe { kvf_agent_create((&raw const *newer).cast(), &mut agent) }
    };
    refused(create(&newer), KVF_ERR_INVALID_ARGUMENT, "log_level");
    newer.added = 1;
    refused(create(&newer), KVF_ERR_ABI_MISMATCH, "config sets a field");
}

fn view() -> kvf_view_desc {
    // SAFETY: all-zero is a value.
    let mut view: kvf_view_desc = unsafe { zeroed() };
    view.role = KVF_ROLE_KEY;
    view.element_bits = 16;
    view.heads = 2;
    view.bytes_per_head = 64;
    view.sections_elem_size = size_of::<kvf_section_desc>();
    view.tensors_elem_size = size_of::<kvf_tensor_desc>();
    view
}

/// One layout of one group of one view, changed by the caller, given to kvf_layout_create().
fn create_layout(
    change: impl FnOnce(&mut kvf_layout_desc, &mut kvf_group_desc, &mut kvf_view_desc),
) -> kvf_status {
    let layers = [0, 1, 2];
    let mut view = view();
    // SAFETY: all-zero is a value.
    let mut group: kvf_group_desc = unsafe { zeroed() };
    group.kind = KVF_GROUP_PAGED;
    group.tokens_per_block = 16;
    group.layers = layers.as_ptr();
    group.num_layers = layers.len();
    group.num_views = 1;
    group.views_elem_size = size_of::<kvf_view_desc>();
    let mut desc = init!(kvf_layout_desc);
    desc.groups_elem_size = size_of::<kvf_group_desc>();
    desc.num_groups = 1;
    change(&mut desc, &mut group, &mut view);
    if group.num_views == 1 {
        group.views = &view;
    }
    if desc.num_groups == 1 {
        desc.groups = &group;
    }
    let mut layout = null_mut();
    // SAFETY: everything that `desc` points to lives here.
    let status = unsafe { kvf_layout_create(&desc, &mut layout) };
    assert_eq!(layout.is_null(), status != KVF_OK);
    // SAFETY: NULL or just made.
    unsafe { assert_eq!(kvf_layout_destroy(layout), KVF_OK) };
    status
}

#[test]
fn a_layout_is_made_from_its_description() {
    assert_eq!(create_layout(|_, _, _| {}), KVF_OK);
    let sections = [kvf_section_desc {
        name: c"x".as_ptr(),
        total: 4,
        reserved: 0,
    }];
    let with_sections = |_: &mut kvf_layout_desc, _: &mut _, view: &mut kvf_view_desc| {
        view.sections = sections.as_ptr();
        view.num_sections = 1;
    };
    assert_eq!(create_layout(with_sections), KVF_OK);
}

#[test]
fn a_layout_names_what_is_wrong_with_it() {
    use KVF_ERR_ABI_MISMATCH as ABI;
    use KVF_ERR_INVALID_ARGUMENT as ARGUMENT;
    refused(
        create_layout(|_, group, _| group.kind = 0),
        ARGUMENT,
        "desc.groups[0].kind is 0",
    );
    refused(
        create_layout(|_, group, _| group.kind = KVF_GROUP_STATE),
        ARGUMENT,
        "desc.groups[0] is a state group with tokens_per_block 16",
    );
    refused(
        create_layout(|_, group, _| group.reserved = 1),
        ARGUMENT,
        "desc.groups[0].reserved is 1",
    );
    refused(
        create_layout(|_, group, _| group.layers = null()),
        ARGUMENT,
        "desc.groups[0].layers is NULL with a count of 3",
    );
    refused(
        create_layout(|_, group, _| group.views_elem_size = 0),
        ABI,
        "elem_size of desc.groups[0].views is 0",
    );
    refused(
        create_layout(|desc, _, _| desc.num_groups = 0),
        ARGUMENT,
        "desc.num_groups is 0",
    );
    refused(
        create_layout(|desc, _, _| desc.num_groups = usize::MAX),
        ARGUMENT,
        "desc.groups is NULL",
    );
    for role in [0, 10] {
        refused(
            create_layout(|_, _, view| view.role = role),
            ARGUMENT,
            &format!("desc.groups[0].views[0].role is {role}"),
        );
    }
    let tensor = kvf_tensor_desc {
        pool: null(),
        offset: 0,
    };
    refused(
        create_layout(|_, _, view| {
            view.tensors = &tensor;
            view.num_tensors = 1;
        }),
        ARGUMENT,
        "desc.groups[0].views[0].tensors[0].pool is NULL",
    );
    let nameless = kvf_section_desc {
        name: null(),
        total: 1,
        reserved: 0,
    };
    refused(
        create_layout(|_, _, view| {
            view.sections = &nameless;
            view.num_sections = 1;
        }),
        ARGUMENT,
        "desc.groups[0].views[0].sections[0].name is NULL",
    );
    let desc = init!(kvf_layout_desc);
    // SAFETY: a NULL result is refused.
    let status = unsafe { kvf_layout_create(&desc, null_mut()) };
    refused(status, ARGUMENT, "layout is NULL");
    let mut layout = null_mut();
    // SAFETY: a NULL description is refused.
    let status = unsafe { kvf_layout_create(null(), &mut layout) };
    refused(status, ARGUMENT, "desc is NULL");
}

const RANK: &str = r#"{"fingerprint": "m", "ranks": [{"global_rank": 0, "groups": [{"kind": "paged",
    "tokens_per_block": 16, "window": 0, "layers": [0, 1], "views": [{"role": "key",
    "element_bits": 16, "heads": 2, "bytes_per_head": 64, "shards": 1, "shard": 0,
    "replicas": 1, "replica": 0}]}]}]}"#;

fn bytes(text: &[u8]) -> kvf_bytes {
    kvf_bytes {
        data: text.as_ptr().cast(),
        bytes: text.len(),
    }
}

#[test]
fn a_plan_is_explained_into_the_callers_buffer() {
    let rank = bytes(RANK.as_bytes());
    let explain = |format: u32, text: *mut c_char, cap: usize, needed: &mut usize| {
        // SAFETY: the inputs live, `text` has `cap` bytes.
        unsafe { kvf_plan_explain(&rank, &rank, KVF_POLICY_LOWEST, format, text, cap, needed) }
    };
    for format in [KVF_EXPLAIN_JSON, KVF_EXPLAIN_TABLE] {
        let mut needed = 0;
        assert_eq!(explain(format, null_mut(), 0, &mut needed), KVF_OK);
        let mut text = vec![b'#' as c_char; needed];
        let (size, short) = (needed, needed - 1);
        needed = 0;
        refused(
            explain(format, text.as_mut_ptr(), short, &mut needed),
            KVF_ERR_OUT_OF_RANGE,
            &format!("text has {short} bytes, {size} are needed"),
        );
        assert_eq!(needed, size);
        assert!(text.iter().all(|c| *c == b'#' as c_char), "untouched");
        assert_eq!(
            explain(format, text.as_mut_ptr(), size, &mut needed),
            KVF_OK
        );
        // SAFETY: the call wrote a NUL-terminated text.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap();
        assert_eq!(text.len() + 1, size);
        assert!(text.contains("key"), "{text}");
        assert_eq!(text.starts_with('{'), format == KVF_EXPLAIN_JSON);
    }
}

#[test]
fn a_plan_refuses_what_it_cannot_read() {
    let rank = bytes(RANK.as_bytes());
    let latin = bytes(b"\xe9");
    let empty = bytes(b"");
    let explain = |source: *const kvf_bytes, destination: *const kvf_bytes, policy, format| {
        // SAFETY: the inputs are NULL or live; only the size is asked for.
        unsafe {
            kvf_plan_explain(
                source,
                destination,
                policy,
                format,
                null_mut(),
                0,
                null_mut(),
            )
        }
    };
    use KVF_ERR_INVALID_ARGUMENT as ARGUMENT;
    refused(explain(null(), &rank, 0, 0), ARGUMENT, "source is NULL");
    refused(
        explain(&rank, null(), 0, 0),
        ARGUMENT,
        "destination is NULL",
    );
    refused(
        explain(&empty, &rank, 0, 0),
        ARGUMENT,
        "source.data has 0 bytes",
    );
    refused(
        explain(&rank, &latin, 0, 0),
        ARGUMENT,
        "destination is not UTF-8",
    );
    refused(explain(&rank, &rank, 2, 0), ARGUMENT, "policy 2 is unknown");
    refused(explain(&rank, &rank, 0, 2), ARGUMENT, "format 2 is unknown");
}
