"""version.py LIBRARY VERSION: the cargo-built library, loaded by another language."""

import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
library.kvf_version_string.restype = ctypes.c_char_p
library.kvf_status_name.restype = ctypes.c_char_p
version = library.kvf_version_string().decode()
print(f"kvferry {version}")
assert version == sys.argv[2], (version, sys.argv[2])
assert library.kvf_status_name(-5) == b"KVF_ERR_SLOT_BUSY"
