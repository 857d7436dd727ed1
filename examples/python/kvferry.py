"""The part of kvferry.h that pull.py needs, for ctypes. Other functions are added the same way.

Structs are written off the header, field by field; tests/python/check_ctypes.py holds their sizes and
offsets against the header's."""

import ctypes
from ctypes import POINTER, Structure, c_char, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
OK, IN_PROGRESS, TIMED_OUT = 0, 1, 3
GROUP_PAGED, ROLE_KEY, ROLE_VALUE = 1, 1, 2
TOKEN_END_ALL = 2**64 - 1
SECOND = 10**9


class kvf_agent_config(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("workers", c_uint32),
        ("name", ctypes.c_char_p),
        ("listen", ctypes.c_char_p),
        ("affinity", POINTER(c_uint32)),
        ("num_affinity", c_size_t),
        ("transports", ctypes.c_char_p),
        ("fingerprint", ctypes.c_char_p),
        ("connect_ns", c_uint64),
        ("peer_silence_ns", c_uint64),
        ("heartbeat_ns", c_uint64),
        ("claim_ns", c_uint64),
        ("lease_ns", c_uint64),
        ("transfer_ns", c_uint64),
        ("max_publications", c_uint32),
        ("log_level", c_uint32),
        ("log", c_void_p),
        ("log_arg", c_void_p),
        ("spin_ns", c_uint64),
    ]


class kvf_host_pool_config(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("numa_node", c_uint32),
        ("bytes", c_uint64),
        ("page_size", c_uint64),
        ("user_data", c_uint64),
    ]


class kvf_tensor_desc(Structure):
    _fields_ = [("pool", c_void_p), ("offset", c_uint64)]


class kvf_view_desc(Structure):
    _fields_ = [
        ("role", c_uint32),
        ("element_bits", c_uint32),
        ("heads", c_uint32),
        ("slots", c_uint32),
        ("bytes_per_head", c_uint64),
        ("shards", c_uint32),
        ("shard", c_uint32),
        ("replicas", c_uint32),
        ("replica", c_uint32),
        ("sections", c_void_p),
        ("sections_elem_size", c_size_t),
        ("num_sections", c_size_t),
        ("tensors", POINTER(kvf_tensor_desc)),
        ("tensors_elem_size", c_size_t),
        ("num_tensors", c_size_t),
        ("slot_stride", c_uint64),
        ("layer_stride", c_uint64),
        ("token_stride", c_uint64),
        ("head_stride", c_uint64),
    ]


class kvf_group_desc(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("tokens_per_block", c_uint32),
        ("window", c_uint32),
        ("ordinal_offset", c_uint32),
        ("ordinal_stride", c_uint32),
        ("reserved", c_uint32),
        ("layers", POINTER(c_uint32)),
        ("num_layers", c_size_t),
        ("views", POINTER(kvf_view_desc)),
        ("views_elem_size", c_size_t),
        ("num_views", c_size_t),
    ]


class kvf_layout_desc(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("global_rank", c_uint32),
        ("tp_rank", c_uint32),
        ("tp_size", c_uint32),
        ("pp_rank", c_uint32),
        ("pp_size", c_uint32),
        ("cp_rank", c_uint32),
        ("cp_size", c_uint32),
        ("dp_rank", c_uint32),
        ("dp_size", c_uint32),
        ("groups", POINTER(kvf_group_desc)),
        ("groups_elem_size", c_size_t),
        ("num_groups", c_size_t),
    ]


class kvf_engine_desc(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("world", c_uint32),
        ("rank", c_uint32),
        ("reserved", c_uint32),
        ("exchange", c_void_p),
        ("exchange_arg", c_void_p),
        ("ranks", c_void_p),
        ("ranks_elem_size", c_size_t),
        ("num_ranks", c_size_t),
    ]


class kvf_key(Structure):
    _fields_ = [("request", c_uint64), ("attempt", c_uint32), ("reserved", c_uint32)]


class kvf_published_group(Structure):
    _fields_ = [
        ("group", c_uint32),
        ("reserved", c_uint32),
        ("slots", POINTER(c_int32)),
        ("num_slots", c_size_t),
        ("first_ordinal", c_uint64),
        ("token_begin", c_uint64),
        ("token_end", c_uint64),
    ]


class kvf_publish_desc(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("reserved", c_uint32),
        ("key", kvf_key),
        ("groups", POINTER(kvf_published_group)),
        ("groups_elem_size", c_size_t),
        ("num_groups", c_size_t),
        ("states", c_void_p),
        ("states_elem_size", c_size_t),
        ("num_states", c_size_t),
        ("stream", c_void_p),
        ("claim_ns", c_uint64),
        ("lease_ns", c_uint64),
        ("aux", c_void_p),
        ("aux_bytes", c_size_t),
        ("prefix_tag", c_uint64),
        ("user_data", c_uint64),
    ]


class kvf_pull_desc(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("group", c_uint32),
        ("peer", c_void_p),
        ("ticket", ctypes.c_char_p),
        ("ticket_bytes", c_size_t),
        ("slots", POINTER(c_int32)),
        ("num_slots", c_size_t),
        ("first_ordinal", c_uint64),
        ("skip_token", c_uint64),
        ("token_end", c_uint64),
        ("stream", c_void_p),
        ("deadline_ns", c_uint64),
        ("prefix_tag", c_uint64),
        ("user_data", c_uint64),
        ("priority", c_int32),
        ("reserved", c_uint32),
    ]


class kvf_transfer_info(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_uint32),
        ("outcome", c_uint32),
        ("cause", c_int32),
        ("memory_safe", c_uint32),
        ("submitted", c_uint32),
        ("num_parts", c_uint32),
        ("id", c_uint64),
        ("key", kvf_key),
        ("bytes", c_uint64),
        ("bytes_total", c_uint64),
        ("elapsed_ns", c_uint64),
        ("transport", c_char * 16),
    ]


def init(kind, /, **fields):
    """A struct as its _INIT macro makes it: zero, the head filled in; then the given fields."""
    head = {}
    if kind._fields_[0][0] == "struct_size":
        head = {"struct_size": ctypes.sizeof(kind), "abi_version": ABI_VERSION}
    return kind(**head, **fields)


def array(kind, items):
    """A C array; keep it alive during the call that reads it."""
    return (kind * len(items))(*items)


class Error(RuntimeError):
    """A failed call."""


class Library:
    """libkvferry.so, with the declarations that ctypes needs."""

    # Argument types; every function here returns a kvf_status.
    FUNCTIONS = {
        "kvf_agent_create": [POINTER(kvf_agent_config), POINTER(c_void_p)],
        "kvf_agent_destroy": [c_void_p, c_uint64],
        "kvf_host_pool_create": [c_void_p, POINTER(kvf_host_pool_config), POINTER(c_void_p)],
        "kvf_pool_memory": [c_void_p, POINTER(c_void_p), POINTER(c_uint64)],
        "kvf_pool_destroy": [c_void_p],
        "kvf_layout_create": [POINTER(kvf_layout_desc), POINTER(c_void_p)],
        "kvf_layout_destroy": [c_void_p],
        "kvf_agent_set_layout": [c_void_p, c_void_p],
        "kvf_engine_create": [c_void_p, POINTER(kvf_engine_desc), POINTER(c_void_p)],
        "kvf_engine_metadata": [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)],
        "kvf_engine_destroy": [c_void_p],
        "kvf_peer_add": [c_void_p, ctypes.c_char_p, c_size_t, c_uint64, POINTER(c_void_p)],
        "kvf_peer_wait": [c_void_p, c_uint64],
        "kvf_peer_destroy": [c_void_p],
        "kvf_publish": [c_void_p, POINTER(kvf_publish_desc), POINTER(c_void_p)],
        "kvf_publication_ticket": [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)],
        "kvf_publication_wait": [c_void_p, c_uint64],
        "kvf_publication_destroy": [c_void_p],
        "kvf_pull_begin": [c_void_p, POINTER(kvf_pull_desc), POINTER(c_void_p)],
        "kvf_transfer_wait": [c_void_p, c_uint64],
        "kvf_transfer_query": [c_void_p, POINTER(kvf_transfer_info), c_void_p, c_size_t, c_size_t],
        "kvf_transfer_destroy": [c_void_p],
    }

    def __init__(self, path):
        library = ctypes.CDLL(path)
        library.kvf_last_error.argtypes = [c_void_p, c_size_t]
        library.kvf_last_error.restype = c_size_t
        library.kvf_status_name.argtypes = [c_int32]
        library.kvf_status_name.restype = ctypes.c_char_p
        library.kvf_abi_version.restype = c_uint32
        if library.kvf_abi_version() != ABI_VERSION:
            raise Error(f"{path} has ABI version {library.kvf_abi_version()}, not {ABI_VERSION}")
        for name, arguments in self.FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int32
        self._library = library

    def name(self, status):
        """KVF_OK, ..."""
        return self._library.kvf_status_name(status).decode()

    def call(self, name, *arguments):
        """Calls a function; raises for an error and returns a state."""
        status = getattr(self._library, name)(*arguments)
        if status < 0:
            text = ctypes.create_string_buffer(self._library.kvf_last_error(None, 0) + 1)
            self._library.kvf_last_error(text, len(text))
            raise Error(f"{name}: {self.name(status)}: {text.value.decode()}")
        return status

    def make(self, name, *arguments):
        """Calls a function whose last parameter receives a handle."""
        handle = c_void_p()
        self.call(name, *arguments, ctypes.byref(handle))
        return handle

    def collect(self, name, handle):
        """Calls a function of (handle, buf, cap, needed) for the size, then for the bytes."""
        needed = c_size_t()
        self.call(name, handle, None, 0, ctypes.byref(needed))
        data = ctypes.create_string_buffer(needed.value)
        self.call(name, handle, data, len(data), ctypes.byref(needed))
        return data.raw
